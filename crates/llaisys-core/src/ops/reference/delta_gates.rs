//! Reference for `delta_gates`.

/// Write strengths `sigmoid(b)` and decays `exp(-rate ln(1 + e^(a + bias)))`, in f64.
///
/// - `b`, `a`: `[n, n_values]`; `rate`, `bias`: `[n_values]`
pub fn delta_gates(b: &[f32], a: &[f32], rate: &[f32], bias: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let strengths = b.iter().map(|&b| 1.0 / (1.0 + (-f64::from(b)).exp())).collect();
    let decay = |(i, &a): (usize, &f32)| {
        let x = f64::from(a) + f64::from(bias[i % bias.len()]);
        let softplus = if x > 30.0 { x } else { x.exp().ln_1p() };
        (-f64::from(rate[i % rate.len()]) * softplus).exp()
    };
    (strengths, a.iter().enumerate().map(decay).collect())
}
