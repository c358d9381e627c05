//! The forward pass: one list of op calls for every architecture, in the order of the papers. Models are transformers
//! with rotary positions, grouped queries and a gated feed-forward block (arXiv:2302.13971, arXiv:2305.13245), with
//! norms before or after each block, with or without experts (arXiv:2401.04088) and recurrent layers (`delta_net`,
//! `short_conv`). What only Gemma 4 has is in `gemma4`.
//!
//! In a model that is split ([`crate::forward::shard`]), each rank runs it on its part. The outputs of the ranks are
//! summed where they join the residual stream, of which every rank has all columns.

use super::journal::Journal;
use super::lora::{ATTN_GATE, LoraAt, LoraPass, LoraSite, lora_hidden};
use super::workspace::{Activations, QkvRows};
use crate::arch::config::ModelConfig;
use crate::arch::spec::QkNorm;
use crate::error::DeviceError;
use crate::forward::weights::{Attention, FeedForward, LayerWeights, Mixer, Projection, Weights};
use crate::ops::{
    self, AttentionRows, Gate, KvHeads, OpContext, PrunedArgmaxScratch, Queries, RecurrentRows, RopeTable,
    Scoring,
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
    /// The number, among the layers of the cache, of the one that each layer reads. `[n_layers]`
    kv_numbers: Vec<usize>,
}

