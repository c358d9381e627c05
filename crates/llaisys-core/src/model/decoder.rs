//! The forward pass: one function for every family, a list of op calls in the order of the papers
//! (pre-norm transformer with rotary positions, grouped queries and a gated feed-forward part;
//! arXiv:2302.13971, arXiv:2305.13245).

use crate::error::{DeviceError, Result};
use crate::model::config::ModelConfig;
use crate::model::weights::Weights;
use crate::ops::{self, AttentionRows, OpContext, RopeTable};
use crate::tensor::{AlignedBuf, KvLayer, KvLayerMut};

/// The rows of one forward pass, at most the workspace's.
#[derive(Debug, Clone, Copy)]
pub struct ForwardRows<'a> {
    /// Token ids, `[n]`, each below the vocabulary size.
    pub tokens: &'a [i32],
    /// Positions, `[n]`.
    pub positions: &'a [i32],
    /// The cell that takes each row's key and value, `[n]`.
    pub cells: &'a [u32],
    /// What each row sees; its own cell is the last.
    pub attention: AttentionRows<'a>,
}

/// The keys and values of each layer; the forward pass knows no more of the cache.
pub trait KvLayers {
    /// Layer `index`, to read.
    fn layer(&self, index: usize) -> KvLayer<'_>;
    /// Layer `index`, to write.
    fn layer_mut(&mut self, index: usize) -> KvLayerMut<'_>;
}

/// A model's weights and the facts that the forward pass branches on.
#[derive(Debug)]
pub struct Decoder {
    config: ModelConfig,
    /// Replaceable by slot.
    pub weights: Weights,
    rope: RopeTable,
}

impl Decoder {
    /// Joins packed weights with their configuration.
    pub fn new(config: ModelConfig, weights: Weights) -> Self {
        let rope = RopeTable::new(config.d_head, config.rope_theta);
        Self { config, weights, rope }
    }

    /// Facts of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Rotation angles by position.
    pub fn rope(&self) -> &RopeTable {
        &self.rope
    }

    /// Runs all layers for `rows`: writes their keys and values into `kv` and leaves the last layer's output
    /// in `work` (see [`Decoder::final_hidden`]). A row's bits depend on nothing but what it sees.
    pub fn forward(
        &self,
        cx: &mut OpContext,
        rows: &ForwardRows<'_>,
        kv: &mut dyn KvLayers,
        work: &mut Workspace,
    ) {
        let config = &self.config;
        let w = work.rows(rows.tokens.len());
        ops::embed(cx, &self.weights.embed, rows.tokens, w.x);
        self.rope.angles(rows.positions, w.cos, w.sin);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            ops::rms_norm(cx, w.x, &layer.attn_norm, config.rms_eps, w.normed);
            let qkv = [layer.q.part(), layer.k.part(), layer.v.part()];
            ops::linear(cx, w.normed, &qkv, &mut [&mut *w.q, &mut *w.k, &mut *w.v]);
            if let (Some(q_norm), Some(k_norm)) = (&layer.q_norm, &layer.k_norm) {
                ops::rms_norm_in_place(cx, w.q, q_norm, config.rms_eps);
                ops::rms_norm_in_place(cx, w.k, k_norm, config.rms_eps);
            }
            ops::rope(cx, w.q, config.d_head, w.cos, w.sin);
            ops::rope(cx, w.k, config.d_head, w.cos, w.sin);
            ops::kv_store(cx, kv.layer_mut(index), rows.cells, w.k, w.v);
            ops::attention(cx, w.q, kv.layer(index), rows.attention, w.attended);
            ops::linear_add(cx, w.attended, &layer.o, w.x);
            ops::rms_norm(cx, w.x, &layer.ffn_norm, config.rms_eps, w.normed);
            let gate_up = ops::LinearPart { weight: &layer.gate_up, bias: None };
            ops::linear(cx, w.normed, &[gate_up], &mut [&mut *w.gate_up]);
            ops::swiglu(cx, w.gate_up, config.d_ff, w.inner);
            ops::linear_add(cx, w.inner, &layer.down, w.x);
        }
    }

    /// The final hidden states `[rows.len(), d_model]` of `rows` of the last [`Decoder::forward`].
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

    /// Logits `[n, vocab_size]` of final hidden states `[n, d_model]`.
    pub fn logits(&self, cx: &mut OpContext, hidden: &[f32], logits: &mut [f32]) {
        let head = ops::LinearPart { weight: self.weights.head(), bias: None };
        ops::linear(cx, hidden, &[head], &mut [logits]);
    }
}

