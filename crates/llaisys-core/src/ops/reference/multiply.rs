//! Reference for `multiply`.

/// `x[i] * y[i]`, in f64.
pub fn multiply(x: &[f32], y: &[f32]) -> Vec<f64> {
    x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).collect()
}
