//! Decode steps whose state is on the device. The host uploads each row's slot and new cell and reads tokens back. It
//! launches the next step of the same rows before it has the tokens ([`OverlapState`]).
//!
//! A decode is [`Steps::launch`], [`Steps::launch_next`], [`Steps::collect`], in this order. A decode may fail or stop
//! in between: the host records a step's changes of the device before the launch, and the next launch compares the
//! record with what its rows need.

use super::decoder::DeviceDecoder;
use super::graphs::{Graphs, Kind, bucket_of};
use super::slots::Sampling;
pub use super::state::StateLimits;
use super::state::{NextToken, SlotCell, State};
use crate::arch::config::ModelConfig;
use crate::cuda::device::{Device, Event};
use crate::cuda::forward::overlap::{InFlightRow, NextRow, OverlapState, Row};
use crate::cuda::ops::sample::{RESULT_BYTES, TOP_BYTES, outcome};
use crate::cuda::ops::sample_tables::SampleTables;
use crate::error::{DeviceError, Result};
use crate::sample::{Outcome, SamplerSpec};
use std::collections::VecDeque;

/// How steps are launched. Results do not depend on it.
#[derive(Debug, Clone, Copy)]
pub struct StepSettings {
    /// Launch the next step before the tokens of the last one are known.
    pub overlap: bool,
    /// Capture the steps' launches and replay them.
    pub graphs: bool,
}

/// A sequence and the slot of its state on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceSlot {
    /// The sequence; ids are never reused.
    pub sequence: i64,
    /// The slot, from 0.
    pub index: usize,
}

/// The device and the model that a step runs on.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    /// The device.
    pub device: &'a dyn Device,
    /// The model on it.
    pub decoder: &'a DeviceDecoder,
}

/// A row of a step: the only one of its sequence.
#[derive(Debug, Clone, Copy)]
pub struct StepRow<'a> {
    /// Its sequence.
    pub slot: SequenceSlot,
    /// The token's position.
    pub position: u32,
    /// The token.
    pub token: u32,
    /// The cell of its key and value, by the KV cache's numbers.
    pub cell: u32,
    /// The ids that may follow, one bit each; `None`: all.
    pub mask: Option<&'a [u32]>,
}

/// Returns the cells of a row's sequence before the row's own, by the KV cache's numbers, in position order. Called
/// only for rows whose sequence changed since the last step.
pub type CellsBefore<'a> = dyn Fn(&StepRow<'_>) -> Vec<u32> + 'a;

/// The decode steps of a model on a device.
#[derive(Debug)]
pub struct Steps {
    state: State,
    graphs: Graphs,
    overlap: OverlapState,
    /// Launched and not yet collected, the oldest first.
    launched: VecDeque<Launched>,
    current: Vec<Current>,
}

/// A step whose outcomes are complete after `event`.
#[derive(Debug, Clone, Copy)]
struct Launched {
    event: Event,
    kind: Kind,
}

/// A row of the current decode.
#[derive(Debug, Clone, Copy)]
struct Current {
    row: Row,
    slot: usize,
    masked: bool,
    /// The event after its step.
    event: Event,
    /// Its row of the step.
    index: usize,
}

impl Steps {
    /// Allocates the state's memory, which must happen before the KV cells get the rest.
    ///
    /// Errors: `Unsupported` for a vocabulary that is too large for the sampler; the device's.
    pub fn new(
        device: &dyn Device,
        config: &ModelConfig,
        limits: StateLimits,
        settings: StepSettings,
    ) -> Result<Self> {
        Ok(Self {
            state: State::new(device, config, limits)?,
            graphs: Graphs::new(settings.graphs),
            overlap: OverlapState::new(settings.overlap),
            launched: VecDeque::new(),
            current: Vec::new(),
        })
    }

    /// Returns the most rows of a step.
    pub fn n_rows(&self) -> usize {
        self.state.limits().n_rows
    }

    /// Sets a sequence's sampling and drops its row in flight. `output` is the part of its completion that exists.
    pub fn attach(&mut self, slot: SequenceSlot, spec: &SamplerSpec, prompt: &[i32], output: &[i32]) {
        self.overlap.invalidate_sequence(slot.sequence);
        let tokens = [prompt, output].concat();
        let fits = SampleTables::check(spec).is_ok() && tokens.len() <= self.state.limits().max_len;
        let of = &mut self.state.slots[slot.index];
        of.sampling = Some(Sampling { spec: spec.clone(), n_prompt: prompt.len(), tokens, fits });
        of.attached = None;
    }

