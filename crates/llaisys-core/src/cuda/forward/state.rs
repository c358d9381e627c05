//! The state that decode steps keep on the device: each slot's cells, newest token and sampling, and the arrays of a
//! step's rows. Kernels read every value that varies between steps from here, so a step can be captured.

use super::arena::Arena;
use super::decoder::DeviceDecoder;
use super::graphs::Kind;
use super::rows::{DeviceRows, Seen};
use super::slots::{Attached, Slot, Synced};
use crate::arch::config::ModelConfig;
use crate::cuda::device::{Device, DevicePtr};
use crate::cuda::ops::sample::{self, RESULT_BYTES, Sample, TOP_BYTES};
use crate::cuda::ops::sample_tables::{Attach, SampleTables};
use crate::cuda::ops::step::{self, StepBegin, StepRows};
use crate::error::{DeviceError, Result};
use crate::sample::SamplerSpec;

/// What the state is sized for.
#[derive(Debug, Clone, Copy)]
pub struct StateLimits {
    /// Sequences.
    pub n_slots: usize,
    /// Rows of a step.
    pub n_rows: usize,
    /// Positions of a sequence.
    pub max_len: usize,
}

/// The token of a sequence that has no cell yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct NextToken {
    pub(super) position: u32,
    pub(super) token: u32,
}

/// A row of a step: a slot and its new cell, by the KV cache's numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct SlotCell {
    pub(super) slot: usize,
    pub(super) cell: u32,
}

/// Bytes of a row of the plan: slot and new cell, u32 each.
const PLAN_BYTES: usize = 8;

/// The slots' state. Slot `s` of the host is slot `s + 1` of the device, whose slot 0 belongs to padding rows.
#[derive(Debug)]
pub(super) struct State {
    limits: StateLimits,
    /// The window of layers that have one; 0 if there are none.
    window: usize,
    tables: SampleTables,
    memory: StateMemory,
    pub(super) slots: Vec<Slot>,
}

/// The arrays of the state. Those by slot have one entry more than there are slots.
#[derive(Debug, Clone, Copy)]
struct StateMemory {
    /// `[1 + n_slots, max_len]` u32
    cell_table: DevicePtr,
    /// `[1 + n_slots]` i32 each
    lengths: DevicePtr,
    bases: DevicePtr,
    last_tokens: DevicePtr,
    /// `[n_rows]` of [`PLAN_BYTES`]
    plan: DevicePtr,
    rows: StepRows,
    /// `[n_rows]` i32, zeros: `n_hidden` of layers without a window.
    none_hidden: DevicePtr,
    /// `[n_rows, vocab_size]` f32
    edited: DevicePtr,
    stats: DevicePtr,
    /// A step's results, then its best tokens.
    outcomes: DevicePtr,
}

impl State {
    /// Allocates the memory, which must happen before the KV cells are counted.
    ///
    /// Errors: `Unsupported` for a vocabulary that is too large for the sampler; the device's.
    pub(super) fn new(device: &dyn Device, config: &ModelConfig, limits: StateLimits) -> Result<Self> {
        let functions = sample::functions().into_iter().chain([step::begin_function()]);
        device.prepare(&functions.collect::<Vec<_>>().iter().collect::<Vec<_>>())?;
        let StateLimits { n_slots, n_rows, max_len } = limits;
        let vocab_size = config.vocab_size;
        let tables = SampleTables::new(device, 1 + n_slots, vocab_size, max_len)?;
        let n_bytes = StateMemory::place(limits, vocab_size, Arena::counting()).1;
        let base = device.alloc("the state of sequences", n_bytes)?;
        let memory = StateMemory::place(limits, vocab_size, Arena::placing(base)).0;
        // The slot of padding rows never has cells, and nothing is hidden.
        for by_slot in [memory.lengths, memory.bases, memory.last_tokens] {
            device.fill(by_slot, 0, 4 * (1 + n_slots))?;
        }
        device.fill(memory.none_hidden, 0, 4 * n_rows)?;
        let slots = (0..n_slots).map(|_| Slot::default()).collect();
        Ok(Self { limits, window: config.window.unwrap_or(0), tables, memory, slots })
    }

    pub(super) fn limits(&self) -> StateLimits {
        self.limits
    }

