//! `layer_norm`: y[t, c] = (x[t, c] - mean_c x[t]) / sqrt(var_c x[t] + eps) * w[c] + b[c]. Reference:
//! `ops/reference/layer_norm.rs`.
//!
//! All arithmetic is f32, in two passes over a row: the mean, then the squares of the differences, which has no
//! cancellation. Sums are ordered as in `rms_norm`, so the order depends only on the row's length.

use super::isa::lanes::{Kernel, Lanes};
use super::rms_norm::{sum, sum_of_squares};
use super::rows::for_row_runs;
use crate::ops::OpContext;

/// The parameters of a [`layer_norm`].
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm<'a> {
    /// Factor of each column, `[d]`.
    pub weight: &'a [f32],
    /// Added to each column, `[d]`.
    pub bias: Option<&'a [f32]>,
    /// Added to the variance.
    pub eps: f32,
}

/// Normalizes each row to mean 0 and variance 1, then applies a weight and a bias per column.
///
/// - `x`: `[n, d]`, in place; the weight determines d
///
/// Panics if shapes disagree. Source: arXiv:1607.06450.
pub fn layer_norm(cx: &OpContext, x: &mut [f32], norm: LayerNorm<'_>) {
    let d = norm.weight.len();
    assert!(x.len().is_multiple_of(d), "{} elements are not whole rows of {d}", x.len());
    assert!(norm.bias.is_none_or(|bias| bias.len() == d), "bias of wrong length");
    let isa = cx.kernels.proof();
    for_row_runs(&cx.pool, x, d, &|_, rows| isa.run(Norm { norm, rows }));
}

struct Norm<'a> {
    norm: LayerNorm<'a>,
    rows: &'a mut [f32],
}

impl Kernel for Norm<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let LayerNorm { weight, bias, eps } = self.norm;
        let d = weight.len();
        for row in self.rows.chunks_exact_mut(d) {
            let mean = lanes.splat(sum(lanes, row) / d as f32);
            for x in row.chunks_mut(L::N) {
                lanes.store_first(lanes.sub(lanes.load_first(x), mean), x);
            }
            let variance = sum_of_squares(lanes, row) / d as f32;
            let factor = lanes.splat(1.0 / (variance + eps).sqrt());
            let mut c = 0;
            while c < d {
                let x = &mut row[c..];
                let scaled =
                    lanes.mul(lanes.mul(lanes.load_first(x), factor), lanes.load_first(&weight[c..]));
                let y = match bias {
                    Some(bias) => lanes.add(scaled, lanes.load_first(&bias[c..])),
                    None => scaled,
                };
                lanes.store_first(y, x);
                c += L::N;
            }
        }
    }
}
