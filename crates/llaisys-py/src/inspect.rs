//! Functions without a context: properties of a checkpoint, instruction sets, CUDA kernels and the random generator.

use crate::errors::{Fault, guarded};
use llaisys_core::checkpoint::Checkpoint;
use llaisys_core::context::IsaName;
use llaisys_core::gpu;
use llaisys_core::sample::philox;
use pyo3::prelude::*;
use std::path::PathBuf;

/// The properties of a checkpoint from its headers: a JSON object with the fields of `model_info.ModelInfo`.
#[pyfunction]
pub(crate) fn inspect(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    let text = py.detach(|| {
        let info = guarded(|| Checkpoint::inspect(&path))?;
        serde_json::to_string(&info).map_err(|e| Fault::Argument(e.to_string()))
    });
    text.map_err(|fault: Fault| fault.into_py(py))
}

/// Instruction sets that this machine can run, best first, of `avx512_bf16`, `avx512_vnni`, `avx512`, `avx2_vnni`,
/// `avx2`, `scalar`.
#[pyfunction]
pub(crate) fn available_isas(py: Python<'_>) -> PyResult<Vec<&'static str>> {
    guarded(|| Ok(IsaName::available().into_iter().map(IsaName::name).collect()))
        .map_err(|fault| fault.into_py(py))
}

/// The CUDA kernels as JSON: the text of each kernel source, its constants and the bounds that its kernels declare.
#[pyfunction]
pub(crate) fn cuda_kernel_sources(py: Python<'_>) -> PyResult<String> {
    guarded(|| Ok(gpu::kernel_sources_json())).map_err(|fault| fault.into_py(py))
}

/// One Philox4x32-10 block, for known-answer tests.
#[pyfunction]
pub(crate) fn philox4x32(
    py: Python<'_>,
    counter: (u32, u32, u32, u32),
    key: (u32, u32),
) -> PyResult<(u32, u32, u32, u32)> {
    let counter = [counter.0, counter.1, counter.2, counter.3];
    let [a, b, c, d] =
        guarded(|| Ok(philox::philox4x32(counter, [key.0, key.1]))).map_err(|fault| fault.into_py(py))?;
    Ok((a, b, c, d))
}
