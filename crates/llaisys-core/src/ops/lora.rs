//! The matrices of LoRA adapters as [`lora`](super::lora) and the products of the base read them, and the rows of a pass
//! that use adapters.

use super::packed::{HALF_PANEL, PANEL};
use crate::error::DeviceError;
use crate::tensor::AlignedBuf;
use half::bf16;
use std::ops::Range;

/// Ranks of a block of [`LoraA`].
pub const RANK_BLOCK: usize = 16;

/// Blocks of equal length, in bf16 or f32.
#[derive(Debug)]
struct Blocks {
    buffer: AlignedBuf,
    is_bf16: bool,
    /// Numbers of a block.
    len: usize,
}

/// The numbers of a block.
#[derive(Debug, Clone, Copy)]
pub(super) enum Numbers<'a> {
    F32(&'a [f32]),
    /// Bits of bf16.
    Bf16(&'a [u16]),
}

impl Blocks {
    fn zeroed(n: usize, len: usize, is_bf16: bool) -> Result<Self, DeviceError> {
        let size = if is_bf16 { size_of::<bf16>() } else { size_of::<f32>() };
        Ok(Self { buffer: AlignedBuf::zeroed("a LoRA adapter", n * len * size)?, is_bf16, len })
    }

    /// Sets number `at` of block `i`.
    fn set(&mut self, i: usize, at: usize, x: f32) {
        let at = i * self.len + at;
        if self.is_bf16 {
            self.buffer.as_mut_slice::<u16>()[at] = bf16::from_f32(x).to_bits();
        } else {
            self.buffer.as_mut_slice::<f32>()[at] = x;
        }
    }

    fn block(&self, i: usize) -> Numbers<'_> {
        let range = i * self.len..(i + 1) * self.len;
        if self.is_bf16 {
            Numbers::Bf16(&self.buffer.as_slice()[range])
        } else {
            Numbers::F32(&self.buffer.as_slice()[range])
        }
    }
}

/// A of all projections of one input, `[n_ranks, n_in]`, in blocks of [`RANK_BLOCK`] ranks: block i is
/// `[n_in][RANK_BLOCK]`. The ranks after the last one are zero.
#[derive(Debug)]
pub struct LoraA {
    blocks: Blocks,
    n_in: usize,
    n_ranks: usize,
}

impl LoraA {
    /// Allocates zeros in bf16 or f32. Errors: no memory.
    pub fn zeroed(n_ranks: usize, n_in: usize, is_bf16: bool) -> Result<Self, DeviceError> {
        let blocks = Blocks::zeroed(n_ranks.div_ceil(RANK_BLOCK), n_in * RANK_BLOCK, is_bf16)?;
        Ok(Self { blocks, n_in, n_ranks })
    }

    /// Sets a rank to `values`, `[n_in]`. Panics if there is no such rank.
    pub fn set_rank(&mut self, rank: usize, values: &[f32]) {
        assert!(rank < self.n_ranks && values.len() == self.n_in, "rank {rank}");
        for (k, &x) in values.iter().enumerate() {
            self.blocks.set(rank / RANK_BLOCK, k * RANK_BLOCK + rank % RANK_BLOCK, x);
        }
    }

    /// Inputs.
    pub fn n_in(&self) -> usize {
        self.n_in
    }

    pub(super) fn n_blocks(&self) -> usize {
        self.n_ranks.div_ceil(RANK_BLOCK)
    }

    pub(super) fn block(&self, i: usize) -> Numbers<'_> {
        self.blocks.block(i)
    }
}

/// B of the rows of one packed matrix, in a block for each of its panels of 32 rows.
///
/// A panel has two halves of 16 rows. In a plain matrix both use the same ranks. In that of gate and up the first half
/// has gates, the second one ups, and each uses its own ranks, or none. With n the smaller number of ranks, a block has
/// `[n][32]`, then `[ranks - n][16]` of the half with more of them. Rows that are not set are zero.
#[derive(Debug)]
pub struct LoraB {
    blocks: Blocks,
    n_rows: usize,
    ranks: [Range<usize>; 2],
}

impl LoraB {
    /// Allocates zeros in bf16 or f32 for a matrix of `n_rows`. `ranks` are those of each half of a panel among the ranks
    /// of [`LoraProduct::a`]. Errors: no memory.
    pub fn zeroed(n_rows: usize, ranks: [Range<usize>; 2], is_bf16: bool) -> Result<Self, DeviceError> {
        let len = (ranks[0].len() + ranks[1].len()) * HALF_PANEL;
        let blocks = Blocks::zeroed(n_rows.div_ceil(PANEL), len, is_bf16)?;
        Ok(Self { blocks, n_rows, ranks })
    }

    /// Sets a row to `values`, one for each rank of its half. Panics if there is no such row.
    pub fn set_row(&mut self, row: usize, values: &[f32]) {
        let (half, n_both) = (row % PANEL / HALF_PANEL, self.n_both());
        assert!(row < self.n_rows && values.len() == self.ranks[half].len(), "row {row}");
        for (j, &x) in values.iter().enumerate() {
            let at = match j.checked_sub(n_both) {
                None => j * PANEL + row % PANEL,
                Some(j) => n_both * PANEL + j * HALF_PANEL + row % HALF_PANEL,
            };
            self.blocks.set(row / PANEL, at, x);
        }
    }

    /// Rows of the matrix.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// The ranks of each half of a panel.
    pub(super) fn ranks(&self) -> &[Range<usize>; 2] {
        &self.ranks
    }

    /// Ranks for which a block has numbers of both halves.
    pub(super) fn n_both(&self) -> usize {
        self.ranks[0].len().min(self.ranks[1].len())
    }

