//! Reference for `sigmoid_gate`.

/// `y[i] = x[i] / (1 + e^-gate[i])`, in f64.
pub fn sigmoid_gate(x: &[f32], gate: &[f32]) -> Vec<f64> {
    x.iter().zip(gate).map(|(&x, &gate)| f64::from(x) / (1.0 + (-f64::from(gate)).exp())).collect()
}
