//! The kernels of `lora`, for one block of a matrix.

use crate::ops::cpu::gate::{HALF_PANEL, gate_up_rows};
use crate::ops::cpu::isa::lanes::{Kernel, Lanes};
use crate::ops::lora::{OUT_BLOCK, RANK_BLOCK};
use crate::ops::packed::PANEL;
use crate::threads::DisjointWriter;
use std::ops::Range;

/// The most rows of a [`Shrink`].
pub(super) const ROWS: usize = 8;
/// Partial sums of a product with A.
const N_SUMS: usize = 4;
/// Vectors of outputs that a tile computes. They divide a block.
const OUT_VECTORS: usize = 2;

/// A stored number.
pub(super) trait Number: Copy {
    /// Loads `N` numbers.
    fn load<L: Lanes>(lanes: L, x: &[Self]) -> L::F;
}

impl Number for f32 {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load(x)
    }
}

/// Bits of bf16.
impl Number for u16 {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_bf16(x)
    }
}

/// `out[i][j] = scales[j] * sum_k a[k][j] * x[rows[i]][k]`
pub(super) struct Shrink<'a, T> {
    /// `[n, n_in]`
    pub(super) x: &'a [f32],
    pub(super) n_in: usize,
    /// At most [`ROWS`].
    pub(super) rows: &'a [u32],
    /// `[n_in][RANK_BLOCK]`
    pub(super) a: &'a [T],
    pub(super) scales: &'a [f32],
    pub(super) out: &'a mut [[f32; RANK_BLOCK]; ROWS],
}

impl<T: Number> Kernel for Shrink<'_, T> {
    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let mut rank = 0;
        while rank < RANK_BLOCK {
            let mut row = 0;
            while row < self.rows.len() {
                row += match self.rows.len() - row {
                    4.. if L::TILE_ROWS >= 4 => self.tile::<L, 4>(lanes, row, rank),
                    2.. if L::TILE_ROWS >= 2 => self.tile::<L, 2>(lanes, row, rank),
                    _ => self.tile::<L, 1>(lanes, row, rank),
                };
            }
            rank += L::N;
        }
    }
}

impl<T: Number> Shrink<'_, T> {
    /// Computes `N` ranks from `rank` on of `R` rows from `row` on. Returns `R`.
    #[inline(always)]
    fn tile<L: Lanes, const R: usize>(&mut self, lanes: L, row: usize, rank: usize) -> usize {
        let n_in = self.n_in;
        let mut x: [&[f32]; R] = [&[]; R];
        let mut i = 0;
        while i < R {
            x[i] = &self.x[self.rows[row + i] as usize * n_in..][..n_in];
            i += 1;
        }
        let mut sums = [[lanes.splat(0.0); N_SUMS]; R];
        let (whole, mut k) = (n_in / N_SUMS * N_SUMS, 0);
        // Two loops, so that the number of the sum is a constant: otherwise the sums would be kept in memory.
        while k < whole {
            let mut part = 0;
            while part < N_SUMS {
                let a = T::load(lanes, &self.a[(k + part) * RANK_BLOCK + rank..]);
                let mut i = 0;
                while i < R {
                    sums[i][part] = lanes.mul_add(lanes.splat(x[i][k + part]), a, sums[i][part]);
                    i += 1;
                }
                part += 1;
            }
            k += N_SUMS;
        }
        while k < n_in {
            let a = T::load(lanes, &self.a[k * RANK_BLOCK + rank..]);
            let mut i = 0;
            while i < R {
                sums[i][0] = lanes.mul_add(lanes.splat(x[i][k]), a, sums[i][0]);
                i += 1;
            }
            k += 1;
        }
        let scales = lanes.load(&self.scales[rank..]);
        let mut i = 0;
        while i < R {
            let [a, b, c, d] = sums[i];
            let sum = lanes.add(lanes.add(a, b), lanes.add(c, d));
            lanes.store(lanes.mul(sum, scales), &mut self.out[row + i][rank..]);
            i += 1;
        }
        R
    }
}

