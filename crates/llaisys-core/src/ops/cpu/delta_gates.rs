//! `delta_gates`: write strengths and decays of the delta rule. Reference: `ops/reference/delta_gates.rs`.
//!
//! A row has one number for each value head, so plain f32 loops on the calling thread are enough.

/// Turns `b` into write strengths `sigmoid(b)` and `a` into decays `exp(-rate softplus(a + bias))`.
///
/// - `b`, `a`: `[n, n_values]`; `rate`, `bias`: `[n_values]`
///
/// Panics if shapes disagree. Source: arXiv:2412.06464.
pub fn delta_gates(b: &mut [f32], a: &mut [f32], rate: &[f32], bias: &[f32]) {
    assert!(b.len() == a.len() && a.len().is_multiple_of(rate.len()) && rate.len() == bias.len(), "gates");
    b.iter_mut().for_each(|b| *b = sigmoid(*b));
    for row in a.chunks_exact_mut(rate.len()) {
        for ((a, rate), bias) in row.iter_mut().zip(rate).zip(bias) {
            *a = (-rate * softplus(*a + bias)).exp();
        }
    }
}

/// `1 / (1 + e^-x)`
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `ln(1 + e^x)`, without overflow.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
