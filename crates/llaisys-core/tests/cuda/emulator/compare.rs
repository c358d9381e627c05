//! Tolerances between results and their references.

use half::{bf16, f16};
use llaisys_core::cuda::device::Element;

/// Returns `x` rounded to the element type.
pub(crate) fn rounded(element: Element, x: f64) -> f64 {
    match element {
        Element::Bf16 => bf16::from_f64(x).to_f64(),
        Element::F16 => f16::from_f64(x).to_f64(),
        Element::F32 => f64::from(x as f32),
    }
}

/// Returns the unit in the last place of the element type at `x`.
pub(crate) fn ulp(element: Element, x: f64) -> f64 {
    let (fraction_bits, least_exponent) = match element {
        Element::Bf16 => (7, -126),
        Element::F16 => (10, -14),
        Element::F32 => (23, -126),
    };
    let exponent =
        if x == 0.0 { least_exponent } else { (x.abs().log2().floor() as i32).max(least_exponent) };
    f64::from(exponent - fraction_bits).exp2()
}

/// Two ulp of the stored type: one for an intermediate rounding and one for the final rounding.
pub(crate) fn two_ulps(element: Element) -> impl Fn(usize, f64) -> f64 {
    move |_, want| 2.0 * ulp(element, want)
}
