//! The decoder on a [`Device`]: weights copied once, memory sized once, and a forward pass that is a list of launches
//! in the order of [`Decoder::forward`](crate::model::decoder::Decoder::forward). Activations and the residual stream
//! are in the weights' 16-bit type and rounded where transformers rounds them, sums and norms are in f32.

pub mod arena;
pub mod load;
pub mod rows;
pub mod support;

use crate::error::{DeviceError, Result};
use crate::model::checkpoint::Checkpoint;
use crate::model::config::ModelConfig;
use crate::model::decoder::ForwardRows;
use crate::model::family::Activation;
use crate::ops::cuda::add_rms_norm::{self, AddRmsNorm};
use crate::ops::cuda::device::{Device, DevicePtr, Element, Product};
use crate::ops::cuda::embed::{self, Embed};
use crate::ops::cuda::gate::{self, Gate, GateKind};
use crate::ops::cuda::gather::Gather;
use crate::ops::cuda::rope_kv_store::{self, HeadShape, RopeKvStore};
use crate::ops::cuda::unit::Function;
use crate::threads::Pool;
use arena::{Arena, Room};
use load::{DeviceLayer, DeviceWeights};
use rows::{DeviceRows, Seen};

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

/// A model on a device, with its KV cells.
#[derive(Debug)]
pub struct DeviceDecoder {
    config: ModelConfig,
    element: Element,
    weights: DeviceWeights,
    limits: DeviceLimits,
    memory: Memory,
    kv: DevicePtr,
    n_cells: usize,
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
    /// `[n_outputs, d_model]`
    hidden: DevicePtr,
    /// `[n_outputs, vocab_size]` f32
    logits: DevicePtr,
    /// Cosines and sines, `[max_len, d_head / 2]` f32 each.
    cos: DevicePtr,
    sin: DevicePtr,
    /// The arrays of a pass.
    rows: DevicePtr,
}

impl DeviceDecoder {
    /// Copies a checkpoint to `device`, compiles its kernels and sizes its memory.
    ///
    /// Errors: what the kernels do not compute, by name; the device's; memory that does not suffice, in numbers.
    pub fn new(
        device: &dyn Device,
        checkpoint: &Checkpoint,
        limits: DeviceLimits,
        pool: &Pool,
    ) -> Result<Self> {
        let config = checkpoint.config().clone();
        support::check(&config)?;
        let element = load::element_of(checkpoint);
        let functions = functions(&config, element);
        device.prepare(&functions.iter().collect::<Vec<_>>())?;
        let weights = load::load(device, checkpoint, element, pool)?;
        let n_bytes = Memory::place(&config, &limits, Arena::counting()).1;
        let base = device.alloc("the activations", n_bytes)?;
        let memory = Memory::place(&config, &limits, Arena::placing(base)).0;
        memory.write_angles(device, &config, limits.max_len)?;
        let n_cells = match limits.cells {
            CellCount::Exactly(n) => n,
            CellCount::Share(utilization) => {
                let total = device.facts().total_bytes;
                let room = Room { total, free: device.free_bytes()?, utilization };
                arena::n_cells(room, arena::cell_bytes(&config), limits.n_rows)?
            }
        };
        // One more: the device's cell 0 takes what padding rows write.
        let kv_bytes = (n_cells + 1) * arena::cell_bytes(&config);
        let kv = device.alloc("the KV cells", kv_bytes)?;
        device.fill(kv, 0, kv_bytes)?;
        Ok(Self { config, element, weights, limits, memory, kv, n_cells })
    }

    /// Facts of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// KV cells.
    pub fn n_cells(&self) -> usize {
        self.n_cells
    }

    /// Runs all layers for `rows` and gives the logits `[outputs.len(), vocab_size]` f32 of `outputs`, in device
    /// memory until the next pass. A row's bits depend on nothing but what it sees and the number of rows.
    ///
    /// Panics on more rows, outputs or listed cells than the limits. Errors: the device's.
    pub fn forward(
        &self,
        device: &dyn Device,
        rows: &ForwardRows<'_>,
        outputs: &[usize],
    ) -> Result<DevicePtr, DeviceError> {
        let (n, most) = (rows.tokens.len(), &self.limits);
        let n_listed = rows.attention.cells.len().max(rows.near.map_or(0, |near| near.cells.len()));
        assert!(n <= most.n_rows && outputs.len() <= most.n_outputs && n_listed <= most.n_listed);
        let at = rows::upload(device, self.memory.rows, rows, outputs)?;
        let pass = Pass { decoder: self, device, rows: at, n };
        pass.run()?;
        pass.logits(outputs.len())?;
        Ok(self.memory.logits)
    }

    fn shape(&self) -> HeadShape {
        let ModelConfig { n_heads, n_kv_heads, d_head, .. } = self.config;
        HeadShape { n_heads, n_kv_heads, d_head }
    }

    /// Keys and values of a layer, `[1 + n_cells, n_kv_heads, d_head]` each.
    fn cells(&self, layer: usize) -> (DevicePtr, DevicePtr) {
        let n_bytes = (self.n_cells + 1) * self.config.n_kv_heads * self.config.d_head * 2;
        (self.kv.at(2 * layer * n_bytes), self.kv.at((2 * layer + 1) * n_bytes))
    }
}

/// Every kernel that a pass of the model starts.
fn functions(config: &ModelConfig, element: Element) -> Vec<Function> {
    vec![
        embed::function(element),
        add_rms_norm::function(element),
        rope_kv_store::function(element),
        gate::function(element, gate_kind(config)),
    ]
}

