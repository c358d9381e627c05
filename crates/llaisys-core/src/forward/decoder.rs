//! The forward pass: one list of op calls for every architecture, in the order of the papers. Models are transformers
//! with rotary positions, grouped queries and a gated feed-forward block (arXiv:2302.13971, arXiv:2305.13245), with
//! norms before or after each block, with or without experts (arXiv:2401.04088) and recurrent layers (`delta_net`,
//! `short_conv`).
//!
//! In a model that is split ([`crate::forward::shard`]), each rank runs it on its part. The outputs of the ranks are
//! summed where they join the residual stream, of which every rank has all columns.

use super::journal::Journal;
use super::lora::{GatedLayer, LoraAt, LoraPass, LoraProjections};
use super::workspace::{Activations, ExpertRows};
use crate::arch::config::ModelConfig;
use crate::arch::experts::Experts;
use crate::arch::spec::QkNorm;
use crate::error::DeviceError;
use crate::forward::weights::{
    Attention, FeedForward, LayerWeights, Mixer, Mlp, Projection, SharedExpert, Weights,
};
use crate::ops::{
    self, AttentionRows, Gate, LoraOutputs, OpContext, PrunedArgmaxScratch, Queries, RecurrentRows,
    RopeTable, Routing, Scoring,
};
use crate::tensor::{KvLayer, KvLayerMut};

pub use super::workspace::{HeadScratch, Workspace};

/// The rows of one forward pass, at most the workspace's.
#[derive(Debug, Clone, Copy)]
pub struct ForwardRows<'a> {
    /// Token ids, `[n]`, each below the vocabulary size.
    pub tokens: &'a [i32],
    /// Positions, `[n]`.
    pub positions: &'a [i32],
    /// The cell where each row's key and value are stored, `[n]`.
    pub cells: &'a [u32],
    /// The cells that each row sees; its own is the last.
    pub attention: AttentionRows<'a>,
    /// The cells that each row sees in layers with a sliding window, in a model with such layers.
    pub windowed: Option<AttentionRows<'a>>,
    /// The rows of each sequence and its states, in a model with recurrent layers.
    pub recurrent: Option<RecurrentRows<'a>>,
    /// The rows that use LoRA adapters; None if there are none.
    pub lora: Option<LoraPass<'a>>,
}

/// The keys and values of each layer with attention, and the states of each recurrent layer, both numbered from 0. The
/// forward pass uses nothing else of the cache.
pub trait KvLayers {
    /// The next layer begins.
    fn begin_layer(&mut self);
    /// Attention layer `index`, to read.
    fn layer(&self, index: usize) -> KvLayer<'_>;
    /// Attention layer `index`, to write.
    fn layer_mut(&mut self, index: usize) -> KvLayerMut<'_>;
    /// All states of recurrent layer `index`, `[n_states, state_len]`.
    fn states_mut(&mut self, index: usize) -> &mut [f32];
    /// The journal of the recurrent layers' inputs; None: nothing is recorded.
    fn journal(&mut self) -> Option<&mut Journal> {
        None
    }
}

/// The weights of a model, or a rank's part of them, and the configuration of the forward pass.
#[derive(Debug)]
pub struct Decoder {
    config: ModelConfig,
    /// The packed weights.
    pub weights: Weights,
    rope: RopeTable,
    /// The table of layers with a window, where it differs.
    local_rope: Option<RopeTable>,
    gate: Gate,
}

impl Decoder {
    /// Combines packed weights with their configuration: the model's, or a rank's of
    /// [`crate::forward::shard::Shard::config`].
    pub fn new(config: ModelConfig, weights: Weights) -> Self {
        let rope = config.rope.table(config.d_rope);
        let local_rope = config.local_rope.as_ref().map(|rope| rope.table(config.d_rope));
        let gate = config.gate;
        Self { config, weights, rope, local_rope, gate }
    }

    /// The configuration of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The activation of the gate of feed-forward blocks.
    pub(super) fn gate(&self) -> Gate {
        self.gate
    }

    /// The rotary embedding of a layer; None if it is not rotated.
    pub fn rope(&self, layer: usize) -> Option<&RopeTable> {
        let local = self.local_rope.as_ref().filter(|_| self.config.windowed[layer]);
        self.config.rotated[layer].then(|| local.unwrap_or(&self.rope))
    }

