//! Inputs of a product, packed once for all its panels.
//!
//! Rows are cut into blocks of `R` rows, the height of the kernel's tile, and columns into runs of 32. In a block the
//! parts of the `R` rows in one run follow each other, so that a kernel reads one stream and packing writes whole
//! cache lines. The block whose first row is `s` begins at `s * (words of a row)` and has this layout:
//!
//! ```text
//! Plain    f32      [k/32][r][k%32]      the inputs
//! Rounded  f32      [k/32][r][k%32]      the inputs rounded to bf16
//! Pairs    2 x bf16 [k/32][r][k%32/2]    the inputs rounded to bf16, even k in the low half
//! Groups   4 x i8   [k/32][r][k%32/4]    the inputs rounded to 8 bits with one scale for each 32 neighbors,
//!          GroupInput [k/32][r]          and that scale
//! Sized    SizedGroup [k/32][r]          the same integers and scale, the integers as sizes and signs
//! ```
//!
//! The last run of a row is padded with zeros.
//!
//! Rounding is the same on every instruction set. To bf16 it is to nearest even. To 8 bits it is
//! `round(x * (127 / absmax))`, to nearest even, with the value `q * (absmax / 127)`. A group with a number that is not
//! finite gets a NaN scale: the results of its row are NaN, and no other row is affected.

#![allow(unsafe_code, reason = "workers pack disjoint blocks of one buffer")]

mod pack;

use super::isa::Isa;
use crate::error::DeviceError;
use crate::quant::BLOCK_LEN;
use crate::tensor::{AlignedBuf, Plain};
use crate::threads::{Disjoint, Pool, share};
use pack::{Item, Outputs};
use std::ops::Range;

/// Elements from which packing is spread over the threads; with fewer, a region costs more than it saves.
const PARALLEL_ELEMENTS: usize = 1 << 13;

/// Blocks per thread from which whole blocks are distributed.
const EVEN_BLOCKS: usize = 8;

/// The form in which a kernel reads its inputs; the layouts are shown above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// f32, unchanged.
    Plain,
    /// f32 rounded to bf16.
    Rounded,
    /// Pairs of bf16.
    Pairs,
    /// 8-bit integers in groups of 32.
    Groups,
    /// The same as sizes and signs, for 8-bit weights on sets without VNNI.
    Sized,
}

impl Form {
    /// Words in a row of `n_columns` inputs.
    fn row_words(self, n_columns: usize) -> usize {
        n_columns.div_ceil(BLOCK_LEN) * self.run_words()
    }

    /// Words in a run of 32 inputs; 0 if it has no words of its own.
    const fn run_words(self) -> usize {
        match self {
            Form::Sized => 0,
            Form::Plain | Form::Rounded => BLOCK_LEN,
            Form::Pairs => BLOCK_LEN / 2,
            Form::Groups => BLOCK_LEN / 4,
        }
    }
}

/// What a kernel needs from one row's group of 32 inputs besides the integers. The sums are multiplied by an offset or
/// a minimum of the weights; they are stored in the form that kernels load.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct GroupInput {
    /// The scale of the integers: absmax / 127.
    pub(crate) scale: f32,
    /// The sum of the integers, times -1: of all, of the first half, of the second half.
    pub(crate) minus_sums: [i32; 3],
    /// The scale times the sum of the integers: of all, of the first half, of the second half.
    pub(crate) scaled_sums: [f32; 3],
    /// Extends the size to 32 bytes.
    padding: u32,
}

impl GroupInput {
    /// A group of integers with this scale and these sums of its halves.
    pub(crate) fn new(scale: f32, [first, second]: [i32; 2]) -> Self {
        let sums = [first + second, first, second];
        let (minus_sums, scaled_sums) = (sums.map(|sum| -sum), sums.map(|sum| scale * sum as f32));
        Self { scale, minus_sums, scaled_sums, padding: 0 }
    }
}

// SAFETY: eight 4-byte numbers without padding between them, any bits allowed, alignment 4.
unsafe impl Plain for GroupInput {}

/// A group of 32 integers for products with 8-bit weights where one factor has to be unsigned: x w is |x| times w, or
/// times the inverted bits of w (which is -w - 1) plus |x| if x is negative.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct SizedGroup {
    /// The sizes of the integers, four per word.
    pub(crate) sizes: [u32; BLOCK_LEN / 4],
    /// What XOR makes the signed factor of a weight that is stored with the offset 128.
    pub(crate) flips: [u32; BLOCK_LEN / 4],
    /// The scale of the integers: absmax / 127.
    pub(crate) scale: f32,
    /// The sum of the negative integers, times -1.
    pub(crate) minus_negatives: i32,
}

/// A one in each byte of a word.
const ONES: u32 = 0x0101_0101;
/// The offset 128 in each byte of a word.
const OFFSETS: u32 = 128 * ONES;

