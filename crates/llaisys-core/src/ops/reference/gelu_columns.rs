//! Reference for `gelu_columns`.

use super::geglu::geglu;

/// `y[t, c] = gelu(gate[t, c]) * x[t, first + c]` with the tanh form of gelu, in f64.
///
/// - `gate`: `[n, width]`; `x`: `[n, x_width]`, of which the columns from `first` on are used; returns `[n, width]`
pub fn gelu_columns(gate: &[f32], width: usize, x: &[f32], first: usize) -> Vec<f64> {
    let n = gate.len() / width;
    let rows = gate.chunks_exact(width).zip(x.chunks_exact(x.len() / n.max(1)));
    rows.flat_map(|(gate, x)| geglu(gate, &x[first..first + width])).collect()
}
