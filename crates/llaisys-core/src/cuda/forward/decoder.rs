//! A model in device memory: its weights, the activations of a pass and the KV cells. `pass.rs` computes with it.

use super::arena::{self, Arena, CellCount, DeviceLimits, MemoryBudget};
use super::load::{self, DeviceWeights};
use super::{rows, support};
use crate::arch::config::ModelConfig;
use crate::cuda::device::{Device, DevicePtr, Element, Exchange};
use crate::cuda::kernel_source::Function;
use crate::cuda::ops::attention::Attention;
use crate::cuda::ops::attn_decode::{AttnDecode, n_splits};
use crate::cuda::ops::attn_prefill::AttnPrefill;
use crate::cuda::ops::rope_kv_store::HeadShape;
use crate::cuda::ops::{add_rms_norm, embed, gate, gemv, join_columns, rope_kv_store, step};
use crate::error::{DeviceError, Result};
use crate::load::checkpoint::Checkpoint;
use crate::threads::Pool;

/// Cells that one launch copies or shifts; more cells take several launches.
pub(super) const MOVES_MAX: usize = 4096;

/// A model on a device, or a rank's part of it, with its KV cells.
#[derive(Debug)]
pub struct DeviceDecoder {
    /// The config of this rank's part.
    pub(super) config: ModelConfig,
    pub(super) element: Element,
    pub(super) weights: DeviceWeights,
    pub(super) limits: DeviceLimits,
    pub(super) memory: Memory,
    pub(super) kv: DevicePtr,
    pub(super) n_cells: usize,
    /// [`moves_bytes`]: pairs of cells to copy, or cells to shift and the angles behind them.
    pub(super) moves: DevicePtr,
}

/// The arrays of a pass, each `[n_rows, width]` except where stated.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    /// The residual stream, `d_model`.
    pub(super) x: DevicePtr,
    /// `d_model`: the normed residual stream, then the output of attention or of the feed-forward network.
    pub(super) branch: DevicePtr,
    pub(super) qkv: DevicePtr,
    pub(super) attended: DevicePtr,
    pub(super) gate_up: DevicePtr,
    pub(super) inner: DevicePtr,
    /// `[n_outputs]` i32: the rows whose outputs are wanted.
    pub(super) outputs: DevicePtr,
    /// `[n_outputs, d_model]`
    pub(super) hidden: DevicePtr,
    /// `[n_outputs, vocab_size]` f32
    pub(super) logits: DevicePtr,
    /// `[n_outputs, n_head_rows]` f32: this rank's logits, if there are several ranks.
    pub(super) own_logits: DevicePtr,
    /// `[world, n_outputs, n_head_rows]` f32
    pub(super) all_logits: DevicePtr,
    /// Cosines and sines, `[max_len, d_head / 2]` f32 each.
    pub(super) cos: DevicePtr,
    pub(super) sin: DevicePtr,
    /// Scratch of decode attention, whose contexts are split over blocks.
    pub(super) scratch: DevicePtr,
    /// [`rows::n_bytes`]: the arrays that [`rows::upload`] writes.
    pub(super) rows: DevicePtr,
}

