//! The cells of a block: the places of their keys and values, and of those to prefetch.

use super::{BLOCK, Job};
use crate::ops::cpu::isa::lanes::{Lanes, prefetch_all};
use crate::ops::cpu::kv_element::KvElement;
use std::ops::Range;

/// Number of cells between the one that is read and the one that is prefetched. With more, the prefetches of a thread
/// with few cells come too late (Zen 4, one row: 64 are 1.1 times as fast as 256). With fewer, many rows wait for
/// memory. If cells have scales, it is a block: those of a block are read before its values.
const fn ahead<T: KvElement>() -> usize {
    if T::SCALE > 0 { BLOCK } else { BLOCK / 2 }
}

/// The cells whose keys and values an item reads, in order.
#[derive(Clone, Copy)]
pub(super) struct Reads<'a> {
    /// The cells, from the start of a block on.
    pub(super) cells: &'a [u32],
    /// The first of the KV heads.
    pub(super) head: usize,
}

/// A block of the cells that an item reads.
pub(super) struct Block<'a, T> {
    keys: &'a [T],
    values: &'a [T],
    /// Elements of a head, without its scale.
    d: usize,
    /// Number of KV heads of the item.
    n_heads: usize,
    /// Offset of the item's part of each cell, in both tensors. Entries after the last cell repeat the first one.
    places: [usize; BLOCK],
    /// Offsets of the cells to prefetch meanwhile.
    later: [usize; BLOCK],
}

impl<'a, T: KvElement> Block<'a, T> {
    /// The block of `cells` (indices) of the first of `reads`, with `n_heads` KV heads of each. The second of `reads`
    /// is what this thread reads next.
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
        let first = first + ahead::<T>();
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

    /// Prefetches the first cells of the block, which no earlier block has prefetched.
    #[inline(always)]
    pub(super) fn fetch_start<L: Lanes>(&self, lanes: L) {
        for data in [self.keys, self.values] {
            for place in &self.places[..ahead::<T>()] {
                prefetch_all(lanes, data.as_ptr().wrapping_add(*place), self.n_heads * (self.d + T::SCALE));
            }
        }
    }

    /// The keys of KV head number `head` of the item.
    #[inline(always)]
    pub(super) fn keys(&self, head: usize) -> HeadRows<'_, T> {
        self.head(self.keys, head)
    }

    /// The values of KV head number `head` of the item.
    #[inline(always)]
    pub(super) fn values(&self, head: usize) -> HeadRows<'_, T> {
        self.head(self.values, head)
    }

    #[inline(always)]
    fn head<'b>(&'b self, data: &'b [T], head: usize) -> HeadRows<'b, T> {
        HeadRows { block: self, data, offset: head * (self.d + T::SCALE) }
    }
}

/// The keys, or the values, of one KV head.
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
    /// Elements of a row.
    #[inline(always)]
    pub(super) fn d(self) -> usize {
        self.block.d
    }

    /// The row of cell `i` of the block, or of its first cell if it has fewer. Panics if the cell does not exist.
    #[inline(always)]
    pub(super) fn row(self, i: usize) -> &'b [T] {
        &self.from(i)[..self.block.d]
    }

    /// The factor of the row of cell `i`.
    #[inline(always)]
    pub(super) fn scale(self, i: usize) -> f32 {
        T::scale(&self.from(i)[..self.block.d + T::SCALE])
    }

    /// The factors of the rows of these cells, which come first; zeros if the type has none.
    #[inline(always)]
    pub(super) fn scales(self, cells: Range<usize>) -> [f32; BLOCK] {
        let mut scales = [0.0; BLOCK];
        if T::SCALE > 0 {
            for (scale, cell) in scales.iter_mut().zip(cells) {
                *scale = self.scale(cell);
            }
        }
        scales
    }

    /// The tensor from the row of cell `i` on.
    #[inline(always)]
    fn from(self, i: usize) -> &'b [T] {
        &self.data[self.block.places[i] + self.offset..]
    }

    /// Prefetches elements `at..at + n` of the row that is read [`ahead`] cells after cell `i`, with the scale if they are
    /// its last.
    #[inline(always)]
    pub(super) fn fetch<L: Lanes>(self, lanes: L, i: usize, at: usize, n: usize) {
        let start = self.data.as_ptr().wrapping_add(self.block.later[i] + self.offset + at);
        let is_last = at + n == self.block.d;
        prefetch_all(lanes, start, if is_last { n + T::SCALE } else { n });
    }
}
