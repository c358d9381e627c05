//! Decode steps whose state lives on the device: the host sends each row's slot and new cell and gets tokens back, and
//! launches the next step of the same rows before it has them ([`Ahead`]).
//!
//! A decode is [`Steps::launch`], [`Steps::launch_ahead`], [`Steps::collect`], in this order. What fails in between, or
//! never comes, leaves nothing wrong: the host notes what a step does to the device before it is launched, and the next
//! launch compares that with what its rows are to find.

use super::DeviceDecoder;
use super::graphs::{Graphs, Kind, bucket_of};
use super::slots::Sampling;
use super::state::State;
pub use super::state::StateLimits;
use crate::error::{DeviceError, Result};
use crate::model::config::ModelConfig;
use crate::ops::cuda::ahead::{Ahead, Row, RowAhead};
use crate::ops::cuda::device::{Device, Event};
use crate::ops::cuda::sample::{RESULT_BYTES, TOP_BYTES, outcome};
use crate::ops::cuda::sample_tables::SampleTables;
use crate::sample::{Outcome, SamplerSpec};
use std::collections::VecDeque;

/// How steps are done; what they give does not depend on it.
#[derive(Debug, Clone, Copy)]
pub struct StepSettings {
    /// Launch a step ahead of the host.
    pub overlap: bool,
    /// Capture the steps' launches and replay them.
    pub graphs: bool,
}

/// A row of a step: the only one of its sequence.
#[derive(Debug, Clone, Copy)]
pub struct StepRow<'a> {
    /// The sequence, never the same id for another one.
    pub sequence: i64,
    /// Its slot, from 0.
    pub slot: usize,
    /// Where the token stands.
    pub position: u32,
    /// The token.
    pub token: u32,
    /// Where its key and value go, by the books' numbers.
    pub cell: u32,
    /// What may come after it, a bit for each id; `None`: everything.
    pub mask: Option<&'a [u32]>,
}

/// The cells of a row's sequence before the row's own, by the books' numbers, in position order. Asked only for rows
/// whose sequence changed since the last step.
pub type CellsBefore<'a> = dyn Fn(&StepRow<'_>) -> Vec<u32> + 'a;

/// The decode steps of a model on a device.
#[derive(Debug)]
pub struct Steps {
    state: State,
    graphs: Graphs,
    ahead: Ahead,
    /// Launched and not yet collected, the oldest first.
    launched: VecDeque<Launched>,
    current: Vec<Current>,
}

/// A step whose outcomes come back after `event`.
#[derive(Debug, Clone, Copy)]
struct Launched {
    event: Event,
    kind: Kind,
}

/// A row of the decode that is going on.
#[derive(Debug, Clone, Copy)]
struct Current {
    row: Row,
    slot: usize,
    masked: bool,
    /// Its step, and which row of it.
    from: (Event, usize),
}

impl Steps {
    /// Takes the state's memory: before the KV cells take what is left.
    ///
    /// Errors: `Unsupported` for a vocabulary that the sampler cannot do; the device's.
    pub fn new(
        device: &dyn Device,
        config: &ModelConfig,
        limits: StateLimits,
        settings: StepSettings,
    ) -> Result<Self> {
        Ok(Self {
            state: State::new(device, config, limits)?,
            graphs: Graphs::new(settings.graphs),
            ahead: Ahead::new(settings.overlap),
            launched: VecDeque::new(),
            current: Vec::new(),
        })
    }

    /// The most rows that a step has.
    pub fn n_rows(&self) -> usize {
        self.state.limits().n_rows
    }

    /// Gives a slot's sequence its sampling; `output` is what of its answer there is. A step under way is lost.
    pub fn attach(
        &mut self,
        (sequence, slot): (i64, usize),
        spec: &SamplerSpec,
        prompt: &[i32],
        output: &[i32],
    ) {
        self.ahead.forget(sequence);
        let tokens = [prompt, output].concat();
        let fits = SampleTables::check(spec).is_ok() && tokens.len() <= self.state.limits().max_len;
        let of = &mut self.state.slots[slot];
        of.sampling = Some(Sampling { spec: spec.clone(), n_prompt: prompt.len(), tokens, fits });
        of.attached = None;
    }

    /// The slot's next sequence takes the best tokens until it is given something else.
    pub fn detach(&mut self, (sequence, slot): (i64, usize)) {
        self.forget(sequence, slot);
        let of = &mut self.state.slots[slot];
        (of.sampling, of.attached) = (None, None);
    }

    /// `token` now belongs to the answer of the slot's sequence.
    pub fn accept(&mut self, slot: usize, token: u32) {
        self.state.slots[slot].accept(token);
    }

    /// Whether what follows `position` in the slot's sequence can be sampled on the device.
    pub fn samples_after(&self, slot: usize, position: u32) -> bool {
        self.state.slots[slot].is_sampled_after(position)
    }

    /// The sequence changes, or its tokens are computed, by other means than a step: what is under way is lost, and
    /// its cells are uploaded before its next step.
    pub fn forget(&mut self, sequence: i64, slot: usize) {
        self.ahead.forget(sequence);
        self.state.slots[slot].synced = None;
    }

    /// Nothing of any sequence is as it was.
    pub fn forget_all(&mut self) {
        self.ahead.land(&[]);
        self.state.slots.iter_mut().for_each(|slot| slot.synced = None);
    }

