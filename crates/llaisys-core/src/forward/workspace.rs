//! The activations of the forward pass.

use super::lora::MODULES_MAX;
use crate::arch::config::ModelConfig;
use crate::error::{DeviceError, Result};
use crate::ops::Routes;
use crate::ops::lora::RANK_BLOCK;
use crate::tensor::AlignedBuf;

/// Activations of the rows of one forward pass, allocated once. Their memory is touched as row counts grow.
#[derive(Debug)]
pub struct Workspace {
    widths: Widths,
    x: AlignedBuf,
    normed: AlignedBuf,
    q: AlignedBuf,
    k: AlignedBuf,
    v: AlignedBuf,
    attended: AlignedBuf,
    inner: AlignedBuf,
    cos: AlignedBuf,
    sin: AlignedBuf,
    local_cos: AlignedBuf,
    local_sin: AlignedBuf,
    query_factors: AlignedBuf,
    logits: AlignedBuf,
    gathered: AlignedBuf,
    expert_inner: AlignedBuf,
    out: AlignedBuf,
    sum: AlignedBuf,
    routes: Routes,
    rows: Vec<u32>,
    weights: Vec<f32>,
    attn_gate: AlignedBuf,
    shared_inner: AlignedBuf,
    gemma4: [AlignedBuf; 4],
    delta: [AlignedBuf; 10],
    short_conv: [AlignedBuf; 3],
    lora_hidden: AlignedBuf,
}

/// Elements in one row of each activation; 0 where the model does not need it.
#[derive(Debug, Clone, Copy)]
struct Widths {
    model: usize,
    q: usize,
    kv: usize,
    inner: usize,
    angles: usize,
    local_angles: usize,
    query_factors: usize,
    /// Router logits.
    experts: usize,
    /// Inputs and outputs of an expert.
    expert_model: usize,
    /// Inner values of an expert.
    expert_inner: usize,
    attn_gate: usize,
    /// Inner values of the shared expert.
    shared: usize,
    /// Keys, values and value heads of a Gated DeltaNet layer.
    delta_keys: usize,
    delta_values: usize,
    delta_heads: usize,
    /// Channels of a short convolution.
    short_conv: usize,
    /// The inputs of all layers, and that of one layer.
    layer_inputs: usize,
    layer_input: usize,
    /// The output of a dense block next to experts.
    dense_output: usize,
    /// Stacked ranks of LoRA adapters.
    lora_hidden: usize,
}

impl Widths {
    /// The widths of [`Gemma4Rows`], in the order of its fields.
    fn gemma4(&self) -> [usize; 4] {
        [self.layer_inputs, self.layer_inputs, self.layer_input, self.dense_output]
    }

    /// The widths of [`DeltaRows`], in the order of its fields.
    fn delta(&self) -> [usize; 10] {
        let Widths { delta_keys: keys, delta_values: values, delta_heads: heads, .. } = *self;
        [keys, keys, values, keys, keys, values, values, heads, heads, values]
    }
}

/// The slices of one pass, each `[n, width]`.
pub(super) struct Activations<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) normed: &'a mut [f32],
    pub(super) qkv: QkvRows<'a>,
    pub(super) inner: &'a mut [f32],
    pub(super) cos: &'a mut [f32],
    pub(super) sin: &'a mut [f32],
    pub(super) local_cos: &'a mut [f32],
    pub(super) local_sin: &'a mut [f32],
    /// `[n]`
    pub(super) query_factors: &'a mut [f32],
    /// Gates of `attended`.
    pub(super) attn_gate: &'a mut [f32],
    pub(super) experts: ExpertRows<'a>,
    pub(super) gemma4: Gemma4Rows<'a>,
    pub(super) delta: DeltaRows<'a>,
    pub(super) short_conv: ShortConvRows<'a>,
    /// The products with A of LoRA adapters.
    pub(super) lora_hidden: &'a mut [f32],
}

/// Queries, keys and values of the widest layer.
pub(super) struct QkvRows<'a> {
    pub(super) q: &'a mut [f32],
    pub(super) k: &'a mut [f32],
    pub(super) v: &'a mut [f32],
    /// The attended values, as wide as the queries.
    pub(super) attended: &'a mut [f32],
}

/// Additional slices for Gemma 4.
pub(super) struct Gemma4Rows<'a> {
    /// The inputs of all layers.
    pub(super) inputs: &'a mut [f32],
    /// Their embeddings.
    pub(super) embedded: &'a mut [f32],
    /// The gate of a layer's input.
    pub(super) gate: &'a mut [f32],
    /// The output of a dense block next to experts.
    pub(super) dense: &'a mut [f32],
}

/// Additional slices for a gated short convolution.
pub(super) struct ShortConvRows<'a> {
    pub(super) input_gate: &'a mut [f32],
    pub(super) output_gate: &'a mut [f32],
    pub(super) input: &'a mut [f32],
}

