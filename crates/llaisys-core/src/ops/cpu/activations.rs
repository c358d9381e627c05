//! Inputs of a product, packed once for all its panels.
//!
//! Rows are cut into blocks of `R` rows, as high as the kernel's tile. Within a block the `R` rows' elements at
//! one place lie side by side, so a kernel reads one stream: the block that starts at row `s` begins at
//! `s * (words of a row)` and holds
//!
//! ```text
//! Plain    f32      [k][r]            the inputs
//! Rounded  f32      [k][r]            the inputs rounded to bf16
//! Pairs    2 x bf16 [k/2][r]          the inputs rounded to bf16, even k in the low half
//! Groups   4 x i8   [k/4][r]          the inputs rounded to 8 bits with one scale for 32 neighbours,
//!          GroupInput [k/32][r]       and that scale
//! ```
//!
//! Rounding is the same on every instruction set: bf16 to nearest even; 8 bits as `round(x * (127 / absmax))`,
//! nearest even, value `q * (absmax / 127)`. A group with a number that is not finite gets a NaN scale: the
//! row's results are NaN and no other row's are.

use super::isa::Isa;
use crate::error::DeviceError;
use crate::quant::BLOCK_LEN;
use crate::tensor::{AlignedBuf, Plain};
use crate::threads::{Disjoint, Pool, share};
use std::ops::Range;

/// Elements above which packing is spread over the threads; below, a region costs more than it saves.
const PARALLEL_ELEMENTS: usize = 1 << 14;

/// In which form a kernel reads its inputs; the layouts are drawn above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// f32 as given.
    Plain,
    /// f32 rounded to bf16, K even.
    Rounded,
    /// Pairs of bf16, K even.
    Pairs,
    /// 8-bit integers in groups of 32.
    Groups,
}

/// What a kernel must know of one row's group of 32 inputs besides the integers.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct GroupInput {
    /// The integers' unit: absmax / 127.
    pub(crate) scale: f32,
    /// `scale` times the sum of the integers, for formats with a minimum.
    pub(crate) scaled_sum: f32,
    /// -128 times the sum of the integers: takes back the offset of unsigned 8-bit weights.
    pub(crate) init_8: i32,
    /// -8 times the sum of the integers: the same for 4-bit weights.
    pub(crate) init_4: i32,
}

// SAFETY: four 4-byte numbers without padding, any bits allowed, alignment 4.
unsafe impl Plain for GroupInput {}

/// How rows are cut into blocks of nearly equal height: 16 rows of at most 12 make 8 + 8, not 12 + 4.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowBlocks {
    n_rows: usize,
    n_blocks: usize,
}

impl RowBlocks {
    /// `n_rows` in blocks of at most `rows_max`.
    pub(crate) fn new(n_rows: usize, rows_max: usize) -> Self {
        Self { n_rows, n_blocks: n_rows.div_ceil(rows_max) }
    }

    /// Number of blocks.
    pub(crate) fn len(self) -> usize {
        self.n_blocks
    }

    /// The rows of block `i`.
    pub(crate) fn rows(self, i: usize) -> Range<usize> {
        share(self.n_rows, self.n_blocks, i)
    }
}

