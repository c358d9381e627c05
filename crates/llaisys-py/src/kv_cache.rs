//! `KvCache`: the KV cache of a context without a model, and `Snapshot`: the allocated cells of either.

use crate::convert::{count, natural, owned};
use crate::errors::{Fault, guarded};
use llaisys_core::Error;
use llaisys_core::kv::{CellRange, KvCache as Core, KvShape, STREAM_LIMIT, Snapshot as CoreSnapshot};
use llaisys_core::seq::{SEQ_LIMIT, SeqId};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

/// A contiguous range for Python: first position, first cell, length.
type RangeTuple = (i32, u32, u32);

/// All allocated cells.
#[pyclass(frozen, module = "llaisys._core")]
pub(crate) struct Snapshot {
    snapshot: CoreSnapshot,
}

impl From<CoreSnapshot> for Snapshot {
    fn from(snapshot: CoreSnapshot) -> Self {
        Self { snapshot }
    }
}

#[pymethods]
impl Snapshot {
    /// The acquired sequences by slot: (id, stream, ranges).
    #[getter]
    fn sequences(&self) -> Vec<(i64, u32, Vec<RangeTuple>)> {
        self.snapshot
            .sequences
            .iter()
            .map(|sequence| (sequence.id.to_raw(), sequence.stream, tuples(&sequence.ranges)))
            .collect()
    }

    /// The cache nodes by id: (id, stream, first position, ranges).
    #[getter]
    fn nodes(&self) -> Vec<(u64, u32, i32, Vec<RangeTuple>)> {
        let nodes = self.snapshot.nodes.iter();
        nodes.map(|node| (node.id, node.stream, node.ranges[0].position, tuples(&node.ranges))).collect()
    }

    /// Free cells of each stream.
    #[getter]
    fn n_free(&self) -> Vec<usize> {
        self.snapshot.n_free.clone()
    }
}

fn tuples(ranges: &[CellRange]) -> Vec<RangeTuple> {
    ranges.iter().map(|range| (range.position, range.cell, range.len)).collect()
}

/// The KV cache of a context without a model. Any thread may call it; a panic in a call makes it unusable.
#[pyclass(frozen, module = "llaisys._core")]
pub(crate) struct KvCache {
    /// None after a panic.
    core: Mutex<Option<Core>>,
}

impl KvCache {
    fn call<T>(&self, py: Python<'_>, call: impl FnOnce(&mut Core) -> Result<T, Error>) -> PyResult<T> {
        let mut guard = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        // Taken out during the call, so that no later call reads a partial change after a panic.
        let result = match guard.take() {
            None => Err(Fault::Dead("the KV cache may be inconsistent".to_owned())),
            Some(mut core) => guarded(|| {
                let result = call(&mut core);
                *guard = Some(core);
                result
            }),
        };
        result.map_err(|fault| fault.into_py(py))
    }
}

#[pymethods]
impl KvCache {
    #[new]
    #[pyo3(signature = (*, n_cells, n_seq_max, n_streams = 1, lifo = false, n_states_kept = None))]
    fn new(
        py: Python<'_>,
        n_cells: i64,
        n_seq_max: i64,
        n_streams: i64,
        lifo: bool,
        n_states_kept: Option<i64>,
    ) -> PyResult<Self> {
        let made = guarded(|| {
            let shape = KvShape {
                n_cells: count("n_cells", n_cells, i64::from(i32::MAX))?,
                n_seq_max: count("n_seq_max", n_seq_max, SEQ_LIMIT as i64)?,
                n_streams: count("n_streams", n_streams, STREAM_LIMIT as i64)?,
                lifo,
            };
            match n_states_kept {
                None => Core::new(shape),
                Some(n) => Core::with_states(shape, natural("n_states_kept", n)? as usize),
            }
        });
        let core = made.map_err(|fault| fault.into_py(py))?;
        Ok(Self { core: Mutex::new(Some(core)) })
    }

