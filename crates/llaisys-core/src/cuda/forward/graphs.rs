//! Decode steps as captured graphs: one for each number of rows that steps are rounded up to, and each kind of step.

use crate::cuda::device::{Device, GraphId};
use crate::error::DeviceError;
use std::collections::BTreeMap;

/// What a graph is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    /// Rows, padding included.
    pub(super) bucket: usize,
    /// Whether logprobs are computed.
    pub(super) logprobs: bool,
}

/// Into how many rows a step of `n` is padded, at most `n_max`: 1, 2, 4, 8, 16, 24, 32, then steps of 16.
pub(super) fn bucket_of(n: usize, n_max: usize) -> usize {
    let bucket = match n {
        0..=8 => n.next_power_of_two(),
        9..=32 => n.next_multiple_of(8),
        _ => n.next_multiple_of(16),
    };
    bucket.min(n_max)
}

/// How far a kind of step has come.
#[derive(Debug, Clone, Copy)]
enum Stage {
    /// It was done launch by launch: its kernels and plans are loaded, which a capture could not do.
    Warm,
    Captured(GraphId),
    /// Its capture failed: it is done launch by launch for ever.
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
    /// None as yet; with `is_on` false there never is one.
    pub(super) fn new(is_on: bool) -> Self {
        Self { is_on, stages: BTreeMap::new(), was_refused: false, refusal: None }
    }

    /// Why the first capture that failed did; told once.
    pub(super) fn take_refusal(&mut self) -> Option<String> {
        self.refusal.take()
    }

    /// Kinds of steps that are replayed.
    pub(super) fn n_captured(&self) -> usize {
        self.stages.values().filter(|stage| matches!(stage, Stage::Captured(_))).count()
    }

    /// Does `launches`, which are the same whenever `kind` is: by themselves the first time, as one replayed launch
    /// from the second time on.
    ///
    /// Errors: the device's; not those of a capture.
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
            let noted = launches();
            // In any case, so that the device is out of the capture.
            let graph = device.end_capture();
            noted.and(graph)
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
                        "a decode step of {n} rows is launched kernel by kernel, as it is no graph: {cause}"
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
    fn buckets_are_those_of_the_design_up_to_the_most_rows() {
        let of = |n| bucket_of(n, 256);
        assert_eq!(
            [1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33, 48, 49, 256].map(of),
            [1, 2, 4, 4, 8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64, 256]
        );
        assert_eq!([3, 5, 6].map(|n| bucket_of(n, 6)), [4, 6, 6]);
    }
}
