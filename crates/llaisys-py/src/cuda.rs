//! Whether CUDA can be used.

use crate::errors::{Fault, guarded};
use llaisys_core::ops::cuda::probe::{Cuda, DRIVER};
use pyo3::prelude::*;
use serde_json::json;
use std::path::PathBuf;

/// What CUDA computes with on this machine, or why it cannot: a JSON object with the fields of `types.CudaInfo`.
/// `folders`: where libraries are looked for before the system's loader is asked; `driver`: the driver's library.
#[pyfunction]
#[pyo3(signature = (folders, driver = DRIVER.to_owned()))]
pub(crate) fn cuda_info(py: Python<'_>, folders: Vec<PathBuf>, driver: String) -> PyResult<String> {
    let text = py.detach(|| {
        let info = guarded(|| Ok(Cuda::find(&driver, &folders)))?;
        let info = match info {
            Ok(Cuda { info, .. }) => {
                let text = |version: u32| format!("{}.{}", version / 1000, version % 1000 / 10);
                json!({
                    "reason": null,
                    "driver_version": text(info.driver_version),
                    "nvrtc_version": text(info.nvrtc_version),
                    "devices": info.devices,
                    "libraries": info.libraries,
                })
            }
            Err(unavailable) => json!({ "reason": unavailable.to_string() }),
        };
        Ok(info.to_string())
    });
    text.map_err(|fault: Fault| fault.into_py(py))
}