/// Additional slices for a Gated DeltaNet layer.
pub(super) struct DeltaRows<'a> {
    /// Inputs of the short convolutions of queries, keys and values.
    pub(super) q_in: &'a mut [f32],
    pub(super) k_in: &'a mut [f32],
    pub(super) v_in: &'a mut [f32],
    pub(super) q: &'a mut [f32],
    pub(super) k: &'a mut [f32],
    pub(super) v: &'a mut [f32],
    pub(super) z: &'a mut [f32],
    pub(super) b: &'a mut [f32],
    pub(super) a: &'a mut [f32],
    pub(super) out: &'a mut [f32],
}

/// Additional slices for a mixture of experts.
pub(super) struct ExpertRows<'a> {
    /// `[n, n_experts]`
    pub(super) logits: &'a mut [f32],
    pub(super) routes: &'a mut Routes,
    /// All rows, for the shared expert.
    pub(super) rows: &'a mut Vec<u32>,
    /// The weight of the shared expert in each row.
    pub(super) weights: &'a mut Vec<f32>,
    /// Inputs of experts, rows of `d_model`; as many rows as the largest pass has.
    pub(super) gathered: &'a mut [f32],
    /// Inner values of experts, rows of `d_ff`; as many as `gathered` has.
    pub(super) inner: &'a mut [f32],
    /// Outputs of the shared expert.
    pub(super) out: &'a mut [f32],
    /// `[n, d_model]`
    pub(super) sum: &'a mut [f32],
    /// Inner values of the shared expert.
    pub(super) shared_inner: &'a mut [f32],
}

impl Workspace {
    /// Allocates for passes of up to `n_rows` rows. Errors: no memory.
    pub fn new(config: &ModelConfig, n_rows: usize) -> Result<Self> {
        let (q, kv) = config.qk_widths();
        let widths = Widths {
            model: config.d_model,
            q,
            kv,
            inner: config.d_ff_max(),
            angles: config.d_rope_full() / 2,
            local_angles: config.local_rope.as_ref().map_or(0, |_| config.d_rope / 2),
            query_factors: config.query_scaling.map_or(0, |_| 1),
            experts: config.experts.map_or(0, |experts| experts.n),
            expert_model: config.experts.map_or(0, |_| config.d_model),
            expert_inner: config.experts.map_or(0, |_| config.d_ff),
            attn_gate: if config.has_attn_gate() { config.n_heads * config.d_head } else { 0 },
            shared: config.d_shared.unwrap_or(0),
            delta_keys: config.delta_net().map_or(0, |delta_net| delta_net.heads.key_width()),
            delta_values: config.delta_net().map_or(0, |delta_net| delta_net.heads.value_width()),
            delta_heads: config.delta_net().map_or(0, |delta_net| delta_net.heads.n_values),
            short_conv: config.short_conv().map_or(0, |short_conv| short_conv.channels),
            layer_inputs: config.d_inputs(),
            layer_input: config.d_input(),
            dense_output: config.dense_output_width(),
            lora_hidden: 0,
        };
        let own = widths.delta().into_iter().chain(widths.gemma4()).sum::<usize>();
        debug_assert_eq!(
            own + 3 * widths.short_conv + widths.attn_gate,
            config.recurrent_width(),
            "as sizing counts them"
        );
        let rows = |width: usize| -> Result<AlignedBuf, DeviceError> {
            AlignedBuf::zeroed("activations", n_rows * width * size_of::<f32>())
        };
        let [a, b, c, d, e, f, g, h, i, j] = widths.delta().map(rows);
        let [inputs, embedded, gate, dense] = widths.gemma4().map(rows);
        Ok(Self {
            widths,
            attn_gate: rows(widths.attn_gate)?,
            shared_inner: rows(widths.shared)?,
            gemma4: [inputs?, embedded?, gate?, dense?],
            delta: [a?, b?, c?, d?, e?, f?, g?, h?, i?, j?],
            short_conv: [rows(widths.short_conv)?, rows(widths.short_conv)?, rows(widths.short_conv)?],
            x: rows(widths.model)?,
            normed: rows(widths.model)?,
            q: rows(widths.q)?,
            k: rows(widths.kv)?,
            v: rows(widths.kv)?,
            attended: rows(widths.q)?,
            inner: rows(widths.inner)?,
            cos: rows(widths.angles)?,
            sin: rows(widths.angles)?,
            local_cos: rows(widths.local_angles)?,
            local_sin: rows(widths.local_angles)?,
            query_factors: rows(widths.query_factors)?,
            logits: rows(widths.experts)?,
            gathered: rows(widths.expert_model)?,
            expert_inner: rows(widths.expert_inner)?,
            out: rows(widths.expert_model)?,
            sum: rows(widths.expert_model)?,
            routes: Routes::default(),
            rows: Vec::new(),
            weights: Vec::new(),
            lora_hidden: rows(0)?,
        })
    }

