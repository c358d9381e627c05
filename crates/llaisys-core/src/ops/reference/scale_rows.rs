//! Reference for `scale_rows`.

/// `y[t][i] = x[t][i] * factors[t]`, in f64.
///
/// - `x`: `[n, width]`; `factors`: `[n]`; returns as `x`
pub fn scale_rows(x: &[f32], factors: &[f32]) -> Vec<f64> {
    let width = x.len() / factors.len();
    let rows = x.chunks_exact(width).zip(factors);
    rows.flat_map(|(row, &factor)| row.iter().map(move |&x| f64::from(x) * f64::from(factor))).collect()
}