    /// Removes a sequence's sampling: the slot's next sequence is sampled greedily until [`Steps::attach`].
    pub fn detach(&mut self, slot: SequenceSlot) {
        self.invalidate_sequence(slot);
        let of = &mut self.state.slots[slot.index];
        (of.sampling, of.attached) = (None, None);
    }

    /// Appends `token` to the completion of the slot's sequence.
    pub fn append_token(&mut self, slot: usize, token: u32) {
        self.state.slots[slot].append_token(token);
    }

    /// Returns whether the token after `position` of the slot's sequence can be sampled on the device.
    pub fn can_sample_after(&self, slot: usize, position: u32) -> bool {
        self.state.slots[slot].can_sample_after(position)
    }

    /// The sequence changes, or its tokens are computed, by other means than a step: drops its row in flight, and
    /// uploads its cells before its next step.
    pub fn invalidate_sequence(&mut self, slot: SequenceSlot) {
        self.overlap.invalidate_sequence(slot.sequence);
        self.state.slots[slot.index].synced = None;
    }

    /// All sequences may have changed: drops the step in flight.
    pub fn invalidate_all(&mut self) {
        self.overlap.match_batch(&[]);
        self.state.slots.iter_mut().for_each(|slot| slot.synced = None);
    }

    /// Drops the rows in flight whose cell `is_taken`.
    pub fn invalidate_cells(&mut self, is_taken: &dyn Fn(u32) -> bool) {
        self.overlap.invalidate_cells(is_taken);
    }

    /// Returns once why steps are launched kernel by kernel, if a graph could not be captured.
    pub fn take_graph_refusal(&mut self) -> Option<String> {
        self.graphs.take_refusal()
    }

    /// Returns the number of captured graphs.
    pub fn n_graphs(&self) -> usize {
        self.graphs.n_captured()
    }

    /// Launches those of `rows` that are not in flight. There are at most `n_rows` rows, at most one per slot, each
    /// with [`Steps::can_sample_after`] its position.
    ///
    /// Panics on a token, position or cell that does not exist. Errors: the device's.
    pub fn launch(
        &mut self,
        target: Target<'_>,
        rows: &[StepRow<'_>],
        cells_before: &CellsBefore<'_>,
    ) -> Result<()> {
        rows.iter().for_each(|row| self.state.check_row(target.decoder, row.next_token(), row.cell));
        for row in rows.iter().filter(|row| row.mask.is_some()) {
            self.overlap.invalidate_sequence(row.slot.sequence);
        }
        let batch: Vec<Row> = rows.iter().map(StepRow::id).collect();
        let in_flight = self.overlap.match_batch(&batch);
        let mut fresh = Vec::new();
        let index_in_flight = |row: &StepRow<'_>, found: &Option<InFlightRow>| {
            found.filter(|found| found.cell == row.cell).map(|found| found.index)
        };
        for (row, found) in rows.iter().zip(&in_flight.rows) {
            if index_in_flight(row, found).is_some() {
                continue;
            }
            let slot = row.slot.index;
            let cells_before = || {
                let cells = cells_before(row);
                target.decoder.check_cells(&cells);
                cells
            };
            self.state.sync(target.device, slot, row.next_token(), &cells_before)?;
            self.state.sync_sampling(target.device, slot, row.mask)?;
            fresh.push(SlotCell { slot, cell: row.cell });
        }
        let fresh_event = if fresh.is_empty() { 0 } else { self.start(target, &fresh)? };
        let mut n_fresh = 0;
        let current = rows.iter().zip(&in_flight.rows).map(|(row, found)| {
            let (event, index) = match (index_in_flight(row, found), in_flight.event) {
                (Some(index), Some(event)) => (event, index),
                _ => {
                    n_fresh += 1;
                    (fresh_event, n_fresh - 1)
                }
            };
            Current { row: row.id(), slot: row.slot.index, masked: row.mask.is_some(), event, index }
        });
        self.current = current.collect();
        Ok(())
    }

