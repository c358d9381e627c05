//! Decode steps as captured graphs: one graph for each bucket of rows and each kind of step.

use crate::cuda::device::{Device, GraphId};
use crate::error::DeviceError;
use std::collections::BTreeMap;

/// The steps that one graph serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    /// Rows, padding included.
    pub(super) bucket: usize,
    /// Whether logprobs are computed.
    pub(super) logprobs: bool,
}

/// Returns the number of rows that a step of `n` rows is padded to: 1, 2, 4, 8, 16, 24, 32, then multiples of 16, up to
/// `n_max`.
pub(super) fn bucket_of(n: usize, n_max: usize) -> usize {
    let bucket = match n {
        0..=8 => n.next_power_of_two(),
        9..=32 => n.next_multiple_of(8),
        _ => n.next_multiple_of(16),
    };
    bucket.min(n_max)
}

/// The state of a kind of step that has run.
#[derive(Debug, Clone, Copy)]
enum Stage {
    /// It has run kernel by kernel. Its kernels and plans are loaded, which a capture cannot do.
    Warm,
    Captured(GraphId),
    /// Its capture failed: it always runs kernel by kernel.
    Refused,
}

/// The graphs of a device's steps.
#[derive(Debug)]
pub(super) struct Graphs {
    is_on: bool,
    stages: BTreeMap<Kind, Stage>,
    was_refused: bool,
    refusal: Option<String>,
}

impl Graphs {
    /// Returns an empty set. With `is_on` false no graph is ever captured.
    pub(super) fn new(is_on: bool) -> Self {
        Self { is_on, stages: BTreeMap::new(), was_refused: false, refusal: None }
    }

    /// Returns once why the first failed capture failed.
    pub(super) fn take_refusal(&mut self) -> Option<String> {
        self.refusal.take()
    }

    /// Returns the number of captured graphs.
    pub(super) fn n_captured(&self) -> usize {
        self.stages.values().filter(|stage| matches!(stage, Stage::Captured(_))).count()
    }

    /// Runs `launches`, which are the same for every step of `kind`. The first time they run one by one. From the
    /// second time on they are captured and replayed.
    ///
    /// Errors: the device's, except those of a capture.
    pub(super) fn run(
        &mut self,
        device: &dyn Device,
        kind: Kind,
        launches: &dyn Fn() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let stage = self.stages.get(&kind).copied();
        let graph = match stage {
            Some(Stage::Captured(graph)) => Some(graph),
            Some(Stage::Warm) => self.capture(device, kind, launches),
            Some(Stage::Refused) | None => None,
        };
        if let Some(graph) = graph {
            return device.replay(graph);
        }
        launches()?;
        if self.is_on {
            self.stages.entry(kind).or_insert(Stage::Warm);
        }
        Ok(())
    }

    fn capture(
        &mut self,
        device: &dyn Device,
        kind: Kind,
        launches: &dyn Fn() -> Result<(), DeviceError>,
    ) -> Option<GraphId> {
        let captured = device.begin_capture().and_then(|()| {
            let recorded = launches();
            // Also after an error, because the device must leave the capture.
            let graph = device.end_capture();
            recorded.and(graph)
        });
        match captured {
            Ok(graph) => {
                self.stages.insert(kind, Stage::Captured(graph));
                Some(graph)
            }
            Err(cause) => {
                self.stages.insert(kind, Stage::Refused);
                if !std::mem::replace(&mut self.was_refused, true) {
                    let n = kind.bucket;
                    let text = format!(
                        "a decode step of {n} rows is launched kernel by kernel: its graph was not captured: {cause}"
                    );
                    self.refusal = Some(text);
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::bucket_of;

    #[test]
    fn buckets_grow_in_steps_up_to_the_most_rows() {
        let of = |n| bucket_of(n, 256);
        assert_eq!(
            [1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33, 48, 49, 256].map(of),
            [1, 2, 4, 4, 8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64, 256]
        );
        assert_eq!([3, 5, 6].map(|n| bucket_of(n, 6)), [4, 6, 6]);
    }
}
