//! `rms_norm`: y[t, c] = x[t, c] / sqrt(mean_c(x[t, c]^2) + eps) * w[c]. Reference: `ops/reference/rms_norm.rs`.
//!
//! All arithmetic is f32. A row has 4 x N partial sums: vector i of every whole group of 4 is added to sum i, and the
//! vectors after the last whole group to sum 0. The order depends only on the row's length.

use super::isa::lanes::{Kernel, Lanes};
use super::rows::for_row_runs;
use crate::ops::OpContext;

/// Root-mean-square normalization of each row, times one weight per column.
///
/// - `x`, `out`: `[n, d]`; `weight`: `[d]`, which determines d
/// - a row whose squares overflow f32 (elements above 1e19) becomes zeros, as in other implementations with f32 sums
///
/// Panics if shapes disagree. Source: arXiv:1910.07467.
pub fn rms_norm(cx: &OpContext, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "output of wrong shape");
    normalize(cx, Some(x), weight, eps, out);
}

/// [`rms_norm`] with `x` as input and output. Applied per head, it is the norm of queries and keys (`x`:
/// `[n * heads, d_head]`).
pub fn rms_norm_in_place(cx: &OpContext, x: &mut [f32], weight: &[f32], eps: f32) {
    normalize(cx, None, weight, eps, x);
}

fn normalize(cx: &OpContext, x: Option<&[f32]>, weight: &[f32], eps: f32, out: &mut [f32]) {
    let d = weight.len();
    assert!(out.len().is_multiple_of(d), "{} elements are not whole rows of {d}", out.len());
    let isa = cx.kernels.proof();
    for_row_runs(&cx.pool, out, d, &|first, rows| {
        let x = x.map(|x| &x[first * d..][..rows.len()]);
        isa.run(Norm { x, weight, eps, out: rows });
    });
}

struct Norm<'a> {
    /// `None` if `out` has the input.
    x: Option<&'a [f32]>,
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for Norm<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let d = self.weight.len();
        for (i, row) in self.out.chunks_exact_mut(d).enumerate() {
            if let Some(x) = self.x {
                row.copy_from_slice(&x[i * d..(i + 1) * d]);
            }
            let mean = sum_of_squares(lanes, row) / d as f32;
            let factor = lanes.splat(1.0 / (mean + self.eps).sqrt());
            for (x, w) in row.chunks_mut(L::N).zip(self.weight.chunks(L::N)) {
                let y = lanes.mul(lanes.load_first(x), factor);
                lanes.store_first(lanes.mul(y, lanes.load_first(w)), x);
            }
        }
    }
}

#[inline(always)]
pub(super) fn sum_of_squares<L: Lanes>(lanes: L, x: &[f32]) -> f32 {
    let mut sums = [lanes.splat(0.0); 4];
    let groups = x.chunks_exact(4 * L::N);
    let tail = groups.remainder();
    for group in groups {
        for (i, sum) in sums.iter_mut().enumerate() {
            let v = lanes.load(&group[i * L::N..]);
            *sum = lanes.mul_add(v, v, *sum);
        }
    }
    for part in tail.chunks(L::N) {
        let v = lanes.load_first(part);
        sums[0] = lanes.mul_add(v, v, sums[0]);
    }
    lanes.sum(lanes.add(lanes.add(sums[0], sums[1]), lanes.add(sums[2], sums[3])))
}
