//! `Context`: one model with its KV cells, owned by the thread that created it.

use crate::convert::{
    OwnedArrays, OwnedMasks, compute_mode, count, natural, owned, parse_isa, parse_kv_dtype,
};
use crate::cuda::Gpu;
use crate::errors::{Fault, guarded};
use crate::kv_cache::Snapshot;
use crate::output::DecodeOutput;
use crate::owned::{Core, Owned};
use crate::sampler::SamplerSpec;
use crate::watchdog::Progress;
use llaisys_core::checkpoint::Checkpoint;
use llaisys_core::context::THREADS_MAX;
use llaisys_core::context::{Context as CoreContext, ContextConfig, DecodeRequest};
use llaisys_core::kv::STREAM_LIMIT;
use llaisys_core::seq::{SEQ_LIMIT, SeqId};
use numpy::{PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;

/// One model on one device with its KV cells. Created, used and closed on one thread.
#[pyclass(frozen, module = "llaisys._core")]
pub(crate) struct Context {
    core: Owned<CoreContext>,
}

impl Core for CoreContext {
    fn is_broken(&self) -> bool {
        CoreContext::is_broken(self)
    }
}

#[pymethods]
impl Context {
    #[new]
    #[pyo3(signature = (
        path, *, dtype = "auto", kv_dtype = "auto", isa = "auto", n_cells, n_seq_max, n_streams = 1, n_batch,
        max_model_len, n_threads, n_ranks = 1, n_states_kept = 0, lifo = false, nan_fill = false, gpu = None,
        pins = true, prune_argmax = false, max_loras = 0, max_lora_rank = 16, progress = None
    ))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        dtype: &str,
        kv_dtype: &str,
        isa: &str,
        n_cells: Option<i64>,
        n_seq_max: i64,
        n_streams: i64,
        n_batch: i64,
        max_model_len: i64,
        n_threads: i64,
        n_ranks: i64,
        n_states_kept: i64,
        lifo: bool,
        nan_fill: bool,
        gpu: Option<&Gpu>,
        pins: bool,
        prune_argmax: bool,
        max_loras: i64,
        max_lora_rank: i64,
        progress: Option<&Progress>,
    ) -> PyResult<Self> {
        let progress = progress.map(|progress| Arc::clone(&progress.core)).unwrap_or_default();
        let load = || {
            let (mode, kv_dtype, isa) = (compute_mode(dtype)?, parse_kv_dtype(kv_dtype)?, parse_isa(isa)?);
            let config = ContextConfig {
                mode,
                kv_dtype,
                isa,
                n_cells: n_cells.map_or(Ok(1), |n| count("n_cells", n, i64::from(i32::MAX)))?,
                n_seq_max: count("n_seq_max", n_seq_max, SEQ_LIMIT as i64)?,
                n_streams: count("n_streams", n_streams, STREAM_LIMIT as i64)?,
                n_states_kept: natural("n_states_kept", n_states_kept)? as usize,
                lifo,
                nan_fill,
                n_batch: count("n_batch", n_batch, i64::from(i32::MAX))?,
                max_model_len: count("max_model_len", max_model_len, i64::from(i32::MAX))?,
                n_threads: count("n_threads", n_threads, THREADS_MAX as i64)?,
                n_ranks: count("n_ranks", n_ranks, THREADS_MAX as i64)?,
                pins,
                prune_argmax,
                max_loras: natural("max_loras", max_loras)? as usize,
                max_lora_rank: natural("max_lora_rank", max_lora_rank)? as usize,
            };
            match gpu {
                None if n_cells.is_none() => {
                    Err(Fault::Argument("n_cells is None, which needs a gpu to fill".to_owned()))
                }
                None => {
                    py.detach(|| guarded(|| CoreContext::new(Checkpoint::open(&path)?, config, progress)))
                }
                Some(gpu) => py.detach(|| guarded(|| gpu.load(&path, config, n_cells.is_none()))),
            }
        };
        Ok(Self { core: Owned::new(load().map_err(|fault| fault.into_py(py))?) })
    }

    /// Free all resources; idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.core.close(py)
    }

    /// The name of the instruction set or the GPU.
    #[getter]
    fn isa(&self, py: Python<'_>) -> PyResult<String> {
        self.core.brief(py, |core| Ok(core.computes_on().to_owned()))
    }

    #[getter]
    fn n_cells(&self, py: Python<'_>) -> PyResult<usize> {
        self.core.brief(py, |core| Ok(core.n_cells()))
    }

    #[getter]
    fn n_cells_free(&self, py: Python<'_>) -> PyResult<usize> {
        self.core.brief(py, |core| Ok(core.n_cells_free()))
    }

    #[getter]
    fn n_seq_free(&self, py: Python<'_>) -> PyResult<usize> {
        self.core.brief(py, |core| Ok(core.n_seq_free()))
    }

    #[getter]
    fn vocab_size(&self, py: Python<'_>) -> PyResult<usize> {
        self.core.brief(py, |core| Ok(core.config().vocab_size))
    }

    /// The window of attention if every layer has one.
    #[getter]
    fn attention_window(&self, py: Python<'_>) -> PyResult<Option<usize>> {
        self.core.brief(py, |core| Ok(core.attention_window()))
    }

    /// Bytes of the packed weights.
    #[getter]
    fn weight_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.core.brief(py, |core| Ok(core.weight_bytes()))
    }

    /// Free cells of one stream.
    fn n_cells_free_in(&self, py: Python<'_>, stream: i64) -> PyResult<usize> {
        self.core.brief(py, |core| core.n_cells_free_in(natural("stream", stream)?))
    }

    /// Acquire a sequence id.
    #[pyo3(signature = (stream = 0))]
    fn seq_acquire(&self, py: Python<'_>, stream: i64) -> PyResult<i64> {
        self.core.brief(py, |core| Ok(core.seq_acquire(natural("stream", stream)?)?.to_raw()))
    }

    /// Release the id, its cells and its sampler.
    fn seq_release(&self, py: Python<'_>, seq_id: i64) -> PyResult<()> {
        self.core.brief(py, |core| core.seq_release(SeqId::from_raw(seq_id)))
    }

    /// Load a LoRA adapter; the GIL is released.
    fn lora_load(&self, py: Python<'_>, path: PathBuf) -> PyResult<(u32, String, usize, usize)> {
        let info = self.core.detached(py, |core| core.lora_load(&path))?;
        Ok((info.slot, info.hash, info.rank, info.n_bytes))
    }

    /// Unload the adapter in a slot.
    fn lora_unload(&self, py: Python<'_>, slot: i64) -> PyResult<()> {
        self.core.brief(py, |core| core.lora_unload(natural("slot", slot)?))
    }

    /// Let a sequence without cells use the adapter in a slot.
    fn seq_set_lora(&self, py: Python<'_>, seq_id: i64, slot: i64) -> PyResult<()> {
        self.core.brief(py, |core| core.seq_set_lora(SeqId::from_raw(seq_id), Some(natural("slot", slot)?)))
    }

    /// Attach sampling to a sequence.
    fn set_sampler(
        &self,
        py: Python<'_>,
        seq_id: i64,
        spec: &SamplerSpec,
        prompt_ids: PyReadonlyArray1<'_, i32>,
        output_ids: PyReadonlyArray1<'_, i32>,
    ) -> PyResult<()> {
        let ids = owned("prompt_ids", &prompt_ids).and_then(|p| Ok((p, owned("output_ids", &output_ids)?)));
        let (prompt, output) = ids.map_err(|fault| fault.into_py(py))?;
        let spec = spec.spec.clone();
        self.core.brief(py, |core| core.set_sampler(SeqId::from_raw(seq_id), spec, &prompt, &output))
    }

    /// One forward pass for all rows; the GIL is released.
    #[pyo3(signature = (
        tokens, positions, n_seq_id, seq_ids, wants_output, *, stream = None, logits_mask = None, return_logits = false
    ))]
    fn decode(
        &self,
        py: Python<'_>,
        tokens: PyReadonlyArray1<'_, i32>,
        positions: PyReadonlyArray1<'_, i32>,
        n_seq_id: PyReadonlyArray1<'_, i32>,
        seq_ids: PyReadonlyArray1<'_, i64>,
        wants_output: PyReadonlyArray1<'_, u8>,
        stream: Option<PyReadonlyArray1<'_, u32>>,
        logits_mask: Option<(PyReadonlyArray1<'_, i32>, PyReadonlyArray2<'_, u32>)>,
        return_logits: bool,
    ) -> PyResult<DecodeOutput> {
        let gather = || -> Result<_, Fault> {
            let arrays = OwnedArrays {
                tokens: owned("tokens", &tokens)?,
                positions: owned("positions", &positions)?,
                n_seq_id: owned("n_seq_id", &n_seq_id)?,
                seq_ids: owned("seq_ids", &seq_ids)?,
                stream: stream.as_ref().map(|s| owned("stream", s)).transpose()?.unwrap_or_default(),
                wants_output: owned("wants_output", &wants_output)?,
            };
            let masks = logits_mask.as_ref().map(|(rows, bits)| OwnedMasks::new(rows, bits)).transpose()?;
            Ok((arrays, masks))
        };
        let (arrays, masks) = gather().map_err(|fault| fault.into_py(py))?;
        let result = self.core.detached(py, |core| {
            let masks = masks.as_ref().map(OwnedMasks::view);
            core.decode(&DecodeRequest { arrays: arrays.view(), masks, return_logits })
        })?;
        DecodeOutput::new(py, result)
    }

    /// Remove positions `p0 <= p < p1` of a sequence.
    fn kv_seq_rm(&self, py: Python<'_>, seq_id: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.core.brief(py, |core| core.kv_seq_rm(SeqId::from_raw(seq_id), p0, p1))
    }

    /// Let `dst` see positions of `src`.
    fn kv_seq_cp(&self, py: Python<'_>, src: i64, dst: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.core.detached(py, |core| core.kv_seq_cp(SeqId::from_raw(src), SeqId::from_raw(dst), p0, p1))
    }

    /// Remove the cells of every other sequence; all ids stay acquired.
    fn kv_seq_keep(&self, py: Python<'_>, seq_id: i64) -> PyResult<()> {
        self.core.brief(py, |core| core.kv_seq_keep(SeqId::from_raw(seq_id)))
    }

    /// Shift positions in the range by `delta` and rotate the stored keys.
    fn kv_seq_add(&self, py: Python<'_>, seq_id: i64, p0: i32, p1: i32, delta: i32) -> PyResult<()> {
        self.core.detached(py, |core| core.kv_seq_add(SeqId::from_raw(seq_id), p0, p1, delta))
    }

    /// Smallest position, -1 if the sequence is empty.
    fn kv_seq_pos_min(&self, py: Python<'_>, seq_id: i64) -> PyResult<i32> {
        self.core.brief(py, |core| Ok(core.kv_seq_pos_min(SeqId::from_raw(seq_id))?.unwrap_or(-1)))
    }

    /// Largest position, -1 if the sequence is empty.
    fn kv_seq_pos_max(&self, py: Python<'_>, seq_id: i64) -> PyResult<i32> {
        self.core.brief(py, |core| Ok(core.kv_seq_pos_max(SeqId::from_raw(seq_id))?.unwrap_or(-1)))
    }

    /// Cache a sequence's cells in a new node.
    fn kv_node_cache(&self, py: Python<'_>, node: u64, seq_id: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.core.brief(py, |core| core.kv_node_cache(node, SeqId::from_raw(seq_id), p0, p1))
    }

    /// Let a sequence that ends at `p0` see a node's positions.
    fn kv_node_attach(&self, py: Python<'_>, node: u64, seq_id: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.core.detached(py, |core| core.kv_node_attach(node, SeqId::from_raw(seq_id), p0, p1))
    }

    /// Let a sequence see a node's cells in place of its own.
    fn kv_node_relink(&self, py: Python<'_>, node: u64, seq_id: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.core.brief(py, |core| core.kv_node_relink(node, SeqId::from_raw(seq_id), p0, p1))
    }

    /// Let a node have the recurrent state of a sequence.
    fn kv_node_keep_state(&self, py: Python<'_>, node: u64, seq_id: i64) -> PyResult<()> {
        self.core.brief(py, |core| core.kv_node_keep_state(node, SeqId::from_raw(seq_id)))
    }

    /// Drop the recurrent state of a node.
    fn kv_node_drop_state(&self, py: Python<'_>, node: u64) -> PyResult<()> {
        self.core.brief(py, |core| core.kv_node_drop_state(node))
    }

    /// Cache nodes that have a recurrent state.
    #[getter]
    fn n_states_kept(&self, py: Python<'_>) -> PyResult<usize> {
        self.core.brief(py, |core| Ok(core.n_states_kept()))
    }

    /// Move a node's positions from `at` on to the new node `tail`.
    fn kv_node_split(&self, py: Python<'_>, node: u64, at: i32, tail: u64) -> PyResult<()> {
        self.core.brief(py, |core| core.kv_node_split(node, at, tail))
    }

    /// Remove a node's positions from `at` on.
    fn kv_node_trim(&self, py: Python<'_>, node: u64, at: i32) -> PyResult<()> {
        self.core.brief(py, |core| core.kv_node_trim(node, at))
    }

    /// K and V of a node's positions; the GIL is released.
    fn kv_node_export(&self, py: Python<'_>, node: u64, p0: i32, p1: i32) -> PyResult<Py<PyArray1<u8>>> {
        let data = self.core.detached(py, |core| core.kv_node_export(node, p0, p1))?;
        Ok(PyArray1::from_vec(py, data).unbind())
    }

    /// The recurrent state of a node; the GIL is released.
    fn kv_node_export_state(&self, py: Python<'_>, node: u64) -> PyResult<Py<PyArray1<u8>>> {
        let data = self.core.detached(py, |core| core.kv_node_export_state(node))?;
        Ok(PyArray1::from_vec(py, data).unbind())
    }

    /// Give a node the recurrent state from an export; the GIL is released.
    fn kv_node_import_state(
        &self,
        py: Python<'_>,
        node: u64,
        data: PyReadonlyArray1<'_, u8>,
    ) -> PyResult<()> {
        let data = owned("data", &data).map_err(|fault| fault.into_py(py))?;
        self.core.detached(py, |core| core.kv_node_import_state(node, &data))
    }

    /// Create a node with K and V from an export; the GIL is released.
    fn kv_node_import(
        &self,
        py: Python<'_>,
        node: u64,
        stream: i64,
        p0: i32,
        data: PyReadonlyArray1<'_, u8>,
    ) -> PyResult<()> {
        let data = owned("data", &data).map_err(|fault| fault.into_py(py))?;
        self.core.detached(py, |core| core.kv_node_import(node, natural("stream", stream)?, p0, &data))
    }

    /// A hash of what K and V depend on other than tokens and positions.
    fn fingerprint(&self, py: Python<'_>) -> PyResult<String> {
        self.core.brief(py, |core| Ok(core.fingerprint()))
    }

    /// Progress counters, readable from any thread.
    fn progress(&self, py: Python<'_>) -> PyResult<Progress> {
        self.core.brief(py, |core| Ok(core.progress().into()))
    }

    /// All allocated cells.
    fn snapshot(&self, py: Python<'_>) -> PyResult<Snapshot> {
        self.core.brief(py, |core| Ok(core.snapshot().into()))
    }

    /// A hash of the allocated cells, the acquired ids and the order of the free cells.
    fn digest(&self, py: Python<'_>) -> PyResult<u64> {
        self.core.brief(py, |core| Ok(core.digest()))
    }

    /// Replace one tensor, by its name in the checkpoint.
    fn replace_weight(
        &self,
        py: Python<'_>,
        name: &str,
        values: PyReadonlyArrayDyn<'_, f32>,
    ) -> PyResult<()> {
        let shape = values.shape().to_vec();
        let elements = owned("values", &values).map_err(|fault| fault.into_py(py))?;
        self.core.detached(py, |core| core.replace_weight(name, &shape, &elements))
    }

    /// Check every invariant of the KV cache.
    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        self.core.brief(py, |core| {
            core.check_integrity();
            Ok(())
        })
    }
}
