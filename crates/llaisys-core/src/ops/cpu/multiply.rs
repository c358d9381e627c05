//! `multiply`: x[i] = x[i] * y[i]. Reference: `ops/reference/multiply.rs`.

use super::rows::for_row_runs;
use crate::ops::OpContext;

/// Multiplies `x` by a gate without an activation, rounding once.
///
/// - `x`, `y`: the same shape; panics otherwise
pub fn multiply(cx: &OpContext, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "x and y differ in shape");
    for_row_runs(&cx.pool, x, 1, &|first, x| {
        x.iter_mut().zip(&y[first..]).for_each(|(x, y)| *x *= y);
    });
}