/// Activations of the rows of one forward pass, allocated once. Pages are touched as row counts grow.
#[derive(Debug)]
pub struct Workspace {
    widths: Widths,
    x: AlignedBuf,
    normed: AlignedBuf,
    q: AlignedBuf,
    k: AlignedBuf,
    v: AlignedBuf,
    attended: AlignedBuf,
    gate_up: AlignedBuf,
    inner: AlignedBuf,
    cos: AlignedBuf,
    sin: AlignedBuf,
}

/// Elements of one row of each activation.
#[derive(Debug, Clone, Copy)]
struct Widths {
    model: usize,
    q: usize,
    kv: usize,
    gate_up: usize,
    inner: usize,
    angles: usize,
}

/// One pass's slices, each `[n, width]`.
struct Activations<'a> {
    x: &'a mut [f32],
    normed: &'a mut [f32],
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
    attended: &'a mut [f32],
    gate_up: &'a mut [f32],
    inner: &'a mut [f32],
    cos: &'a mut [f32],
    sin: &'a mut [f32],
}

impl Workspace {
    /// Room for passes of up to `n_rows` rows. Errors: no memory.
    pub fn new(config: &ModelConfig, n_rows: usize) -> Result<Self> {
        let widths = Widths {
            model: config.d_model,
            q: config.n_heads * config.d_head,
            kv: config.n_kv_heads * config.d_head,
            gate_up: ops::gate_up_rows(config.d_ff),
            inner: config.d_ff,
            angles: config.d_head / 2,
        };
        let rows = |width: usize| -> Result<AlignedBuf, DeviceError> {
            AlignedBuf::zeroed("activations", n_rows * width * size_of::<f32>())
        };
        Ok(Self {
            widths,
            x: rows(widths.model)?,
            normed: rows(widths.model)?,
            q: rows(widths.q)?,
            k: rows(widths.kv)?,
            v: rows(widths.kv)?,
            attended: rows(widths.q)?,
            gate_up: rows(widths.gate_up)?,
            inner: rows(widths.inner)?,
            cos: rows(widths.angles)?,
            sin: rows(widths.angles)?,
        })
    }

    /// The widest input of a product, for [`OpContext::new`].
    pub fn max_columns(config: &ModelConfig) -> usize {
        config.d_model.max(config.n_heads * config.d_head).max(config.d_ff)
    }

    fn rows(&mut self, n: usize) -> Activations<'_> {
        let w = self.widths;
        Activations {
            x: first(&mut self.x, n * w.model),
            normed: first(&mut self.normed, n * w.model),
            q: first(&mut self.q, n * w.q),
            k: first(&mut self.k, n * w.kv),
            v: first(&mut self.v, n * w.kv),
            attended: first(&mut self.attended, n * w.q),
            gate_up: first(&mut self.gate_up, n * w.gate_up),
            inner: first(&mut self.inner, n * w.inner),
            cos: first(&mut self.cos, n * w.angles),
            sin: first(&mut self.sin, n * w.angles),
        }
    }

    /// The last layer's output of all rows, and room for the final hidden states of `n` of them.
    fn output(&mut self, n: usize) -> (&[f32], &mut [f32]) {
        (self.x.as_slice(), first(&mut self.normed, n * self.widths.model))
    }
}

fn first(buffer: &mut AlignedBuf, n: usize) -> &mut [f32] {
    &mut buffer.as_mut_slice()[..n]
}
