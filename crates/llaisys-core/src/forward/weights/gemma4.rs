//! The weights that only Gemma 4 has.

use super::{Mlp, Projection};
use crate::ops::packed::PackedMatrix;

/// The inputs of layers that depend on the token.
#[derive(Debug)]
pub struct LayerInputs {
    /// Embeddings of all layers, `[vocab_size, n_layers * d_input]`.
    pub embed: PackedMatrix,
    /// From the token's embedding to the inputs of all layers, `[n_layers * d_input, d_model]`.
    pub projection: PackedMatrix,
    /// Norm of each layer's part of the projection, `[d_input]`.
    pub norm: Vec<f32>,
}

/// What adds the input of a layer to the residual stream.
#[derive(Debug)]
pub struct InputBranch {
    /// Gate of the input, `[d_input, d_model]`.
    pub gate: PackedMatrix,
    /// `[d_model, d_input]`.
    pub projection: Projection,
    /// Norm of the projected input, `[d_model]`.
    pub norm: Vec<f32>,
}

/// A dense block next to the experts of a layer.
#[derive(Debug)]
pub struct DenseBranch {
    /// The block.
    pub mlp: Mlp,
    /// Norm of its output, `[d_model]`.
    pub post_norm: Vec<f32>,
    /// Norm before the experts, `[d_model]`.
    pub experts_norm: Vec<f32>,
    /// Norm of the output of the experts, `[d_model]`.
    pub experts_post_norm: Vec<f32>,
    /// Norm before the router, `[d_model]`: its factors, divided by the root of `d_model`.
    pub router_norm: Vec<f32>,
    /// Factor of the weight of each expert, `[n_experts]`.
    pub expert_scale: Vec<f32>,
}

impl LayerInputs {
    pub(super) fn n_bytes(&self) -> usize {
        self.embed.n_bytes() + self.projection.n_bytes() + self.norm.len() * size_of::<f32>()
    }
}

impl InputBranch {
    pub(super) fn n_bytes(&self) -> usize {
        self.gate.n_bytes() + self.projection.n_bytes() + self.norm.len() * size_of::<f32>()
    }
}

impl DenseBranch {
    pub(super) fn n_bytes(&self) -> usize {
        let Self { mlp, post_norm, experts_norm, experts_post_norm, router_norm, expert_scale } = self;
        let vectors = [post_norm, experts_norm, experts_post_norm, router_norm, expert_scale];
        mlp.n_bytes() + vectors.into_iter().map(Vec::len).sum::<usize>() * size_of::<f32>()
    }
}
