//! The forward pass of encoders: one list of op calls for every family, in the order of the papers (BERT,
//! arXiv:1810.04805; ModernBERT, arXiv:2412.13663). Every row of a text sees all of its rows, or a window to both sides.
//!
//! Keys and values are in as many cells as a batch has rows, which every layer uses again. Nothing is cached between
//! batches.

mod pack;

use super::decoder::KvLayers;
use super::weights::Projection;
use crate::arch::encoder::{EncoderConfig, HeadRule, PositionRule};
use crate::error::DeviceError;
use crate::ops::packed::PackedMatrix;
use crate::ops::{
    self, AttentionRow, AttentionRows, Gate, GatedPart, HeadWidths, LayerNorm, OpContext, Queries, RopeTable,
    Scoring,
};
use crate::tensor::AlignedBuf;
use std::ops::Range;

/// The rows of one forward pass: texts one after the other, at most as many rows as the workspace has.
#[derive(Debug, Clone, Copy)]
pub struct EncoderRows<'a> {
    /// Token ids, `[n]`, each below the vocabulary size.
    pub tokens: &'a [i32],
    /// Token types, `[n]`, each below their number; ignored in a family without them.
    pub types: &'a [i32],
    /// The rows of each text, in order.
    pub texts: &'a [Range<usize>],
}

/// The weights of an encoder and the configuration of the forward pass.
#[derive(Debug)]
pub struct Encoder {
    config: EncoderConfig,
    words: PackedMatrix,
    positions: Option<PackedMatrix>,
    types: Option<PackedMatrix>,
    embed_norm: Norm,
    layers: Vec<Layer>,
    final_norm: Option<Norm>,
    head: Option<Head>,
    /// Of layers with and without a window.
    ropes: Option<[RopeTable; 2]>,
}

#[derive(Debug)]
struct Norm {
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

#[derive(Debug)]
struct Layer {
    qkv: [Projection; 3],
    o: Projection,
    attn_norm: Option<Norm>,
    up: Up,
    down: Projection,
    ffn_norm: Norm,
}

/// The first projection of the feed-forward block.
#[derive(Debug)]
enum Up {
    Plain(Projection),
    /// Gate and up, interleaved.
    Gated(PackedMatrix),
}

/// A classifier.
#[derive(Debug)]
struct Head {
    dense: Projection,
    norm: Option<Norm>,
    out: Projection,
}

/// A forward pass: its number of rows, the cells, and the activations.
struct Pass<'a> {
    n: usize,
    kv: &'a mut dyn KvLayers,
    work: &'a mut EncoderWorkspace,
}

/// The residual stream x, and memory of the same length.
struct Residual<'a> {
    x: &'a mut [f32],
    scratch: &'a mut [f32],
}

/// The activations of a forward pass, allocated once. Their memory is touched as row counts grow.
#[derive(Debug)]
pub struct EncoderWorkspace {
    x: AlignedBuf,
    scratch: AlignedBuf,
    qkv: [AlignedBuf; 3],
    attended: AlignedBuf,
    inner: AlignedBuf,
    angles: [AlignedBuf; 4],
    cells: Vec<u32>,
    positions: Vec<i32>,
    all: Vec<AttentionRow>,
    local: Vec<AttentionRow>,
}

impl EncoderWorkspace {
    /// Allocates for passes of up to `n_rows` rows. Errors: no memory.
    pub fn new(config: &EncoderConfig, n_rows: usize) -> Result<Self, DeviceError> {
        let rows = |width: usize| AlignedBuf::zeroed("activations", n_rows * width * size_of::<f32>());
        let d = config.d_model;
        let n_angles = if config.spec.positions == PositionRule::Rotated { config.d_head() / 2 } else { 0 };
        Ok(Self {
            x: rows(d)?,
            scratch: rows(d)?,
            qkv: [rows(d)?, rows(d)?, rows(d)?],
            attended: rows(d)?,
            inner: rows(config.d_ff)?,
            angles: [rows(n_angles)?, rows(n_angles)?, rows(n_angles)?, rows(n_angles)?],
            cells: Vec::new(),
            positions: Vec::new(),
            all: Vec::new(),
            local: Vec::new(),
        })
    }

    /// Lists positions and cells of `texts`, and the cells that each row sees: all of its text, or those up to `window`
    /// away.
    fn lay_out(&mut self, texts: &[Range<usize>], window: usize) {
        self.positions.clear();
        self.all.clear();
        self.local.clear();
        for text in texts {
            let (start, len) = (text.start as u32, text.len());
            self.positions.extend(0..len as i32);
            self.all.extend((0..len).map(|_| AttentionRow { start, n_hidden: 0, n_visible: len as u32 }));
            self.local.extend((0..len).map(|row| AttentionRow {
                start,
                n_hidden: row.saturating_sub(window) as u32,
                n_visible: len.min(row + window + 1) as u32,
            }));
        }
        self.cells.clear();
        self.cells.extend(0..self.positions.len() as u32);
    }
}

impl Encoder {
    /// The configuration of the model.
    pub fn config(&self) -> &EncoderConfig {
        &self.config
    }

