//! LoRA adapters (arXiv:2106.09685) in the forward pass: after a projection, each row that uses an adapter adds
//! `scale * B (A x)`. The weights of the model are not changed, so one pass computes rows of several adapters and rows
//! without one.

mod pack;

use crate::forward::weights::Mlp;
use crate::ops::lora::{LoraProduct, LoraRows};

pub(super) use pack::MODULES_MAX;

/// A loaded adapter.
#[derive(Debug)]
pub struct LoraAdapter {
    layers: Vec<LayerLora>,
    /// The largest rank of a module.
    pub rank: usize,
    /// A hash of everything that the adapter adds to keys and values.
    pub hash: u128,
}

/// What an adapter adds to the projections of one layer.
#[derive(Debug, Default)]
struct LayerLora {
    /// By [`LoraAt`].
    products: [Option<LoraProduct>; 4],
}

/// An input of projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoraAt {
    /// That of attention: query (0), key (1), value (2), gate of the output (3).
    Attention,
    /// The attended values: output projection (0).
    Attended,
    /// That of the feed-forward block: gate (0), up (1).
    FeedForward,
    /// The inner values of the feed-forward block: down (0).
    Inner,
}

impl LoraAdapter {
    /// Bytes of all matrices.
    pub fn n_bytes(&self) -> usize {
        let products = self.layers.iter().flat_map(|layer| layer.products.iter().flatten());
        products.map(LoraProduct::n_bytes).sum()
    }
}

/// The adapters of a pass.
#[derive(Debug, Clone, Copy)]
pub struct LoraPass<'a> {
    /// By slot.
    pub adapters: &'a [Option<LoraAdapter>],
    /// The rows that use them, at least one.
    pub rows: LoraRows<'a>,
}

impl<'a> LoraPass<'a> {
    /// What the adapter in `slot` adds to the projections of an input.
    pub(super) fn product(self, slot: u32, layer: usize, at: LoraAt) -> Option<&'a LoraProduct> {
        let adapter = self.adapters[slot as usize].as_ref().expect("a slot in use has an adapter");
        adapter.layers[layer].products[at as usize].as_ref()
    }

    /// True if an adapter of the pass changes the projections of an input.
    pub(super) fn changes(self, layer: usize, at: LoraAt) -> bool {
        self.rows.groups.iter().any(|group| self.product(group.slot, layer, at).is_some())
    }
}

/// Projections of one input.
pub(super) struct LoraProjections<'a> {
    pub(super) layer: usize,
    pub(super) at: LoraAt,
    /// `[n, n_in]`
    pub(super) input: &'a [f32],
    /// `[n, width]`
    pub(super) scratch: &'a mut [f32],
}

/// The gate and up projections of a dense layer.
pub(super) struct GatedLayer<'a> {
    pub(super) layer: usize,
    pub(super) mlp: &'a Mlp,
    /// `[n, d_model]`
    pub(super) input: &'a [f32],
    /// As in [`LoraProjections`].
    pub(super) scratch: &'a mut [f32],
    /// `[n, gate_up_rows(d_dense)]` of the widest layer.
    pub(super) gate_up: &'a mut [f32],
}