    /// Launches the next step of the decode's rows: `next_cells` has the cell of each next token if the next decode has
    /// the same rows. Rows with a mask are left out, because their next token needs the host.
    ///
    /// Panics on a cell that does not exist. Errors: the device's.
    pub fn launch_next(&mut self, target: Target<'_>, next_cells: &[u32]) -> Result<()> {
        target.decoder.check_cells(next_cells);
        let max_len = self.state.max_len(target.decoder);
        let continues = |current: &&Current| !current.masked && (current.row.position as usize) + 1 < max_len;
        let (slots, rows): (Vec<usize>, Vec<NextRow>) = self
            .current
            .iter()
            .zip(next_cells)
            .filter(|(current, _)| continues(current))
            .map(|(Current { row, slot, .. }, &cell)| {
                (*slot, NextRow { sequence: row.sequence, position: row.position + 1, cell })
            })
            .unzip();
        if !self.overlap.may_launch(rows.len()) {
            return Ok(());
        }
        let plan = slots.iter().zip(&rows).map(|(&slot, row)| SlotCell { slot, cell: row.cell });
        let plan: Vec<SlotCell> = plan.collect();
        let event = self.start(target, &plan)?;
        self.overlap.launched(event, rows);
        Ok(())
    }

    /// Waits for the launched rows and returns their outcomes, in their order.
    ///
    /// Errors: the device's.
    pub fn collect(&mut self, device: &dyn Device) -> Result<Vec<Outcome>> {
        let mut outcomes = vec![None; self.current.len()];
        let mut events: Vec<Event> = self.current.iter().map(|current| current.event).collect();
        events.sort_unstable();
        events.dedup();
        for event in events {
            let (kind, bytes) = self.wait(device, event)?;
            let (results, tops) = bytes.split_at(kind.bucket * RESULT_BYTES);
            for (current, outcome_of) in self.current.iter().zip(&mut outcomes) {
                let Current { slot, event: of_event, index, .. } = *current;
                if of_event == event {
                    let result = &results[index * RESULT_BYTES..(index + 1) * RESULT_BYTES];
                    let top = tops.get(index * TOP_BYTES..(index + 1) * TOP_BYTES).unwrap_or_default();
                    *outcome_of = outcome(result, top, self.state.slots[slot].n_top());
                }
            }
        }
        let outcomes: Vec<Outcome> =
            outcomes.into_iter().map(|outcome| outcome.expect("no row's slot is idle")).collect();
        for (Current { row, slot, .. }, outcome) in self.current.drain(..).zip(&outcomes) {
            if let Outcome::Token { id, .. } = outcome {
                self.overlap.set_token(row.sequence, *id);
                self.state.slots[slot].sampled(*id);
            }
        }
        Ok(outcomes)
    }

    /// Launches a step of these slots and new cells.
    fn start(&mut self, target: Target<'_>, rows: &[SlotCell]) -> Result<Event, DeviceError> {
        let Target { device, decoder } = target;
        let logprobs = rows.iter().any(|row| self.state.slots[row.slot].n_top().is_some());
        let kind = Kind { bucket: bucket_of(rows.len(), self.state.limits().n_rows), logprobs };
        self.state.plan(device, rows, kind.bucket)?;
        // SAFETY: `launch` and `launch_next` checked cells, positions and the tokens that the host uploads; the device
        // samples ids of the vocabulary.
        let launch = || unsafe { self.state.launch(device, decoder, kind) };
        self.graphs.run(device, kind, &launch)?;
        let (outcomes, n_bytes) = self.state.outcomes(kind);
        let event = device.read_back(outcomes, n_bytes)?;
        self.launched.push_back(Launched { event, kind });
        Ok(event)
    }

    /// Waits for the outcomes of a step. Outcomes of earlier steps that were not collected are dropped, because
    /// read-backs are collected in their order.
    fn wait(&mut self, device: &dyn Device, event: Event) -> Result<(Kind, Vec<u8>), DeviceError> {
        loop {
            let next = *self.launched.front().expect("the step was launched and not collected");
            let mut bytes = vec![0; self.state.outcomes(next.kind).1];
            device.collect(next.event, &mut bytes)?;
            self.launched.pop_front();
            if next.event == event {
                return Ok((next.kind, bytes));
            }
        }
    }
}

impl StepRow<'_> {
    fn next_token(&self) -> NextToken {
        NextToken { position: self.position, token: self.token }
    }

    fn id(&self) -> Row {
        Row { sequence: self.slot.sequence, position: self.position, token: self.token }
    }
}
