//! The decoder on a [`Device`]: weights copied once, memory sized once, and a forward pass that is a list of launches
//! in the order of [`Decoder::forward`](crate::forward::decoder::Decoder::forward). Activations and the residual stream
//! are in the weights' 16-bit type and rounded where transformers rounds them, sums and norms are in f32.
//!
//! Of a model that is split ([`crate::forward::shard`]), each rank's device has its heads and inner columns, a part of the
//! head's rows, and all of the embeddings. What attention and feed-forward part give is rounded and then summed over the
//! ranks, two times in a layer; logits are put together from every rank's. All ranks do the same passes at the same time.

pub mod arena;
mod cells;
mod graphs;
pub mod load;
pub mod overlap;
mod pass;
mod replace;
pub mod rows;
mod slots;
mod state;
pub mod steps;
pub mod support;

use crate::arch::config::ModelConfig;
use crate::arch::spec::Activation;
use crate::cuda::device::{Device, DevicePtr, Element, Exchange};
use crate::cuda::kernel_source::Function;
use crate::cuda::ops::attention::Attention;
use crate::cuda::ops::attn_decode::{AttnDecode, n_splits};
use crate::cuda::ops::attn_prefill::AttnPrefill;
use crate::cuda::ops::rope_kv_store::HeadShape;
use crate::cuda::ops::{add_rms_norm, embed, gate, gemv, join_columns, rope_kv_store, step};
use crate::error::{DeviceError, Result};
use crate::forward::decoder::ForwardRows;
use crate::load::checkpoint::Checkpoint;
use crate::ops::{Gate as GateKind, Scoring};
use crate::threads::Pool;
use arena::{Arena, Room};
use load::DeviceWeights;
use pass::Pass;

/// What the memory of a decoder is sized for.
#[derive(Debug, Clone, Copy)]
pub struct DeviceLimits {
    /// Rows of a pass.
    pub n_rows: usize,
    /// Rows of a pass whose logits are wanted.
    pub n_outputs: usize,
    /// Positions of a sequence.
    pub max_len: usize,
    /// Entries of the lists of cells that the rows of a pass see.
    pub n_listed: usize,
    /// KV cells.
    pub cells: CellCount,
}

/// How many KV cells there are.
#[derive(Debug, Clone, Copy)]
pub enum CellCount {
    /// So many.
    Exactly(usize),
    /// What fits into this share of the device's memory, but at least a pass.
    Share(f64),
}

/// A model on a device, or a rank's part of it, with its KV cells.
#[derive(Debug)]
pub struct DeviceDecoder {
    /// Of this rank's part.
    config: ModelConfig,
    element: Element,
    weights: DeviceWeights,
    limits: DeviceLimits,
    memory: Memory,
    kv: DevicePtr,
    n_cells: usize,
    /// For [`cells`]: what cells move where.
    moves: DevicePtr,
}

/// Where the activations of a pass lie, each `[n_rows, width]`.
#[derive(Debug, Clone, Copy)]
struct Memory {
    /// The residual stream, `d_model`.
    x: DevicePtr,
    /// What is read of it, and what is to be added to it.
    branch: DevicePtr,
    qkv: DevicePtr,
    attended: DevicePtr,
    gate_up: DevicePtr,
    inner: DevicePtr,
    /// `[n_outputs]` i32: rows whose outputs are wanted.
    outputs: DevicePtr,
    /// `[n_outputs, d_model]`
    hidden: DevicePtr,
    /// `[n_outputs, vocab_size]` f32
    logits: DevicePtr,
    /// `[n_outputs, n_head_rows]` f32: this rank's logits, of several ranks.
    own_logits: DevicePtr,
    /// `[world, n_outputs, n_head_rows]` f32
    all_logits: DevicePtr,
    /// Cosines and sines, `[max_len, d_head / 2]` f32 each.
    cos: DevicePtr,
    sin: DevicePtr,
    /// Of rows that share their contexts' work.
    scratch: DevicePtr,
    /// The arrays of a pass.
    rows: DevicePtr,
}

impl DeviceDecoder {
    /// Copies a checkpoint to `device`, compiles its kernels and sizes its memory. Of a device with a rank of several, that
    /// rank's part; then all ranks have to call this, and each gets as many cells as the one with the fewest.
    ///
    /// Errors: what the kernels do not compute, or what cannot be split so, by name; the device's; memory that does not suffice, in numbers.
    pub fn new(
        device: &dyn Device,
        checkpoint: &Checkpoint,
        limits: DeviceLimits,
        pool: &Pool,
    ) -> Result<Self> {
        let config = load::shard_of(device).config(checkpoint.config())?;
        support::check(&config)?;
        let element = load::element_of(checkpoint);
        let functions = functions(&config, element);
        device.prepare(&functions.iter().collect::<Vec<_>>())?;
        let weights = load::load(device, checkpoint, element, pool)?;
        let n_bytes = Memory::place(device, &config, &limits, Arena::counting()).1;
        let base = device.alloc("the activations", n_bytes)?;
        let memory = Memory::place(device, &config, &limits, Arena::placing(base)).0;
        memory.write_angles(device, &config, limits.max_len)?;
        let moves = device.alloc("the lists of cells that move", cells::moves_bytes(&config))?;
        let n_cells = match limits.cells {
            CellCount::Exactly(n) => n,
            CellCount::Share(utilization) => {
                let total = device.facts().total_bytes;
                let room = Room { total, free: device.free_bytes()?, utilization };
                arena::n_cells(room, arena::cell_bytes(&config), limits.n_rows)?
            }
        };
        let n_cells = fewest(device, n_cells)?;
        // One more: the device's cell 0 takes what padding rows write.
        let kv_bytes = (n_cells + 1) * arena::cell_bytes(&config);
        let kv = device.alloc("the KV cells", kv_bytes)?;
        device.fill(kv, 0, kv_bytes)?;
        Ok(Self { config, element, weights, limits, memory, kv, n_cells, moves })
    }