    /// Returns the number of positions of a sequence. Panics if `decoder` has fewer.
    pub(super) fn max_len(&self, decoder: &DeviceDecoder) -> usize {
        let max_len = self.limits.max_len;
        assert!(max_len <= decoder.limits.max_len, "the decoder has {} positions", decoder.limits.max_len);
        max_len
    }

    /// Panics unless kernels can index memory with a row's token and position, and its cell.
    pub(super) fn check_row(&self, decoder: &DeviceDecoder, next: NextToken, cell: u32) {
        let NextToken { position, token } = next;
        let (vocab_size, max_len) = (decoder.config.vocab_size, self.max_len(decoder));
        assert!((token as usize) < vocab_size, "token {token} of {vocab_size}");
        assert!((position as usize) < max_len, "position {position} of {max_len}");
        decoder.check_cells(&[cell]);
    }

    /// Uploads the state of a sequence whose next token is `token` at `position`, after the cells that `list` returns
    /// (the KV cache's numbers). Uploads nothing if the device has that state from the last step.
    ///
    /// Panics if the sequence has `max_len` cells. Errors: the device's.
    pub(super) fn sync(
        &mut self,
        device: &dyn Device,
        slot: usize,
        next: NextToken,
        list: &dyn Fn() -> Vec<u32>,
    ) -> Result<(), DeviceError> {
        let NextToken { position, token } = next;
        let next_position = |synced: &Synced| synced.length as i64 + synced.base;
        let memory = self.memory;
        match self.slots[slot].synced {
            Some(synced) if next_position(&synced) == i64::from(position) => {
                if synced.last_token != token {
                    self.slots[slot].synced = None;
                    device.upload_words(memory.last_tokens.at(4 * (slot + 1)), [token])?;
                    self.slots[slot].synced = Some(Synced { last_token: token, ..synced });
                }
            }
            _ => {
                // Unknown until all of it is there.
                self.slots[slot].synced = None;
                let cells = list();
                assert!(cells.len() < self.limits.max_len, "{} cells of a sequence", cells.len());
                let base = i64::from(position) - cells.len() as i64;
                device.upload_words(memory.lengths.at(4 * (slot + 1)), [cells.len() as u32])?;
                device.upload_words(memory.bases.at(4 * (slot + 1)), [base as u32])?;
                device.upload_words(memory.last_tokens.at(4 * (slot + 1)), [token])?;
                let synced = Synced { length: cells.len(), base, last_token: token };
                let row = memory.cell_table.at(4 * (slot + 1) * self.limits.max_len);
                device.upload_words(row, cells.into_iter().map(|cell| cell + 1))?;
                self.slots[slot].synced = Some(synced);
            }
        }
        Ok(())
    }

    /// Uploads the sampling of a slot's sequence if the tables differ, and its mask.
    ///
    /// Errors: the device's. A sequence whose sampling does not fit the tables is never in a step.
    pub(super) fn sync_sampling(
        &mut self,
        device: &dyn Device,
        slot: usize,
        mask: Option<&[u32]>,
    ) -> Result<()> {
        let of = &mut self.slots[slot];
        if !of.is_attached(mask.is_some()) {
            let greedy = SamplerSpec { temperature: 0.0, ..SamplerSpec::default() };
            let masked = mask.is_some() || of.attached.is_some_and(|attached| attached.masked);
            of.attached = None;
            let (spec, tokens, n_prompt) = match &of.sampling {
                Some(sampling) => (&sampling.spec, &sampling.tokens[..], sampling.n_prompt),
                None => (&greedy, &[][..], 0),
            };
            let (prompt, output) = tokens.split_at(n_prompt);
            self.tables.attach(device, slot + 1, &Attach { spec, prompt, output, masked })?;
            of.attached = Some(Attached { n_tokens: tokens.len(), masked });
        }
        if of.attached.is_some_and(|attached| attached.masked) {
            self.tables.set_mask(device, slot + 1, mask)?;
        }
        Ok(())
    }

    /// Uploads the plan of a step: a slot and its new cell for each row, then padding up to the bucket.
    ///
    /// Panics if a slot's state is not on the device, or has `max_len` cells.
    pub(super) fn plan(
        &mut self,
        device: &dyn Device,
        rows: &[SlotCell],
        bucket: usize,
    ) -> Result<(), DeviceError> {
        let padding = std::iter::repeat_n([0, 0], bucket - rows.len());
        let planned = rows.iter().map(|row| [row.slot as u32 + 1, row.cell + 1]);
        // Recorded first: if the step fails, its slots no longer match.
        for row in rows {
            let synced = self.slots[row.slot].synced.as_mut().expect("a step has synced slots only");
            assert!(synced.length < self.limits.max_len, "{} cells of a sequence", synced.length);
            synced.length += 1;
        }
        device.upload_words(self.memory.plan, planned.chain(padding).flatten())
    }

