//! `gelu`: y[i] = x[i] / 2 (1 + erf(x[i] / sqrt(2))). Reference: `ops/reference/gelu.rs`.
//!
//! With q = erfc(|x| / sqrt(2)) / 2, the result is max(x, 0) - |x| q, which has no cancellation for negative x. erfc(z)
//! is t e^(-z^2 + P(t)) with t = 1 / (1 + z / 2) and a polynomial P of degree 9, with a relative error below 1.2e-7 (W.
//! H. Press et al., Numerical Recipes, section 6.2). Rounding -z^2 adds z^2 2^-24 to it, so the absolute error of y is
//! below 5e-7.

use super::isa::lanes::{Kernel, Lanes, exp};
use super::rows::for_row_runs;
use crate::ops::OpContext;

/// The Gaussian error linear unit of each number.
///
/// - `x`: any shape, in place. Source: arXiv:1606.08415.
pub fn gelu(cx: &OpContext, x: &mut [f32]) {
    let isa = cx.kernels.proof();
    for_row_runs(&cx.pool, x, 1, &|_, x| isa.run(Gelu { x }));
}

struct Gelu<'a> {
    x: &'a mut [f32],
}

impl Kernel for Gelu<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for part in self.x.chunks_mut(L::N) {
            lanes.store_first(gelu_of(lanes, lanes.load_first(part)), part);
        }
    }
}

/// The coefficients of P, the highest power first.
const ERFC: [f32; 10] = [
    0.170_872_77,
    -0.822_152_23,
    1.488_515_9,
    -1.135_204,
    0.278_868_07,
    -0.186_288_06,
    0.096_784_18,
    0.374_091_96,
    1.000_023_7,
    -1.265_512_2,
];
/// From here on q is 0 in f32. Larger numbers would make 0 times infinity.
const LARGEST: f32 = 20.0;

/// [`gelu`] of `N` numbers; NaN for NaN.
#[inline(always)]
pub(super) fn gelu_of<L: Lanes>(lanes: L, x: L::F) -> L::F {
    let (zero, one) = (lanes.splat(0.0), lanes.splat(1.0));
    // The operand that is kept if either is NaN comes second.
    let a = lanes.min(lanes.splat(LARGEST), lanes.max(x, lanes.sub(zero, x)));
    let half_z = lanes.mul(a, lanes.splat(std::f32::consts::FRAC_1_SQRT_2 / 2.0));
    let t = lanes.div(one, lanes.add(one, half_z));
    let mut p = lanes.splat(ERFC[0]);
    for c in &ERFC[1..] {
        p = lanes.mul_add(p, t, lanes.splat(*c));
    }
    let exponent = lanes.mul_add(lanes.mul(a, lanes.splat(-0.5)), a, p);
    let q = lanes.mul(lanes.mul(t, exp(lanes, exponent)), lanes.splat(0.5));
    lanes.sub(lanes.max(x, zero), lanes.mul(a, q))
}
