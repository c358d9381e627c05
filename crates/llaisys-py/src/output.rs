//! `DecodeOutput`: the result of one decode, as NumPy arrays.

use llaisys_core::context::DecodeResult;
use llaisys_core::sample::RowFault;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

/// The logprobs of one row for Python: output row, logprob of the sampled id, its rank, the best ids.
type RowLogprobs = (usize, f32, u32, Vec<(u32, f32)>);

/// The result of a decode. Output rows are the batch rows with output flags, in batch order.
#[pyclass(frozen, module = "llaisys._core")]
pub(crate) struct DecodeOutput {
    rows: Py<PyArray1<i32>>,
    token_ids: Py<PyArray1<i32>>,
    faults: Vec<(usize, &'static str)>,
    logits: Option<Py<PyArray2<f32>>>,
    hidden: Option<Py<PyArray2<f32>>>,
    logprobs: Vec<RowLogprobs>,
    graph_refusal: Option<String>,
}

impl DecodeOutput {
    /// Passes the core's vectors to NumPy without a copy.
    pub(crate) fn new(py: Python<'_>, result: DecodeResult) -> PyResult<Self> {
        let n_out = result.rows.len();
        let matrix = |values: Vec<f32>| -> PyResult<Py<PyArray2<f32>>> {
            let n_columns = values.len().checked_div(n_out).unwrap_or(0);
            Ok(PyArray1::from_vec(py, values).reshape([n_out, n_columns])?.unbind())
        };
        Ok(Self {
            rows: PyArray1::from_vec(py, result.rows).unbind(),
            token_ids: PyArray1::from_vec(py, result.token_ids).unbind(),
            faults: result.faults.into_iter().map(|(row, fault)| (row, fault_name(fault))).collect(),
            logits: result.logits.map(matrix).transpose()?,
            hidden: result.hidden.map(matrix).transpose()?,
            logprobs: result
                .logprobs
                .into_iter()
                .map(|(out_row, l)| (out_row, l.logprob, l.rank, l.top))
                .collect(),
            graph_refusal: result.graph_refusal,
        })
    }
}

#[pymethods]
impl DecodeOutput {
    /// `[n_out]`: the batch row of each output row.
    #[getter]
    fn rows(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.rows.clone_ref(py)
    }

    /// `[n_out]`: the sampled id; -1 where the row requested no logits or is faulty.
    #[getter]
    fn token_ids(&self, py: Python<'_>) -> Py<PyArray1<i32>> {
        self.token_ids.clone_ref(py)
    }

    /// Faulty output rows: (batch row, `"non_finite"` or `"all_masked"`).
    #[getter]
    fn faults(&self) -> Vec<(usize, &'static str)> {
        self.faults.clone()
    }

    /// `[n_out, vocab_size]` if requested.
    #[getter]
    fn logits(&self, py: Python<'_>) -> Option<Py<PyArray2<f32>>> {
        self.logits.as_ref().map(|array| array.clone_ref(py))
    }

    /// `[n_out, d_model]` final hidden states if any row requested them.
    #[getter]
    fn hidden(&self, py: Python<'_>) -> Option<Py<PyArray2<f32>>> {
        self.hidden.as_ref().map(|array| array.clone_ref(py))
    }

    /// For rows whose sampler requests them: (output row, logprob, rank, best ids with logprobs).
    #[getter]
    fn logprobs(&self) -> Vec<RowLogprobs> {
        self.logprobs.clone()
    }

    /// Why decode steps on a GPU run without a CUDA graph, if one could not be captured. Reported once.
    #[getter]
    fn graph_refusal(&self) -> Option<&str> {
        self.graph_refusal.as_deref()
    }
}

fn fault_name(fault: RowFault) -> &'static str {
    match fault {
        RowFault::NonFinite => "non_finite",
        RowFault::AllMasked => "all_masked",
    }
}