    /// Bytes of the packed weights.
    pub fn n_bytes(&self) -> usize {
        let tables = [Some(&self.words), self.positions.as_ref(), self.types.as_ref()];
        let tables: usize = tables.into_iter().flatten().map(PackedMatrix::n_bytes).sum();
        let norms: usize =
            [Some(&self.embed_norm), self.final_norm.as_ref()].into_iter().flatten().map(Norm::n_bytes).sum();
        let layers: usize = self.layers.iter().map(Layer::n_bytes).sum();
        tables + norms + layers + self.head.as_ref().map_or(0, Head::n_bytes)
    }

    /// Computes the final hidden states `[n, d_model]` of all rows. The bits of a row depend only on its text.
    pub fn forward<'w>(
        &self,
        cx: &mut OpContext,
        rows: &EncoderRows<'_>,
        kv: &mut dyn KvLayers,
        work: &'w mut EncoderWorkspace,
    ) -> &'w mut [f32] {
        let n = rows.tokens.len();
        work.lay_out(rows.texts, self.config.window);
        self.embed(cx, rows, work);
        if let Some(ropes) = &self.ropes {
            let n_angles = n * self.config.d_head() / 2;
            let [local_cos, local_sin, cos, sin] = &mut work.angles;
            ropes[0].angles(&work.positions, first(local_cos, n_angles), first(local_sin, n_angles));
            ropes[1].angles(&work.positions, first(cos, n_angles), first(sin, n_angles));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            kv.begin_layer();
            self.attention(cx, index, Pass { n, kv: &mut *kv, work: &mut *work });
            self.feed_forward(cx, layer, n, work);
        }
        let x = first(&mut work.x, n * self.config.d_model);
        if let Some(norm) = &self.final_norm {
            self.normalize(cx, norm, x);
        }
        x
    }

    fn embed(&self, cx: &mut OpContext, rows: &EncoderRows<'_>, work: &mut EncoderWorkspace) {
        let len = rows.tokens.len() * self.config.d_model;
        let (x, scratch) = (first(&mut work.x, len), first(&mut work.scratch, len));
        ops::embed(cx, &self.words, rows.tokens, x);
        if let Some(table) = &self.positions {
            let offset = self.config.first_position as i32;
            let ids: Vec<i32> = work.positions.iter().map(|position| position + offset).collect();
            ops::embed(cx, table, &ids, scratch);
            ops::add(cx, x, scratch);
        }
        if let Some(table) = &self.types {
            ops::embed(cx, table, rows.types, scratch);
            ops::add(cx, x, scratch);
        }
        self.normalize(cx, &self.embed_norm, x);
    }

    /// Adds the output of layer `index`'s attention to the residual stream of `n` rows.
    fn attention(&self, cx: &mut OpContext, index: usize, pass: Pass<'_>) {
        let Pass { n, kv, work } = pass;
        let (config, layer) = (&self.config, &self.layers[index]);
        let (len, is_local) = (n * config.d_model, config.is_local(index));
        let (x, scratch) = (first(&mut work.x, len), first(&mut work.scratch, len));
        let input = self.input(cx, layer.attn_norm.as_ref(), x, scratch);
        let [q, k, v] = work.qkv.each_mut().map(|buffer| first(buffer, len));
        let parts = layer.qkv.each_ref().map(Projection::part);
        ops::linear(cx, input, &parts, &mut [&mut *q, &mut *k, &mut *v]);
        let d_head = config.d_head();
        if self.ropes.is_some() {
            let [local_cos, local_sin, cos, sin] = &mut work.angles;
            let (cos, sin) = if is_local { (local_cos, local_sin) } else { (cos, sin) };
            let n_angles = n * d_head / 2;
            let (cos, sin) = (first(cos, n_angles), first(sin, n_angles));
            ops::rope(cx, q, HeadWidths::whole(d_head), cos, sin);
            ops::rope(cx, k, HeadWidths::whole(d_head), cos, sin);
        }
        ops::kv_store(cx, kv.layer_mut(0), &work.cells, k, v);
        let seen = if is_local { &work.local } else { &work.all };
        let seen = AttentionRows { cells: &work.cells, rows: seen, window: None, n_shared: &[] };
        let scoring = Scoring { scale: 1.0 / (d_head as f32).sqrt(), soft_cap: None };
        let attended = first(&mut work.attended, len);
        ops::attention(cx, Queries { q, scoring, sinks: None }, kv.layer(0), seen, attended);
        self.add_projection(cx, attended, &layer.o, Residual { x: &mut *x, scratch });
        if let Some(norm) = layer.attn_norm.as_ref().filter(|_| !config.spec.pre_norms) {
            self.normalize(cx, norm, x);
        }
    }

    /// Adds the output of a layer's feed-forward block to the residual stream of `n` rows.
    fn feed_forward(&self, cx: &mut OpContext, layer: &Layer, n: usize, work: &mut EncoderWorkspace) {
        let len = n * self.config.d_model;
        let (x, scratch) = (first(&mut work.x, len), first(&mut work.scratch, len));
        let inner = first(&mut work.inner, n * self.config.d_ff);
        let input = self.input(cx, Some(&layer.ffn_norm), x, scratch);
        match &layer.up {
            Up::Plain(up) => {
                ops::linear(cx, input, &[up.part()], &mut [&mut *inner]);
                ops::gelu(cx, inner);
            }
            Up::Gated(gate_up) => {
                ops::linear_gated(cx, input, GatedPart { gate_up, bias: None, gate: Gate::Gelu }, inner);
            }
        }
        self.add_projection(cx, inner, &layer.down, Residual { x: &mut *x, scratch });
        if !self.config.spec.pre_norms {
            self.normalize(cx, &layer.ffn_norm, x);
        }
    }

    /// The input of a block: with norms before it a normalized copy of `x` in `scratch`, else `x`.
    fn input<'a>(
        &self,
        cx: &OpContext,
        norm: Option<&Norm>,
        x: &'a [f32],
        scratch: &'a mut [f32],
    ) -> &'a [f32] {
        match norm.filter(|_| self.config.spec.pre_norms) {
            None => x,
            Some(norm) => {
                scratch.copy_from_slice(x);
                self.normalize(cx, norm, scratch);
                scratch
            }
        }
    }

    /// `x += projection(input)`
    fn add_projection(
        &self,
        cx: &mut OpContext,
        input: &[f32],
        projection: &Projection,
        residual: Residual<'_>,
    ) {
        let Residual { x, scratch } = residual;
        if projection.bias.is_none() {
            return ops::linear_add(cx, input, &projection.matrix, x);
        }
        ops::linear(cx, input, &[projection.part()], &mut [&mut *scratch]);
        ops::add(cx, x, scratch);
    }

    fn normalize(&self, cx: &OpContext, norm: &Norm, x: &mut [f32]) {
        let (weight, bias) = (&norm.weight, norm.bias.as_deref());
        ops::layer_norm(cx, x, LayerNorm { weight, bias, eps: self.config.eps });
    }

    /// Returns the classifier's output for each of `texts`, `[n_texts]`, from the final hidden states; None without a
    /// classifier.
    pub fn scores(
        &self,
        cx: &mut OpContext,
        hidden: &[f32],
        texts: &[Range<usize>],
        work: &mut EncoderWorkspace,
    ) -> Option<Vec<f32>> {
        let (head, d) = (self.head.as_ref()?, self.config.d_model);
        let len = texts.len() * d;
        let (pooled, dense) = (first(&mut work.attended, len), first(&mut work.scratch, len));
        for (text, pooled) in texts.iter().zip(pooled.chunks_exact_mut(d)) {
            let rows = &hidden[text.start * d..text.end * d];
            if self.config.pools_mean {
                mean_of_rows(rows, pooled);
            } else {
                pooled.copy_from_slice(&rows[..d]);
            }
        }
        ops::linear(cx, pooled, &[head.dense.part()], &mut [&mut *dense]);
        match self.config.spec.head {
            // A cap of 1 is the hyperbolic tangent.
            HeadRule::Pooler | HeadRule::Dense => ops::soft_cap(cx, dense, 1.0),
            HeadRule::Normed => ops::gelu(cx, dense),
        }
        if let Some(norm) = &head.norm {
            self.normalize(cx, norm, dense);
        }
        let mut scores = vec![0.0; texts.len()];
        ops::linear(cx, dense, &[head.out.part()], &mut [&mut scores[..]]);
        Some(scores)
    }
}

