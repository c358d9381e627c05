//! The checked hyper-parameters of a model, from any container.

mod layers;

use crate::arch::bounds::{D_FF_MAX, SCALE, bounded, check_id};
use crate::arch::delta_net::DeltaNet;
use crate::arch::experts::Experts;
use crate::arch::gemma4::Gemma4;
use crate::arch::recurrent::RecurrentLayer;
use crate::arch::rope::{LongRope, QueryScaling, RopeConfig};
use crate::arch::row_map::RowMap;
use crate::arch::short_conv::ShortConv;
use crate::arch::spec::{ArchSpec, QkNorm};
use crate::arch::weight_id::{DeltaWeight, ExpertPart, LayerInputWeight, LayerWeight, NameTable, WeightId};
use crate::arch::wrapper::Wrapper;
use crate::error::FormatError;
use crate::ops::{ClampedSilu, Gate, KvHeads};

/// The hyper-parameters of the forward pass. Only [`crate::load::checkpoint::Checkpoint::open`] creates them, so every
/// value is within the bounds below, `d_head` is even, `n_kv_heads` divides `n_heads`, and ids are below `vocab_size`.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// The properties that all models of the architecture share.
    pub arch: &'static ArchSpec,
    /// The names of tensors in the container.
    pub names: &'static NameTable,
    /// The multimodal architecture that contains the model.
    pub wrapper: Option<&'static Wrapper>,
    /// Added to the container's norm weights.
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
    /// Inner width of the feed-forward block, or of one expert.
    pub d_ff: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Context length of the model, in positions.
    pub max_positions: usize,
    /// Added to the mean square in every norm.
    pub rms_eps: f32,
    /// Elements of a head that are rotated, the first ones.
    pub d_rope: usize,
    /// The rotary embedding.
    pub rope: RopeConfig,
    /// The rotary embedding instead of `rope` in a long context; [`ModelConfig::choose_rope`] decides.
    pub long_rope: Option<LongRope>,
    /// The rotary embedding of layers with a window, where it differs.
    pub local_rope: Option<RopeConfig>,
    /// Which layers are rotated. `[n_layers]`
    pub rotated: Vec<bool>,
    /// Scaling of rotated queries by position.
    pub query_scaling: Option<QueryScaling>,
    /// Positions that a layer with a sliding window sees, including the row's own.
    pub window: Option<usize>,
    /// Which layers have the window. `[n_layers]`
    pub windowed: Vec<bool>,
    /// The recurrent layers.
    pub recurrent_layer: Option<RecurrentLayer>,
    /// Which layers are recurrent instead of attention. `[n_layers]`
    pub recurrent: Vec<bool>,
    /// Factor of attention scores before the softmax.
    pub score_scale: f32,
    /// Soft cap of scores.
    pub attn_soft_cap: Option<f32>,
    /// Soft cap of logits.
    pub logit_soft_cap: Option<f32>,
    /// Factor of embeddings.
    pub embed_scale: f32,
    /// Factor of everything that is added to the residual stream.
    pub residual_scale: f32,
    /// Factor of logits, before their soft cap.
    pub logit_scale: f32,
    /// The activation of the gates of feed-forward blocks.
    pub gate: Gate,
    /// The mixture of experts of every layer, except the first `n_dense` ones.
    pub experts: Option<Experts>,
    /// Inner width of the expert that all tokens use.
    pub d_shared: Option<usize>,
    /// The properties that only Gemma 4 has.
    pub gemma4: Option<Gemma4>,
    /// The head is the embedding matrix.
    pub tied_head: bool,
    /// The q, k and v projections add a bias.
    pub qkv_bias: bool,
    /// The output projection of attention adds a bias.
    pub o_bias: bool,
    /// The projections of the feed-forward block add a bias.
    pub mlp_bias: bool,
    /// Queries and keys are normalized.
    pub qk_norm: bool,
    /// Token at the beginning of a text.
    pub bos: Option<u32>,
    /// Tokens that end a completion, each once.
    pub eos: Vec<u32>,
}

type SizeOf = fn(&ModelConfig) -> usize;

/// Upper bounds of the sizes, inclusive: far above real models, far below what could overflow a product.
const LIMITS: [(&str, SizeOf, usize); 8] = [
    ("the number of layers", |c| c.n_layers, 1 << 10),
    ("the model width", |c| c.d_model, 1 << 17),
    ("the number of heads", |c| c.n_heads, 1 << 10),
    ("the number of key-value heads", |c| c.n_kv_heads, 1 << 10),
    ("the head width", |c| c.d_head, 1 << 10),
    ("the feed-forward width", |c| c.d_ff, D_FF_MAX),
    ("the vocabulary size", |c| c.vocab_size, 1 << 20),
    ("the number of positions", |c| c.max_positions, 1 << 24),
];
const RMS_EPS: (f64, f64) = (1e-12, 1e-1);