    /// Rows under way whose cell is taken are lost.
    pub fn forget_taken(&mut self, is_taken: &dyn Fn(u32) -> bool) {
        self.ahead.forget_taken(is_taken);
    }

    /// Why decode steps are launched kernel by kernel where they should be one launch, if a capture failed; told once.
    pub fn take_graph_refusal(&mut self) -> Option<String> {
        self.graphs.take_refusal()
    }

    /// Graphs that were captured.
    pub fn n_graphs(&self) -> usize {
        self.graphs.n_captured()
    }

    /// Starts what of `rows` is not under way already. At most as many rows as the limits say, at most one of a slot,
    /// each of a sequence that [`Steps::samples_after`] its position.
    ///
    /// Errors: the device's.
    pub fn launch(
        &mut self,
        (device, decoder): (&dyn Device, &DeviceDecoder),
        rows: &[StepRow<'_>],
        cells_before: &CellsBefore<'_>,
    ) -> Result<()> {
        for row in rows.iter().filter(|row| row.mask.is_some()) {
            self.ahead.forget(row.sequence);
        }
        let batch: Vec<Row> = rows.iter().map(StepRow::id).collect();
        let landing = self.ahead.land(&batch);
        let mut fresh = Vec::new();
        let has_cell = |row: &StepRow<'_>, landed: &Option<(usize, u32)>| {
            landed.filter(|(_, cell)| *cell == row.cell).map(|(index, _)| index)
        };
        for (row, landed) in rows.iter().zip(&landing.rows) {
            if has_cell(row, landed).is_some() {
                continue;
            }
            self.state.sync(device, row.slot, (row.position, row.token), &|| cells_before(row))?;
            self.state.sync_sampling(device, row.slot, row.mask)?;
            fresh.push((row.slot, row.cell));
        }
        let event = if fresh.is_empty() { 0 } else { self.start((device, decoder), &fresh)? };
        let mut n_fresh = 0;
        let current = rows.iter().zip(&landing.rows).map(|(row, landed)| {
            let from = match (has_cell(row, landed), landing.event) {
                (Some(index), Some(event)) => (event, index),
                _ => {
                    n_fresh += 1;
                    (event, n_fresh - 1)
                }
            };
            Current { row: row.id(), slot: row.slot, masked: row.mask.is_some(), from }
        });
        self.current = current.collect();
        Ok(())
    }

    /// Starts one more step of the decode's rows: `next_cells` has for each the cell that its next token would get if
    /// the next decode were of the same rows. Rows with a mask are left out: their next one needs the host.
    ///
    /// Errors: the device's.
    pub fn launch_ahead(&mut self, target: (&dyn Device, &DeviceDecoder), next_cells: &[u32]) -> Result<()> {
        let max_len = self.state.limits().max_len;
        let goes_on = |current: &&Current| !current.masked && (current.row.position as usize) + 1 < max_len;
        let (slots, rows): (Vec<usize>, Vec<RowAhead>) = self
            .current
            .iter()
            .zip(next_cells)
            .filter(|(current, _)| goes_on(current))
            .map(|(Current { row, slot, .. }, &cell)| {
                (*slot, RowAhead { sequence: row.sequence, position: row.position + 1, cell })
            })
            .unzip();
        if !self.ahead.may_launch(rows.len()) {
            return Ok(());
        }
        let plan: Vec<(usize, u32)> = slots.iter().zip(&rows).map(|(&slot, row)| (slot, row.cell)).collect();
        let event = self.start(target, &plan)?;
        self.ahead.launch(event, rows);
        Ok(())
    }

    /// Waits for the outcomes of the launched rows, in their order.
    ///
    /// Errors: the device's.
    pub fn collect(&mut self, device: &dyn Device) -> Result<Vec<Outcome>> {
        let mut outcomes = vec![None; self.current.len()];
        let mut events: Vec<Event> = self.current.iter().map(|current| current.from.0).collect();
        events.sort_unstable();
        events.dedup();
        for event in events {
            let (kind, bytes) = self.wait(device, event)?;
            let (results, tops) = bytes.split_at(kind.bucket * RESULT_BYTES);
            for (current, outcome_of) in self.current.iter().zip(&mut outcomes) {
                let Current { slot, from: (of_event, index), .. } = *current;
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
                self.ahead.feed(row.sequence, *id);
                self.state.slots[slot].sampled(*id);
            }
        }
        Ok(outcomes)
    }

    /// Starts a step of these slots and new cells.
    fn start(
        &mut self,
        (device, decoder): (&dyn Device, &DeviceDecoder),
        rows: &[(usize, u32)],
    ) -> Result<Event, DeviceError> {
        let logprobs = rows.iter().any(|&(slot, _)| self.state.slots[slot].n_top().is_some());
        let kind = Kind { bucket: bucket_of(rows.len(), self.state.limits().n_rows), logprobs };
        self.state.plan(device, rows, kind.bucket)?;
        self.graphs.run(device, kind, &|| self.state.launch(device, decoder, kind))?;
        let (outcomes, n_bytes) = self.state.outcomes(kind);
        let event = device.read_back(outcomes, n_bytes)?;
        self.launched.push_back(Launched { event, kind });
        Ok(event)
    }

    /// The outcomes of a step. Those of the steps before it that nobody asked for are dropped: read-backs are
    /// collected in their order.
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
    fn id(&self) -> Row {
        Row { sequence: self.sequence, position: self.position, token: self.token }
    }
}
