//! Reference for `gather`.

/// `y[i] = x[rows[i]]`, exactly.
///
/// - `x`: `[n, width]`; returns `[m, width]`
pub fn gather(x: &[f32], width: usize, rows: &[u32]) -> Vec<f32> {
    rows.iter().flat_map(|&row| &x[row as usize * width..][..width]).copied().collect()
}
