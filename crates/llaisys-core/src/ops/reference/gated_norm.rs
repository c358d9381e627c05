//! Reference for `gated_norm`.

use super::rms_norm::rms_norm;

/// `y[t, c] = rms_norm(x)[t, c] * silu(z[t, c])`, in f64.
///
/// - `x`, `z`: `[n, d]`; `weight`: `[d]`; returns `[n, d]`
pub fn gated_norm(x: &[f32], z: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    rms_norm(x, weight, eps).iter().zip(z).map(|(y, &z)| y * silu(f64::from(z))).collect()
}
