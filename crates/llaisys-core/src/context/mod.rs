//! `Context`: the one door. Owns weights, cells, storage, sequence ids, samplers, kernels and threads.
//!
//! Methods take `&mut self`: one thread owns a context, and there is nobody to race with. A refused call
//! changes nothing. A panic inside a change of the books leaves [`Context::is_broken`] true, and the context
//! must then never be used again; a panic in a forward pass leaves everything as it was.

mod decode;
mod layout;
mod sampling;
#[cfg(test)]
mod tests;

pub use decode::{DecodeRequest, DecodeResult};
pub use sampling::RowMasks;

use crate::batch::BatchLimits;
use crate::dtype::{ComputeMode, KvDType};
use crate::error::{Rejected, Result, Unsupported};
use crate::kv::cells::Cells;
use crate::kv::storage::Storage;
use crate::model::checkpoint::{Checkpoint, WeightNames};
use crate::model::config::ModelConfig;
use crate::model::decoder::{Decoder, Workspace};
use crate::model::weights::{Replacement, Weights};
use crate::ops::dispatch::{IsaName, Kernels};
use crate::ops::{MAX_D_HEAD, OpContext, rope_shift};
use crate::sample::{Sampler, SamplerSpec};
use crate::seq::{SEQ_LIMIT, SeqId, SeqPool};
use crate::threads::Pool;
use layout::Layout;
use sampling::SamplerBank;
use std::path::Path;

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
    /// Sequences that may exist at a time, at most [`SEQ_LIMIT`].
    pub n_seq_max: usize,
    /// Rows of one forward pass; a larger batch is split.
    pub n_batch: usize,
    /// Positions are below this; at most the model's own limit.
    pub max_model_len: usize,
    /// Compute threads, the caller's included.
    pub n_threads: usize,
}

/// One model with its KV cells.
#[derive(Debug)]
pub struct Context {
    config: ContextConfig,
    decoder: Decoder,
    names: WeightNames,
    ops: OpContext,
    work: Workspace,
    layout: Layout,
    cells: Cells,
    storage: Storage,
    seqs: SeqPool,
    samplers: SamplerBank,
    broken: bool,
}

impl Context {
    /// Opens the checkpoint at `path` (a folder or a `.gguf` file), packs its weights, drops the files.
    ///
    /// Errors: a damaged or unsupported checkpoint, a setting out of its bounds, no memory.
    pub fn load(path: &Path, config: ContextConfig) -> Result<Self> {
        Self::new(Checkpoint::open(path)?, config)
    }

    /// As [`Context::load`], from an open checkpoint.
    pub fn new(checkpoint: Checkpoint, config: ContextConfig) -> Result<Self> {
        let model = checkpoint.config().clone();
        check(&config, &model)?;
        let kernels = Kernels::select(config.isa)?;
        let pool = Pool::new(config.n_threads)?;
        let weights = Weights::pack(&checkpoint, config.mode, &pool)?;
        let names = checkpoint.into_names();
        let max_columns = Workspace::max_columns(&model);
        let ops = OpContext::new(kernels, pool, config.n_batch, max_columns)?;
        let kv_dtype = config.kv_dtype.unwrap_or(match config.mode {
            ComputeMode::Float32 => KvDType::Float32,
            ComputeMode::Auto | ComputeMode::Bfloat16 => KvDType::Bfloat16,
        });
        let mut storage =
            Storage::new(model.n_layers, config.n_cells, model.n_kv_heads, model.d_head, kv_dtype)?;
        if cfg!(debug_assertions) {
            poison(&mut storage);
        }
        Ok(Self {
            work: Workspace::new(&model, config.n_batch)?,
            layout: Layout::new(config.n_seq_max, model.window),
            cells: Cells::new(config.n_cells, config.n_seq_max, 0),
            storage,
            seqs: SeqPool::new(config.n_seq_max),
            samplers: SamplerBank::new(&config, model.vocab_size)?,
            broken: false,
            decoder: Decoder::new(model, weights),
            names,
            ops,
            config,
        })
    }

    /// Facts of the model.
    pub fn config(&self) -> &ModelConfig {
        self.decoder.config()
    }

