//! Reference for `causal_conv`.

/// `y[t, c] = f(sum_j taps[j, c] x[t - K + 1 + j, c])` for one sequence, whose inputs before row 0 are `window`, in f64;
/// f is silu, or without it nothing. Returns `y`, and the window after the last row.
///
/// - `x`: `[n, width]`; `taps`: `[K, width]`; `window`: `[K - 1, width]`
pub fn causal_conv(
    x: &[f32],
    taps: &[f32],
    silu: bool,
    window: &[f32],
    width: usize,
) -> (Vec<f64>, Vec<f32>) {
    let inputs = [window, x].concat();
    let n_taps = taps.len() / width;
    let mut y = Vec::with_capacity(x.len());
    for t in 0..x.len() / width {
        for c in 0..width {
            let tap = |j: usize| f64::from(taps[j * width + c]) * f64::from(inputs[(t + j) * width + c]);
            let sum: f64 = (0..n_taps).map(tap).sum();
            y.push(if silu { sum / (1.0 + (-sum).exp()) } else { sum });
        }
    }
    (y, inputs[inputs.len() - window.len()..].to_vec())
}
