//! Reference for `lora`.

/// One adapter of one projection.
#[derive(Debug, Clone, Copy)]
pub struct Lora<'a> {
    /// `[rank, n_in]`
    pub a: &'a [f32],
    /// `[n_out, rank]`
    pub b: &'a [f32],
    /// Of one row.
    pub n_in: usize,
    /// alpha / rank, or alpha / sqrt(rank).
    pub scale: f32,
}

/// `y[n] + sum_j b[n, j] * scale * sum_k a[j, k] * x[k]` for one row, in f64; and the same sum of the sizes of all terms.
///
/// - `x`: `[n_in]`; `y`: `[n_out]`
pub fn lora(x: &[f32], lora: Lora<'_>, y: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let f64s = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let (x, a, b, scale) = (f64s(x), f64s(lora.a), f64s(lora.b), f64::from(lora.scale));
    let products = |row: &[f64]| row.iter().zip(&x).map(|(a, x)| a * x).collect::<Vec<f64>>();
    let inner: Vec<Vec<f64>> = a.chunks_exact(lora.n_in).map(products).collect();
    let rank = inner.len();
    let out = |(b, &y): (&[f64], &f32)| {
        let terms = b.iter().zip(&inner).map(|(b, inner)| b * scale * inner.iter().sum::<f64>());
        let sizes = b
            .iter()
            .zip(&inner)
            .map(|(b, inner)| (b * scale).abs() * inner.iter().map(|product| product.abs()).sum::<f64>());
        let y = f64::from(y);
        (y + terms.sum::<f64>(), y.abs() + sizes.sum::<f64>())
    };
    b.chunks_exact(rank).zip(y).map(out).unzip()
}