/// The place of a projection's outputs in a row of the output.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    /// Elements of a row of the output.
    pub(super) stride: usize,
    /// Where every second half panel belongs to the projection: whether it is the second of two.
    pub(super) half: Option<bool>,
}

impl Columns {
    /// The place of output `n`. The outputs after it, up to a multiple of 16, follow it.
    #[inline(always)]
    fn at(self, n: usize) -> usize {
        match self.half {
            None => n,
            Some(second) => n / HALF_PANEL * PANEL + n % HALF_PANEL + if second { HALF_PANEL } else { 0 },
        }
    }

    /// The elements of a row of the output of a projection with `n` outputs.
    pub(super) fn width(self, n: usize) -> usize {
        if self.half.is_some() { gate_up_rows(n) } else { n }
    }
}

/// `out[rows[i]][n] += sum_j b[j][n] * hidden[i][j]`
pub(super) struct Expand<'a, T> {
    /// Rows of `width`, of which the first `rank` elements count.
    pub(super) hidden: &'a [f32],
    pub(super) width: usize,
    pub(super) rank: usize,
    pub(super) rows: &'a [u32],
    /// `[rank][OUT_BLOCK]`
    pub(super) b: &'a [T],
    /// The outputs of the block.
    pub(super) range: Range<usize>,
    pub(super) columns: Columns,
    pub(super) out: DisjointWriter<'a, f32>,
}

impl<T: Number> Kernel for Expand<'_, T> {
    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let mut row = 0;
        while row < self.rows.len() {
            row += match self.rows.len() - row {
                4.. => self.tile_rows::<L, 4>(lanes, row),
                2.. => self.tile_rows::<L, 2>(lanes, row),
                _ => self.tile_rows::<L, 1>(lanes, row),
            };
        }
    }
}

impl<T: Number> Expand<'_, T> {
    /// Computes the block for `R` rows from `row` on. Returns `R`.
    #[inline(always)]
    fn tile_rows<L: Lanes, const R: usize>(&mut self, lanes: L, row: usize) -> usize {
        let mut first = 0;
        while first < OUT_BLOCK && self.range.start + first < self.range.end {
            self.tile::<L, R>(lanes, row, first);
            first += OUT_VECTORS * L::N;
        }
        R
    }

    /// Computes [`OUT_VECTORS`] vectors from output `first` of the block on, for `R` rows from `row` on.
    #[inline(always)]
    fn tile<L: Lanes, const R: usize>(&mut self, lanes: L, row: usize, first: usize) {
        let mut hidden: [&[f32]; R] = [&[]; R];
        let mut i = 0;
        while i < R {
            hidden[i] = &self.hidden[(row + i) * self.width..][..self.rank];
            i += 1;
        }
        let mut sums = [[lanes.splat(0.0); OUT_VECTORS]; R];
        let mut j = 0;
        while j < self.rank {
            let mut t = 0;
            while t < OUT_VECTORS {
                let b = T::load(lanes, &self.b[j * OUT_BLOCK + first + t * L::N..]);
                let mut i = 0;
                while i < R {
                    sums[i][t] = lanes.mul_add(lanes.splat(hidden[i][j]), b, sums[i][t]);
                    i += 1;
                }
                t += 1;
            }
            j += 1;
        }
        let mut i = 0;
        while i < R {
            let start = self.rows[row + i] as usize * self.columns.stride;
            let mut t = 0;
            while t < OUT_VECTORS && self.range.start + first + t * L::N < self.range.end {
                let n = self.range.start + first + t * L::N;
                let (at, len) = (start + self.columns.at(n), L::N.min(self.range.end - n));
                let y = self.out.range(at..at + len);
                lanes.store_first(lanes.add(lanes.load_first(y), sums[i][t]), y);
                t += 1;
            }
            i += 1;
        }
    }
}
