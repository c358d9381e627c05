//! `Encoder`: one encoder on the CPU, owned by the thread that created it.

use crate::convert::{compute_mode, count, owned, parse_isa};
use crate::errors::{Fault, guarded};
use crate::owned::{Core, Owned};
use crate::watchdog::Progress;
use llaisys_core::context::THREADS_MAX;
use llaisys_core::context::encoder::{EncodeRequest, EncoderContext, EncoderSettings};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;

/// The hidden states `[n, d_model]` of all rows, and the score of each text if the model has a classifier.
type Encoded = (Py<PyArray2<f32>>, Option<Py<PyArray1<f32>>>);

/// One encoder on the CPU. Created, used and closed on one thread.
#[pyclass(frozen, module = "llaisys._core")]
pub(crate) struct Encoder {
    core: Owned<EncoderContext>,
}

/// A panic in a forward pass has no side effects.
impl Core for EncoderContext {
    fn is_broken(&self) -> bool {
        false
    }
}

#[pymethods]
impl Encoder {
    #[new]
    #[pyo3(signature = (
        path, *, dtype = "auto", isa = "auto", n_batch, max_model_len, n_threads, pins = true, progress = None
    ))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        dtype: &str,
        isa: &str,
        n_batch: i64,
        max_model_len: i64,
        n_threads: i64,
        pins: bool,
        progress: Option<&Progress>,
    ) -> PyResult<Self> {
        let progress = progress.map(|progress| Arc::clone(&progress.core)).unwrap_or_default();
        let load = || -> Result<EncoderContext, Fault> {
            let settings = EncoderSettings {
                mode: compute_mode(dtype)?,
                isa: parse_isa(isa)?,
                n_batch: count("n_batch", n_batch, i64::from(i32::MAX))?,
                max_model_len: count("max_model_len", max_model_len, i64::from(i32::MAX))?,
                n_threads: count("n_threads", n_threads, THREADS_MAX as i64)?,
                pins,
            };
            py.detach(|| guarded(|| EncoderContext::load(&path, settings, progress)))
        };
        Ok(Self { core: Owned::new(load().map_err(|fault| fault.into_py(py))?) })
    }

    /// Compute whole texts, one after the other in `tokens`; the GIL is released.
    fn encode(
        &self,
        py: Python<'_>,
        tokens: PyReadonlyArray1<'_, i32>,
        types: PyReadonlyArray1<'_, i32>,
        lengths: PyReadonlyArray1<'_, i64>,
    ) -> PyResult<Encoded> {
        let arrays = owned("tokens", &tokens)
            .and_then(|tokens| Ok((tokens, owned("types", &types)?, owned("lengths", &lengths)?)));
        let (tokens, types, lengths) = arrays.map_err(|fault| fault.into_py(py))?;
        // A negative length becomes one that is too long, which the core rejects.
        let lengths: Vec<usize> =
            lengths.into_iter().map(|n| usize::try_from(n).unwrap_or(usize::MAX)).collect();
        let n = tokens.len();
        let result = self.core.detached(py, |core| {
            core.encode(&EncodeRequest { tokens: &tokens, types: &types, lengths: &lengths })
        })?;
        let n_columns = result.hidden.len() / n;
        let hidden = PyArray1::from_vec(py, result.hidden).reshape([n, n_columns])?.unbind();
        Ok((hidden, result.scores.map(|scores| PyArray1::from_vec(py, scores).unbind())))
    }

    /// Free all resources; idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.core.close(py)
    }

    /// The name of the instruction set.
    #[getter]
    fn isa(&self, py: Python<'_>) -> PyResult<String> {
        self.core.brief(py, |core| Ok(core.computes_on().to_owned()))
    }

    /// Bytes of the packed weights.
    #[getter]
    fn weight_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.core.brief(py, |core| Ok(core.weight_bytes()))
    }

    /// Progress counters, readable from any thread.
    fn progress(&self, py: Python<'_>) -> PyResult<Progress> {
        self.core.brief(py, |core| Ok(core.progress().into()))
    }
}
