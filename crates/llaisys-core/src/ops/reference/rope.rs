//! Reference for `rope` and its angles.

use crate::ops::HeadWidths;

/// The angle of each pair at each position: `position * theta^(-2i / d_rope)`, in f64.
///
/// - `positions`: `[n]`; returns `[n, d_rope / 2]` radians
pub fn angles(d_rope: usize, theta: f64, positions: &[i32]) -> Vec<f64> {
    let angle = |p: i32, i: usize| f64::from(p) * theta.powf(-((2 * i) as f64) / d_rope as f64);
    positions.iter().flat_map(|&p| (0..d_rope / 2).map(move |i| angle(p, i))).collect()
}

/// Each pair `(a, b) = (x[i], x[i + d_rope/2])` of a head becomes `(a cos - b sin, b cos + a sin)`, in f64. The elements
/// from `d_rope` on stay.
///
/// - `x`: `[n, n_heads, d_head]`; `cos`, `sin`: `[n, d_rope / 2]`; returns as `x`
pub fn rope(x: &[f32], widths: HeadWidths, cos: &[f32], sin: &[f32]) -> Vec<f64> {
    let half = widths.d_rope / 2;
    let row_len = x.len() * half / cos.len();
    let mut y = Vec::with_capacity(x.len());
    for (t, row) in x.chunks_exact(row_len).enumerate() {
        for head in row.chunks_exact(widths.d_head) {
            for c in 0..widths.d_rope {
                let i = c % half;
                let (a, b) = (f64::from(head[i]), f64::from(head[i + half]));
                let (cos, sin) = (f64::from(cos[t * half + i]), f64::from(sin[t * half + i]));
                y.push(if c < half { a * cos - b * sin } else { b * cos + a * sin });
            }
            y.extend(head[widths.d_rope..].iter().map(|&x| f64::from(x)));
        }
    }
    y
}