    /// Allocates what passes with LoRA adapters of ranks up to `max_rank` need in addition. Errors: no memory.
    pub fn with_lora(mut self, n_rows: usize, max_rank: usize) -> Result<Self> {
        let width = (MODULES_MAX * max_rank).next_multiple_of(RANK_BLOCK);
        self.widths.lora_hidden = width;
        self.lora_hidden = AlignedBuf::zeroed("activations", n_rows * width * size_of::<f32>())?;
        Ok(self)
    }

    /// Returns the width of the widest input of a matrix product, for
    /// [`OpContext::new`](crate::ops::OpContext::new).
    pub fn max_columns(config: &ModelConfig) -> usize {
        let values = config.delta_net().map_or(0, |delta_net| delta_net.heads.value_width());
        let d_shared = config.d_shared.unwrap_or(0);
        [config.qk_widths().0, config.d_ff_max(), values, d_shared]
            .into_iter()
            .fold(config.d_model, usize::max)
    }

    pub(super) fn rows(&mut self, n: usize) -> Activations<'_> {
        let w = self.widths;
        let mut delta = self.delta.iter_mut().zip(w.delta()).map(|(buffer, width)| first(buffer, n * width));
        let mut next = || delta.next().expect("a buffer for each width");
        let delta = DeltaRows {
            q_in: next(),
            k_in: next(),
            v_in: next(),
            q: next(),
            k: next(),
            v: next(),
            z: next(),
            b: next(),
            a: next(),
            out: next(),
        };
        let mut gemma4 =
            self.gemma4.iter_mut().zip(w.gemma4()).map(|(buffer, width)| first(buffer, n * width));
        let mut next = || gemma4.next().expect("a buffer for each width");
        let [inputs, embedded, gate, dense] = std::array::from_fn(|_| next());
        let [input_gate, output_gate, input] =
            self.short_conv.each_mut().map(|buffer| first(buffer, n * w.short_conv));
        Activations {
            short_conv: ShortConvRows { input_gate, output_gate, input },
            attn_gate: first(&mut self.attn_gate, n * w.attn_gate),
            gemma4: Gemma4Rows { inputs, embedded, gate, dense },
            delta,
            lora_hidden: first(&mut self.lora_hidden, n * w.lora_hidden),
            x: first(&mut self.x, n * w.model),
            normed: first(&mut self.normed, n * w.model),
            qkv: QkvRows {
                q: first(&mut self.q, n * w.q),
                k: first(&mut self.k, n * w.kv),
                v: first(&mut self.v, n * w.kv),
                attended: first(&mut self.attended, n * w.q),
            },
            inner: first(&mut self.inner, n * w.inner),
            cos: first(&mut self.cos, n * w.angles),
            sin: first(&mut self.sin, n * w.angles),
            local_cos: first(&mut self.local_cos, n * w.local_angles),
            local_sin: first(&mut self.local_sin, n * w.local_angles),
            query_factors: first(&mut self.query_factors, n * w.query_factors),
            experts: ExpertRows {
                logits: first(&mut self.logits, n * w.experts),
                routes: &mut self.routes,
                rows: &mut self.rows,
                weights: &mut self.weights,
                gathered: self.gathered.as_mut_slice(),
                inner: self.expert_inner.as_mut_slice(),
                out: first(&mut self.out, n * w.expert_model),
                sum: first(&mut self.sum, n * w.expert_model),
                shared_inner: first(&mut self.shared_inner, n * w.shared),
            },
        }
    }

    /// The output of [`Decoder::final_hidden`](super::decoder::Decoder::final_hidden) for `n` rows, `[n, d_model]`.
    pub fn hidden(&self, n: usize) -> &[f32] {
        &self.normed.as_slice()[..n * self.widths.model]
    }

    /// The last layer's output of all rows, and the buffer for the final hidden states of `n` of them.
    pub(super) fn output(&mut self, n: usize) -> (&[f32], &mut [f32]) {
        (self.x.as_slice(), first(&mut self.normed, n * self.widths.model))
    }
}

/// Buffers in which ranks assemble the logits of some rows; they grow with use.
#[derive(Debug, Default)]
pub struct HeadScratch {
    own: Vec<f32>,
    all: Vec<f32>,
}

impl HeadScratch {
    /// Buffers for this rank's part, `[n]`, and for the parts of all ranks, `[world, n]`.
    pub(super) fn parts(&mut self, n: usize, world: usize) -> (&mut [f32], &mut [f32]) {
        self.own.resize(n, 0.0);
        self.all.resize(world * n, 0.0);
        (&mut self.own, &mut self.all)
    }
}

fn first(buffer: &mut AlignedBuf, n: usize) -> &mut [f32] {
    &mut buffer.as_mut_slice()[..n]
}
