//! The kernel of `lora`: products with one block of A.

use crate::ops::cpu::isa::lanes::{Kernel, Lanes};
use crate::ops::lora::RANK_BLOCK;

/// The most rows of a [`Shrink`].
pub(super) const ROWS: usize = 8;
/// Partial sums of a product with A.
const N_SUMS: usize = 4;

/// A stored number.
pub(in crate::ops::cpu) trait Number: Copy {
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
                    4.. if const { L::TILE_ROWS >= 4 } => self.tile::<L, 4>(lanes, row, rank),
                    2.. if const { L::TILE_ROWS >= 2 } => self.tile::<L, 2>(lanes, row, rank),
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
