//! `Context`: the API of the core. It owns the weights, the KV cache and its tensors, samplers, kernels and threads.
//!
//! Methods take `&mut self`: one thread owns a context, so there are no races. Rejected calls have no side effects.
//! A panic inside a change of the KV cache leaves [`Context::is_broken`] true, and the context must not be used again;
//! a panic in a forward pass has no side effects.

pub(crate) mod backend;
mod cpu_backend;
mod decode;
pub mod encoder;
pub(crate) mod fingerprint;
mod kv;
mod layout;
mod lora;
pub(crate) mod sampling;
mod state_rows;
#[cfg(test)]
mod tests;

pub use crate::ops::dispatch::IsaName;
pub use crate::threads::THREADS_MAX;
pub use decode::{DecodeRequest, DecodeResult};
pub use lora::{LORA_RANK_MAX, LORA_SLOTS_MAX, LoraInfo};
pub use sampling::RowMasks;

use crate::arch::config::ModelConfig;
use crate::batch::BatchLimits;
use crate::dtype::{ComputeMode, KvDType};
use crate::error::{Rejected, Result, Unsupported};
use crate::faults::fault_point;
use crate::forward::shard::Shard;
use crate::forward::weights::Replacement;
use crate::kv::{KvCache, KvShape};
use crate::load::checkpoint::{Checkpoint, WeightNames};
use crate::ops::MAX_D_HEAD;
use crate::ops::dispatch::Kernels;
use crate::progress::Progress;
use crate::threads::Pool;
use backend::Backend;
use cpu_backend::CpuBackend;
use fingerprint::{Fingerprint, kv_dtype_name};
use kv::Change;
use layout::Layout;
use lora::LoraBank;
use sampling::SamplerBank;
use state_rows::StateRows;
use std::path::Path;
use std::sync::Arc;

/// Settings of a context. Every number is at least 1.
#[derive(Debug, Clone, Copy)]
pub struct ContextConfig {
    /// Number formats of weights and products.
    pub mode: ComputeMode,
    /// Type of K and V. None: f32 in mode float32, else bf16.
    pub kv_dtype: Option<KvDType>,
    /// Instruction set. None: the best of the machine.
    pub isa: Option<IsaName>,
    /// KV cells; a cell has one token of one or more sequences.
    pub n_cells: usize,
    /// Sequences that may exist at a time, at most [`crate::seq::SEQ_LIMIT`].
    pub n_seq_max: usize,
    /// KV streams of equal size; divides `n_cells`.
    pub n_streams: usize,
    /// Cache nodes that may have a recurrent state at a time; without effect in a model without recurrent layers.
    pub n_states_kept: usize,
    /// Reuse what was freed last (for tests).
    pub lifo: bool,
    /// Fill every cell that is free or reserved with NaN (for tests): a read of a cell before its first write then
    /// shows in the logits. Always on in builds with debug assertions.
    pub nan_fill: bool,
    /// Rows of one forward pass; a larger batch is split.
    pub n_batch: usize,
    /// Positions are below this; at most the model's own limit. A LongRoPE model rotates all positions by its long
    /// factors if this is more than its original context, and by its short ones otherwise.
    pub max_model_len: usize,
    /// Compute threads of all ranks, including the caller's.
    pub n_threads: usize,
    /// Ranks that the model is split over, each with its part of weights and cells and at least one thread.
    pub n_ranks: usize,
    /// With exactly as many CPUs as threads, pin each thread to a CPU; each rank has a contiguous range of CPUs.
    pub pins: bool,
    /// Keep an 8-bit copy of a 16- or 32-bit head, with which most greedy tokens are found without reading the whole
    /// head (one rank, on the CPU).
    pub prune_argmax: bool,
    /// LoRA adapters that may be loaded at a time; 0 for none (one rank, on the CPU).
    pub max_loras: usize,
    /// Adapters of ranks up to this are accepted.
    pub max_lora_rank: usize,
}

impl Default for ContextConfig {
    /// A small context on the CPU: 4096 cells, up to 8 sequences, one thread per CPU. Settings that have a default in
    /// the Python binding have the same one here.
    fn default() -> Self {
        Self {
            mode: ComputeMode::Auto,
            kv_dtype: None,
            isa: None,
            n_cells: 4096,
            n_seq_max: 8,
            n_streams: 1,
            n_states_kept: 0,
            lifo: false,
            nan_fill: false,
            n_batch: 512,
            max_model_len: 2048,
            n_threads: std::thread::available_parallelism().map_or(1, |n| n.get().min(THREADS_MAX)),
            n_ranks: 1,
            pins: true,
            prune_argmax: false,
            max_loras: 0,
            max_lora_rank: 16,
        }
    }
}