    #[getter]
    fn n_cells(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, |kv| Ok(kv.n_cells()))
    }

    #[getter]
    fn n_cells_free(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, |kv| Ok(kv.n_cells_free()))
    }

    /// Free cells of one stream.
    fn n_cells_free_in(&self, py: Python<'_>, stream: i64) -> PyResult<usize> {
        self.call(py, |kv| kv.n_cells_free_in(natural("stream", stream)?))
    }

    #[getter]
    fn n_seq_free(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, |kv| Ok(kv.n_seq_free()))
    }

    /// Acquire a sequence id.
    #[pyo3(signature = (stream = 0))]
    fn seq_acquire(&self, py: Python<'_>, stream: i64) -> PyResult<i64> {
        self.call(py, |kv| Ok(kv.seq_acquire(natural("stream", stream)?)?.to_raw()))
    }

    /// Release the id and its cells.
    fn seq_release(&self, py: Python<'_>, seq_id: i64) -> PyResult<()> {
        self.call(py, |kv| kv.seq_release(SeqId::from_raw(seq_id)))
    }

    /// Change the cache as a decode of these rows does.
    fn extend(
        &self,
        py: Python<'_>,
        positions: PyReadonlyArray1<'_, i32>,
        n_seq_id: PyReadonlyArray1<'_, i32>,
        seq_ids: PyReadonlyArray1<'_, i64>,
    ) -> PyResult<()> {
        let gather = || -> Result<_, Fault> {
            let positions = owned("positions", &positions)?;
            Ok((positions, owned("n_seq_id", &n_seq_id)?, owned("seq_ids", &seq_ids)?))
        };
        let (positions, n_seq_id, seq_ids) = gather().map_err(|fault| fault.into_py(py))?;
        self.call(py, |kv| kv.extend(&positions, &n_seq_id, &seq_ids))
    }

    /// Remove positions `p0 <= p < p1` of a sequence.
    fn kv_seq_rm(&self, py: Python<'_>, seq_id: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.call(py, |kv| kv.seq_rm(SeqId::from_raw(seq_id), p0, p1))
    }

    /// Let `dst` see positions of `src`.
    fn kv_seq_cp(&self, py: Python<'_>, src: i64, dst: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.call(py, |kv| {
            kv.seq_cp(SeqId::from_raw(src), SeqId::from_raw(dst), p0, p1).map(|_no_tensors| ())
        })
    }

    /// Remove the cells of every other sequence; all ids stay acquired.
    fn kv_seq_keep(&self, py: Python<'_>, seq_id: i64) -> PyResult<()> {
        self.call(py, |kv| kv.seq_keep(SeqId::from_raw(seq_id)))
    }

    /// Shift positions in the range by `delta`.
    fn kv_seq_add(&self, py: Python<'_>, seq_id: i64, p0: i32, p1: i32, delta: i32) -> PyResult<()> {
        self.call(py, |kv| kv.seq_add(SeqId::from_raw(seq_id), p0, p1, delta).map(|_no_tensors| ()))
    }

    /// Smallest position, -1 if the sequence is empty.
    fn kv_seq_pos_min(&self, py: Python<'_>, seq_id: i64) -> PyResult<i32> {
        self.call(py, |kv| Ok(kv.pos_min(SeqId::from_raw(seq_id))?.unwrap_or(-1)))
    }

    /// Largest position, -1 if the sequence is empty.
    fn kv_seq_pos_max(&self, py: Python<'_>, seq_id: i64) -> PyResult<i32> {
        self.call(py, |kv| Ok(kv.pos_max(SeqId::from_raw(seq_id))?.unwrap_or(-1)))
    }

    /// Cache a sequence's cells in a new node.
    fn kv_node_cache(&self, py: Python<'_>, node: u64, seq_id: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.call(py, |kv| kv.node_cache(node, SeqId::from_raw(seq_id), p0, p1))
    }

    /// Let a sequence that ends at `p0` see a node's positions.
    fn kv_node_attach(&self, py: Python<'_>, node: u64, seq_id: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.call(py, |kv| kv.node_attach(node, SeqId::from_raw(seq_id), p0, p1).map(|_no_tensors| ()))
    }

    /// Let a sequence see a node's cells in place of its own.
    fn kv_node_relink(&self, py: Python<'_>, node: u64, seq_id: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.call(py, |kv| kv.node_relink(node, SeqId::from_raw(seq_id), p0, p1))
    }

    /// Let a node have the recurrent state of a sequence.
    fn kv_node_keep_state(&self, py: Python<'_>, node: u64, seq_id: i64) -> PyResult<()> {
        self.call(py, |kv| kv.node_keep_state(node, SeqId::from_raw(seq_id)))
    }

    /// Drop the recurrent state of a node.
    fn kv_node_drop_state(&self, py: Python<'_>, node: u64) -> PyResult<()> {
        self.call(py, |kv| kv.node_drop_state(node))
    }

    /// Cache nodes that have a recurrent state.
    #[getter]
    fn n_states_kept(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, |kv| Ok(kv.n_states_kept()))
    }

    /// Move a node's positions from `at` on to the new node `tail`.
    fn kv_node_split(&self, py: Python<'_>, node: u64, at: i32, tail: u64) -> PyResult<()> {
        self.call(py, |kv| kv.node_split(node, at, tail))
    }

    /// Remove a node's positions from `at` on.
    fn kv_node_trim(&self, py: Python<'_>, node: u64, at: i32) -> PyResult<()> {
        self.call(py, |kv| kv.node_trim(node, at))
    }

    /// All allocated cells.
    fn snapshot(&self, py: Python<'_>) -> PyResult<Snapshot> {
        self.call(py, |kv| Ok(kv.snapshot().into()))
    }

    /// Check every invariant.
    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |kv| {
            kv.check();
            Ok(())
        })
    }

    /// A hash of the allocated cells, the acquired ids and the order of the free cells.
    fn digest(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |kv| Ok(kv.digest()))
    }
}
