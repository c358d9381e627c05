//! Reference for `clamped_swiglu`.

use crate::ops::ClampedSilu;

/// `y[i] = (u + 1) g / (1 + e^(-alpha g))` with `g = min(gate[i], limit)` and `u = up[i]` clamped to `-limit..limit`, in
/// f64.
pub fn clamped_swiglu(gate: &[f32], up: &[f32], clamp: ClampedSilu) -> Vec<f64> {
    let (limit, alpha) = (f64::from(clamp.limit), f64::from(clamp.alpha));
    let product = |(&gate, &up): (&f32, &f32)| {
        let (g, u) = (f64::from(gate).min(limit), f64::from(up).clamp(-limit, limit));
        (u + 1.0) * g / (1.0 + (-alpha * g).exp())
    };
    gate.iter().zip(up).map(product).collect()
}