    pub(super) fn block(&self, panel: usize) -> Numbers<'_> {
        self.blocks.block(panel)
    }

    /// The bytes of a panel's block; empty after the last panel.
    pub(super) fn block_bytes(&self, panel: usize) -> &[u8] {
        let all = self.blocks.buffer.as_slice();
        let n_bytes = all.len() / self.n_rows.div_ceil(PANEL);
        all.get(panel * n_bytes..(panel + 1) * n_bytes).unwrap_or_default()
    }
}

/// What one adapter adds to the projections of one input. The ranks of all projections are stacked, so that the input is
/// read once.
#[derive(Debug)]
pub struct LoraProduct {
    /// A.
    pub a: LoraA,
    /// The scale of each rank, as many as the blocks of `a` have ranks.
    pub scales: Vec<f32>,
    /// At most one for each packed matrix.
    pub parts: Vec<LoraPart>,
}

/// What one adapter adds to the outputs of one packed matrix.
#[derive(Debug)]
pub struct LoraPart {
    /// The number of the matrix among those of the input.
    pub target: usize,
    /// B.
    pub b: LoraB,
}

impl LoraProduct {
    /// Ranks, with those that fill the last block.
    pub fn width(&self) -> usize {
        self.a.n_blocks() * RANK_BLOCK
    }

    /// Bytes of the matrices.
    pub fn n_bytes(&self) -> usize {
        let parts = self.parts.iter().map(|part| part.b.blocks.buffer.len());
        self.a.blocks.buffer.len() + parts.sum::<usize>()
    }
}

/// The rows of a pass that use one adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoraGroup {
    /// The slot of the adapter.
    pub slot: u32,
    /// Where its rows begin in the list of all rows that use adapters.
    pub start: usize,
    /// Its rows.
    pub n: usize,
}

impl LoraGroup {
    fn end(&self) -> usize {
        self.start + self.n
    }
}

/// The place of a row in [`LoraRows`].
#[derive(Debug, Clone, Copy)]
struct Place {
    group: u32,
    /// In the list of all rows that use adapters.
    index: u32,
}

/// The rows of a pass, grouped by adapter.
#[derive(Debug, Clone, Copy)]
pub struct LoraRows<'a> {
    groups: &'a [LoraGroup],
    /// The rows of the first group in ascending order, then those of the second, and so on.
    rows: &'a [u32],
    /// Of each row of the pass; None: it uses no adapter.
    places: &'a [Option<Place>],
}

/// The rows of one adapter in a block of rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct LoraRun<'a> {
    /// The slot of the adapter.
    pub(super) slot: u32,
    /// The rows, ascending.
    pub(super) rows: &'a [u32],
    /// The place of the first in the list of all rows that use adapters; the others follow it.
    pub(super) index: usize,
    /// The adapter's last row before the block.
    pub(super) before: Option<usize>,
}

impl LoraRun<'_> {
    /// The run without its first `n` rows.
    #[inline(always)]
    pub(super) fn after(self, n: usize) -> Self {
        Self { rows: &self.rows[n..], index: self.index + n, ..self }
    }
}

impl<'a> LoraRows<'a> {
    /// Rows of the pass, with those that use no adapter.
    pub fn n_rows(self) -> usize {
        self.places.len()
    }

    /// One for each adapter.
    pub fn groups(self) -> &'a [LoraGroup] {
        self.groups
    }

    /// The rows of a group.
    pub fn of(self, group: &LoraGroup) -> &'a [u32] {
        &self.rows[group.start..group.end()]
    }

    /// The rows in `block` of the adapter of `row`; None if it uses none, or if it is not the first of them.
    #[inline(always)]
    pub(super) fn run(self, row: usize, block: &Range<usize>) -> Option<LoraRun<'a>> {
        let place = self.places[row]?;
        let (group, index) = (&self.groups[place.group as usize], place.index as usize);
        let before = if index > group.start { Some(self.rows[index - 1] as usize) } else { None };
        if let Some(before) = before
            && before >= block.start
        {
            return None;
        }
        let mut end = index + 1;
        while end < group.end() && (self.rows[end] as usize) < block.end {
            end += 1;
        }
        Some(LoraRun { slot: group.slot, rows: &self.rows[index..end], index, before })
    }
}

/// Groups the rows of passes by adapter; the memory is reused.
#[derive(Debug, Default)]
pub struct LoraGrouping {
    groups: Vec<LoraGroup>,
    rows: Vec<u32>,
    places: Vec<Option<Place>>,
}

impl LoraGrouping {
    /// Groups rows of which `slots` are the slots of their adapters. None if no row uses one.
    pub fn group(&mut self, slots: impl Iterator<Item = Option<u32>>) -> Option<LoraRows<'_>> {
        let Self { groups, rows, places } = self;
        groups.clear();
        places.clear();
        for slot in slots {
            places.push(slot.map(|slot| {
                let known = groups.iter().position(|group| group.slot == slot);
                let group = known.unwrap_or_else(|| {
                    groups.push(LoraGroup { slot, start: 0, n: 0 });
                    groups.len() - 1
                });
                groups[group].n += 1;
                Place { group: group as u32, index: 0 }
            }));
        }
        let mut n_rows = 0;
        for group in &mut *groups {
            group.start = n_rows;
            n_rows += std::mem::take(&mut group.n);
        }
        rows.resize(n_rows, 0);
        for (row, place) in places.iter_mut().enumerate() {
            let Some(place) = place else { continue };
            let group = &mut groups[place.group as usize];
            place.index = group.end() as u32;
            rows[group.end()] = row as u32;
            group.n += 1;
        }
        (!groups.is_empty()).then_some(LoraRows { groups, rows, places })
    }
}
