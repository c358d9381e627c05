//! Reference for `rms_norm`.

/// `y[t, c] = x[t, c] / sqrt(mean_c(x[t, c]^2) + eps) * w[c]`, in f64.
///
/// - `x`: `[n, d]`; `weight`: `[d]`; returns `[n, d]`
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let d = weight.len();
    let mut y = Vec::with_capacity(x.len());
    for x in x.chunks_exact(d) {
        let sum: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let root = (sum / d as f64 + f64::from(eps)).sqrt();
        y.extend(x.iter().zip(weight).map(|(&x, &w)| f64::from(x) / root * f64::from(w)));
    }
    y
}
