//! `scale_rows`: x[t][i] = x[t][i] * factors[t]. Reference: `ops/reference/scale_rows.rs`.

use super::rows::for_row_runs;
use crate::ops::OpContext;

/// Multiplies each row by its own factor, rounding once.
///
/// - `x`: `[n, width]`; `factors`: `[n]`
///
/// Panics if shapes disagree.
pub fn scale_rows(cx: &OpContext, x: &mut [f32], factors: &[f32]) {
    if factors.is_empty() {
        return assert!(x.is_empty(), "rows without factors");
    }
    let width = x.len() / factors.len();
    assert_eq!(x.len(), width * factors.len(), "factors of wrong shape");
    for_row_runs(&cx.pool, x, width, &|first, x| {
        for (row, factor) in x.chunks_exact_mut(width).zip(&factors[first..]) {
            row.iter_mut().for_each(|x| *x *= factor);
        }
    });
}
