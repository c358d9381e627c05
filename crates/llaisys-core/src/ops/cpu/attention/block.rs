//! The cells of a block: where their keys and values lie, and those that are read later.

use super::{BLOCK, Job};
use crate::ops::cpu::isa::lanes::{Lanes, prefetch_all};
use crate::ops::cpu::kv_element::KvElement;
use std::ops::Range;

/// Cells between what is read and what is fetched: what memory brings while they are worked on. With more, a thread that
/// has few cells in all fetches too late (Zen 4, one row: 64 are 1.1 times as fast as 256); with fewer, many rows wait
/// for memory.
const AHEAD: usize = BLOCK / 2;

/// What an item reads, in order: keys and values of cells.
#[derive(Clone, Copy)]
pub(super) struct Reads<'a> {
    /// From the start of a block on.
    pub(super) cells: &'a [u32],
    /// The first of the kv heads.
    pub(super) head: usize,
}

/// A block of the cells that an item reads.
pub(super) struct Block<'a, T> {
    keys: &'a [T],
    values: &'a [T],
    /// Numbers of a head.
    d: usize,
    /// The item's kv heads.
    n_heads: usize,
    /// Elements before the item's part of each cell, in both tensors; past the last cell the first one's.
    places: [usize; BLOCK],
    /// The same of cells that are read later, to be fetched meanwhile.
    later: [usize; BLOCK],
}

impl<'a, T: KvElement> Block<'a, T> {
    /// The `cells` (indices) of what the first of `reads` reads, `n_heads` KV heads of each. The second of `reads` is
    /// what this thread reads next.
    #[inline(always)]
    pub(super) fn new(job: &Job<'a, T>, reads: [Reads<'a>; 2], n_heads: usize, cells: Range<usize>) -> Self {
        let ([own, next], first, n) = (reads, cells.start, cells.len());
        let head_len = job.heads.d_head + T::SCALE;
        let cell_len = job.heads.n_kv_heads * head_len;
        let place = |reads: Reads<'_>, cell: u32| cell as usize * cell_len + reads.head * head_len;
        let cells = &own.cells[first..first + n];
        let mut places = [place(own, cells[0]); BLOCK];
        for (at, cell) in places.iter_mut().zip(cells) {
            *at = place(own, *cell);
        }
        let mut later = places;
        let first = first + AHEAD;
        let own_cells = own.cells.get(first..).unwrap_or_default();
        let next_cells = next.cells.get(first.saturating_sub(own.cells.len())..).unwrap_or_default();
        for (at, cell) in later[..n].iter_mut().zip(own_cells) {
            *at = place(own, *cell);
        }
        for (at, cell) in later[own_cells.len().min(n)..n].iter_mut().zip(next_cells) {
            *at = place(next, *cell);
        }
        Self { keys: job.k, values: job.v, d: job.heads.d_head, n_heads, places, later }
    }

    /// Fetches the first of the block's cells, which no block before it has.
    #[inline(always)]
    pub(super) fn fetch_start<L: Lanes>(&self, lanes: L) {
        for data in [self.keys, self.values] {
            for place in &self.places[..AHEAD] {
                prefetch_all(lanes, data.as_ptr().wrapping_add(*place), self.n_heads * (self.d + T::SCALE));
            }
        }
    }

    /// The keys of the item's kv head number `head`.
    #[inline(always)]
    pub(super) fn keys(&self, head: usize) -> HeadRows<'_, T> {
        self.head(self.keys, head)
    }

    /// The values of the item's kv head number `head`.
    #[inline(always)]
    pub(super) fn values(&self, head: usize) -> HeadRows<'_, T> {
        self.head(self.values, head)
    }

    #[inline(always)]
    fn head<'b>(&'b self, data: &'b [T], head: usize) -> HeadRows<'b, T> {
        HeadRows { block: self, data, offset: head * (self.d + T::SCALE) }
    }
}

/// The keys, or the values, of one kv head.
pub(super) struct HeadRows<'b, T> {
    block: &'b Block<'b, T>,
    data: &'b [T],
    /// Elements of the item's part of a cell before the head.
    offset: usize,
}

impl<T> Clone for HeadRows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for HeadRows<'_, T> {}

impl<'b, T: KvElement> HeadRows<'b, T> {
    /// Numbers of a row.
    #[inline(always)]
    pub(super) fn d(self) -> usize {
        self.block.d
    }

    /// The row of cell `i` of the block; of its first one if it has fewer. Panics if the cell is not there.
    #[inline(always)]
    pub(super) fn row(self, i: usize) -> &'b [T] {
        &self.from(i)[..self.block.d]
    }

    /// By what the row of cell `i` is multiplied.
    #[inline(always)]
    pub(super) fn scale(self, i: usize) -> f32 {
        T::scale(&self.from(i)[..self.block.d + T::SCALE])
    }

    /// The tensor from the row of cell `i` on.
    #[inline(always)]
    fn from(self, i: usize) -> &'b [T] {
        &self.data[self.block.places[i] + self.offset..]
    }

    /// Fetches elements `at..at + n` of the row that is as far behind cell `i` as all is fetched ahead.
    #[inline(always)]
    pub(super) fn fetch<L: Lanes>(self, lanes: L, i: usize, at: usize, n: usize) {
        let start = self.data.as_ptr().wrapping_add(self.block.later[i] + self.offset + at);
        prefetch_all(lanes, start, n);
    }
}
