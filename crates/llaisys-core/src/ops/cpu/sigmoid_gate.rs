//! `sigmoid_gate`: x[i] = x[i] * sigmoid(gate[i]). Reference: `ops/reference/sigmoid_gate.rs`.

use super::isa::lanes::{Kernel, Lanes, exp};
use super::rows::for_row_runs;
use crate::ops::OpContext;

/// Multiplies `x` by the sigmoid of its gate.
///
/// - `x`, `gate`: of equal length
///
/// Panics if shapes disagree. Source: arXiv:2505.06708.
pub fn sigmoid_gate(cx: &OpContext, x: &mut [f32], gate: &[f32]) {
    assert_eq!(x.len(), gate.len(), "gates of wrong shape");
    let isa = cx.kernels.proof();
    for_row_runs(&cx.pool, x, 1, &|first, x| {
        let gate = &gate[first..][..x.len()];
        isa.run(SigmoidGate { x, gate });
    });
}

struct SigmoidGate<'a> {
    x: &'a mut [f32],
    gate: &'a [f32],
}

impl Kernel for SigmoidGate<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for (x, gate) in self.x.chunks_mut(L::N).zip(self.gate.chunks(L::N)) {
            let negative = lanes.sub(lanes.splat(0.0), lanes.load_first(gate));
            let divisor = lanes.add(lanes.splat(1.0), exp(lanes, negative));
            lanes.store_first(lanes.div(lanes.load_first(x), divisor), x);
        }
    }
}
