//! Reference for `layer_norm`.

/// `y[t, c] = (x[t, c] - mean_c x[t]) / sqrt(var_c x[t] + eps) * w[c] + b[c]`, in f64. The variance is that of the whole
/// row.
///
/// - `x`: `[n, d]`; `weight`: `[d]`; `bias`: `[d]`, zeros if absent; returns `[n, d]`
pub fn layer_norm(x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32) -> Vec<f64> {
    let d = weight.len();
    let mut y = Vec::with_capacity(x.len());
    for x in x.chunks_exact(d) {
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / d as f64;
        let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / d as f64;
        let root = (variance + f64::from(eps)).sqrt();
        y.extend(x.iter().enumerate().map(|(c, &x)| {
            let bias = bias.map_or(0.0, |bias| f64::from(bias[c]));
            (f64::from(x) - mean) / root * f64::from(weight[c]) + bias
        }));
    }
    y
}