const RECURRENT: &str = "only a model with these layers has their weights";

impl ModelConfig {
    /// True if logits are the products of the head, unchanged. A scale or a soft cap can create new ties.
    pub fn has_plain_logits(&self) -> bool {
        self.logit_scale == 1.0 && self.logit_soft_cap.is_none()
    }

    /// Checks every value. Errors: a value is out of bounds or not divisible, or an id is outside the vocabulary.
    pub(crate) fn check(&self) -> Result<(), FormatError> {
        for (what, size, max) in LIMITS {
            bounded(what, size(self) as f64, 1.0, max as f64)?;
        }
        bounded("the epsilon of the norms", f64::from(self.rms_eps), RMS_EPS.0, RMS_EPS.1)?;
        bounded("the rotated width of a head", self.d_rope as f64, 2.0, self.d_head as f64)?;
        let long_rope = self.long_rope.as_ref().map(|long| &long.rope);
        for rope in [Some(&self.rope), long_rope].into_iter().flatten() {
            rope.check(self.d_rope_full())?;
        }
        self.local_rope.as_ref().map_or(Ok(()), |rope| rope.check(self.d_rope))?;
        self.gemma4.map_or(Ok(()), |gemma4| self.check_gemma4(&gemma4))?;
        if let Some(scaling) = &self.query_scaling {
            scaling.check()?;
        }
        self.check_scales()?;
        if let Some(window) = self.window {
            bounded("the sliding window", window as f64, 1.0, self.max_positions as f64)?;
        }
        if let Some(recurrent) = &self.recurrent_layer {
            recurrent.check()?;
        }
        if let Some(d_shared) = self.d_shared {
            bounded("the width of the shared expert", d_shared as f64, 1.0, D_FF_MAX as f64)?;
        }
        if let Some(experts) = self.experts {
            experts.check(self.n_layers)?;
        }
        for (what, got) in [("the head width", self.d_head), ("the rotated width of a head", self.d_rope)] {
            if !got.is_multiple_of(2) {
                return Err(FormatError::NotAMultiple { what, got, of: "a pair", divisor: 2 });
            }
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
        let (limit, alpha) = match self.gate {
            Gate::ClampedSilu(ClampedSilu { limit, alpha }) => (Some(limit), Some(alpha)),
            _ => (None, None),
        };
        let scales = [
            ("the bound of gates", limit),
            ("the factor of gates", alpha),
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

    /// Chooses the rotary embedding of a context of `max_model_len` positions, once for all of its sequences. The keys of
    /// one choice are wrong with the other, so a sequence cannot grow from one into the other.
    pub fn choose_rope(&mut self, max_model_len: usize) {
        if let Some(long) = self.long_rope.take().filter(|long| max_model_len > long.original) {
            self.rope = long.rope;
        }
    }

    /// The window of layer `index`; None if it sees all positions.
    pub fn window_of(&self, index: usize) -> Option<usize> {
        self.window.filter(|_| self.windowed[index])
    }

    /// The name of a weight's tensor; None if the container does not store the weight by itself.
    pub fn name(&self, id: WeightId) -> Option<String> {
        let name = self.names.name(id)?;
        Some(self.wrapper.map_or_else(|| name.clone(), |wrapper| wrapper.name(&name)))
    }

    /// The id of every weight of this model, as the container stores them.
    pub fn weight_ids(&self) -> impl Iterator<Item = WeightId> + '_ {
        let mut parts: Vec<LayerWeight> = Vec::new();
        for part in self.names.parts() {
            match (part, self.experts) {
                (LayerWeight::Expert(_, matrix), Some(experts)) => {
                    parts.extend((0..experts.n).map(|expert| LayerWeight::Expert(expert, matrix)));
                }
                _ => parts.push(part),
            }
        }
        let layers = (0..self.n_layers).flat_map(move |index| {
            let parts: Vec<LayerWeight> =
                parts.iter().copied().filter(|&part| self.has(index, part)).collect();
            parts.into_iter().map(move |part| WeightId::Layer(index, part))
        });
        let head = (!self.tied_head).then_some(WeightId::LmHead);
        let inputs = LayerInputWeight::ALL.into_iter().filter(|_| self.d_inputs() > 0);
        let layers = inputs.map(WeightId::LayerInputs).chain(layers);
        [WeightId::Embed].into_iter().chain(layers).chain([WeightId::OutputNorm]).chain(head)
    }

    /// True if layer `index` is recurrent instead of attention.
    pub fn is_recurrent(&self, index: usize) -> bool {
        self.recurrent[index]
    }

    /// The mixture of experts of layer `index`; None if it has a dense feed-forward block.
    pub fn experts_of(&self, index: usize) -> Option<Experts> {
        self.experts.filter(|experts| index >= experts.n_dense)
    }

    /// True if layer `index` has a dense feed-forward block: instead of experts, or next to them.
    pub fn has_dense(&self, index: usize) -> bool {
        self.gemma4.is_some() || self.experts_of(index).is_none()
    }

    /// Inner width of a dense feed-forward block, except where they differ ([`ModelConfig::d_dense_of`]).
    pub fn d_dense(&self) -> usize {
        self.experts.map_or(self.d_ff, |experts| experts.d_dense)
    }

    /// Inner width of the widest feed-forward block or expert.
    pub fn d_ff_max(&self) -> usize {
        let dense =
            (0..self.n_layers).filter(|&index| self.has_dense(index)).map(|index| self.d_dense_of(index));
        dense.fold(self.d_ff, usize::max)
    }

    /// Recurrent layers.
    pub fn n_recurrent(&self) -> usize {
        self.recurrent.iter().filter(|&&recurrent| recurrent).count()
    }

    /// Numbers (f32) of the recurrent state of one sequence, all layers; 0 for a model without recurrent layers.
    pub fn state_len(&self) -> usize {
        self.recurrent_layer.map_or(0, |layer| self.n_recurrent() * layer.state_len())
    }

    /// Numbers (f32) that are recorded of one row of a sequence with drafts, all recurrent layers; 0 without them.
    pub fn journal_width(&self) -> usize {
        self.recurrent_layer.map_or(0, |layer| self.n_recurrent() * layer.journal_width())
    }

    /// Activations of one row that only a model with recurrent layers or with inputs of layers needs; 0 for the others.
    pub fn recurrent_width(&self) -> usize {
        let layer = self.recurrent_layer.map_or(0, |layer| layer.row_width());
        let gate = if self.has_attn_gate() { self.n_heads * self.d_head } else { 0 };
        layer + gate + self.gemma4_width()
    }

    /// The recurrent layers, if they are of this kind.
    pub fn delta_net(&self) -> Option<DeltaNet> {
        match self.recurrent_layer? {
            RecurrentLayer::DeltaNet(delta_net) => Some(delta_net),
            RecurrentLayer::ShortConv(_) => None,
        }
    }

    /// As [`ModelConfig::delta_net`].
    pub fn short_conv(&self) -> Option<ShortConv> {
        match self.recurrent_layer? {
            RecurrentLayer::DeltaNet(_) => None,
            RecurrentLayer::ShortConv(short_conv) => Some(short_conv),
        }
    }

    /// True if the output of attention has a gate.
    pub fn has_attn_gate(&self) -> bool {
        self.delta_net().is_some()
    }

    /// True if layer `index` has this weight.
    fn has(&self, index: usize, part: LayerWeight) -> bool {
        let (has_attention, experts) = (!self.is_recurrent(index), self.experts_of(index));
        let has_kv = has_attention && self.kv_source(index) == index;
        match part {
            LayerWeight::AttnNorm | LayerWeight::FfnNorm => self.arch.pre_norms,
            LayerWeight::AttnPostNorm | LayerWeight::FfnPostNorm => self.arch.post_norms,
            LayerWeight::QBias | LayerWeight::KBias | LayerWeight::VBias => self.qkv_bias && has_attention,
            LayerWeight::K => has_kv,
            LayerWeight::V => has_kv && self.has_v(index),
            LayerWeight::KNorm => self.qk_norm && has_kv,
            LayerWeight::Gemma4(part) => self.gemma4.is_some_and(|g| g.has(part, experts.is_some())),
            LayerWeight::OBias => self.o_bias && has_attention,
            LayerWeight::GateBias | LayerWeight::UpBias | LayerWeight::DownBias => self.mlp_bias,
            LayerWeight::QNorm => self.qk_norm && has_attention,
            LayerWeight::GateUp | LayerWeight::Gate | LayerWeight::Up | LayerWeight::Down => {
                self.has_dense(index)
            }
            LayerWeight::Router | LayerWeight::Expert(..) | LayerWeight::Experts(_) => experts.is_some(),
            LayerWeight::ExpertsGateUp => experts.is_some(),
            LayerWeight::RouterProjectionBias
            | LayerWeight::ExpertsBias(_)
            | LayerWeight::ExpertsGateUpBias => experts.is_some_and(|experts| experts.projection_biases),
            LayerWeight::Sinks => self.arch.attn_sinks && has_attention,
            LayerWeight::RouterBias => experts.is_some_and(|experts| experts.has_bias),
            LayerWeight::Shared(_) | LayerWeight::SharedScale => self.d_shared.is_some() && experts.is_some(),
            LayerWeight::Qkv | LayerWeight::Q | LayerWeight::O => has_attention,
            LayerWeight::QAndGate | LayerWeight::AttnGate => has_attention,
            LayerWeight::Delta(_) | LayerWeight::ShortConv(_) => !has_attention,
        }
    }

    /// Returns the stored weight that contains the rows of a layer's matrix, and where they are in it.
    pub fn stored_in(&self, part: LayerWeight) -> (LayerWeight, RowMap) {
        let stores = |part| self.names.parts().any(|stored| stored == part);
        let (d, q, kv) = (self.d_head, self.n_heads * self.d_head, self.n_kv_heads * self.d_head);
        let (stored, first) = match part {
            LayerWeight::Delta(part) => return self.stored_delta(part),
            LayerWeight::ShortConv(part) => {
                let (stored, rows) = self.short_conv().expect(RECURRENT).stored(part);
                return (LayerWeight::ShortConv(stored), rows);
            }
            LayerWeight::Q if stores(LayerWeight::QAndGate) => {
                return (LayerWeight::QAndGate, RowMap::groups(0, d, 2 * d));
            }
            LayerWeight::AttnGate => return (LayerWeight::QAndGate, RowMap::groups(d, d, 2 * d)),
            LayerWeight::Q if stores(LayerWeight::Qkv) => (LayerWeight::Qkv, 0),
            LayerWeight::K if stores(LayerWeight::Qkv) => (LayerWeight::Qkv, q),
            LayerWeight::V if stores(LayerWeight::Qkv) => (LayerWeight::Qkv, q + kv),
            LayerWeight::Gate if stores(LayerWeight::GateUp) => (LayerWeight::GateUp, 0),
            LayerWeight::Up if stores(LayerWeight::GateUp) => (LayerWeight::GateUp, self.d_dense()),
            LayerWeight::Expert(expert, part @ (ExpertPart::Gate | ExpertPart::Up))
                if stores(LayerWeight::ExpertsGateUp) =>
            {
                let rows = self.rows_in_gate_up(part);
                return (LayerWeight::ExpertsGateUp, rows.after(2 * expert * self.d_ff));
            }
            LayerWeight::Expert(expert, matrix) if stores(LayerWeight::Experts(matrix)) => {
                (LayerWeight::Experts(matrix), expert * self.expert_shape(matrix)[0])
            }
            other => (other, 0),
        };
        (stored, RowMap::from_row(first))
    }

    /// Where the rows of gate or up of an expert are in its fused matrix.
    fn rows_in_gate_up(&self, part: ExpertPart) -> RowMap {
        let is_up = usize::from(part == ExpertPart::Up);
        if self.names.interleaved_experts {
            RowMap::groups(is_up, 1, 2)
        } else {
            RowMap::from_row(is_up * self.d_ff)
        }
    }

    /// Returns the stored weight that contains the biases of a matrix of all experts, one row for each, and where an
    /// expert's biases are in its row.
    pub fn stored_expert_bias(&self, part: ExpertPart) -> (LayerWeight, RowMap) {
        let is_fused = self.names.parts().any(|stored| stored == LayerWeight::ExpertsGateUpBias);
        match part {
            ExpertPart::Gate | ExpertPart::Up if is_fused => {
                (LayerWeight::ExpertsGateUpBias, self.rows_in_gate_up(part))
            }
            part => (LayerWeight::ExpertsBias(part), RowMap::from_row(0)),
        }
    }

    /// As [`ModelConfig::stored_in`], for a weight of a recurrent layer.
    fn stored_delta(&self, part: DeltaWeight) -> (LayerWeight, RowMap) {
        use DeltaWeight::{A, B, Ba, K, Q, Qkv, Qkvz, V, Z};
        let candidates: &[DeltaWeight] = match part {
            Q | K | V => &[Qkv, Qkvz],
            Z => &[Qkvz],
            A | B => &[Ba],
            _ => &[],
        };
        let stores = |fused| self.names.parts().any(|stored| stored == LayerWeight::Delta(fused));
        let fused = candidates.iter().copied().find(|&fused| stores(fused)).unwrap_or(part);
        let rows = self.delta_net().expect(RECURRENT).rows_in(fused, part);
        (LayerWeight::Delta(fused), rows)
    }

    /// As [`ModelConfig::stored_in`], for any weight.
    pub fn stored_weight(&self, id: WeightId) -> (WeightId, RowMap) {
        let WeightId::Layer(index, part) = id else { return (id, RowMap::from_row(0)) };
        let (stored, rows) = self.stored_in(part);
        (WeightId::Layer(index, stored), rows)
    }

    /// The shape of a weight, slowest dimension first.
    pub fn shape(&self, id: WeightId) -> Vec<usize> {
        let index = if let WeightId::Layer(index, _) = id { index } else { 0 };
        let KvHeads { n_kv_heads, d_head } = self.kv_heads(index);
        let (d, q, kv) = (self.d_model, self.n_heads * d_head, n_kv_heads * d_head);
        let d_dense = self.d_dense_of(index);
        let qk_norm = |projection| match self.arch.qk_norm {
            QkNorm::Projection => projection,
            QkNorm::Head | QkNorm::RotatedHead | QkNorm::None => d_head,
        };
        let n_experts = self.experts.map_or(0, |experts| experts.n);
        match id {
            WeightId::Embed | WeightId::LmHead => vec![self.vocab_size, d],
            WeightId::OutputNorm => vec![d],
            WeightId::LayerInputs(part) => self.layer_inputs_shape(part),
            WeightId::Layer(_, part) => match part {
                LayerWeight::AttnNorm | LayerWeight::AttnPostNorm => vec![d],
                LayerWeight::FfnNorm | LayerWeight::FfnPostNorm => vec![d],
                LayerWeight::Qkv => vec![q + 2 * kv, d],
                LayerWeight::QAndGate => vec![2 * q, d],
                LayerWeight::Q | LayerWeight::AttnGate => vec![q, d],
                LayerWeight::K | LayerWeight::V => vec![kv, d],
                LayerWeight::QBias => vec![q],
                LayerWeight::KBias | LayerWeight::VBias => vec![kv],
                LayerWeight::O => vec![d, q],
                LayerWeight::OBias | LayerWeight::DownBias => vec![d],
                LayerWeight::GateBias | LayerWeight::UpBias => vec![d_dense],
                LayerWeight::QNorm => vec![qk_norm(q)],
                LayerWeight::KNorm => vec![qk_norm(kv)],
                LayerWeight::GateUp => vec![2 * d_dense, d],
                LayerWeight::Gate | LayerWeight::Up => vec![d_dense, d],
                LayerWeight::Down => vec![d, d_dense],
                LayerWeight::Router => vec![n_experts, d],
                LayerWeight::RouterBias | LayerWeight::RouterProjectionBias => vec![n_experts],
                LayerWeight::ExpertsBias(matrix) => vec![n_experts, self.expert_shape(matrix)[0]],
                LayerWeight::ExpertsGateUpBias => vec![n_experts, 2 * self.d_ff],
                LayerWeight::Sinks => vec![self.n_heads],
                LayerWeight::Expert(_, matrix) => self.expert_shape(matrix).to_vec(),
                LayerWeight::Experts(matrix) => {
                    let [rows, columns] = self.expert_shape(matrix);
                    vec![n_experts, rows, columns]
                }
                LayerWeight::ExpertsGateUp => vec![n_experts, 2 * self.d_ff, d],
                LayerWeight::Shared(matrix) => {
                    let d_shared = self.d_shared.unwrap_or(0);
                    if matrix == ExpertPart::Down { vec![d, d_shared] } else { vec![d_shared, d] }
                }
                LayerWeight::SharedScale => vec![1, d],
                LayerWeight::Gemma4(part) => self.gemma4_shape(part),
                LayerWeight::Delta(part) => self.delta_net().expect(RECURRENT).shape(part, d),
                LayerWeight::ShortConv(part) => self.short_conv().expect(RECURRENT).shape(part),
            },
        }
    }

    /// The shape of a matrix of one expert.
    pub fn expert_shape(&self, matrix: ExpertPart) -> [usize; 2] {
        match matrix {
            ExpertPart::Gate | ExpertPart::Up => [self.d_ff, self.d_model],
            ExpertPart::Down => [self.d_model, self.d_ff],
        }
    }
}

/// Appends the ids of `more` that `ids` does not have yet, in order.
pub(crate) fn add_ids(ids: &mut Vec<u32>, more: &[u32]) {
    for &id in more {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
}