fn gate_kind(config: &ModelConfig) -> GateKind {
    match config.family.activation {
        Activation::Silu => GateKind::Silu,
        Activation::GeluTanh => GateKind::GeluTanh,
    }
}

impl Memory {
    /// Where everything lies in an arena, and how many bytes that is.
    fn place(config: &ModelConfig, limits: &DeviceLimits, mut arena: Arena) -> (Self, usize) {
        let DeviceLimits { n_rows, n_outputs, max_len, n_listed, .. } = *limits;
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
            hidden: arena.take(n_outputs * config.d_model * 2),
            logits: arena.take(n_outputs * config.vocab_size * size_of::<f32>()),
            cos: arena.take(angles),
            sin: arena.take(angles),
            rows: arena.take(rows::n_bytes(n_rows, n_outputs, n_listed, config.window.is_some())),
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
        for (at, values) in [self.cos, self.sin].into_iter().zip(&angles) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            device.upload(at, &bytes)?;
        }
        Ok(())
    }
}

/// One pass at work.
struct Pass<'a> {
    decoder: &'a DeviceDecoder,
    device: &'a dyn Device,
    rows: DeviceRows,
    n: usize,
}

impl Pass<'_> {
    fn run(&self) -> Result<(), DeviceError> {
        let DeviceDecoder { config, element, weights, memory, .. } = self.decoder;
        Embed {
            element: *element,
            table: weights.embed,
            tokens: self.rows.tokens,
            out: memory.x,
            n_rows: self.n,
            width: config.d_model,
        }
        .launch(self.device)?;
        let mut added = DevicePtr::NULL;
        for (index, layer) in weights.layers.iter().enumerate() {
            self.add_norm(added, layer.attn_norm)?;
            self.attention(index, layer)?;
            self.add_norm(memory.branch, layer.ffn_norm)?;
            self.feed_forward(layer)?;
            added = memory.branch;
        }
        self.add_norm(added, weights.output_norm)
    }

    /// Adds a branch to the residual stream and norms that into the branch's place.
    fn add_norm(&self, x: DevicePtr, weight: DevicePtr) -> Result<(), DeviceError> {
        let DeviceDecoder { config, element, memory, .. } = self.decoder;
        let norm = AddRmsNorm {
            element: *element,
            residual: memory.x,
            x,
            weight,
            out: memory.branch,
            n_rows: self.n,
            width: config.d_model,
            eps: config.rms_eps,
            rounds_twice: true,
        };
        norm.launch(self.device)
    }

    fn attention(&self, index: usize, layer: &DeviceLayer) -> Result<(), DeviceError> {
        let DeviceDecoder { config, element, memory, .. } = self.decoder;
        let shape = self.decoder.shape();
        let (q, qkv) = (config.n_heads * config.d_head, shape.n_all() * config.d_head);
        self.product((memory.branch, config.d_model), (layer.qkv, layer.qkv_bias), (memory.qkv, qkv))?;
        let (keys, values) = self.decoder.cells(index);
        RopeKvStore {
            element: *element,
            shape,
            qkv: memory.qkv,
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            eps: config.rms_eps,
            cos: memory.cos,
            sin: memory.sin,
            positions: self.rows.positions,
            cells: self.rows.cells,
            keys,
            values,
            n_rows: self.n,
        }
        .launch(self.device)?;
        let seen = self.rows.near.filter(|_| config.windowed[index]).unwrap_or(self.rows.far);
        self.attend((keys, values), seen)?;
        self.product((memory.attended, q), (layer.o, DevicePtr::NULL), (memory.branch, config.d_model))
    }

    fn feed_forward(&self, layer: &DeviceLayer) -> Result<(), DeviceError> {
        let DeviceDecoder { config, element, memory, .. } = self.decoder;
        let (d_model, d_ff) = (config.d_model, config.d_ff);
        let none = DevicePtr::NULL;
        self.product((memory.branch, d_model), (layer.gate_up, none), (memory.gate_up, 2 * d_ff))?;
        Gate {
            element: *element,
            kind: gate_kind(config),
            gate_up: memory.gate_up,
            out: memory.inner,
            n_rows: self.n,
            width: d_ff,
        }
        .launch(self.device)?;
        self.product((memory.inner, d_ff), (layer.down, none), (memory.branch, d_model))
    }

    /// Of the rows whose final hidden states [`Pass::run`] left in the branch's place.
    fn logits(&self, n_outputs: usize) -> Result<(), DeviceError> {
        let DeviceDecoder { config, element, weights, memory, .. } = self.decoder;
        if n_outputs == 0 {
            return Ok(());
        }
        Gather {
            element: *element,
            x: memory.branch,
            rows: self.rows.outputs,
            out: memory.hidden,
            n_rows: n_outputs,
            width: config.d_model,
        }
        .launch(self.device)?;
        self.device.product(&Product {
            m: n_outputs,
            n: config.vocab_size,
            k: config.d_model,
            element: *element,
            out_element: Element::F32,
            input: memory.hidden,
            weight: weights.head,
            bias: DevicePtr::NULL,
            out: memory.logits,
        })
    }

    /// `out[n, width] = input[n, k] . weight^T + bias`.
    fn product(
        &self,
        (input, k): (DevicePtr, usize),
        (weight, bias): (DevicePtr, DevicePtr),
        (out, width): (DevicePtr, usize),
    ) -> Result<(), DeviceError> {
        let element = self.decoder.element;
        self.device.product(&Product {
            m: self.n,
            n: width,
            k,
            element,
            out_element: element,
            input,
            weight,
            bias,
            out,
        })
    }
}
