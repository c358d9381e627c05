//! Reference for `scale`.

/// `y[i] = x[i] * factor`, in f64.
pub fn scale(x: &[f32], factor: f32) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x) * f64::from(factor)).collect()
}
