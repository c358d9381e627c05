//! `geglu`: y[t, f] = gelu(gate[t, f]) * up[t, f], gelu by its tanh form. Meaning: `ops/reference/geglu.rs`.
//!
//! x/2 (1 + tanh u) is x / (1 + e^-2u), which has no cancellation: with u = sqrt(2/pi) (x + 0.044715 x^3), the
//! exponent is x (a + b x^2).

use super::isa::lanes::{Lanes, exp};
use super::swiglu::{GateFunction, gated};
use crate::ops::OpContext;

/// -2 sqrt(2/pi)
const A: f32 = -1.595_769_2;
/// 0.044715 times that
const B: f32 = -0.071_354_814;

/// The gated activation of the feed-forward block, with gelu for silu.
///
/// - arguments as of [`swiglu`](super::swiglu::swiglu)
///
/// Panics if shapes disagree. Source: arXiv:2002.05202, arXiv:1606.08415.
pub fn geglu(cx: &OpContext, gate_up: &[f32], d_ff: usize, out: &mut [f32]) {
    gated::<GeluTanh>(cx, gate_up, d_ff, out);
}

struct GeluTanh;

impl GateFunction for GeluTanh {
    #[inline(always)]
    fn of<L: Lanes>(lanes: L, x: L::F) -> L::F {
        let factor = lanes.mul_add(lanes.mul(x, x), lanes.splat(B), lanes.splat(A));
        let e = exp(lanes, lanes.mul(x, factor));
        lanes.div(x, lanes.add(lanes.splat(1.0), e))
    }
}