impl SizedGroup {
    /// A group of these integers, four per word.
    #[inline(always)]
    pub(crate) fn new(scale: f32, words: &[u32; BLOCK_LEN / 4]) -> Self {
        let mut group = Self { scale, ..Self::default() };
        for (i, word) in words.iter().enumerate() {
            let negative = (word >> 7 & ONES) * 255;
            // No byte overflows: of -127 the bits are inverted to 126.
            group.sizes[i] = (word ^ negative) + (negative & ONES);
            group.flips[i] = negative ^ OFFSETS;
            for size in (group.sizes[i] & negative).to_le_bytes() {
                group.minus_negatives += i32::from(size);
            }
        }
        group
    }

    /// The integers, four per word.
    fn words(&self) -> [u32; BLOCK_LEN / 4] {
        std::array::from_fn(|i| {
            let negative = self.flips[i] ^ OFFSETS;
            (self.sizes[i] ^ negative) + (negative & ONES)
        })
    }
}

// SAFETY: 4-byte numbers without padding between them, any bits allowed, alignment 4.
unsafe impl Plain for SizedGroup {}

/// Cuts rows into blocks of nearly equal height: 16 rows with a limit of 12 become 8 + 8, not 12 + 4.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowBlocks {
    first: usize,
    n_rows: usize,
    n_blocks: usize,
}

impl RowBlocks {
    /// `rows` in blocks of at most `rows_max`.
    pub(crate) fn new(rows: &Range<usize>, rows_max: usize) -> Self {
        Self { first: rows.start, n_rows: rows.len(), n_blocks: rows.len().div_ceil(rows_max) }
    }

    /// Number of blocks.
    pub(crate) fn len(self) -> usize {
        self.n_blocks
    }

    /// The rows of block `i`.
    pub(crate) fn rows(self, i: usize) -> Range<usize> {
        let rows = share(self.n_rows, self.n_blocks, i);
        self.first + rows.start..self.first + rows.end
    }
}

/// One block in the form that a kernel reads.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Inputs<'a> {
    /// [`Form::Plain`] or [`Form::Rounded`].
    Plain(&'a [f32]),
    /// [`Form::Pairs`].
    Pairs(&'a [u32]),
    /// [`Form::Groups`]: the integers, four per word, and the groups.
    Groups(&'a [u32], &'a [GroupInput]),
    /// [`Form::Sized`].
    Sized(&'a [SizedGroup]),
}

impl Inputs<'_> {
    /// Number of groups; 0 for plain forms.
    pub(crate) fn n_groups(&self) -> usize {
        match self {
            Inputs::Plain(_) | Inputs::Pairs(_) => 0,
            Inputs::Groups(_, groups) => groups.len(),
            Inputs::Sized(groups) => groups.len(),
        }
    }

    /// The integers of group `i`, four per word, and their scale.
    pub(crate) fn group(&self, i: usize) -> ([u32; BLOCK_LEN / 4], f32) {
        match self {
            Inputs::Plain(_) | Inputs::Pairs(_) => unreachable!("a plain form has no groups"),
            Inputs::Groups(words, groups) => (words.as_chunks().0[i], groups[i].scale),
            Inputs::Sized(groups) => (groups[i].words(), groups[i].scale),
        }
    }
}

/// Parameters of packing.
#[derive(Clone, Copy)]
pub(crate) struct Packing<'a> {
    pub(crate) isa: Isa,
    pub(crate) pool: &'a Pool,
    pub(crate) form: Form,
    /// The most rows in a block.
    pub(crate) rows_max: usize,
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
    sized: AlignedBuf,
    /// The blocks of the packing in progress; the memory is reused.
    blocks: Vec<Range<usize>>,
}

