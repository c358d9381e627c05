//! Hyper-parameters of a model, checked, whatever container they came from.

use crate::formats::FormatError;
use crate::model::family::{FamilyFacts, QkNorm};
use crate::model::rope::RopeConfig;
use crate::model::slot::{ExpertPart, LayerSlot, NameTable, Slot};

/// What the forward pass needs to know. Made by [`crate::model::checkpoint::Checkpoint::open`] only, so every
/// value is within the bounds below, `d_head` is even, `n_kv_heads` divides `n_heads`, and ids are below
/// `vocab_size`.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// The facts that all models of the family share.
    pub family: &'static FamilyFacts,
    /// How the container spells the names of tensors, and which it has.
    pub names: &'static NameTable,
    /// What the container's norm weights lack.
    pub norm_offset: f32,
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
    /// Inner width of the feed-forward part, or of one expert's.
    pub d_ff: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Positions that the model was made for.
    pub max_positions: usize,
    /// Added to the mean square in every norm.
    pub rms_eps: f32,
    /// The rotation.
    pub rope: RopeConfig,
    /// The rotation of layers with a window, where it is another.
    pub local_rope: Option<RopeConfig>,
    /// Positions that a layer with a sliding window sees, its own included.
    pub window: Option<usize>,
    /// Which layers have the window; none if it is None. `[n_layers]`
    pub windowed: Vec<bool>,
    /// What scores are multiplied with before the softmax.
    pub score_scale: f32,
    /// Soft cap of scores.
    pub attn_soft_cap: Option<f32>,
    /// Soft cap of logits.
    pub logit_soft_cap: Option<f32>,
    /// What embeddings are multiplied with.
    pub embed_scale: f32,
    /// What is multiplied with all that is added to the residual stream.
    pub residual_scale: f32,
    /// What logits are multiplied with, before their soft cap.
    pub logit_scale: f32,
    /// The mixture of experts of every layer.
    pub experts: Option<Experts>,
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

/// A mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// Experts of a layer.
    pub n: usize,
    /// Experts that compute a token.
    pub n_used: usize,
    /// The weights of those are scaled to a sum of 1.
    pub normalise: bool,
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
/// Of multipliers and soft caps.
const SCALE: (f64, f64) = (1e-6, 1e6);
const EXPERTS_MAX: usize = 1 << 9;

impl ModelConfig {
    /// True if logits are the head's products as they are. Otherwise other ids can tie after a scale or a cap.
    pub fn has_plain_logits(&self) -> bool {
        self.logit_scale == 1.0 && self.logit_soft_cap.is_none()
    }

    /// Checks every value. Errors: out of bounds, not divisible, an id outside of the vocabulary.
    pub(super) fn check(&self) -> Result<(), FormatError> {
        for (what, size, max) in LIMITS {
            bounded(what, size(self) as f64, 1.0, max as f64)?;
        }
        bounded("the epsilon of the norms", f64::from(self.rms_eps), RMS_EPS.0, RMS_EPS.1)?;
        for rope in [Some(&self.rope), self.local_rope.as_ref()].into_iter().flatten() {
            rope.check(self.d_head)?;
        }
        self.check_scales()?;
        if let Some(window) = self.window {
            bounded("the sliding window", window as f64, 1.0, self.max_positions as f64)?;
        }
        if let Some(experts) = self.experts {
            bounded("the number of experts", experts.n as f64, 1.0, EXPERTS_MAX as f64)?;
            bounded("the number of experts used", experts.n_used as f64, 1.0, experts.n as f64)?;
        }
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

    fn check_scales(&self) -> Result<(), FormatError> {
        let scales = [
            ("the scale of scores", Some(self.score_scale)),
            ("the scale of embeddings", Some(self.embed_scale)),
            ("the scale of the residual branches", Some(self.residual_scale)),
            ("the scale of logits", Some(self.logit_scale)),
            ("the soft cap of scores", self.attn_soft_cap),
            ("the soft cap of logits", self.logit_soft_cap),
        ];
        scales
            .into_iter()
            .filter_map(|(what, scale)| scale.map(|scale| (what, scale)))
            .try_for_each(|(what, scale)| bounded(what, f64::from(scale), SCALE.0, SCALE.1))
    }

    /// True if layer `index` sees only the last `window` positions.
    pub fn window_of(&self, index: usize) -> Option<usize> {
        self.window.filter(|_| self.windowed[index])
    }

    /// Every slot that this model has: norms, attention, feed-forward part of each layer.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        let mut parts: Vec<LayerSlot> = Vec::new();
        for part in self.names.parts().filter(|&part| self.has(part)) {
            match (part, self.experts) {
                (LayerSlot::Expert(_, matrix), Some(experts)) => {
                    parts.extend((0..experts.n).map(|expert| LayerSlot::Expert(expert, matrix)));
                }
                _ => parts.push(part),
            }
        }
        let n = parts.len();
        let layers = (0..self.n_layers * n).map(move |i| Slot::Layer(i / n, parts[i % n]));
        let head = (!self.tied_head).then_some(Slot::LmHead);
        [Slot::Embed].into_iter().chain(layers).chain([Slot::OutputNorm]).chain(head)
    }