impl ContextConfig {
    fn kv_shape(&self) -> KvShape {
        let ContextConfig { n_cells, n_seq_max, n_streams, lifo, .. } = *self;
        KvShape { n_cells, n_seq_max, n_streams, lifo }
    }
}

/// One model with its KV cells.
#[derive(Debug)]
pub struct Context {
    config: ContextConfig,
    model: ModelConfig,
    names: WeightNames,
    backend: Box<dyn Backend>,
    layout: Layout,
    /// Of a model with recurrent layers.
    state_rows: Option<StateRows>,
    kv: KvCache,
    samplers: SamplerBank,
    loras: LoraBank,
    fingerprint: Fingerprint,
    progress: Arc<Progress>,
    broken: bool,
}

impl Context {
    /// Opens the checkpoint at `path` (a folder or a `.gguf` file), packs its weights, and closes its files.
    ///
    /// Errors: a damaged or unsupported checkpoint, or one that is truncated while it is loaded; a setting out of its
    /// bounds, no memory.
    pub fn load(path: &Path, config: ContextConfig) -> Result<Self> {
        Self::new(Checkpoint::open(path)?, config, Arc::default())
    }

    /// As [`Context::load`], from an open checkpoint. Any thread may read the progress of loading from `progress`.
    pub fn new(mut checkpoint: Checkpoint, config: ContextConfig, progress: Arc<Progress>) -> Result<Self> {
        check(&config, checkpoint.config())?;
        checkpoint.choose_rope(config.max_model_len);
        let kernels = Kernels::select(config.isa)?;
        let pool = Pool::shared(config.n_threads, config.pins)?;
        checkpoint.check_quantizable(config.mode)?;
        let decoders = cpu_backend::pack(&checkpoint, &config, &pool, &progress)?;
        let kv_dtype = config.kv_dtype.unwrap_or(match config.mode {
            ComputeMode::Float32 => KvDType::Float32,
            _ => KvDType::Bfloat16,
        });
        let backend_format = format!("cpu {} {}", kernels.isa().name(), kv_dtype_name(kv_dtype));
        let fingerprint = Fingerprint::new(&checkpoint, &config, &backend_format)?;
        let backend = Box::new(CpuBackend::new(decoders, &config, kernels, kv_dtype, pool)?);
        Ok(Self { progress, ..Self::assemble(checkpoint, config, backend, fingerprint)? })
    }

    /// Adds KV cache and samplers to a backend that has the checkpoint's weights and the configuration's cells.
    pub(crate) fn assemble(
        checkpoint: Checkpoint,
        mut config: ContextConfig,
        mut backend: Box<dyn Backend>,
        fingerprint: Fingerprint,
    ) -> Result<Self> {
        let model = checkpoint.config().clone();
        let shape = config.kv_shape();
        let is_recurrent = model.recurrent_layer.is_some();
        let mut kv = if is_recurrent {
            KvCache::with_states(shape, config.n_states_kept)?
        } else {
            KvCache::new(shape)?
        };
        config.nan_fill |= cfg!(debug_assertions);
        if config.nan_fill {
            backend.nan_fill_all()?;
            kv.take_freed_cells();
            kv.take_freed_states();
        }
        Ok(Self {
            layout: Layout::new(config.n_seq_max, model.window),
            state_rows: is_recurrent.then(|| StateRows::new(config.n_seq_max)),
            kv,
            samplers: SamplerBank::new(&config, model.vocab_size, Kernels::select(config.isa)?)?,
            loras: LoraBank::new(config.max_loras, model.n_layers, config.n_seq_max),
            fingerprint,
            progress: Arc::default(),
            broken: false,
            names: checkpoint.into_names(),
            model,
            backend,
            config,
        })
    }