    /// The window W if every layer has one. The next row of a sequence whose last position is p sees p + 2 - W
    /// and later: [`Context::kv_seq_rm`] of what lies before changes no later result.
    pub fn attention_window(&self) -> Option<usize> {
        let config = self.config();
        config.window.filter(|_| config.windowed.iter().all(|&windowed| windowed))
    }

    /// The chosen instruction set.
    pub fn isa(&self) -> IsaName {
        self.ops.kernels.isa()
    }

    /// KV cells in all.
    pub fn n_cells(&self) -> usize {
        self.cells.n_cells()
    }

    /// KV cells that no sequence sees.
    pub fn n_cells_free(&self) -> usize {
        self.cells.n_free()
    }

    /// Sequence ids that can be lent.
    pub fn n_seq_free(&self) -> usize {
        self.seqs.n_free()
    }

    /// Bytes of the packed weights.
    pub fn weight_bytes(&self) -> usize {
        self.decoder.weights.n_bytes()
    }

    /// True after a panic in the middle of a change: what the context holds can no longer be trusted.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Lends a sequence id with no cells and no sampler. Errors: all are lent.
    pub fn seq_acquire(&mut self) -> Result<SeqId> {
        self.change(|context| Ok(context.seqs.acquire()?))
    }

    /// Takes the id back, with its cells and its sampler. Errors: it is stale.
    pub fn seq_release(&mut self, id: SeqId) -> Result<()> {
        self.seqs.check_lent(id)?;
        self.change(|context| {
            context.cells.seq_rm(id.slot(), -1, -1)?;
            context.samplers.detach(id);
            Ok(context.seqs.release(id)?)
        })
    }

    /// Attaches sampling to a sequence; without it rows are sampled greedily. `prompt` and `output` are the
    /// tokens that penalties look at. Errors: a stale id, a parameter out of its bounds.
    pub fn set_sampler(
        &mut self,
        id: SeqId,
        spec: SamplerSpec,
        prompt: &[i32],
        output: &[i32],
    ) -> Result<()> {
        self.seqs.check_lent(id)?;
        let sampler = Sampler::new(spec, self.config().vocab_size, prompt, output).map_err(Rejected::from)?;
        self.samplers.attach(id, sampler);
        Ok(())
    }

    /// Forgets positions `p0 <= p < p1`; negative `p0`: from the start, negative `p1`: to the end.
    pub fn kv_seq_rm(&mut self, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        self.seqs.check_lent(id)?;
        self.change(|context| context.cells.seq_rm(id.slot(), p0, p1))
    }

    /// Lets `dst` see the cells of `src` in a range (as in [`Context::kv_seq_rm`]); nothing is copied.
    /// Errors: a stale id, or `dst` has positions there.
    pub fn kv_seq_cp(&mut self, src: SeqId, dst: SeqId, p0: i32, p1: i32) -> Result<()> {
        self.seqs.check_lent(src)?;
        self.seqs.check_lent(dst)?;
        self.change(|context| context.cells.seq_cp(src.slot(), dst.slot(), p0, p1))
    }

    /// Forgets the cells of every sequence but this one; their ids stay lent.
    pub fn kv_seq_keep(&mut self, id: SeqId) -> Result<()> {
        self.seqs.check_lent(id)?;
        self.change(|context| context.cells.seq_keep(id.slot()))
    }

    /// Adds `delta` to the positions in a range (as in [`Context::kv_seq_rm`]) and rotates their stored keys
    /// by it. Errors: a stale id, a cell shared with another sequence, a position taken, negative or past
    /// `max_model_len`.
    pub fn kv_seq_add(&mut self, id: SeqId, p0: i32, p1: i32, delta: i32) -> Result<()> {
        self.seqs.check_lent(id)?;
        self.check_shift(id, (p0, p1), delta)?;
        self.change(|context| {
            let moved = context.cells.seq_add(id.slot(), p0, p1, delta)?;
            for layer in 0..context.decoder.config().n_layers {
                rope_shift(
                    &context.ops,
                    context.storage.layer_mut(layer),
                    &moved,
                    delta,
                    context.decoder.rope(layer),
                );
            }
            Ok(())
        })
    }

