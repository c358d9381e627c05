//! LoRA adapters (arXiv:2106.09685) in the forward pass: to a projection, each row that uses an adapter adds
//! `scale * B (A x)`. The weights of the model are not changed, so one pass computes rows of several adapters and rows
//! without one.

mod pack;

use crate::ops::lora::{LoraProduct, LoraRows};
use crate::ops::{self, LoraHidden, LoraInput, OpContext};

pub(super) use pack::{ATTN_GATE, MODULES_MAX};

/// A packed adapter.
#[derive(Debug)]
pub struct LoraAdapter {
    /// For each layer by [`LoraAt`].
    layers: Vec<[Option<LoraProduct>; 4]>,
    /// The largest rank of a module.
    pub rank: usize,
    /// A hash of everything that the adapter adds to keys and values.
    pub hash: u128,
}

/// An input of projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoraAt {
    /// That of attention: query (0), key (1), value (2), gate of the output (3).
    Attention,
    /// The attended values: output projection (0).
    Attended,
    /// That of the feed-forward block: gate and up, which are one matrix (0).
    FeedForward,
    /// The inner values of the feed-forward block: down (0).
    Inner,
}

/// An input of projections in a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct LoraSite {
    pub(super) layer: usize,
    pub(super) at: LoraAt,
}

impl LoraAdapter {
    /// Bytes of all matrices.
    pub fn n_bytes(&self) -> usize {
        self.layers.iter().flatten().flatten().map(LoraProduct::n_bytes).sum()
    }
}

/// The loaded adapters by slot. An op reads those of one input, so they are kept by input.
#[derive(Debug)]
pub struct LoraAdapters {
    is_loaded: Vec<bool>,
    /// For each layer by [`LoraAt`], and by slot.
    sites: Vec<[Vec<Option<Box<LoraProduct>>>; 4]>,
}

impl LoraAdapters {
    /// Empty slots for adapters of a model with `n_layers`.
    pub fn new(n_slots: usize, n_layers: usize) -> Self {
        let empty = || (0..n_slots).map(|_| None).collect();
        let sites = (0..n_layers).map(|_| std::array::from_fn(|_| empty())).collect();
        Self { is_loaded: vec![false; n_slots], sites }
    }

    /// The first empty slot.
    pub fn free_slot(&self) -> Option<usize> {
        self.is_loaded.iter().position(|is_loaded| !is_loaded)
    }

    /// True if the slot exists and has an adapter.
    pub fn is_loaded(&self, slot: u32) -> bool {
        self.is_loaded.get(slot as usize).is_some_and(|&is_loaded| is_loaded)
    }

    /// Puts an adapter of the model into an empty slot.
    pub fn insert(&mut self, slot: usize, adapter: LoraAdapter) {
        self.is_loaded[slot] = true;
        for (sites, products) in self.sites.iter_mut().zip(adapter.layers) {
            for (site, product) in sites.iter_mut().zip(products) {
                site[slot] = product.map(Box::new);
            }
        }
    }

    /// Frees the memory of the adapter in a slot.
    pub fn remove(&mut self, slot: u32) {
        let slot = slot as usize;
        self.is_loaded[slot] = false;
        self.sites.iter_mut().flatten().for_each(|site| site[slot] = None);
    }
}

/// The adapters of a pass.
#[derive(Debug, Clone, Copy)]
pub struct LoraPass<'a> {
    /// All loaded adapters.
    pub adapters: &'a LoraAdapters,
    /// The adapters of the rows, at least one.
    pub rows: LoraRows<'a>,
}

/// Computes what the adapters of a pass need to add to the projections of `input`, `[n, n_in]`. None if they add nothing.
///
/// - `scratch`: `[n, width]`
pub(super) fn lora_hidden<'a>(
    cx: &OpContext,
    pass: Option<LoraPass<'a>>,
    site: LoraSite,
    input: &'a [f32],
    scratch: &'a mut [f32],
) -> Option<LoraHidden<'a>> {
    let LoraPass { adapters, rows } = pass?;
    let products = &adapters.sites[site.layer][site.at as usize];
    ops::lora(cx, LoraInput { x: input, rows, products }, scratch)
}