impl DeviceDecoder {
    /// Copies a checkpoint to `device`, compiles its kernels and sizes its memory. A device that is one rank of several
    /// gets that rank's part. Then all ranks must call this, and each gets as many cells as the rank with the fewest.
    ///
    /// Errors: `Unsupported` for a model that the kernels cannot compute or that cannot be split so; the device's,
    /// among them too little memory, with the numbers.
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
        let moves = device.alloc("the lists of cells that move", moves_bytes(&config))?;
        let n_cells = match limits.cells {
            CellCount::Exactly(n) => n,
            CellCount::Share(utilization) => {
                let total = device.facts().total_bytes;
                let budget = MemoryBudget { total, free: device.free_bytes()?, utilization };
                arena::n_cells(budget, arena::cell_bytes(&config), limits.n_rows)?
            }
        };
        let n_cells = fewest(device, n_cells)?;
        // One more: padding rows write to the device's cell 0.
        let kv_bytes = (n_cells + 1) * arena::cell_bytes(&config);
        let kv = device.alloc("the KV cells", kv_bytes)?;
        device.fill(kv, 0, kv_bytes)?;
        Ok(Self { config, element, weights, limits, memory, kv, n_cells, moves })
    }

    /// Returns the model's config; on a rank of several, that of its part.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the number of KV cells.
    pub fn n_cells(&self) -> usize {
        self.n_cells
    }

    /// Returns the array that the logits are written to, `[n_logits, vocab_size]` f32.
    pub fn logits(&self) -> DevicePtr {
        self.memory.logits
    }

    /// Returns the array that [`DeviceDecoder::outputs`] writes final hidden states to, `[n, d_model]`.
    pub fn hidden(&self) -> DevicePtr {
        self.memory.hidden
    }

    /// Returns the type of weights, activations and cells.
    pub fn element(&self) -> Element {
        self.element
    }

    /// Returns the bytes of the weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.weights.n_bytes
    }

    /// Returns the bytes of one cell's keys and values in all layers.
    pub fn cell_bytes(&self) -> usize {
        arena::cell_bytes(&self.config)
    }

    pub(super) fn shape(&self) -> HeadShape {
        let ModelConfig { n_heads, n_kv_heads, d_head, .. } = self.config;
        HeadShape { n_heads, n_kv_heads, d_head }
    }

    /// Returns the keys and values of a layer, `[1 + n_cells, n_kv_heads, d_head]` each.
    pub(super) fn cells(&self, layer: usize) -> (DevicePtr, DevicePtr) {
        let n_bytes = self.array_bytes();
        (self.kv.at(2 * layer * n_bytes), self.kv.at((2 * layer + 1) * n_bytes))
    }

    /// Returns the bytes of one cell's key (or value) in one layer.
    pub(super) fn bytes_of_cell(&self) -> usize {
        self.config.n_kv_heads * self.config.d_head * 2
    }

    /// Returns the bytes of the keys (or values) of a layer.
    pub(super) fn array_bytes(&self) -> usize {
        (self.n_cells + 1) * self.bytes_of_cell()
    }

    /// Panics if one of `cells` is not a cell of this decoder, by the KV cache's numbers.
    pub(super) fn check_cells(&self, cells: &[u32]) {
        let outside = cells.iter().find(|&&cell| cell as usize >= self.n_cells);
        assert!(outside.is_none(), "cell {outside:?} of {}", self.n_cells);
    }
}

/// Returns every kernel that a forward pass and changes of cells launch.
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
        gate::function(element, config.arch.activation.gate()),
        gemv::function(element, element),
        gemv::function(element, Element::F32),
        join_columns::function(),
        rope_kv_store::shift_function(element),
        step::copy_function(),
    ]
}

/// Returns the least `n` of all ranks, each of which calls this.
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

/// Returns the attention of this model with every array NULL.
pub(super) fn attention(config: &ModelConfig, element: Element) -> Attention {
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
        score_scale: config.score_scale,
        out: none,
    }
}

/// Returns the bytes of [`DeviceDecoder::moves`]: pairs of cells, and the angles of a shift.
fn moves_bytes(config: &ModelConfig) -> usize {
    MOVES_MAX * 2 * size_of::<u32>() + config.d_head * size_of::<f32>()
}

/// Returns the most scratch bytes that decode attention needs for any number of rows up to `n_rows`.
fn scratch_bytes(config: &ModelConfig, n_rows: usize, n_sms: usize) -> usize {
    // The element's size does not matter: scratch is f32.
    let attention = attention(config, Element::Bf16);
    let bytes = |n| AttnDecode::scratch_bytes(&attention, n, n_splits(n, config.n_kv_heads, n_sms));
    (1..=n_rows).map(bytes).max().unwrap_or(0)
}

impl Memory {
    /// Places all arrays in an arena; returns them and the bytes of all.
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

    /// Uploads the rotation angles of positions `0..max_len`.
    fn write_angles(
        &self,
        device: &dyn Device,
        config: &ModelConfig,
        max_len: usize,
    ) -> Result<(), DeviceError> {
        let positions: Vec<i32> = (0..max_len as i32).collect();
        let mut angles = [vec![0.0; max_len * config.d_head / 2], vec![0.0; max_len * config.d_head / 2]];
        let [cos, sin] = &mut angles;
        config.rope.table(config.d_rope).angles(&positions, cos, sin);
        for (at, values) in [self.cos, self.sin].into_iter().zip(angles) {
            device.upload_words(at, values.into_iter().map(f32::to_bits))?;
        }
        Ok(())
    }
}
