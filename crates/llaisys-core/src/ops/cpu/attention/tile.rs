//! The two products of attention, in tiles of rows (rows x query heads of an item) by vectors.
//!
//! An output's sum runs in one order whatever the tile's shape, so tiles can be cut as the rows at hand allow.

use super::BLOCK;
use super::scratch::TILE_VECTORS;
use crate::ops::cpu::isa::lanes::{Lanes, MAX_LANES, prefetch_all};
use crate::ops::cpu::kv_element::KvElement;

/// A tile whose code depends on its number of rows.
pub(super) trait Tile {
    /// Computes the tile.
    fn run<const R: usize>(self);
}

/// Computes a tile of `n_rows <= L::TILE_ROWS` rows.
#[inline(always)]
pub(super) fn run<T: Tile>(n_rows: usize, tile: T) {
    match n_rows {
        1 => tile.run::<1>(),
        2 => tile.run::<2>(),
        3 => tile.run::<3>(),
        4 => tile.run::<4>(),
        5 => tile.run::<5>(),
        6 => tile.run::<6>(),
        _ => unreachable!("tiles have up to 6 rows"),
    }
}

/// Scores of some rows against up to `4 N` keys.
pub(super) struct Scores<'a, L> {
    pub(super) lanes: L,
    /// `[d][R]`
    pub(super) queries: &'a [f32],
    /// `[d][4 N]`
    pub(super) keys: &'a [f32],
    /// Vectors of keys to score.
    pub(super) n_vectors: usize,
    /// R rows, [`BLOCK`] apart, from the first of the keys.
    pub(super) out: &'a mut [f32],
}

impl<L: Lanes> Tile for Scores<'_, L> {
    #[inline(always)]
    fn run<const R: usize>(mut self) {
        if self.n_vectors == TILE_VECTORS {
            return self.vectors::<R, TILE_VECTORS>(0);
        }
        for first in 0..self.n_vectors {
            self.vectors::<R, 1>(first);
        }
    }
}

impl<L: Lanes> Scores<'_, L> {
    #[inline(always)]
    fn vectors<const R: usize, const C: usize>(&mut self, first: usize) {
        let lanes = self.lanes;
        let mut sums = [[lanes.splat(0.0); C]; R];
        for (q, k) in self.queries.chunks_exact(R).zip(self.keys.chunks_exact(TILE_VECTORS * L::N)) {
            let mut keys = [lanes.splat(0.0); C];
            for (c, key) in keys.iter_mut().enumerate() {
                *key = lanes.load(&k[(first + c) * L::N..]);
            }
            for (sums, &q) in sums.iter_mut().zip(q) {
                let q = lanes.splat(q);
                for (sum, key) in sums.iter_mut().zip(keys) {
                    *sum = lanes.mul_add(q, key, *sum);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, sum) in sums.iter().enumerate() {
                lanes.store(*sum, &mut self.out[r * BLOCK + (first + c) * L::N..]);
            }
        }
    }
}

/// Where a tile finds the values of a block.
pub(super) trait Values<L> {
    /// As stored, or converted.
    type Element: KvElement;
    /// The value of cell `j` of the block.
    fn row(&self, j: usize) -> &[Self::Element];
    /// Called before cell `j` is used, once for each row.
    fn look_ahead(&self, lanes: L, j: usize);
}

/// Values converted beforehand: `[cell][d padded]`.
pub(super) struct Packed<'a> {
    pub(super) values: &'a [f32],
    pub(super) padded: usize,
}

impl<L: Lanes> Values<L> for Packed<'_> {
    type Element = f32;

    #[inline(always)]
    fn row(&self, j: usize) -> &[f32] {
        &self.values[j * self.padded..][..self.padded]
    }

    #[inline(always)]
    fn look_ahead(&self, _lanes: L, _j: usize) {}
}

/// One kv head of a tensor.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'a, T> {
    /// `[cell][kv_head][d]`
    pub(super) data: &'a [T],
    /// Elements of a cell.
    pub(super) cell_len: usize,
    /// Where the head begins in a cell.
    pub(super) offset: usize,
    pub(super) d: usize,
}

impl<'a, T> HeadRows<'a, T> {
    /// The head's row of `cell`.
    #[inline(always)]
    pub(super) fn row(&self, cell: u32) -> &'a [T] {
        &self.data[cell as usize * self.cell_len + self.offset..][..self.d]
    }
}

/// Values where they are stored.
pub(super) struct Stored<'a, T> {
    pub(super) values: HeadRows<'a, T>,
    /// The block's cells.
    pub(super) cells: &'a [u32],
    /// Keys to fetch meanwhile, and for which cells: the next block's.
    pub(super) ahead: (HeadRows<'a, T>, &'a [u32]),
}

impl<L: Lanes, T: KvElement> Values<L> for Stored<'_, T> {
    type Element = T;

    #[inline(always)]
    fn row(&self, j: usize) -> &[T] {
        self.values.row(self.cells[j])
    }

    #[inline(always)]
    fn look_ahead(&self, lanes: L, j: usize) {
        let (keys, cells) = &self.ahead;
        if let Some(cell) = cells.get(j) {
            prefetch_all(lanes, keys.row(*cell));
        }
    }
}

