//! `gather`: selected rows of a matrix. Reference: `ops/reference/gather.rs`.

use super::rows::for_row_runs;
use crate::ops::OpContext;

/// `out[i] = x[rows[i]]`.
///
/// - `x`: `[n, width]`; `rows`: `[m]`; `out`: `[m, width]`
///
/// Panics if a row does not exist, or if shapes disagree.
pub fn gather(cx: &OpContext, x: &[f32], width: usize, rows: &[u32], out: &mut [f32]) {
    assert_eq!(out.len(), rows.len() * width, "output of wrong shape");
    for_row_runs(&cx.pool, out, width, &|first, out| {
        for (row, out) in rows[first..].iter().zip(out.chunks_exact_mut(width)) {
            out.copy_from_slice(&x[*row as usize * width..][..width]);
        }
    });
}
