//! `Context`: the one door. Owns weights, cells, storage, sequence ids, samplers, kernels and threads.
//!
//! Methods take `&mut self`: one thread owns a context, and there is nobody to race with. A refused call
//! changes nothing. A panic inside a change of the books leaves [`Context::is_broken`] true, and the context
//! must then never be used again; a panic in a forward pass leaves everything as it was.

mod backend;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cuda_ranks;
#[cfg(feature = "cuda")]
mod cuda_steps;
mod decode;
mod fingerprint;
mod kv;
mod layout;
mod ranks;
mod sampling;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
pub use cuda::Gpu;
pub use decode::{DecodeRequest, DecodeResult};
pub use sampling::RowMasks;

use crate::batch::BatchLimits;
use crate::books::Books;
use crate::dtype::{ComputeMode, KvDType};
use crate::error::{Rejected, Result, Unsupported};
use crate::faults::fault_point;
use crate::kv::KvShape;
use crate::model::checkpoint::{Checkpoint, WeightNames};
use crate::model::config::ModelConfig;
use crate::model::held::check_source;
use crate::model::shard::Shard;
use crate::model::weights::Replacement;
use crate::ops::MAX_D_HEAD;
use crate::ops::dispatch::{IsaName, Kernels};
use crate::progress::Progress;
use crate::threads::{Pool, THREADS_MAX};
use backend::Backend;
use fingerprint::Fingerprint;
use kv::Change;
use layout::Layout;
use ranks::Ranks;
use sampling::SamplerBank;
use std::path::Path;
use std::sync::Arc;

/// Settings of a context. Every number is at least 1.
#[derive(Debug, Clone, Copy)]
pub struct ContextConfig {
    /// How weights are held and multiplied.
    pub mode: ComputeMode,
    /// Type of K and V; None: f32 in mode float32, else bf16.
    pub kv_dtype: Option<KvDType>,
    /// Instruction set; None: the best that the machine has.
    pub isa: Option<IsaName>,
    /// KV cells, one token of one or more sequences each.
    pub n_cells: usize,
    /// Sequences that may exist at a time, at most [`crate::seq::SEQ_LIMIT`].
    pub n_seq_max: usize,
    /// Arenas of equal size; divides `n_cells`.
    pub n_streams: usize,
    /// Hand out what was freed last (for tests).
    pub lifo: bool,
    /// Fill every cell that is free or reserved with NaN (for tests): one that is read before it is written shows
    /// in the logits. Always on in builds with debug assertions.
    pub poison: bool,
    /// Rows of one forward pass; a larger batch is split.
    pub n_batch: usize,
    /// Positions are below this; at most the model's own limit.
    pub max_model_len: usize,
    /// Compute threads of all ranks together, the caller's included.
    pub n_threads: usize,
    /// Ranks that the model is split over, each with its part of weights and cells and at least one thread of its own.
    pub n_ranks: usize,
    /// Threads stay each on a CPU of its own where there are exactly as many CPUs: of ranks, on equal runs of them.
    pub pins: bool,
    /// Keeps an 8-bit copy of a head in 16 or 32 bits, by which greedy tokens are found without reading all of it. Of a
    /// model on one rank of the CPU.
    pub screens_head: bool,
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
    backend: Backend,
    layout: Layout,
    books: Books,
    samplers: SamplerBank,
    fingerprint: Fingerprint,
    progress: Arc<Progress>,
    broken: bool,
}

impl Context {
    /// Opens the checkpoint at `path` (a folder or a `.gguf` file), packs its weights, drops the files.
    ///
    /// Errors: a damaged or unsupported checkpoint, or one that is truncated meanwhile; a setting out of its bounds, no
    /// memory.
    pub fn load(path: &Path, config: ContextConfig) -> Result<Self> {
        Self::new(Checkpoint::open(path)?, config, Arc::default())
    }