    /// Configuration of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.model
    }

    /// The size W of the attention window if every layer has one. The next row of a sequence whose last position is p
    /// sees positions from p + 2 - W on, so removing earlier ones ([`Context::kv_seq_rm`]) does not change later
    /// results.
    pub fn attention_window(&self) -> Option<usize> {
        let config = self.config();
        config.window.filter(|_| config.windowed.iter().all(|&windowed| windowed))
    }

    /// The name of the instruction set or the GPU that computes.
    pub fn computes_on(&self) -> &str {
        self.backend.name()
    }

    /// A hash of what keys and values depend on other than tokens: configuration, all weights (replaced ones included),
    /// number formats, instruction set or GPU architecture, type and layout of a cell. It has 32 hexadecimal digits and
    /// is the same in every process. Contexts with the same fingerprint may exchange exported cells.
    pub fn fingerprint(&self) -> String {
        self.fingerprint.to_string()
    }

    /// Bytes of the packed weights.
    pub fn weight_bytes(&self) -> usize {
        self.backend.weight_bytes()
    }

    /// Progress counters; any thread may read them, also during a decode.
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// True after a panic or a device failure in the middle of a change: the state of the context is then unreliable.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Replaces one tensor, by its name in the checkpoint, with `values` of the checkpoint's shape in its row
    /// order. Cells computed with the old values stay as they are.
    ///
    /// Errors: an unknown name, another shape, a tensor in quantized blocks, a model that is split over ranks or has
    /// recurrent layers.
    pub fn replace_weight(&mut self, name: &str, shape: &[usize], values: &[f32]) -> Result<()> {
        fault_point!("weights.replace");
        let Some(id) = self.names.weight_id(name) else {
            return Err(Rejected::NoSuchWeight { name: name.to_owned() }.into());
        };
        let want = self.names.shape(id);
        let n_values: usize = shape.iter().product();
        if shape != want || values.len() != n_values {
            let (name, want, got) = (name.to_owned(), want.to_vec(), shape.to_vec());
            return Err(Rejected::WeightShape { name, want, got }.into());
        }
        let of_model = match self.model.recurrent_layer {
            Some(_) => Some("weights of a model with recurrent layers"),
            None if self.model.arch.attn_sinks => Some("weights of a model with attention sinks"),
            None if self.model.gemma4.is_some() => Some("weights of a model with heads of two widths"),
            None => None,
        };
        if let Some(stored) = of_model {
            let name = name.to_owned();
            return Err(Unsupported::ReplaceWeight { name, stored, given: "new values" }.into());
        }
        if self.config.n_ranks > 1 {
            let (name, stored) = (name.to_owned(), "parts on several ranks");
            return Err(Unsupported::ReplaceWeight { name, stored, given: "a whole tensor" }.into());
        }
        let n_columns = if want.len() < 2 { 1 } else { want[want.len() - 1] };
        self.change(Change::All, |context| {
            let stored_row = |n: usize| context.names.stored_row(id, n);
            let offset = context.names.offset(id);
            let replacement = Replacement { name, values, n_columns, stored_row: &stored_row, offset };
            context.backend.replace_weight(id, &replacement)?;
            context.fingerprint = context.fingerprint.with_replaced(name, values);
            Ok(())
        })
    }

    /// The bounds that a batch is checked against.
    fn limits(&self) -> BatchLimits {
        BatchLimits {
            vocab_size: self.config().vocab_size,
            max_positions: self.config.max_model_len,
            n_seq_max: self.config.n_seq_max,
            n_streams: self.config.n_streams,
        }
    }
}

/// Rejects settings out of their bounds, and a model that the kernels cannot run.
pub(crate) fn check(config: &ContextConfig, model: &ModelConfig) -> Result<()> {
    if model.d_head_max() > MAX_D_HEAD {
        let (what, value) = ("the head width", model.d_head_max().to_string());
        return Err(Unsupported::Feature { what, value, supported: "up to 512" }.into());
    }
    let counts = [
        ("n_batch", config.n_batch, i32::MAX as usize),
        ("max_model_len", config.max_model_len, model.max_positions),
        ("n_threads", config.n_threads, THREADS_MAX),
        ("n_ranks", config.n_ranks, THREADS_MAX),
    ];
    for (what, got, max) in counts {
        if got < 1 || got > max {
            return Err(Rejected::OutOfRange { what, got: got as i64, min: 1, max: max as i64 }.into());
        }
    }
    if config.max_loras > 0 {
        check_lora(config)?;
    }
    Shard { rank: 0, world: config.n_ranks }.config(model)?;
    Ok(())
}

fn check_lora(config: &ContextConfig) -> Result<()> {
    let counts = [
        ("max_loras", config.max_loras, LORA_SLOTS_MAX),
        ("max_lora_rank", config.max_lora_rank, LORA_RANK_MAX),
    ];
    for (what, got, max) in counts {
        if got < 1 || got > max {
            return Err(Rejected::OutOfRange { what, got: got as i64, min: 1, max: max as i64 }.into());
        }
    }
    if config.n_ranks > 1 {
        let value = format!("with tensor_parallel_size {}", config.n_ranks);
        return Err(Unsupported::feature("enable_lora", value, "tensor_parallel_size 1").into());
    }
    Ok(())
}
