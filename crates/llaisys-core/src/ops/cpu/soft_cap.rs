//! `soft_cap`: x[i] = cap * tanh(x[i] / cap). Reference: `ops/reference/soft_cap.rs`.

use super::isa::lanes::{Kernel, Lanes, tanh};
use super::rows::for_row_runs;
use crate::ops::OpContext;

/// Limits numbers smoothly to -cap..cap; numbers near zero hardly change.
///
/// - `x`: any shape. Source: Gemma 2, arXiv:2408.00118.
pub fn soft_cap(cx: &OpContext, x: &mut [f32], cap: f32) {
    let isa = cx.kernels.proof();
    for_row_runs(&cx.pool, x, 1, &|_, x| isa.run(Cap { x, cap }));
}

/// [`soft_cap`] of a slice, for use in other kernels.
pub(super) struct Cap<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) cap: f32,
}

impl Kernel for Cap<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let cap = lanes.splat(self.cap);
        for part in self.x.chunks_mut(L::N) {
            let y = tanh(lanes, lanes.div(lanes.load_first(part), cap));
            lanes.store_first(lanes.mul(y, cap), part);
        }
    }
}