    /// As [`Context::load`], from an open checkpoint. Any thread may read from `progress` how far it has come.
    pub fn new(checkpoint: Checkpoint, config: ContextConfig, progress: Arc<Progress>) -> Result<Self> {
        check(&config, checkpoint.config())?;
        let kernels = Kernels::select(config.isa)?;
        let pool = Pool::shared(config.n_threads, config.pins)?;
        check_source(&checkpoint, config.mode)?;
        let decoders = ranks::pack(&checkpoint, &config, &pool, &progress)?;
        let kv_dtype = config.kv_dtype.unwrap_or(match config.mode {
            ComputeMode::Float32 => KvDType::Float32,
            _ => KvDType::Bfloat16,
        });
        let how = format!("{:?}", (kv_dtype, kernels.isa()));
        let fingerprint = Fingerprint::new(&checkpoint, &config, &how)?;
        let ranks = Ranks::new(decoders, &config, (kernels, kv_dtype), pool)?;
        Ok(Self { progress, ..Self::assemble(checkpoint, config, (Backend::Cpu(ranks), fingerprint))? })
    }

    /// Books and samplers for a backend that has the checkpoint's weights and the configuration's cells.
    fn assemble(
        checkpoint: Checkpoint,
        mut config: ContextConfig,
        (mut backend, fingerprint): (Backend, Fingerprint),
    ) -> Result<Self> {
        let model = checkpoint.config().clone();
        let mut books = Books::new(config.kv_shape())?;
        config.poison |= cfg!(debug_assertions);
        if config.poison {
            backend.poison_all()?;
            books.take_freed();
        }
        Ok(Self {
            layout: Layout::new(config.n_seq_max, model.window),
            books,
            samplers: SamplerBank::new(&config, model.vocab_size)?,
            fingerprint,
            progress: Arc::default(),
            broken: false,
            names: checkpoint.into_names(),
            model,
            backend,
            config,
        })
    }

    /// Facts of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.model
    }

    /// The window W if every layer has one. The next row of a sequence whose last position is p sees p + 2 - W
    /// and later: [`Context::kv_seq_rm`] of what lies before changes no later result.
    pub fn attention_window(&self) -> Option<usize> {
        let config = self.config();
        config.window.filter(|_| config.windowed.iter().all(|&windowed| windowed))
    }

    /// What computes, in words: the instruction set, or the GPU's name.
    pub fn computes_on(&self) -> &str {
        self.backend.name()
    }

    /// What keys and values depend on besides tokens: configuration, all weights (replaced ones included), how they
    /// are computed with, instruction set or GPU architecture, type and layout of a cell. 32 hexadecimal digits, the same in every
    /// process: cells may go from one context to another of the same fingerprint.
    pub fn fingerprint(&self) -> String {
        self.fingerprint.to_string()
    }

    /// Bytes of the packed weights.
    pub fn weight_bytes(&self) -> usize {
        self.backend.weight_bytes()
    }

    /// What has been done so far; any thread may read it, also while a decode runs.
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// True after a panic, or a failure of the device, in the middle of a change: what the context holds can no longer be trusted.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Replaces one tensor, by its name in the checkpoint, with `values` of the checkpoint's shape in its row
    /// order. Cells computed with the old values stay as they are.
    ///
    /// Errors, with nothing changed: no such name, another shape, a slot held in quantised blocks, a model that is split.
    pub fn replace_weight(&mut self, name: &str, shape: &[usize], values: &[f32]) -> Result<()> {
        fault_point!("weights.replace");
        let Some(slot) = self.names.slot_named(name) else {
            return Err(Rejected::NoSuchWeight { name: name.to_owned() }.into());
        };
        let want = self.names.shape(slot);
        let n_values: usize = shape.iter().product();
        if shape != want || values.len() != n_values {
            let (name, want, got) = (name.to_owned(), want.to_vec(), shape.to_vec());
            return Err(Rejected::WeightShape { name, want, got }.into());
        }
        let n_columns = if want.len() < 2 { 1 } else { want[want.len() - 1] };
        self.change(Change::All, |context| {
            let stored_row = |n: usize| context.names.stored_row(slot, n);
            let offset = context.names.offset(slot);
            let replacement = Replacement { name, values, n_columns, stored_row: &stored_row, offset };
            context.backend.replace(slot, &replacement)?;
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

/// Refuses settings out of their bounds, and a model that the kernels cannot run.
fn check(config: &ContextConfig, model: &ModelConfig) -> Result<()> {
    if model.d_head > MAX_D_HEAD {
        let (what, value) = ("the head width", model.d_head.to_string());
        return Err(Unsupported::Feature { what, value, supported: "up to 256" }.into());
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
    Shard { rank: 0, world: config.n_ranks }.config(model)?;
    Ok(())
}
