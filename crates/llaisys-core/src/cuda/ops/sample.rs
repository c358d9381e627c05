//! `sample`: from logits to tokens and their logprobs. Definition: [`crate::sample::sample`]. Greedy rows use the same
//! kernels.
//!
//! The kernels read a row's sampling parameters from the tables of its slot, so a captured launch can be replayed while
//! slots change.

use super::sample_tables::{MAX_TOP, SampleTables};
use crate::cuda::device::{Arg, Device, DevicePtr, Element, Launch};
use crate::cuda::kernel_source::{self, Function, Kernel, KernelSource};
use crate::error::DeviceError;
use crate::sample::{Logprobs, Outcome, RowFault};

/// `kernels/sample.cu`. It uses f32 logits only, so one module serves both storage types.
pub static SOURCE: KernelSource = KernelSource {
    name: "sample",
    text: concat!(
        "#line 1 \"sample.cuh\"\n",
        include_str!("../kernels/sample.cuh"),
        "#line 1 \"sample.cu\"\n",
        include_str!("../kernels/sample.cu")
    ),
    variants: || vec![vec![kernel_source::storage(Element::Bf16)]],
    kernels: &[
        Kernel {
            name: "sample_scan",
            max_threads: SCAN_THREADS,
            max_registers: 64,
            max_shared_bytes: Kernel::NO_SHARED,
        },
        Kernel {
            name: "sample_draw",
            max_threads: DRAW_THREADS,
            max_registers: 64,
            max_shared_bytes: Kernel::NO_SHARED,
        },
        Kernel {
            name: "sample_logprobs",
            max_threads: DRAW_THREADS,
            max_registers: 64,
            max_shared_bytes: Kernel::NO_SHARED,
        },
    ],
};

const SCAN_THREADS: u32 = 256;
const DRAW_THREADS: u32 = 512;
/// Logits of a block of the first kernel.
const CHUNK: usize = 4096;
/// Bytes of a `ChunkStat` in `sample.cuh`.
const STAT_BYTES: usize = 64;
/// Bytes of a row's result.
pub const RESULT_BYTES: usize = 16;
/// Bytes of a row's best tokens.
pub const TOP_BYTES: usize = MAX_TOP * 8;

/// Returns one of the three kernels.
pub fn function(name: &'static str) -> Function {
    SOURCE.function(&[kernel_source::storage(Element::Bf16)], name)
}

/// Returns the kernels in the order of their launches.
pub fn functions() -> [Function; 3] {
    ["sample_scan", "sample_draw", "sample_logprobs"].map(function)
}

/// Returns the bytes of [`Sample::stats`] for `n_rows` rows.
pub fn stats_bytes(n_rows: usize, vocab_size: usize) -> usize {
    n_rows * vocab_size.div_ceil(CHUNK) * STAT_BYTES
}

/// Samples the next token of each row, and computes its logprobs where its slot wants them.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// The sampling parameters and tokens of each slot. Each row's token is appended to its slot's.
    pub tables: &'a SampleTables,
    /// `[n_rows, vocab_size]` f32: the model's logits; not changed.
    pub logits: DevicePtr,
    /// `[n_rows, vocab_size]` f32: logits after penalties, biases and masks, of rows that have any.
    pub edited: DevicePtr,
    /// `[n_rows, slot_stride]` u32; the first number of each row is its slot. A row of an idle slot is padding.
    pub slots: DevicePtr,
    /// 1, or 2 for the plan of [`super::step::StepBegin`].
    pub slot_stride: usize,
    /// `[n_rows]` i32: the position of the row's input token. The sampled token has the next position.
    pub positions: DevicePtr,
    /// [`stats_bytes`] bytes of scratch.
    pub stats: DevicePtr,
    /// `[n_slots]` i32, or NULL: each slot's newest token, the input of its next step.
    pub last_tokens: DevicePtr,
    /// `[n_rows]` of [`RESULT_BYTES`].
    pub results: DevicePtr,
    /// `[n_rows]` of [`TOP_BYTES`]; NULL if no row wants logprobs, which saves a launch.
    pub tops: DevicePtr,
    /// Rows, 1 to 65535.
    pub n_rows: usize,
}

