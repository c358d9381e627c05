//! The mixture of experts of one model.

use crate::arch::bounds::{D_FF_MAX, SCALE, bounded};
use crate::error::FormatError;

const EXPERTS_MAX: usize = 1 << 9;

/// A mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// Experts of a layer.
    pub n: usize,
    /// Experts that are used for a token.
    pub n_used: usize,
    /// The weights of the used experts are scaled to a sum of 1.
    pub normalize: bool,
    /// Scores are sigmoids of the router's logits instead of their softmax.
    pub sigmoid: bool,
    /// The router and the matrices of experts add biases.
    pub projection_biases: bool,
    /// A bias of the scores decides which experts are used; their weights are without it.
    pub has_bias: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// The first layers, which have a dense feed-forward block.
    pub n_dense: usize,
    /// Inner width of these blocks.
    pub d_dense: usize,
}

impl Experts {
    /// Checks every value, in a model of `n_layers`. Errors: one is out of bounds.
    pub(super) fn check(&self, n_layers: usize) -> Result<(), FormatError> {
        bounded("the number of experts", self.n as f64, 1.0, EXPERTS_MAX as f64)?;
        bounded("the number of experts used", self.n_used as f64, 1.0, self.n as f64)?;
        bounded("the scale of experts", f64::from(self.scale), SCALE.0, SCALE.1)?;
        bounded("the number of dense layers", self.n_dense as f64, 0.0, n_layers as f64)?;
        bounded("the feed-forward width of dense layers", self.d_dense as f64, 1.0, D_FF_MAX as f64)
    }
}