impl Activations {
    /// Allocates capacity for `max_rows` rows of `max_columns` inputs.
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
            sized: zeroed(elements / BLOCK_LEN * size_of::<SizedGroup>())?,
            blocks: Vec::with_capacity(max_rows),
        })
    }

    /// The most rows of a product.
    pub(crate) fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Packs `x`, each of `groups` in blocks of its own: the groups are consecutive rows, and together all of `x`.
    /// Panics if `x` exceeds the capacity.
    pub(crate) fn pack(
        &mut self,
        packing: Packing<'_>,
        x: Rows<'_>,
        groups: impl Iterator<Item = Range<usize>>,
    ) {
        let Packing { isa, pool, form, rows_max } = packing;
        assert!(
            x.n_rows <= self.max_rows && x.n_columns <= self.max_columns,
            "{} rows of {} inputs, the context has capacity for {} of {}",
            x.n_rows,
            x.n_columns,
            self.max_rows,
            self.max_columns,
        );
        let mut blocks = std::mem::take(&mut self.blocks);
        blocks.clear();
        for rows in groups {
            let of_group = RowBlocks::new(&rows, rows_max);
            blocks.extend((0..of_group.len()).map(|i| of_group.rows(i)));
        }
        let n_runs = x.n_columns.div_ceil(BLOCK_LEN);
        let serial = x.values.len() < PARALLEL_ELEMENTS;
        // A few blocks do not occupy all threads evenly, so their columns are cut as well.
        let is_even = blocks.len() >= EVEN_BLOCKS * pool.n_threads();
        let n_parts = if serial || is_even { 1 } else { pool.n_threads().min(n_runs) };
        let buffers = self.buffers(form);
        let pack_item = |item: usize| {
            let rows = blocks[item / n_parts].clone();
            let runs = share(n_runs, n_parts, item % n_parts);
            // SAFETY: items are disjoint in rows or in runs, so their places are, and one worker packs each.
            // `part` checks that rows are inside the buffers.
            let out = unsafe { buffers.part(x.n_columns, &rows, &runs) };
            pack::pack(isa, Item { x: x.sub(&rows), runs }, out);
        };
        let n_items = blocks.len() * n_parts;
        if serial {
            (0..n_items).for_each(pack_item);
        } else {
            pool.run(&|worker| share(n_items, pool.n_threads(), worker).for_each(&pack_item));
        }
        self.blocks = blocks;
    }

    fn buffers(&mut self, form: Form) -> Buffers<'_> {
        let words = match form {
            Form::Plain => self.plain.as_mut_slice(),
            Form::Rounded | Form::Pairs => self.bf16.as_mut_slice(),
            Form::Groups | Form::Sized => self.integers.as_mut_slice(),
        };
        Buffers {
            form,
            words: Disjoint::new(words),
            groups: Disjoint::new(self.groups.as_mut_slice()),
            sized: Disjoint::new(self.sized.as_mut_slice()),
        }
    }

    /// The rows `rows` of the current product in `form`; they must be a packed block.
    pub(crate) fn block(&self, form: Form, n_columns: usize, rows: &Range<usize>) -> Inputs<'_> {
        let range = |words: usize| rows.start * words..rows.end * words;
        let words = range(form.row_words(n_columns));
        match form {
            Form::Plain => Inputs::Plain(&self.plain.as_slice()[words]),
            Form::Rounded => Inputs::Plain(&self.bf16.as_slice()[words]),
            Form::Pairs => Inputs::Pairs(&self.bf16.as_slice()[words]),
            Form::Groups => Inputs::Groups(
                &self.integers.as_slice()[words],
                &self.groups.as_slice()[range(n_columns / BLOCK_LEN)],
            ),
            Form::Sized => Inputs::Sized(&self.sized.as_slice()[range(n_columns / BLOCK_LEN)]),
        }
    }
}

/// The buffers of one form during packing. For the plain forms, words are the bits of f32.
struct Buffers<'a> {
    form: Form,
    words: Disjoint<'a, u32>,
    groups: Disjoint<'a, GroupInput>,
    sized: Disjoint<'a, SizedGroup>,
}

impl Buffers<'_> {
    /// The place of the runs `runs` of the block `rows`.
    ///
    /// # Safety
    /// While the result is in use, no other call may have runs of these rows that overlap.
    unsafe fn part(&self, n_columns: usize, rows: &Range<usize>, runs: &Range<usize>) -> Outputs<'_> {
        let place = |row_words: usize, run_words: usize| {
            let word = |run: usize| rows.start * row_words + rows.len() * run * run_words;
            word(runs.start)..word(runs.end)
        };
        let words = place(self.form.row_words(n_columns), self.form.run_words());
        // SAFETY: `place` is injective in rows and runs, and the caller keeps those apart.
        let words = unsafe { self.words.range(words) };
        match self.form {
            Form::Plain => Outputs::Plain(words),
            Form::Rounded => Outputs::Rounded(words),
            Form::Pairs => Outputs::Pairs(words),
            Form::Groups => {
                // SAFETY: as above.
                Outputs::Groups(words, unsafe { self.groups.range(place(n_columns / BLOCK_LEN, 1)) })
            }
            Form::Sized => {
                // SAFETY: as above.
                Outputs::Sized(unsafe { self.sized.range(place(n_columns / BLOCK_LEN, 1)) })
            }
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
        assert!(n_columns > 0 && values.len().is_multiple_of(n_columns), "inputs must be whole rows");
        Self { values, n_rows: values.len() / n_columns, n_columns }
    }

    fn sub(self, rows: &Range<usize>) -> Self {
        let values = &self.values[rows.start * self.n_columns..rows.end * self.n_columns];
        Self { values, n_rows: rows.len(), ..self }
    }
}