    /// Smallest position held, None if the sequence is empty. Errors: a stale id.
    pub fn kv_seq_pos_min(&self, id: SeqId) -> Result<Option<i32>> {
        self.seqs.check_lent(id)?;
        Ok(self.cells.pos_min(id.slot()))
    }

    /// Largest position held, None if the sequence is empty. Errors: a stale id.
    pub fn kv_seq_pos_max(&self, id: SeqId) -> Result<Option<i32>> {
        self.seqs.check_lent(id)?;
        Ok(self.cells.pos_max(id.slot()))
    }

    /// Replaces one tensor, by its name in the checkpoint, with `values` of the checkpoint's shape in its row
    /// order. Cells computed with the old values stay as they are.
    ///
    /// Errors, with nothing changed: no such name, another shape, a slot held in quantised blocks.
    pub fn replace_weight(&mut self, name: &str, shape: &[usize], values: &[f32]) -> Result<()> {
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
        self.change(|context| {
            let stored_row = |n: usize| context.names.stored_row(slot, n);
            let offset = context.names.offset(slot);
            let replacement = Replacement { name, values, n_columns, stored_row: &stored_row, offset };
            context.decoder.weights.replace(slot, &replacement)
        })
    }

    /// Checks every invariant of cells and sequence ids. Panics, and marks the context as broken, if one does
    /// not hold.
    pub fn check_integrity(&mut self) {
        self.broken = true;
        self.cells.check();
        self.seqs.check();
        self.broken = false;
    }

    /// A number that changes when the cell table, the free list or the order of either changes.
    pub fn digest(&self) -> u64 {
        self.cells.digest()
    }

    /// The bounds that a batch is checked against.
    fn limits(&self) -> BatchLimits {
        BatchLimits {
            vocab_size: self.config().vocab_size,
            max_positions: self.config.max_model_len,
            n_seq_max: self.config.n_seq_max,
            n_streams: 1,
        }
    }

    /// Runs a change of the books. If it panics, the context stays marked as broken.
    fn change<T>(&mut self, change: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.broken = true;
        let result = change(self);
        self.broken = false;
        result
    }

    /// Refuses a shift that would leave the context's range; the cells know no such bound.
    fn check_shift(&self, id: SeqId, (p0, p1): (i32, i32), delta: i32) -> Result<()> {
        let (p0, p1) = (p0.max(0), if p1 < 0 { i32::MAX } else { p1 });
        let mut runs = self.cells.runs(id.slot()).iter().rev();
        let last = runs.find(|run| run.position < p1).map(|run| run.end().min(p1) - 1);
        let Some(last) = last.filter(|&last| last >= p0) else { return Ok(()) };
        let (got, max) = (i64::from(last) + i64::from(delta), self.config.max_model_len as i64 - 1);
        if got > max {
            return Err(Rejected::OutOfRange { what: "the shifted position", got, min: 0, max }.into());
        }
        Ok(())
    }
}

/// Fills every cell with NaN, so that one that is read before it is written shows in the logits.
fn poison(storage: &mut Storage) {
    for layer in 0..storage.n_layers() {
        let layer = storage.layer_mut(layer);
        // All bits set is a NaN in f32 and in bf16.
        layer.k.as_mut_slice::<u8>().fill(0xff);
        layer.v.as_mut_slice::<u8>().fill(0xff);
    }
}

/// Refuses settings out of their bounds, and a model that the kernels cannot run.
fn check(config: &ContextConfig, model: &ModelConfig) -> Result<()> {
    if model.d_head > MAX_D_HEAD {
        let (what, value) = ("the head width", model.d_head.to_string());
        return Err(Unsupported::Feature { what, value, supported: "up to 256" }.into());
    }
    let counts = [
        ("n_cells", config.n_cells, i32::MAX as usize),
        ("n_seq_max", config.n_seq_max, SEQ_LIMIT),
        ("n_batch", config.n_batch, i32::MAX as usize),
        ("max_model_len", config.max_model_len, model.max_positions),
        ("n_threads", config.n_threads, i32::MAX as usize),
    ];
    for (what, got, max) in counts {
        if got < 1 || got > max {
            return Err(Rejected::OutOfRange { what, got: got as i64, min: 1, max: max as i64 }.into());
        }
    }
    Ok(())
}
