//! Hyper-parameters of a model, checked, whatever container they came from.

use crate::formats::FormatError;
use crate::model::family::FamilyFacts;
use crate::model::slot::{LayerSlot, Slot};

/// What the forward pass needs to know. Made by [`crate::model::checkpoint::Checkpoint::open`] only, so every
/// value is within the bounds below, `d_head` is even, `n_kv_heads` divides `n_heads`, and ids are below
/// `vocab_size`.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// The facts that all models of the family share.
    pub family: &'static FamilyFacts,
    /// Layers.
    pub n_layers: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub d_head: usize,
    /// Inner width of the feed-forward part.
    pub d_ff: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Positions that the model was made for.
    pub max_positions: usize,
    /// Added to the mean square in every norm.
    pub rms_eps: f32,
    /// Base of the rotation's frequencies.
    pub rope_theta: f64,
    /// The head is the embedding.
    pub tied_head: bool,
    /// The q, k and v projections add a bias.
    pub qkv_bias: bool,
    /// Query and key heads are normed before the rotation.
    pub qk_norm: bool,
    /// Token that begins a text.
    pub bos: Option<u32>,
    /// Tokens that end an answer, each once.
    pub eos: Vec<u32>,
}

type SizeOf = fn(&ModelConfig) -> usize;

/// Bounds of the sizes, inclusive: far above real models, far below what could overflow a product.
const LIMITS: [(&str, SizeOf, usize); 8] = [
    ("the number of layers", |c| c.n_layers, 1 << 10),
    ("the model width", |c| c.d_model, 1 << 17),
    ("the number of heads", |c| c.n_heads, 1 << 10),
    ("the number of key-value heads", |c| c.n_kv_heads, 1 << 10),
    ("the head width", |c| c.d_head, 1 << 10),
    ("the feed-forward width", |c| c.d_ff, 1 << 20),
    ("the vocabulary size", |c| c.vocab_size, 1 << 20),
    ("the number of positions", |c| c.max_positions, 1 << 24),
];
const RMS_EPS: (f64, f64) = (1e-12, 1e-1);
const ROPE_THETA: (f64, f64) = (1.0, 1e12);

impl ModelConfig {
    /// Checks every value. Errors: out of bounds, not divisible, an id outside of the vocabulary.
    pub(super) fn check(&self) -> Result<(), FormatError> {
        for (what, size, max) in LIMITS {
            bounded(what, size(self) as f64, 1.0, max as f64)?;
        }
        bounded("the epsilon of the norms", f64::from(self.rms_eps), RMS_EPS.0, RMS_EPS.1)?;
        bounded("the rope base", self.rope_theta, ROPE_THETA.0, ROPE_THETA.1)?;
        let even =
            FormatError::NotAMultiple { what: "the head width", got: self.d_head, of: "a pair", divisor: 2 };
        if !self.d_head.is_multiple_of(2) {
            return Err(even);
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let (got, divisor) = (self.n_heads, self.n_kv_heads);
            return Err(FormatError::NotAMultiple {
                what: "the number of heads",
                got,
                of: "the number of key-value heads",
                divisor,
            });
        }
        for &id in &self.eos {
            check_id("the end token", id, self.vocab_size)?;
        }
        self.bos.map_or(Ok(()), |id| check_id("the begin token", id, self.vocab_size))
    }

    /// Every slot that this model has, in the order of the forward pass.
    pub fn slots(&self) -> Vec<Slot> {
        let head = (!self.tied_head).then_some(Slot::LmHead);
        let parts = LayerSlot::ALL.into_iter().filter(|part| match part {
            LayerSlot::QBias | LayerSlot::KBias | LayerSlot::VBias => self.qkv_bias,
            LayerSlot::QNorm | LayerSlot::KNorm => self.qk_norm,
            _ => true,
        });
        let parts: Vec<LayerSlot> = parts.collect();
        let layers =
            (0..self.n_layers).flat_map(|layer| parts.iter().map(move |&part| Slot::Layer(layer, part)));
        [Slot::Embed].into_iter().chain(layers).chain([Slot::OutputNorm]).chain(head).collect()
    }

    /// The shape of a slot's tensor, slowest first.
    pub fn shape(&self, slot: Slot) -> Vec<usize> {
        let (d, q) = (self.d_model, self.n_heads * self.d_head);
        let kv = self.n_kv_heads * self.d_head;
        match slot {
            Slot::Embed | Slot::LmHead => vec![self.vocab_size, d],
            Slot::OutputNorm => vec![d],
            Slot::Layer(_, part) => match part {
                LayerSlot::AttnNorm | LayerSlot::FfnNorm => vec![d],
                LayerSlot::Q => vec![q, d],
                LayerSlot::K | LayerSlot::V => vec![kv, d],
                LayerSlot::QBias => vec![q],
                LayerSlot::KBias | LayerSlot::VBias => vec![kv],
                LayerSlot::O => vec![d, q],
                LayerSlot::QNorm | LayerSlot::KNorm => vec![self.d_head],
                LayerSlot::Gate | LayerSlot::Up => vec![self.d_ff, d],
                LayerSlot::Down => vec![d, self.d_ff],
            },
        }
    }
}

fn bounded(what: &'static str, got: f64, min: f64, max: f64) -> Result<(), FormatError> {
    // Written so that NaN is refused.
    if got >= min && got <= max { Ok(()) } else { Err(FormatError::Bounds { what, got, min, max }) }
}

/// Refuses an id that is not in the vocabulary.
pub(super) fn check_id(what: &'static str, id: u32, vocab_size: usize) -> Result<(), FormatError> {
    if (id as usize) < vocab_size {
        return Ok(());
    }
    Err(FormatError::TokenId { what, got: id.into(), vocab_size })
}

/// The ids of `more` that `ids` lacks are added, in order: each id once.
pub(super) fn add_ids(ids: &mut Vec<u32>, more: &[u32]) {
    for &id in more {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
}
