//! Whether CUDA can be used, and with what.

use crate::convert::natural;
use crate::errors::{Fault, guarded};
use llaisys_core::Error;
use llaisys_core::context::{self, Context, ContextConfig};
use llaisys_core::error::Unsupported;
use llaisys_core::model::checkpoint::Checkpoint;
use llaisys_core::ops::cuda::nvidia::{Nvidia, NvidiaSettings};
use llaisys_core::ops::cuda::probe::{Cuda, DRIVER};
use pyo3::prelude::*;
use serde_json::json;
use std::path::{Path, PathBuf};

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

/// A GPU for a context, and how it is used.
#[pyclass(frozen, module = "llaisys._core")]
pub(crate) struct Gpu {
    folders: Vec<PathBuf>,
    driver: String,
    ordinal: usize,
    cubin_folder: Option<PathBuf>,
    memory_share: f64,
    synchronous: bool,
    overlap: bool,
}

#[pymethods]
impl Gpu {
    #[new]
    #[pyo3(signature = (
        folders, *, driver = DRIVER.to_owned(), ordinal = 0, cubin_folder = None, memory_share = 0.9,
        synchronous = false, overlap = true
    ))]
    fn new(
        py: Python<'_>,
        folders: Vec<PathBuf>,
        driver: String,
        ordinal: i64,
        cubin_folder: Option<PathBuf>,
        memory_share: f64,
        synchronous: bool,
        overlap: bool,
    ) -> PyResult<Self> {
        let ordinal = natural("ordinal", ordinal).map_err(|error| Fault::Core(error).into_py(py))? as usize;
        if !(memory_share > 0.0 && memory_share <= 1.0) {
            let text = format!("memory_share is {memory_share}, allowed is more than 0 up to 1");
            return Err(Fault::Argument(text).into_py(py));
        }
        Ok(Self { folders, driver, ordinal, cubin_folder, memory_share, synchronous, overlap })
    }
}

impl Gpu {
    /// The checkpoint at `path` on the GPU, opened on this thread. `fills`: as many cells as its memory has room for,
    /// in place of the configuration's number.
    ///
    /// Errors: CUDA cannot be used, with the reason; there is no such GPU; as [`Context::on_gpu`].
    pub(crate) fn load(&self, path: &Path, config: ContextConfig, fills: bool) -> Result<Context, Error> {
        let checkpoint = Checkpoint::open(path)?;
        let cuda = Cuda::find(&self.driver, &self.folders);
        let cuda = cuda.map_err(|why| Unsupported::Device { name: "cuda", reason: why.to_string() })?;
        let settings = NvidiaSettings {
            ordinal: self.ordinal,
            cubin_folder: self.cubin_folder.clone(),
            n_threads: config.n_threads,
            synchronous: self.synchronous,
        };
        let device = Box::new(Nvidia::open(cuda, &settings)?);
        let gpu = context::Gpu {
            device,
            memory_share: fills.then_some(self.memory_share),
            graphs: !self.synchronous,
            overlap: self.overlap && !self.synchronous,
        };
        Context::on_gpu(checkpoint, config, gpu)
    }
}
