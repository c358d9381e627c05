//! `scale`: x[i] = x[i] * factor. Reference: `ops/reference/scale.rs`.

use super::rows::for_row_runs;
use crate::ops::OpContext;

/// Multiplies every number, rounding once; a factor of 1 costs nothing.
///
/// - `x`: any shape
pub fn scale(cx: &OpContext, x: &mut [f32], factor: f32) {
    if factor != 1.0 {
        for_row_runs(&cx.pool, x, 1, &|_, x| x.iter_mut().for_each(|x| *x *= factor));
    }
}