/// The mean of rows of `mean.len()` numbers, summed in their order.
fn mean_of_rows(rows: &[f32], mean: &mut [f32]) {
    let d = mean.len();
    let n = (rows.len() / d) as f64;
    for (c, mean) in mean.iter_mut().enumerate() {
        let sum: f64 = rows[c..].iter().step_by(d).map(|&x| f64::from(x)).sum();
        *mean = (sum / n) as f32;
    }
}

fn first(buffer: &mut AlignedBuf, n: usize) -> &mut [f32] {
    &mut buffer.as_mut_slice()[..n]
}

impl Norm {
    fn n_bytes(&self) -> usize {
        (self.weight.len() + self.bias.as_ref().map_or(0, Vec::len)) * size_of::<f32>()
    }
}

impl Layer {
    fn n_bytes(&self) -> usize {
        let up = match &self.up {
            Up::Plain(up) => projection_bytes(up),
            Up::Gated(gate_up) => gate_up.n_bytes(),
        };
        let projections: usize = self.qkv.iter().chain([&self.o, &self.down]).map(projection_bytes).sum();
        let norms = self.attn_norm.as_ref().map_or(0, Norm::n_bytes) + self.ffn_norm.n_bytes();
        up + projections + norms
    }
}

impl Head {
    fn n_bytes(&self) -> usize {
        let norm = self.norm.as_ref().map_or(0, Norm::n_bytes);
        projection_bytes(&self.dense) + projection_bytes(&self.out) + norm
    }
}

fn projection_bytes(projection: &Projection) -> usize {
    projection.matrix.n_bytes() + projection.bias.as_ref().map_or(0, Vec::len) * size_of::<f32>()
}
