//! How far results may be from their references.

use half::{bf16, f16};
use llaisys_core::cuda::device::Element;

/// The value that an element of this type keeps.
pub(crate) fn rounded(element: Element, x: f64) -> f64 {
    match element {
        Element::Bf16 => bf16::from_f64(x).to_f64(),
        Element::F16 => f16::from_f64(x).to_f64(),
        Element::F32 => f64::from(x as f32),
    }
}

/// The distance of the numbers that an element of this type keeps around `x`.
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

/// Two places of the stored type: what one rounding on the way and one at the end may cost.
pub(crate) fn two_ulps(element: Element) -> impl Fn(usize, f64) -> f64 {
    move |_, want| 2.0 * ulp(element, want)
}
