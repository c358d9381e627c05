//! `Books`: the bookkeeping of a context without a model, and `Snapshot`: what either holds.

use crate::convert::{count, natural, owned};
use crate::errors::{Fault, guarded};
use llaisys_core::Error;
use llaisys_core::books::{Books as Core, Snapshot as CoreSnapshot};
use llaisys_core::kv::{KvShape, Run};
use llaisys_core::seq::SeqId;
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Consecutive positions in consecutive cells as Python sees them: first position, first cell, how many.
type RunTuple = (i32, u32, u32);

/// What the books hold.
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
    /// The lent sequences by slot: (id, stream, runs).
    #[getter]
    fn sequences(&self) -> Vec<(i64, u32, Vec<RunTuple>)> {
        self.snapshot
            .sequences
            .iter()
            .map(|held| (held.id.to_raw(), held.stream, tuples(&held.runs)))
            .collect()
    }

    /// The segments by id: (id, stream, first position, runs).
    #[getter]
    fn segments(&self) -> Vec<(u64, u32, i32, Vec<RunTuple>)> {
        let segments = self.snapshot.segments.iter();
        segments.map(|held| (held.id, held.stream, held.runs[0].position, tuples(&held.runs))).collect()
    }

    /// Free cells of each stream.
    #[getter]
    fn n_free(&self) -> Vec<usize> {
        self.snapshot.n_free.clone()
    }
}

fn tuples(runs: &[Run]) -> Vec<RunTuple> {
    runs.iter().map(|run| (run.position, run.cell, run.len)).collect()
}

/// The books of a context with no model behind them. Any thread may call; a panic in a change breaks them.
#[pyclass(frozen, module = "llaisys._core")]
pub(crate) struct Books {
    /// None after a panic.
    core: Mutex<Option<Core>>,
}

impl Books {
    fn call<T>(&self, py: Python<'_>, call: impl FnOnce(&mut Core) -> Result<T, Error>) -> PyResult<T> {
        let mut held = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        // Taken out for the call: a panic leaves nothing half-changed to be read.
        let result = match held.take() {
            None => Err(Fault::Dead("the books' invariants may not hold".to_owned())),
            Some(mut core) => guarded(|| {
                let result = call(&mut core);
                *held = Some(core);
                result
            }),
        };
        result.map_err(|fault| fault.into_py(py))
    }
}

#[pymethods]
impl Books {
    #[new]
    #[pyo3(signature = (*, n_cells, n_seq_max, n_streams = 1, lifo = false))]
    fn new(py: Python<'_>, n_cells: i64, n_seq_max: i64, n_streams: i64, lifo: bool) -> PyResult<Self> {
        let made = guarded(|| {
            Core::new(KvShape {
                n_cells: count("n_cells", n_cells, i64::from(i32::MAX))?,
                n_seq_max: count("n_seq_max", n_seq_max, 256)?,
                n_streams: count("n_streams", n_streams, 256)?,
                lifo,
            })
        });
        let core = made.map_err(|fault| fault.into_py(py))?;
        Ok(Self { core: Mutex::new(Some(core)) })
    }

    #[getter]
    fn n_cells(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, |books| Ok(books.cells().n_cells()))
    }

    #[getter]
    fn n_cells_free(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, |books| Ok(books.cells().n_free()))
    }

    /// Free cells of one stream.
    fn n_cells_free_in(&self, py: Python<'_>, stream: i64) -> PyResult<usize> {
        self.call(py, |books| books.cells().n_free_in(natural("stream", stream)?))
    }

    #[getter]
    fn n_seq_free(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, |books| Ok(books.n_seq_free()))
    }

    /// Lends a sequence id.
    #[pyo3(signature = (stream = 0))]
    fn seq_acquire(&self, py: Python<'_>, stream: i64) -> PyResult<i64> {
        self.call(py, |books| Ok(books.seq_acquire(natural("stream", stream)?)?.to_raw()))
    }

    /// Returns the id and its cells.
    fn seq_release(&self, py: Python<'_>, seq_id: i64) -> PyResult<()> {
        self.call(py, |books| books.seq_release(SeqId::from_raw(seq_id)))
    }

    /// What a decode of these rows does to the books.
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
        self.call(py, |books| books.extend(&positions, &n_seq_id, &seq_ids))
    }

    /// Forgets positions `p0 <= p < p1` of a sequence.
    fn kv_seq_rm(&self, py: Python<'_>, seq_id: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.call(py, |books| books.seq_rm(SeqId::from_raw(seq_id), p0, p1))
    }

    /// Lets `dst` see positions of `src`.
    fn kv_seq_cp(&self, py: Python<'_>, src: i64, dst: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.call(py, |books| {
            books.seq_cp(SeqId::from_raw(src), SeqId::from_raw(dst), p0, p1).map(|_no_tensors| ())
        })
    }

    /// Forgets every sequence but this one (their ids stay lent).
    fn kv_seq_keep(&self, py: Python<'_>, seq_id: i64) -> PyResult<()> {
        self.call(py, |books| books.seq_keep(SeqId::from_raw(seq_id)))
    }

    /// Shifts positions in the range by `delta`.
    fn kv_seq_add(&self, py: Python<'_>, seq_id: i64, p0: i32, p1: i32, delta: i32) -> PyResult<()> {
        self.call(py, |books| books.seq_add(SeqId::from_raw(seq_id), p0, p1, delta).map(|_no_tensors| ()))
    }

    /// Smallest position held, -1 if none.
    fn kv_seq_pos_min(&self, py: Python<'_>, seq_id: i64) -> PyResult<i32> {
        self.call(py, |books| Ok(books.pos_min(SeqId::from_raw(seq_id))?.unwrap_or(-1)))
    }

    /// Largest position held, -1 if none.
    fn kv_seq_pos_max(&self, py: Python<'_>, seq_id: i64) -> PyResult<i32> {
        self.call(py, |books| Ok(books.pos_max(SeqId::from_raw(seq_id))?.unwrap_or(-1)))
    }

    /// Holds a sequence's cells as a new segment.
    fn kv_retain(&self, py: Python<'_>, segment: u64, seq_id: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.call(py, |books| books.retain(segment, SeqId::from_raw(seq_id), p0, p1))
    }

    /// Lets a sequence that ends at `p0` see a segment's positions.
    fn kv_attach(&self, py: Python<'_>, segment: u64, seq_id: i64, p0: i32, p1: i32) -> PyResult<()> {
        self.call(py, |books| books.attach(segment, SeqId::from_raw(seq_id), p0, p1).map(|_no_tensors| ()))
    }

    /// Gives a segment's positions from `at` to the new segment `tail`.
    fn kv_segment_split(&self, py: Python<'_>, segment: u64, at: i32, tail: u64) -> PyResult<()> {
        self.call(py, |books| books.segment_split(segment, at, tail))
    }

    /// Forgets a segment's positions from `at`.
    fn kv_segment_trim(&self, py: Python<'_>, segment: u64, at: i32) -> PyResult<()> {
        self.call(py, |books| books.segment_trim(segment, at))
    }

    /// Everything that is held.
    fn snapshot(&self, py: Python<'_>) -> PyResult<Snapshot> {
        self.call(py, |books| Ok(books.snapshot().into()))
    }

    /// Checks every invariant.
    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |books| {
            books.check();
            Ok(())
        })
    }

    /// Changes when anything that is held, or the order of the free cells, changes.
    fn digest(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |books| Ok(books.digest()))
    }
}