/// One block as a kernel reads it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Inputs<'a> {
    /// [`Form::Plain`] or [`Form::Rounded`].
    Plain(&'a [f32]),
    /// [`Form::Pairs`].
    Pairs(&'a [u32]),
    /// [`Form::Groups`]: the integers, four to a word, and the groups.
    Groups(&'a [u32], &'a [GroupInput]),
}

/// The packed inputs of the current product, in every form that one of its parts reads.
#[derive(Debug)]
pub(crate) struct Activations {
    max_rows: usize,
    max_columns: usize,
    plain: AlignedBuf,
    bf16: AlignedBuf,
    integers: AlignedBuf,
    groups: AlignedBuf,
}

impl Activations {
    /// Room for `max_rows` rows of `max_columns` inputs.
    pub(crate) fn new(max_rows: usize, max_columns: usize) -> Result<Self, DeviceError> {
        let elements = max_rows.saturating_mul(max_columns.next_multiple_of(BLOCK_LEN));
        let zeroed = |bytes| AlignedBuf::zeroed("packed activations", bytes);
        Ok(Self {
            max_rows,
            max_columns,
            plain: zeroed(elements.saturating_mul(4))?,
            bf16: zeroed(elements.saturating_mul(4))?,
            integers: zeroed(elements)?,
            groups: zeroed(elements / BLOCK_LEN * size_of::<GroupInput>())?,
        })
    }

    /// Packs `x` `[n_rows, n_columns]` in `form`, in blocks of at most `rows_max`.
    pub(crate) fn pack(&mut self, (isa, pool): (Isa, &Pool), form: Form, x: Rows<'_>, rows_max: usize) {
        assert!(
            x.n_rows <= self.max_rows && x.n_columns <= self.max_columns,
            "{} rows of {} inputs, the context has room for {} of {}",
            x.n_rows,
            x.n_columns,
            self.max_rows,
            self.max_columns,
        );
        let blocks = RowBlocks::new(x.n_rows, rows_max);
        let (plain, pairs) = match form {
            Form::Plain => (Disjoint::new(self.plain.as_mut_slice()), Disjoint::new(&mut [][..])),
            Form::Rounded => (Disjoint::new(self.bf16.as_mut_slice()), Disjoint::new(&mut [][..])),
            Form::Pairs => (Disjoint::new(&mut [][..]), Disjoint::new(self.bf16.as_mut_slice())),
            Form::Groups => (Disjoint::new(&mut [][..]), Disjoint::new(self.integers.as_mut_slice())),
        };
        let groups = Disjoint::new(self.groups.as_mut_slice());
        let pack_one = |i: usize| {
            let rows = blocks.rows(i);
            // SAFETY: blocks are disjoint ranges of rows, and each is packed by one worker.
            let out = unsafe {
                match form {
                    Form::Plain => Outputs::Plain(plain.range(x.words(&rows, 1))),
                    Form::Rounded => Outputs::Rounded(plain.range(x.even_words(&rows, 1))),
                    Form::Pairs => Outputs::Pairs(pairs.range(x.even_words(&rows, 2))),
                    Form::Groups => Outputs::Groups(
                        pairs.range(x.words(&rows, 4)),
                        groups.range(x.words(&rows, BLOCK_LEN)),
                    ),
                }
            };
            pack_block(isa, x.sub(&rows), out);
        };
        if x.values.len() < PARALLEL_ELEMENTS {
            (0..blocks.len()).for_each(pack_one);
        } else {
            pool.run(&|worker| share(blocks.len(), pool.n_threads(), worker).for_each(&pack_one));
        }
    }

    /// The rows `rows` (a block that was packed) of the current product in `form`.
    pub(crate) fn block(&self, form: Form, n_columns: usize, rows: &Range<usize>) -> Inputs<'_> {
        let range = |words: usize| rows.start * words..rows.end * words;
        let even = n_columns.next_multiple_of(2);
        match form {
            Form::Plain => Inputs::Plain(&self.plain.as_slice()[range(n_columns)]),
            Form::Rounded => Inputs::Plain(&self.bf16.as_slice()[range(even)]),
            Form::Pairs => Inputs::Pairs(&self.bf16.as_slice()[range(even / 2)]),
            Form::Groups => Inputs::Groups(
                &self.integers.as_slice()[range(n_columns / 4)],
                &self.groups.as_slice()[range(n_columns / BLOCK_LEN)],
            ),
        }
    }
}

/// Rows of inputs, `[n_rows, n_columns]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) n_rows: usize,
    pub(crate) n_columns: usize,
}

impl<'a> Rows<'a> {
    /// `values` in rows of `n_columns`.
    pub(crate) fn new(values: &'a [f32], n_columns: usize) -> Self {
        assert!(n_columns > 0 && values.len().is_multiple_of(n_columns), "inputs are whole rows");
        Self { values, n_rows: values.len() / n_columns, n_columns }
    }

    fn sub(self, rows: &Range<usize>) -> Self {
        let values = &self.values[rows.start * self.n_columns..rows.end * self.n_columns];
        Self { values, n_rows: rows.len(), ..self }
    }

    /// Where the packed block of `rows` lies, at `per_word` inputs a word.
    fn words(self, rows: &Range<usize>, per_word: usize) -> Range<usize> {
        let words = self.n_columns / per_word;
        rows.start * words..rows.end * words
    }

    /// As [`Self::words`] with the inputs padded to an even number.
    fn even_words(self, rows: &Range<usize>, per_word: usize) -> Range<usize> {
        let words = self.n_columns.next_multiple_of(2) / per_word;
        rows.start * words..rows.end * words
    }
}