    /// Launches the kernels of a step whose plan is on the device. They depend only on its kind.
    ///
    /// Errors: the device's.
    ///
    /// # Safety
    /// The slots of the plan, and the cells of the slots and of the plan, are `decoder`'s. Their positions are below
    /// its `max_len`, and their tokens below its vocabulary size.
    pub(super) unsafe fn launch(
        &self,
        device: &dyn Device,
        decoder: &DeviceDecoder,
        kind: Kind,
    ) -> Result<(), DeviceError> {
        let (memory, rows) = (&self.memory, self.memory.rows);
        let begin = StepBegin {
            plan: memory.plan,
            cell_table: memory.cell_table,
            lengths: memory.lengths,
            bases: memory.bases,
            last_tokens: memory.last_tokens,
            rows,
            n_rows: kind.bucket,
            max_len: self.limits.max_len,
            window: self.window,
        };
        // SAFETY: `plan` indexed `slots` with each slot and asserted that it has fewer than `max_len` cells.
        unsafe { begin.launch(device) }?;
        let windowed = Seen {
            cells: memory.cell_table,
            start: rows.starts,
            n_hidden: rows.n_hidden,
            n_visible: rows.n_visible,
            tiles: DevicePtr::NULL,
            n_tiles: 0,
        };
        let resident = DeviceRows {
            tokens: rows.tokens,
            positions: rows.positions,
            cells: rows.cells,
            full: Seen { n_hidden: memory.none_hidden, ..windowed },
            windowed: (self.window > 0).then_some(windowed),
            n_alone: kind.bucket,
        };
        // SAFETY: `step_begin` writes rows of the plan's slots, whose values the caller promises, and of padding.
        let logits = unsafe { decoder.forward_resident(device, resident, kind.bucket) }?;
        let sample = Sample {
            tables: &self.tables,
            logits,
            edited: memory.edited,
            slots: memory.plan,
            slot_stride: PLAN_BYTES / 4,
            positions: rows.positions,
            stats: memory.stats,
            last_tokens: memory.last_tokens,
            results: memory.outcomes,
            tops: if kind.logprobs {
                memory.outcomes.at(kind.bucket * RESULT_BYTES)
            } else {
                DevicePtr::NULL
            },
            n_rows: kind.bucket,
        };
        // SAFETY: as for `begin`; the tables have rows of `max_len` tokens, and positions are below it.
        unsafe { sample.launch(device) }
    }

    /// Returns the array of a step's outcomes, and its bytes.
    pub(super) fn outcomes(&self, kind: Kind) -> (DevicePtr, usize) {
        let of_row = RESULT_BYTES + if kind.logprobs { TOP_BYTES } else { 0 };
        (self.memory.outcomes, kind.bucket * of_row)
    }
}

impl StateMemory {
    /// Places all arrays in an arena; returns them and the bytes of all.
    fn place(limits: StateLimits, vocab_size: usize, mut arena: Arena) -> (Self, usize) {
        let StateLimits { n_slots, n_rows, max_len } = limits;
        let cell_table = arena.take(4 * (1 + n_slots) * max_len);
        let mut by_slot = || arena.take(4 * (1 + n_slots));
        let (lengths, bases, last_tokens) = (by_slot(), by_slot(), by_slot());
        let plan = arena.take(PLAN_BYTES * n_rows);
        let mut by_row = || arena.take(4 * n_rows);
        let rows = StepRows {
            tokens: by_row(),
            positions: by_row(),
            cells: by_row(),
            starts: by_row(),
            n_hidden: by_row(),
            n_visible: by_row(),
        };
        let none_hidden = by_row();
        let memory = Self {
            cell_table,
            lengths,
            bases,
            last_tokens,
            plan,
            rows,
            none_hidden,
            edited: arena.take(4 * n_rows * vocab_size),
            stats: arena.take(sample::stats_bytes(n_rows, vocab_size)),
            outcomes: arena.take(n_rows * (RESULT_BYTES + TOP_BYTES)),
        };
        (memory, arena.n_bytes())
    }
}