    /// Runs all layers for `rows`: writes their keys and values into `kv`, and the last layer's output into `work` (see
    /// [`Decoder::final_hidden`]). The bits of a row depend only on the cells that it sees and on the number of ranks.
    /// Errors: another rank failed.
    pub fn forward(
        &self,
        cx: &mut OpContext,
        rows: &ForwardRows<'_>,
        kv: &mut dyn KvLayers,
        work: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let w = work.rows(rows.tokens.len());
        self.embed(cx, rows.tokens, w.x)?;
        ops::scale(cx, w.x, self.config.embed_scale);
        self.rope.angles(rows.positions, w.cos, w.sin);
        if let Some(rope) = &self.local_rope {
            rope.angles(rows.positions, w.local_cos, w.local_sin);
        }
        if let Some(scaling) = &self.config.query_scaling {
            scaling.factors(rows.positions, w.query_factors);
        }
        let mut pass = Pass { rows, kv, w };
        let (mut n_attention, mut n_recurrent) = (0, 0);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            pass.kv.begin_layer();
            match &layer.mixer {
                Mixer::DeltaNet(weights) => {
                    normalized(cx, layer.attn_norm.as_ref(), self.config.rms_eps, pass.w.x, pass.w.normed);
                    self.delta_net(cx, n_recurrent, weights, &mut pass)?;
                    n_recurrent += 1;
                }
                Mixer::ShortConv(weights) => {
                    normalized(cx, layer.attn_norm.as_ref(), self.config.rms_eps, pass.w.x, pass.w.normed);
                    self.short_conv(cx, n_recurrent, weights, &mut pass)?;
                    n_recurrent += 1;
                }
                Mixer::Attention(weights) => {
                    self.attention(cx, LayerNumber { index, of_kind: n_attention }, weights, &mut pass)?;
                    n_attention += 1;
                }
            }
            self.feed_forward(cx, index, layer, &mut pass)?;
        }
        Ok(())
    }

    /// Writes the embeddings of `tokens` to `x`. Each of several ranks has the rows of some tokens and contributes
    /// zeros for the others.
    fn embed(&self, cx: &mut OpContext, tokens: &[i32], x: &mut [f32]) -> Result<(), DeviceError> {
        let table = &self.weights.embed;
        if cx.collective.world() == 1 {
            ops::embed(cx, table, tokens, x);
            return Ok(());
        }
        let first = cx.collective.rank() * table.n_rows();
        let own = |&token: &i32| (token as usize).checked_sub(first).filter(|&row| row < table.n_rows());
        let rows: Vec<i32> = tokens.iter().map(|token| own(token).map_or(0, |row| row as i32)).collect();
        ops::embed(cx, table, &rows, x);
        for (x, _) in x.chunks_exact_mut(self.config.d_model).zip(tokens).filter(|(_, t)| own(t).is_none()) {
            x.fill(0.0);
        }
        cx.collective.all_reduce_sum(x)
    }

    /// Adds the output of a layer's attention to the residual stream.
    fn attention(
        &self,
        cx: &mut OpContext,
        LayerNumber { index, of_kind }: LayerNumber,
        weights: &Attention,
        pass: &mut Pass<'_>,
    ) -> Result<(), DeviceError> {
        let (config, layer) = (&self.config, &self.weights.layers[index]);
        let (rows, w) = (pass.rows, &mut pass.w);
        let input = normalized(cx, layer.attn_norm.as_ref(), config.rms_eps, w.x, w.normed);
        let qkv = [weights.q.part(), weights.k.part(), weights.v.part()];
        ops::linear(cx, input, &qkv, &mut [&mut *w.q, &mut *w.k, &mut *w.v]);
        if let Some(weight) = &weights.gate {
            ops::linear(cx, input, &[ops::LinearPart { weight, bias: None }], &mut [&mut *w.attn_gate]);
        }
        let projections =
            LoraProjections { layer: index, at: LoraAt::Attention, input, scratch: w.lora_hidden };
        let outputs = &mut [&mut *w.q, &mut *w.k, &mut *w.v, &mut *w.attn_gate];
        self.add_lora(cx, rows, projections, LoraOutputs::Separate(outputs));
        let norms_rotated = config.arch.qk_norm == QkNorm::RotatedHead;
        if !norms_rotated {
            self.normalize_heads(cx, weights, w);
        }
        if config.rotated[index] {
            let is_local = config.windowed[index] && self.local_rope.is_some();
            let (cos, sin) = if is_local { (&*w.local_cos, &*w.local_sin) } else { (&*w.cos, &*w.sin) };
            ops::rope(cx, w.q, config.head_widths(), cos, sin);
            ops::rope(cx, w.k, config.head_widths(), cos, sin);
        }
        if norms_rotated {
            self.normalize_heads(cx, weights, w);
        }
        if config.query_scaling.is_some() {
            ops::scale_rows(cx, w.q, w.query_factors);
        }
        ops::kv_store(cx, pass.kv.layer_mut(of_kind), rows.cells, w.k, w.v);
        let scoring = Scoring { scale: config.score_scale, soft_cap: config.attn_soft_cap };
        let seen = rows.windowed.filter(|_| config.windowed[index]).unwrap_or(rows.attention);
        let queries = Queries { q: w.q, scoring, sinks: weights.sinks.as_deref() };
        ops::attention(cx, queries, pass.kv.layer(of_kind), seen, w.attended);
        if weights.gate.is_some() {
            ops::sigmoid_gate(cx, w.attended, w.attn_gate);
        }
        let lora = BranchLora { rows, layer: index, at: LoraAt::Attended, scratch: w.lora_hidden };
        let norm = layer.attn_post_norm.as_ref();
        let branch = Branch { input: w.attended, projection: &weights.o, norm, lora: Some(lora) };
        self.add_projection(cx, branch, w.x, w.normed)
    }

    /// Normalizes queries and keys, if the model does.
    fn normalize_heads(&self, cx: &OpContext, weights: &Attention, w: &mut Activations<'_>) {
        if let (Some(q_norm), Some(k_norm)) = (&weights.q_norm, &weights.k_norm) {
            ops::rms_norm_in_place(cx, w.q, q_norm, self.config.rms_eps);
            ops::rms_norm_in_place(cx, w.k, k_norm, self.config.rms_eps);
        }
    }

    /// Adds the output of a layer's feed-forward block to the residual stream.
    fn feed_forward(
        &self,
        cx: &mut OpContext,
        index: usize,
        layer: &LayerWeights,
        pass: &mut Pass<'_>,
    ) -> Result<(), DeviceError> {
        let (rows, w) = (pass.rows, &mut pass.w);
        let input = normalized(cx, layer.ffn_norm.as_ref(), self.config.rms_eps, w.x, w.normed);
        let norm = layer.ffn_post_norm.as_ref();
        match (&layer.feed_forward, self.config.experts) {
            (FeedForward::Experts { router, bias, experts, shared }, Some(config)) => {
                let (bias, shared) = (bias.as_deref(), shared.as_ref());
                let mixture = Mixture { router, bias, experts, shared, config, input, inner: w.inner };
                self.experts(cx, mixture, &mut w.experts);
                cx.collective.all_reduce_sum(w.experts.sum)?;
                self.add_branch(cx, w.experts.sum, norm, w.x);
                Ok(())
            }
            (FeedForward::Dense(mlp), _) => {
                let n = input.len() / self.config.d_model;
                let inner = &mut w.inner[..n * self.config.d_dense()];
                let (scratch, gate_up) = (&mut *w.lora_hidden, &mut *w.lora_gate_up);
                self.gated(cx, rows, GatedLayer { layer: index, mlp, input, scratch, gate_up }, inner);
                let lora = BranchLora { rows, layer: index, at: LoraAt::Inner, scratch: w.lora_hidden };
                let branch = Branch { input: inner, projection: &mlp.down, norm, lora: Some(lora) };
                self.add_projection(cx, branch, w.x, w.normed)
            }
            (FeedForward::Experts { .. }, None) => unreachable!("experts are packed by the configuration"),
        }
    }

    /// Computes the weighted sum of the outputs of each row's experts. They are added in ascending order of the
    /// experts, then the shared one, so that the sum does not depend on which rows are computed together.
    fn experts(&self, cx: &mut OpContext, mixture: Mixture<'_>, w: &mut ExpertRows<'_>) {
        let (d_model, d_ff) = (self.config.d_model, self.config.d_ff);
        ops::linear(cx, mixture.input, &[mixture.router.part()], &mut [&mut *w.logits]);
        let Experts { n: n_experts, n_used, normalize, sigmoid, scale, .. } = mixture.config;
        let routing = Routing { n_experts, n_used, sigmoid, bias: mixture.bias, normalize, scale };
        ops::route(w.logits, routing, w.routes);
        w.sum.fill(0.0);
        for (number, mlp) in mixture.experts.iter().enumerate() {
            w.rows.clear();
            w.weights.clear();
            for (row, weight) in w.routes.of(number) {
                w.rows.push(row as u32);
                w.weights.push(weight);
            }
            let n = w.rows.len();
            if n == 0 {
                continue;
            }
            let (gathered, out) = (&mut w.gathered[..n * d_model], &mut w.out[..n * d_model]);
            let inner = &mut mixture.inner[..n * d_ff];
            ops::gather(cx, mixture.input, d_model, w.rows, gathered);
            ops::linear_gated(cx, gathered, mlp.gated_part(self.gate), inner);
            ops::linear(cx, inner, &[mlp.down.part()], &mut [&mut *out]);
            ops::scatter_add(w.sum, d_model, w.rows, w.weights, out);
        }
        if let Some(SharedExpert { mlp, scale }) = mixture.shared {
            let n = mixture.input.len() / d_model;
            w.rows.clear();
            w.rows.extend(0..n as u32);
            w.weights.clear();
            w.weights.resize(n, 0.0);
            ops::linear(
                cx,
                mixture.input,
                &[ops::LinearPart { weight: scale, bias: None }],
                &mut [&mut *w.weights],
            );
            w.weights.iter_mut().for_each(|weight| *weight = 1.0 / (1.0 + (-*weight).exp()));
            ops::linear_gated(cx, mixture.input, mlp.gated_part(self.gate), w.shared_inner);
            ops::linear(cx, w.shared_inner, &[mlp.down.part()], &mut [&mut *w.out]);
            ops::scatter_add(w.sum, d_model, w.rows, w.weights, w.out);
        }
    }

    /// Adds the projection of a branch to the residual stream `x`. With several ranks it is summed over them first, and
    /// with a norm it is normalized; either needs `scratch`, of the length of `x`, and so does a bias, which the first
    /// rank adds.
    pub(super) fn add_projection(
        &self,
        cx: &mut OpContext,
        branch: Branch<'_>,
        x: &mut [f32],
        scratch: &mut [f32],
    ) -> Result<(), DeviceError> {
        let Branch { input, projection: Projection { matrix, bias }, norm, lora } = branch;
        let add_lora = |cx: &OpContext, input: &[f32], out: &mut [f32]| {
            if let Some(BranchLora { rows, layer, at, scratch }) = lora {
                let projections = LoraProjections { layer, at, input, scratch };
                self.add_lora(cx, rows, projections, LoraOutputs::Separate(&mut [out]));
            }
        };
        if norm.is_some() || bias.is_some() || cx.collective.world() > 1 {
            let bias = bias.as_deref().filter(|_| cx.collective.rank() == 0);
            ops::linear(cx, input, &[ops::LinearPart { weight: matrix, bias }], &mut [&mut *scratch]);
            add_lora(cx, input, scratch);
            cx.collective.all_reduce_sum(scratch)?;
            self.add_branch(cx, scratch, norm, x);
        } else {
            ops::scale(cx, input, self.config.residual_scale);
            ops::linear_add(cx, input, matrix, x);
            add_lora(cx, input, x);
        }
        Ok(())
    }

    /// Adds a branch to the residual stream.
    fn add_branch(&self, cx: &mut OpContext, branch: &mut [f32], norm: Option<&Vec<f32>>, x: &mut [f32]) {
        if let Some(norm) = norm {
            ops::rms_norm_in_place(cx, branch, norm, self.config.rms_eps);
        }
        ops::scale(cx, branch, self.config.residual_scale);
        ops::add(cx, x, branch);
    }

    /// Computes the final hidden states `[rows.len(), d_model]` of `rows` of the last [`Decoder::forward`].
    pub fn final_hidden<'w>(
        &self,
        cx: &mut OpContext,
        rows: &[usize],
        work: &'w mut Workspace,
    ) -> &'w mut [f32] {
        let d_model = self.config.d_model;
        let (x, hidden) = work.output(rows.len());
        for (to, &row) in hidden.chunks_exact_mut(d_model).zip(rows) {
            to.copy_from_slice(&x[row * d_model..(row + 1) * d_model]);
        }
        ops::rms_norm_in_place(cx, hidden, &self.weights.output_norm, self.config.rms_eps);
        hidden
    }

    /// Sets `ids` to the ids of the largest logits of final hidden states `[n, d_model]`, the lowest on ties. Rows for
    /// which the pruned argmax does not find it are None. Empty without argmax bounds, which need a model on one rank
    /// whose logits are the products of the head ([`ModelConfig::has_plain_logits`]).
    pub fn pruned_argmax(
        &self,
        cx: &mut OpContext,
        hidden: &[f32],
        scratch: &mut PrunedArgmaxScratch,
        ids: &mut Vec<Option<u32>>,
    ) {
        ids.clear();
        if let Some(bounds) = self.weights.argmax_bounds() {
            ids.extend(ops::pruned_argmax(cx, hidden, self.weights.head(), bounds, scratch));
        }
    }

    /// Writes the logits `[n, vocab_size]` of final hidden states `[n, d_model]`. Every rank calls this; a rank with
    /// empty `logits` only contributes its part. Errors: another rank failed.
    pub fn logits(
        &self,
        cx: &mut OpContext,
        hidden: &[f32],
        scratch: &mut HeadScratch,
        logits: &mut [f32],
    ) -> Result<(), DeviceError> {
        let weight = self.weights.head();
        let head = ops::LinearPart { weight, bias: None };
        let world = cx.collective.world();
        if world == 1 {
            ops::linear(cx, hidden, &[head], &mut [&mut *logits]);
        } else {
            let (n, n_own) = (hidden.len() / self.config.d_model, weight.n_rows());
            let (own, all) = scratch.parts(n * n_own, world);
            ops::linear(cx, hidden, &[head], &mut [&mut *own]);
            cx.collective.all_gather(own, all)?;
            for (row, logits) in logits.chunks_exact_mut(self.config.vocab_size).enumerate() {
                for (part, logits) in all.chunks_exact(n * n_own).zip(logits.chunks_mut(n_own)) {
                    logits.copy_from_slice(&part[row * n_own..][..logits.len()]);
                }
            }
        }
        ops::scale(cx, logits, self.config.logit_scale);
        if let Some(cap) = self.config.logit_soft_cap {
            ops::soft_cap(cx, logits, cap);
        }
        Ok(())
    }
}