    /// Facts of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// KV cells.
    pub fn n_cells(&self) -> usize {
        self.n_cells
    }

    /// Where logits are left, `[n_logits, vocab_size]` f32.
    pub fn logits(&self) -> DevicePtr {
        self.memory.logits
    }

    /// Where [`DeviceDecoder::outputs`] leaves final hidden states, `[n, d_model]`.
    pub fn hidden(&self) -> DevicePtr {
        self.memory.hidden
    }

    /// Of weights, activations and cells.
    pub fn element(&self) -> Element {
        self.element
    }

    /// Bytes of the weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.weights.n_bytes
    }

    /// Runs all layers for `rows`; `on_layer` is called when each is about to be started. The final hidden states stay
    /// for [`DeviceDecoder::outputs`] until the next pass. A row's bits depend on nothing but what it sees and the
    /// number of rows.
    ///
    /// Panics on more rows or listed cells than the limits. Errors: the device's.
    pub fn run(
        &self,
        device: &dyn Device,
        rows: &ForwardRows<'_>,
        on_layer: &dyn Fn(),
    ) -> Result<(), DeviceError> {
        let (n, most) = (rows.tokens.len(), &self.limits);
        let n_listed = rows.attention.cells.len().max(rows.windowed.map_or(0, |rows| rows.cells.len()));
        assert!(n <= most.n_rows && n_listed <= most.n_listed, "{n} rows, {n_listed} listed cells");
        let group = self.config.n_heads / self.config.n_kv_heads;
        let rows = rows::upload(device, self.memory.rows, rows, group)?;
        Pass { decoder: self, device, rows, n }.run(on_layer)
    }

    /// Gathers the final hidden states of `outputs`, rows of the last pass. Of the first `n_logits` of them it
    /// computes the logits. Both stay on the device until the next pass or call.
    ///
    /// Panics on more outputs than the limits. Errors: the device's.
    pub fn outputs(
        &self,
        device: &dyn Device,
        outputs: &[usize],
        n_logits: usize,
    ) -> Result<(), DeviceError> {
        let n = outputs.len();
        assert!(n_logits <= n && n <= self.limits.n_outputs, "{n} outputs, {n_logits} of them with logits");
        device.upload_words(self.memory.outputs, outputs.iter().map(|&row| row as u32))?;
        pass::outputs(self, device, n, n_logits)
    }

    /// A pass whose outputs are known: [`DeviceDecoder::run`], and the logits of `outputs`.
    pub fn forward(
        &self,
        device: &dyn Device,
        rows: &ForwardRows<'_>,
        outputs: &[usize],
    ) -> Result<DevicePtr, DeviceError> {
        self.run(device, rows, &|| ())?;
        self.outputs(device, outputs, outputs.len())?;
        Ok(self.logits())
    }

    /// As [`DeviceDecoder::forward`] of `n` rows that lie in device memory already, each alone in its sequence, with
    /// the logits of all: `[n, vocab_size]`. Launches alone, so it may be captured.
    fn forward_resident(
        &self,
        device: &dyn Device,
        rows: rows::DeviceRows,
        n: usize,
    ) -> Result<DevicePtr, DeviceError> {
        assert!(n <= self.limits.n_rows && n <= self.limits.n_outputs, "{n} rows of a step");
        Pass { decoder: self, device, rows, n }.run(&|| ())?;
        pass::head(self, device, self.memory.branch, n)?;
        Ok(self.memory.logits)
    }

    fn shape(&self) -> HeadShape {
        let ModelConfig { n_heads, n_kv_heads, d_head, .. } = self.config;
        HeadShape { n_heads, n_kv_heads, d_head }
    }

    /// Keys and values of a layer, `[1 + n_cells, n_kv_heads, d_head]` each.
    fn cells(&self, layer: usize) -> (DevicePtr, DevicePtr) {
        let n_bytes = self.array_bytes();
        (self.kv.at(2 * layer * n_bytes), self.kv.at((2 * layer + 1) * n_bytes))
    }
}