impl Sample<'_> {
    /// Launches the kernels.
    ///
    /// Errors: an array ends too early; those of [`Device::launch`].
    ///
    /// # Safety
    /// When the kernels run, `tables` and `last_tokens` have each of `slots`, and the position of each row is below the
    /// length of a row of `tables`.
    pub unsafe fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        self.check_arrays()?;
        let tables = self.tables;
        let vocab = tables.vocab_size as u32;
        let n_chunks = tables.vocab_size.div_ceil(CHUNK) as u32;
        let of_slots = [
            Arg::U32(vocab),
            Arg::Ptr(self.slots),
            Arg::U32(self.slot_stride as u32),
            Arg::Ptr(self.positions),
            Arg::Ptr(tables.params),
        ];
        let start = |name, grid, block, args: &[Arg]| {
            // SAFETY: `check_arrays` checked the arrays for all rows; the caller promises slots and positions;
            // `SampleTables::attach` checked the ids of edits.
            unsafe {
                device.launch(&Launch { function: &function(name), grid, block, shared_bytes: 0, args })
            }
        };
        let by_chunk = [n_chunks, self.n_rows as u32, 1];
        let by_row = [self.n_rows as u32, 1, 1];

        let mut args = vec![Arg::Ptr(self.logits), Arg::Ptr(self.edited)];
        args.extend(of_slots);
        args.extend([Arg::Ptr(tables.tokens), Arg::U32(tables.max_len as u32)]);
        args.extend([tables.masks, tables.edits, tables.words, self.stats].map(Arg::Ptr));
        start("sample_scan", by_chunk, SCAN_THREADS, &args)?;

        let mut args = vec![Arg::Ptr(self.logits), Arg::Ptr(self.edited)];
        args.extend(of_slots);
        args.extend([Arg::Ptr(self.stats), Arg::Ptr(tables.tokens), Arg::U32(tables.max_len as u32)]);
        args.extend([self.last_tokens, self.results].map(Arg::Ptr));
        start("sample_draw", by_row, DRAW_THREADS, &args)?;

        if self.tops == DevicePtr::NULL {
            return Ok(());
        }
        let mut args = vec![Arg::Ptr(self.logits)];
        args.extend(of_slots);
        args.extend([self.stats, self.results, self.tops].map(Arg::Ptr));
        start("sample_logprobs", by_row, DRAW_THREADS, &args)
    }

    /// Checks the arrays that are as long as the rows.
    fn check_arrays(&self) -> Result<(), DeviceError> {
        let (n_rows, vocab_size) = (self.n_rows, self.tables.vocab_size);
        for logits in [self.logits, self.edited] {
            logits.array(SOURCE.name, Element::F32.n_bytes(n_rows * vocab_size))?;
        }
        self.slots.array(SOURCE.name, 4 * n_rows * self.slot_stride)?;
        self.positions.array(SOURCE.name, 4 * n_rows)?;
        self.stats.array(SOURCE.name, stats_bytes(n_rows, vocab_size))?;
        self.results.array(SOURCE.name, n_rows * RESULT_BYTES)?;
        if self.tops != DevicePtr::NULL {
            self.tops.array(SOURCE.name, n_rows * TOP_BYTES)?;
        }
        Ok(())
    }
}

/// Returns the outcome of a row, `None` for padding. `result` is its part of [`Sample::results`] and `top` its part of
/// [`Sample::tops`]. `n_top` is the number of best tokens that it wants; `None`: no logprobs.
pub fn outcome(result: &[u8], top: &[u8], n_top: Option<u32>) -> Option<Outcome> {
    let [id, outcome, logprob, rank] = word_array(result);
    let logprobs = |n: u32| Logprobs {
        logprob: f32::from_bits(logprob),
        rank,
        top: top
            .chunks_exact(8)
            .take(n as usize)
            .map(word_array)
            .map(|[id, logprob]| (id, f32::from_bits(logprob)))
            .collect(),
    };
    match outcome {
        0 => Some(Outcome::Token { id, logprobs: n_top.map(logprobs) }),
        1 => Some(Outcome::Fault(RowFault::NonFinite)),
        2 => Some(Outcome::Fault(RowFault::AllMasked)),
        _ => None,
    }
}

fn word_array<const N: usize>(bytes: &[u8]) -> [u32; N] {
    std::array::from_fn(|i| {
        let word = &bytes[4 * i..4 * i + 4];
        u32::from_le_bytes([word[0], word[1], word[2], word[3]])
    })
}
