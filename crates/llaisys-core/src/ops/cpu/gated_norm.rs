//! `gated_norm`: y[t, c] = rms_norm(x)[t, c] * silu(z[t, c]). Reference: `ops/reference/gated_norm.rs`.

use super::gate::silu;
use super::isa::lanes::{Kernel, Lanes};
use super::rms_norm::sum_of_squares;
use super::rows::for_row_runs;
use crate::ops::OpContext;

/// Root-mean-square normalization of each row of `x` in place, times one weight per column and the silu of its gate.
///
/// - `x`, `z`: `[n, d]`; `weight`: `[d]`, which determines d
///
/// Panics if shapes disagree. Source: arXiv:2405.21060, with the gate after the norm.
pub fn gated_norm(cx: &OpContext, x: &mut [f32], z: &[f32], weight: &[f32], eps: f32) {
    let d = weight.len();
    assert!(x.len().is_multiple_of(d) && x.len() == z.len(), "rows or gates of wrong shape");
    let isa = cx.kernels.proof();
    for_row_runs(&cx.pool, x, d, &|first, x| {
        let z = &z[first * d..][..x.len()];
        isa.run(GatedNorm { x, z, weight, eps });
    });
}

struct GatedNorm<'a> {
    x: &'a mut [f32],
    z: &'a [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for GatedNorm<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let d = self.weight.len();
        for (x, z) in self.x.chunks_exact_mut(d).zip(self.z.chunks_exact(d)) {
            let mean = sum_of_squares(lanes, x) / d as f32;
            let factor = lanes.splat(1.0 / (mean + self.eps).sqrt());
            for ((x, w), z) in x.chunks_mut(L::N).zip(self.weight.chunks(L::N)).zip(z.chunks(L::N)) {
                let y = lanes.mul(lanes.load_first(x), factor);
                let y = lanes.mul(y, lanes.load_first(w));
                lanes.store_first(lanes.mul(y, silu(lanes, lanes.load_first(z))), x);
            }
        }
    }
}
