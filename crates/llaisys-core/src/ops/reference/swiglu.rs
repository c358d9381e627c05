//! Reference for `swiglu`.

/// `y[i] = silu(gate[i]) * up[i]` with `silu(x) = x / (1 + e^-x)`, in f64.
pub fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f64> {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    gate.iter().zip(up).map(|(&gate, &up)| silu(f64::from(gate)) * f64::from(up)).collect()
}