/// The output of a layer's attention or feed-forward block, to be added to the residual stream.
pub(super) struct Branch<'a> {
    pub(super) input: &'a mut [f32],
    /// The projection back to the width of the model.
    pub(super) projection: &'a Projection,
    /// Norm of the projected values.
    pub(super) norm: Option<&'a Vec<f32>>,
    /// The adapters of the projection; None if it can have none.
    pub(super) lora: Option<BranchLora<'a>>,
}

/// The adapters of the projection of a branch.
pub(super) struct BranchLora<'a> {
    rows: &'a ForwardRows<'a>,
    layer: usize,
    at: LoraAt,
    scratch: &'a mut [f32],
}

/// The number of a layer, and its number among those of its kind.
#[derive(Debug, Clone, Copy)]
struct LayerNumber {
    index: usize,
    of_kind: usize,
}

/// One forward pass: its rows, the cache, and the activations.
pub(super) struct Pass<'a> {
    pub(super) rows: &'a ForwardRows<'a>,
    pub(super) kv: &'a mut dyn KvLayers,
    pub(super) w: Activations<'a>,
}

/// The mixture of experts of a layer, and its activations.
struct Mixture<'a> {
    router: &'a Projection,
    bias: Option<&'a [f32]>,
    experts: &'a [Mlp],
    shared: Option<&'a SharedExpert>,
    config: Experts,
    /// `[n, d_model]`
    input: &'a [f32],
    /// Inner values of one expert, `[n, d_ff]`.
    inner: &'a mut [f32],
}

/// Returns `x`, or if there is a norm, `x` normalized into `out`.
fn normalized<'a>(
    cx: &OpContext,
    norm: Option<&Vec<f32>>,
    eps: f32,
    x: &'a [f32],
    out: &'a mut [f32],
) -> &'a [f32] {
    match norm {
        None => x,
        Some(norm) => {
            ops::rms_norm(cx, x, norm, eps, out);
            out
        }
    }
}