    /// True if the model has this place in its layers, if the container stores it so.
    fn has(&self, part: LayerSlot) -> bool {
        match part {
            LayerSlot::AttnNorm | LayerSlot::FfnNorm => self.family.pre_norms,
            LayerSlot::AttnPostNorm | LayerSlot::FfnPostNorm => self.family.post_norms,
            LayerSlot::QBias | LayerSlot::KBias | LayerSlot::VBias => self.qkv_bias,
            LayerSlot::QNorm | LayerSlot::KNorm => self.qk_norm,
            LayerSlot::GateUp | LayerSlot::Gate | LayerSlot::Up | LayerSlot::Down => self.experts.is_none(),
            LayerSlot::Router | LayerSlot::Expert(..) | LayerSlot::Experts(_) => self.experts.is_some(),
            LayerSlot::Qkv | LayerSlot::Q | LayerSlot::K | LayerSlot::V | LayerSlot::O => true,
        }
    }

    /// Where the rows of a matrix of a layer are stored: in which place, and from which row on.
    pub fn stored_in(&self, part: LayerSlot) -> (LayerSlot, usize) {
        let stores = |part| self.names.parts().any(|stored| stored == part);
        let (q, kv) = (self.n_heads * self.d_head, self.n_kv_heads * self.d_head);
        match part {
            LayerSlot::Q if stores(LayerSlot::Qkv) => (LayerSlot::Qkv, 0),
            LayerSlot::K if stores(LayerSlot::Qkv) => (LayerSlot::Qkv, q),
            LayerSlot::V if stores(LayerSlot::Qkv) => (LayerSlot::Qkv, q + kv),
            LayerSlot::Gate if stores(LayerSlot::GateUp) => (LayerSlot::GateUp, 0),
            LayerSlot::Up if stores(LayerSlot::GateUp) => (LayerSlot::GateUp, self.d_ff),
            LayerSlot::Expert(expert, matrix) if stores(LayerSlot::Experts(matrix)) => {
                (LayerSlot::Experts(matrix), expert * self.expert_shape(matrix)[0])
            }
            other => (other, 0),
        }
    }

    /// As [`ModelConfig::stored_in`], of any slot.
    pub fn stored_slot(&self, slot: Slot) -> (Slot, usize) {
        let Slot::Layer(index, part) = slot else { return (slot, 0) };
        let (stored, first) = self.stored_in(part);
        (Slot::Layer(index, stored), first)
    }

    /// The shape of a slot's tensor, slowest first.
    pub fn shape(&self, slot: Slot) -> Vec<usize> {
        let (d, q) = (self.d_model, self.n_heads * self.d_head);
        let kv = self.n_kv_heads * self.d_head;
        let qk_norm = |projection| match self.family.qk_norm {
            QkNorm::Projection => projection,
            QkNorm::Head | QkNorm::None => self.d_head,
        };
        let n_experts = self.experts.map_or(0, |experts| experts.n);
        match slot {
            Slot::Embed | Slot::LmHead => vec![self.vocab_size, d],
            Slot::OutputNorm => vec![d],
            Slot::Layer(_, part) => match part {
                LayerSlot::AttnNorm | LayerSlot::AttnPostNorm => vec![d],
                LayerSlot::FfnNorm | LayerSlot::FfnPostNorm => vec![d],
                LayerSlot::Qkv => vec![q + 2 * kv, d],
                LayerSlot::Q => vec![q, d],
                LayerSlot::K | LayerSlot::V => vec![kv, d],
                LayerSlot::QBias => vec![q],
                LayerSlot::KBias | LayerSlot::VBias => vec![kv],
                LayerSlot::O => vec![d, q],
                LayerSlot::QNorm => vec![qk_norm(q)],
                LayerSlot::KNorm => vec![qk_norm(kv)],
                LayerSlot::GateUp => vec![2 * self.d_ff, d],
                LayerSlot::Gate | LayerSlot::Up => vec![self.d_ff, d],
                LayerSlot::Down => vec![d, self.d_ff],
                LayerSlot::Router => vec![n_experts, d],
                LayerSlot::Expert(_, matrix) => self.expert_shape(matrix).to_vec(),
                LayerSlot::Experts(matrix) => {
                    let [rows, columns] = self.expert_shape(matrix);
                    vec![n_experts, rows, columns]
                }
            },
        }
    }

    fn expert_shape(&self, matrix: ExpertPart) -> [usize; 2] {
        match matrix {
            ExpertPart::Gate | ExpertPart::Up => [self.d_ff, self.d_model],
            ExpertPart::Down => [self.d_model, self.d_ff],
        }
    }
}

/// Refuses a number out of its bounds.
pub(super) fn bounded(what: &'static str, got: f64, min: f64, max: f64) -> Result<(), FormatError> {
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