/// Weighted values of some rows that see the same cells of a block, added to what they have.
pub(super) struct Weighted<'a, L, V> {
    pub(super) lanes: L,
    pub(super) values: &'a V,
    /// R rows, [`BLOCK`] apart.
    pub(super) weights: &'a [f32],
    /// Cells of the block that the rows see.
    pub(super) n_cells: usize,
    /// By what the sums so far are multiplied: `[R]`.
    pub(super) rescale: &'a [f32],
    /// R rows of whole vectors.
    pub(super) out: &'a mut [f32],
}

impl<L: Lanes, V: Values<L>> Tile for Weighted<'_, L, V> {
    #[inline(always)]
    fn run<const R: usize>(mut self) {
        let d = self.values.row(0).len();
        let mut at = 0;
        while at + TILE_VECTORS * L::N <= d {
            self.vectors::<R, TILE_VECTORS>(at);
            at += TILE_VECTORS * L::N;
        }
        while at < d {
            self.vectors::<R, 1>(at);
            at += L::N;
        }
    }
}

impl<L: Lanes, V: Values<L>> Weighted<'_, L, V> {
    #[inline(always)]
    fn vectors<const R: usize, const C: usize>(&mut self, at: usize) {
        let lanes = self.lanes;
        let mut weights = [self.weights; R];
        for (r, row) in weights.iter_mut().enumerate() {
            *row = &self.weights[r * BLOCK..][..self.n_cells];
        }
        let mut sums = [[lanes.splat(0.0); C]; R];
        for j in 0..self.n_cells {
            if at == 0 {
                self.values.look_ahead(lanes, j);
            }
            let row = &self.values.row(j)[at..];
            let mut values = [lanes.splat(0.0); C];
            if C == 1 {
                values[0] = V::Element::load_first(lanes, row);
            } else {
                let row = &row[..C * L::N];
                for (c, value) in values.iter_mut().enumerate() {
                    *value = V::Element::load(lanes, &row[c * L::N..]);
                }
            }
            for (sums, weights) in sums.iter_mut().zip(weights) {
                let weight = lanes.splat(weights[j]);
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = lanes.mul_add(weight, value, *sum);
                }
            }
        }
        self.add(at, &sums);
    }

    /// Rescales what is there and adds `sums`.
    #[inline(always)]
    fn add<const R: usize, const C: usize>(&mut self, at: usize, sums: &[[L::F; C]; R]) {
        let lanes = self.lanes;
        let row_len = self.out.len() / R;
        for ((out, sums), &rescale) in self.out.chunks_exact_mut(row_len).zip(sums).zip(self.rescale) {
            for (c, sum) in sums.iter().enumerate() {
                let out = &mut out[at + c * L::N..];
                lanes.store(lanes.mul_add(lanes.load(out), lanes.splat(rescale), *sum), out);
            }
        }
    }
}

/// Keys of `cells` (at most `4 N`) turned to `[d][4 N]`, so that a vector is one dimension of N cells. Missing
/// cells of the last vector repeat the last one. Fetches the same cells' values meanwhile.
#[inline(always)]
pub(super) fn pack_keys<L: Lanes, T: KvElement>(
    lanes: L,
    (keys, values): (HeadRows<'_, T>, HeadRows<'_, T>),
    cells: &[u32],
    out: &mut [f32],
) {
    let line_len = TILE_VECTORS * L::N;
    let n_words = keys.d / T::PER_WORD;
    for (c, cells) in cells.chunks(L::N).enumerate() {
        for cell in cells {
            prefetch_all(lanes, values.row(*cell));
        }
        for first in (0..n_words).step_by(L::N) {
            let mut tile = [lanes.splat(0.0); MAX_LANES];
            for (i, words) in tile.iter_mut().enumerate().take(L::N) {
                let row = keys.row(cells[i.min(cells.len() - 1)]);
                *words = T::load_words(lanes, &row[first * T::PER_WORD..]);
            }
            lanes.transpose(&mut tile);
            for (i, words) in tile.iter().enumerate().take(L::N.min(n_words - first)) {
                let at = (first + i) * T::PER_WORD * line_len + c * L::N;
                T::store_words(lanes, *words, &mut out[at..], line_len);
            }
        }
    }
}

/// Values of `cells` as f32, `[cell][d padded]`.
#[inline(always)]
pub(super) fn pack_values<L: Lanes, T: KvElement>(
    lanes: L,
    values: HeadRows<'_, T>,
    cells: &[u32],
    out: &mut [f32],
) {
    let padded = values.d.next_multiple_of(L::N);
    for (cell, out) in cells.iter().zip(out.chunks_exact_mut(padded)) {
        for (x, out) in values.row(*cell).chunks(L::N).zip(out.chunks_exact_mut(L::N)) {
            lanes.store(T::load_first(lanes, x), out);
        }
    }
}