/// Where one packed block goes.
enum Outputs<'a> {
    Plain(&'a mut [f32]),
    Rounded(&'a mut [f32]),
    Pairs(&'a mut [u32]),
    Groups(&'a mut [u32], &'a mut [GroupInput]),
}

/// Packs one block, compiled for each instruction set.
fn pack_block(isa: Isa, x: Rows<'_>, out: Outputs<'_>) {
    match isa {
        Isa::Scalar => pack_lanes(x, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the token proves that the CPU has these features.
        Isa::Avx2(_) => unsafe { pack_avx2(x, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512(_) => unsafe { pack_avx512(x, out) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn pack_avx2(x: Rows<'_>, out: Outputs<'_>) {
    pack_lanes(x, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn pack_avx512(x: Rows<'_>, out: Outputs<'_>) {
    pack_lanes(x, out);
}

/// The packing itself: plain loops that compilers turn into vector code, with the same result on every set. No
/// closures here: they would be compiled without the set's features.
///
/// Runs of 32 columns are taken for all rows in turn, so that the places they go to, which are neighbours, stay
/// in the cache; zeros follow the last column.
#[inline(always)]
fn pack_lanes(x: Rows<'_>, mut out: Outputs<'_>) {
    let n_runs = x.n_columns / BLOCK_LEN;
    for run in 0..n_runs {
        for (row, values) in x.values.chunks_exact(x.n_columns).enumerate() {
            out.put(Place { run, row, n_rows: x.n_rows }, &values.as_chunks().0[run]);
        }
    }
    if n_runs * BLOCK_LEN < x.n_columns {
        for (row, values) in x.values.chunks_exact(x.n_columns).enumerate() {
            let tail = &values[n_runs * BLOCK_LEN..];
            let mut padded = [0.0; BLOCK_LEN];
            padded[..tail.len()].copy_from_slice(tail);
            out.put(Place { run: n_runs, row, n_rows: x.n_rows }, &padded);
        }
    }
}

/// Which run of 32 columns of which row.
#[derive(Clone, Copy)]
struct Place {
    run: usize,
    row: usize,
    n_rows: usize,
}

impl Outputs<'_> {
    /// Rounds one run and puts it in its place.
    #[inline(always)]
    fn put(&mut self, place: Place, values: &[f32; BLOCK_LEN]) {
        match self {
            Outputs::Plain(out) => put_words(out, place, values),
            Outputs::Rounded(out) => {
                let mut rounded = *values;
                for value in &mut rounded {
                    *value = f32::from_bits(round_bf16(*value) << 16);
                }
                put_words(out, place, &rounded);
            }
            Outputs::Pairs(out) => {
                let mut pairs = [0; BLOCK_LEN / 2];
                for (pair, values) in pairs.iter_mut().zip(values.as_chunks::<2>().0) {
                    *pair = round_bf16(values[0]) | round_bf16(values[1]) << 16;
                }
                put_words(out, place, &pairs);
            }
            Outputs::Groups(words, groups) => {
                let (group, integers) = round_group(values);
                groups[place.run * place.n_rows + place.row] = group;
                put_words(words, place, &integers);
            }
        }
    }
}

/// Writes the `N` words of a run into its row's column of `[word][row]`; padding past the end is left out.
#[inline(always)]
fn put_words<T: Copy, const N: usize>(out: &mut [T], place: Place, words: &[T; N]) {
    let out = &mut out[place.run * N * place.n_rows + place.row..];
    if place.n_rows == 1
        && let Some(out) = out.first_chunk_mut()
    {
        *out = *words;
        return;
    }
    for i in 0..N {
        if let Some(slot) = out.get_mut(i * place.n_rows) {
            *slot = words[i];
        }
    }
}

/// The bf16 nearest to `value` (ties to even) in the low half of a word; a NaN stays one.
#[inline(always)]
fn round_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if value.is_nan() { bits >> 16 | 0x40 } else { rounded }
}

/// Rounds 32 inputs to 8 bits with one scale; integers four to a word, first in the low byte.
#[inline(always)]
fn round_group(values: &[f32; BLOCK_LEN]) -> (GroupInput, [u32; BLOCK_LEN / 4]) {
    // Bits of absolute values order like the values, infinities above all numbers and NaNs above those.
    let max_bits = values.iter().fold(0, |max, value| (value.to_bits() & 0x7fff_ffff).max(max));
    let max = f32::from_bits(max_bits);
    let inverse = 127.0 / max;
    if !max.is_finite() {
        return (
            GroupInput { scale: f32::NAN, scaled_sum: f32::NAN, init_8: 0, init_4: 0 },
            [0; BLOCK_LEN / 4],
        );
    }
    if !inverse.is_finite() {
        // Zeros, or so small that 127/max overflows: below 2^-120, nothing beside any weight.
        return (GroupInput::default(), [0; BLOCK_LEN / 4]);
    }
    // Adding 1.5 * 2^23 leaves the integer, rounded to nearest even, in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let mut integers = [0_i32; BLOCK_LEN];
    for (integer, value) in integers.iter_mut().zip(values) {
        *integer = (value * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    }
    let mut bytes = [0_u8; BLOCK_LEN];
    for (byte, integer) in bytes.iter_mut().zip(&integers) {
        *byte = (integer & 0xff) as u8;
    }
    let sum: i32 = integers.iter().sum();
    let scale = max / 127.0;
    let group = GroupInput { scale, scaled_sum: scale * sum as f32, init_8: -128 * sum, init_4: -8 * sum };
    let mut words = [0; BLOCK_LEN / 4];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    (group, words)
}