impl Decoder {
    /// Combines packed weights with their configuration: the model's, or a rank's of
    /// [`crate::forward::shard::Shard::config`].
    pub fn new(config: ModelConfig, weights: Weights) -> Self {
        let rope = config.rope.table(config.d_rope_full());
        let local_rope = config.local_rope.as_ref().map(|rope| rope.table(config.d_rope));
        let gate = config.gate;
        let own: Vec<usize> = config.kv_layers().collect();
        // Recurrent layers read none, and have any number.
        let number = |index| own.partition_point(|&layer| layer < config.kv_source(index));
        let kv_numbers = (0..config.n_layers).map(number).collect();
        Self { config, weights, rope, local_rope, gate, kv_numbers }
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
        let mut w = work.rows(rows.tokens.len());
        let tokens = &*self.embedded(rows.tokens);
        self.embed(cx, tokens, w.x)?;
        ops::scale(cx, w.x, self.config.embed_scale);
        self.layer_inputs(cx, tokens, w.x, &mut w.gemma4);
        self.rope.angles(rows.positions, w.cos, w.sin);
        if let Some(rope) = &self.local_rope {
            rope.angles(rows.positions, w.local_cos, w.local_sin);
        }
        if let Some(scaling) = &self.config.query_scaling {
            scaling.factors(rows.positions, w.query_factors);
        }
        let mut pass = Pass { rows, kv, w };
        let mut n_recurrent = 0;
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
                    self.attention(cx, index, weights, &mut pass)?;
                }
            }
            self.feed_forward(cx, index, layer, &mut pass)?;
            self.add_input(cx, index, layer, &mut pass)?;
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
        index: usize,
        weights: &Attention,
        pass: &mut Pass<'_>,
    ) -> Result<(), DeviceError> {
        let (config, layer) = (&self.config, &self.weights.layers[index]);
        let (rows, w) = (pass.rows, &mut pass.w);
        let input = normalized(cx, layer.attn_norm.as_ref(), config.rms_eps, w.x, w.normed);
        let Qkv { q, k, v, attended } = Qkv::new(config, index, rows.tokens.len(), &mut w.qkv);
        let site = LoraSite { layer: index, at: LoraAt::Attention };
        let lora = lora_hidden(cx, rows.lora, site, input, w.lora_hidden);
        match (&weights.k, &weights.v) {
            (Some(w_k), Some(w_v)) => {
                let parts = [weights.q.part(), w_k.part(), w_v.part()];
                ops::linear_lora(cx, input, &parts, lora, &mut [&mut *q, &mut *k, &mut *v]);
            }
            (Some(w_k), None) => {
                let parts = [weights.q.part(), w_k.part()];
                ops::linear_lora(cx, input, &parts, lora, &mut [&mut *q, &mut *k]);
            }
            _ => ops::linear_lora(cx, input, &[weights.q.part()], lora, &mut [&mut *q]),
        }
        if let Some(weight) = &weights.gate {
            let (part, lora) =
                (ops::LinearPart { weight, bias: None }, lora.map(|lora| lora.after(ATTN_GATE)));
            ops::linear_lora(cx, input, &[part], lora, &mut [&mut *w.attn_gate]);
        }
        if let (Some(_), None) = (&weights.k, &weights.v) {
            v.copy_from_slice(k);
        }
        let norms_rotated = config.arch.qk_norm == QkNorm::RotatedHead;
        if !norms_rotated {
            self.normalize_heads(cx, weights, q, k);
        }
        if let Some(v_norm) = &weights.v_norm {
            ops::rms_norm_in_place(cx, v, v_norm, config.rms_eps);
        }
        if config.rotated[index] {
            let is_local = config.windowed[index] && self.local_rope.is_some();
            let (cos, sin) = if is_local { (&*w.local_cos, &*w.local_sin) } else { (&*w.cos, &*w.sin) };
            ops::rope(cx, q, config.head_widths(index), cos, sin);
            if !k.is_empty() {
                ops::rope(cx, k, config.head_widths(index), cos, sin);
            }
        }
        if norms_rotated {
            self.normalize_heads(cx, weights, q, k);
        }
        if config.query_scaling.is_some() {
            ops::scale_rows(cx, q, w.query_factors);
        }
        let cells = self.kv_numbers[index];
        if weights.k.is_some() {
            ops::kv_store(cx, pass.kv.layer_mut(cells), rows.cells, k, v);
        }
        let scoring = Scoring { scale: config.score_scale, soft_cap: config.attn_soft_cap };
        let seen = rows.windowed.filter(|_| config.windowed[index]).unwrap_or(rows.attention);
        let queries = Queries { q, scoring, sinks: weights.sinks.as_deref() };
        ops::attention(cx, queries, pass.kv.layer(cells), seen, attended);
        if weights.gate.is_some() {
            ops::sigmoid_gate(cx, attended, w.attn_gate);
        }
        let site = LoraSite { layer: index, at: LoraAt::Attended };
        let lora = rows.lora.map(|pass| BranchLora { pass, site, scratch: &mut *w.lora_hidden });
        let norm = layer.attn_post_norm.as_ref();
        let branch = Branch { input: attended, projection: &weights.o, norm, lora };
        self.add_projection(cx, branch, w.x, w.normed)
    }

    /// Normalizes queries and keys, if the model does.
    fn normalize_heads(&self, cx: &OpContext, weights: &Attention, q: &mut [f32], k: &mut [f32]) {
        for (x, norm) in [(q, &weights.q_norm), (k, &weights.k_norm)] {
            if let Some(norm) = norm {
                ops::rms_norm_in_place(cx, x, norm, self.config.rms_eps);
            }
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
        match &layer.feed_forward {
            FeedForward::Experts { dense: Some(dense), .. } => {
                self.dense_and_experts(cx, index, dense, pass);
                self.add_branch(cx, pass.w.experts.sum, norm, pass.w.x);
                Ok(())
            }
            FeedForward::Experts { .. } => {
                self.route(cx, layer, input, &mut w.experts);
                self.experts(cx, layer, input, &mut w.experts);
                cx.collective.all_reduce_sum(w.experts.sum)?;
                self.add_branch(cx, w.experts.sum, norm, w.x);
                Ok(())
            }
            FeedForward::Dense(mlp) => {
                let n = input.len() / self.config.d_model;
                let inner = &mut w.inner[..n * self.config.d_dense_of(index)];
                let site = LoraSite { layer: index, at: LoraAt::FeedForward };
                let lora = lora_hidden(cx, rows.lora, site, input, w.lora_hidden);
                ops::linear_gated_lora(cx, input, mlp.gated_part(self.gate), lora, inner);
                let site = LoraSite { layer: index, at: LoraAt::Inner };
                let lora = rows.lora.map(|pass| BranchLora { pass, site, scratch: &mut *w.lora_hidden });
                let branch = Branch { input: inner, projection: &mlp.down, norm, lora };
                self.add_projection(cx, branch, w.x, w.normed)
            }
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
        if norm.is_some() || bias.is_some() || cx.collective.world() > 1 {
            let bias = bias.as_deref().filter(|_| cx.collective.rank() == 0);
            let (part, lora) =
                (ops::LinearPart { weight: matrix, bias }, BranchLora::hidden(lora, cx, input));
            ops::linear_lora(cx, input, &[part], lora, &mut [&mut *scratch]);
            cx.collective.all_reduce_sum(scratch)?;
            self.add_branch(cx, scratch, norm, x);
        } else {
            ops::scale(cx, input, self.config.residual_scale);
            let lora = BranchLora::hidden(lora, cx, input);
            ops::linear_add_lora(cx, input, matrix, lora, x);
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
    /// The adapters of the projection; None if no row uses one, or if the projection can have none.
    pub(super) lora: Option<BranchLora<'a>>,
}

/// The adapters of the projection of a branch.
pub(super) struct BranchLora<'a> {
    pub(super) pass: LoraPass<'a>,
    pub(super) site: LoraSite,
    /// `[n, width]`
    pub(super) scratch: &'a mut [f32],
}

impl<'a> BranchLora<'a> {
    /// As [`lora_hidden`].
    fn hidden(lora: Option<Self>, cx: &OpContext, input: &'a [f32]) -> Option<ops::LoraHidden<'a>> {
        let Self { pass, site, scratch } = lora?;
        lora_hidden(cx, Some(pass), site, input, scratch)
    }
}

/// One forward pass: its rows, the cache, and the activations.
pub(super) struct Pass<'a> {
    pub(super) rows: &'a ForwardRows<'a>,
    pub(super) kv: &'a mut dyn KvLayers,
    pub(super) w: Activations<'a>,
}

/// Queries, keys and values of a layer, each as wide as its heads.
struct Qkv<'a> {
    /// `[n, n_heads * d_head]`
    q: &'a mut [f32],
    /// `[n, n_kv_heads * d_head]`; empty in a layer that reads the keys and values of another one.
    k: &'a mut [f32],
    /// As `k`.
    v: &'a mut [f32],
    /// As `q`.
    attended: &'a mut [f32],
}

impl<'a> Qkv<'a> {
    /// Takes what layer `index` needs for `n` rows of buffers for the widest layer.
    fn new(config: &ModelConfig, index: usize, n: usize, buffers: &'a mut QkvRows<'_>) -> Self {
        let KvHeads { n_kv_heads, d_head } = config.kv_heads(index);
        let n_q = n * config.n_heads * d_head;
        let n_kv = if config.kv_source(index) == index { n * n_kv_heads * d_head } else { 0 };
        Self {
            q: &mut buffers.q[..n_q],
            k: &mut buffers.k[..n_kv],
            v: &mut buffers.v[..n_kv],
            attended: &mut buffers.attended[..n_q],
        }
    }
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