/// Every kernel that a model starts.
fn functions(config: &ModelConfig, element: Element) -> Vec<Function> {
    let attention = attention(config, element);
    let [decode, merge] = AttnDecode::functions(&attention);
    vec![
        embed::function(element),
        add_rms_norm::function(element),
        rope_kv_store::function(element),
        decode,
        merge,
        AttnPrefill::function(&attention),
        gate::function(element, gate_kind(config)),
        gemv::function(element, element),
        gemv::function(element, Element::F32),
        join_columns::function(),
        rope_kv_store::shift_function(element),
        step::copy_function(),
    ]
}

/// The least of what every rank calls this with.
fn fewest(device: &dyn Device, n: usize) -> Result<usize, DeviceError> {
    let world = device.world();
    if world == 1 {
        return Ok(n);
    }
    const APART: usize = 256;
    let own = device.alloc("the ranks' numbers of cells", APART + 4 * world)?;
    let all = own.at(APART);
    // A number of cells fits into 32 bits, and a gather copies bits.
    device.upload_words(own, [n as u32])?;
    device.exchange(&Exchange::AllGather { from: own, to: all, n: 1, element: Element::F32 })?;
    let mut bytes = vec![0; 4 * world];
    device.download(all, &mut bytes)?;
    let numbers = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize);
    Ok(numbers.min().unwrap_or(n))
}

/// The attention of this model, of no rows as yet.
fn attention(config: &ModelConfig, element: Element) -> Attention {
    let ModelConfig { n_heads, n_kv_heads, d_head, .. } = *config;
    let none = DevicePtr::NULL;
    Attention {
        element,
        n_heads,
        n_kv_heads,
        d_head,
        q: none,
        q_width: (n_heads + 2 * n_kv_heads) * d_head,
        k: none,
        v: none,
        cells: none,
        n_hidden: none,
        n_visible: none,
        scoring: Scoring { scale: config.score_scale, soft_cap: None },
        out: none,
    }
}

/// Bytes that decode rows of any number up to `n_rows` need to split their contexts.
fn scratch_bytes(config: &ModelConfig, n_rows: usize, n_sms: usize) -> usize {
    // The element's size does not matter: sums are in f32.
    let attention = attention(config, Element::Bf16);
    let bytes = |n| AttnDecode::scratch_bytes(&attention, n, n_splits(n, config.n_kv_heads, n_sms));
    (1..=n_rows).map(bytes).max().unwrap_or(0)
}

fn gate_kind(config: &ModelConfig) -> GateKind {
    match config.arch.activation {
        Activation::Silu => GateKind::Silu,
        Activation::GeluTanh => GateKind::GeluTanh,
    }
}

impl Memory {
    /// Where everything lies in an arena, and how many bytes that is.
    fn place(
        device: &dyn Device,
        config: &ModelConfig,
        limits: &DeviceLimits,
        mut arena: Arena,
    ) -> (Self, usize) {
        let DeviceLimits { n_rows, n_outputs, max_len, .. } = *limits;
        let (n_sms, world) = (device.facts().n_sms as usize, device.world());
        let part = if world == 1 { 0 } else { load::n_head_rows(config.vocab_size, world) };
        let q = config.n_heads * config.d_head;
        let qkv = q + 2 * config.n_kv_heads * config.d_head;
        let mut rows_of = |width: usize| arena.take(n_rows * width * 2);
        let (x, branch) = (rows_of(config.d_model), rows_of(config.d_model));
        let (qkv, attended) = (rows_of(qkv), rows_of(q));
        let (gate_up, inner) = (rows_of(2 * config.d_ff), rows_of(config.d_ff));
        let angles = max_len * config.d_head / 2 * size_of::<f32>();
        let memory = Self {
            x,
            branch,
            qkv,
            attended,
            gate_up,
            inner,
            outputs: arena.take(n_outputs * size_of::<i32>()),
            hidden: arena.take(n_outputs * config.d_model * 2),
            logits: arena.take(n_outputs * config.vocab_size * size_of::<f32>()),
            own_logits: arena.take(n_outputs * part * size_of::<f32>()),
            all_logits: arena.take(world * n_outputs * part * size_of::<f32>()),
            cos: arena.take(angles),
            sin: arena.take(angles),
            scratch: arena.take(scratch_bytes(config, n_rows, n_sms)),
            rows: arena.take(rows::n_bytes(config, limits)),
        };
        (memory, arena.n_bytes())
    }

    /// The rotation of every position.
    fn write_angles(
        &self,
        device: &dyn Device,
        config: &ModelConfig,
        max_len: usize,
    ) -> Result<(), DeviceError> {
        let positions: Vec<i32> = (0..max_len as i32).collect();
        let mut angles = [vec![0.0; max_len * config.d_head / 2], vec![0.0; max_len * config.d_head / 2]];
        let [cos, sin] = &mut angles;
        config.rope.table(config.d_head).angles(&positions, cos, sin);
        for (at, values) in [self.cos, self.sin].into_iter().zip(angles) {
            device.upload_words(at, values.into_iter().map(f32::to_bits))?;
        }
        Ok(())
    }
}
