//! Reference for `linear`, and for the rounding of its inputs.

use half::bf16;

/// `y[t, n] = b[n] + sum_k x[t, k] * w[n, k]`, in f64.
///
/// - `x`: `[n_tokens, n_columns]`; `weight`: `[n_rows, n_columns]`; `bias`: `[n_rows]` or empty for zeros
/// - returns `[n_tokens, n_rows]`
pub fn linear(x: &[f64], n_columns: usize, weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let n_rows = weight.len() / n_columns;
    let mut y = Vec::with_capacity(x.len() / n_columns * n_rows);
    for x in x.chunks_exact(n_columns) {
        for (n, w) in weight.chunks_exact(n_columns).enumerate() {
            let sum: f64 = x.iter().zip(w).map(|(x, w)| x * w).sum();
            y.push(sum + bias.get(n).copied().unwrap_or(0.0));
        }
    }
    y
}

/// The inputs of a bf16 product: each rounded to the nearest bf16, ties to even.
pub fn round_bf16(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| bf16::from_f32(x).to_f64()).collect()
}

/// The inputs of a product with grouped weights: in groups of 32 with `scale = absmax / 127`, each rounded to the
/// nearest multiple of the scale.
pub fn round_groups(x: &[f32]) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    for group in x.chunks(32) {
        let max = group.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
        let (scale, inverse) = if max > 0.0 { (max / 127.0, 127.0 / max) } else { (0.0, 0.0) };
        out.extend(group.iter().map(|x| f64::from((x * inverse).round_ties_even()) * f64::from(scale)));
    }
    out
}
