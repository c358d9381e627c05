//! Reference for `scatter_add`.

/// `y[rows[i]] + weights[i] * x[i]` over all `i`, in f64.
///
/// - `y`: `[n, width]`; `x`: `[m, width]`; returns as `y`
pub fn scatter_add(y: &[f32], width: usize, rows: &[u32], weights: &[f32], x: &[f32]) -> Vec<f64> {
    let mut out: Vec<f64> = y.iter().map(|&y| f64::from(y)).collect();
    for (i, &row) in rows.iter().enumerate() {
        for c in 0..width {
            out[row as usize * width + c] += f64::from(weights[i]) * f64::from(x[i * width + c]);
        }
    }
    out
}
