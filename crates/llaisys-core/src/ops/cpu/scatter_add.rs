//! `scatter_add`: weighted rows added to rows of a matrix. Reference: `ops/reference/scatter_add.rs`.

/// `y[rows[i]] += weights[i] * x[i]`, in the order of `i`, product and sum rounded once each.
///
/// - `y`: `[n, width]`; `x`: `[m, width]`; `rows`, `weights`: `[m]`
///
/// Runs on the calling thread: a row is small compared with the matrices that computed it. Panics if a row does not
/// exist, or if shapes disagree.
pub fn scatter_add(y: &mut [f32], width: usize, rows: &[u32], weights: &[f32], x: &[f32]) {
    assert!(
        rows.len() == weights.len() && x.len() == rows.len() * width,
        "rows, weights or x of wrong shape"
    );
    for ((row, weight), x) in rows.iter().zip(weights).zip(x.chunks_exact(width)) {
        let y = &mut y[*row as usize * width..][..width];
        y.iter_mut().zip(x).for_each(|(y, x)| *y += weight * x);
    }
}
