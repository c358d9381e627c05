//! Reference for `geglu`.

/// `y[i] = gelu(gate[i]) * up[i]` with `gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, in f64.
pub fn geglu(gate: &[f32], up: &[f32]) -> Vec<f64> {
    let gelu = |x: f64| {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        // x / 2 (1 + tanh u), without its cancellation.
        x / (1.0 + (-2.0 * u).exp())
    };
    gate.iter().zip(up).map(|(&gate, &up)| gelu(f64::from(gate)) * f64::from(up)).collect()
}
