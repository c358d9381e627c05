//! Reference for `soft_cap`.

/// `y[i] = cap * tanh(x[i] / cap)`, in f64.
pub fn soft_cap(x: &[f32], cap: f32) -> Vec<f64> {
    let cap = f64::from(cap);
    x.iter().map(|&x| cap * (f64::from(x) / cap).tanh()).collect()
}
