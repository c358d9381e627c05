//! `cuda_info`, and `Gpu`: the GPU of a context and its settings.

use crate::convert::natural;
use crate::errors::{Fault, guarded};
use llaisys_core::Error;
use llaisys_core::checkpoint::Checkpoint;
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::error::Unsupported;
use llaisys_core::gpu;
use llaisys_core::gpu::Nccl;
use llaisys_core::gpu::{Cuda, DRIVER};
use llaisys_core::gpu::{Nvidia, NvidiaSettings};
use pyo3::prelude::*;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What CUDA uses on this machine, or why it cannot be used: a JSON object with the fields of `model_info.CudaInfo`.
/// `folders` are searched for libraries before the system's loader is used; `driver` is the driver's library.
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

/// A GPU for a context, and its settings.
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
    /// Loads the checkpoint at `path` on the GPU, which is opened on this thread. Several ranks use as many GPUs from this
    /// one on. `fills`: use as many cells as fit in the GPU's memory instead of the configured number.
    ///
    /// Errors: CUDA cannot be used, with the reason; there is no such GPU; as [`Context::on_gpu`].
    pub(crate) fn load(&self, path: &Path, config: ContextConfig, fills: bool) -> Result<Context, Error> {
        let checkpoint = Checkpoint::open(path)?;
        let (n_ranks, n_threads) = (config.n_ranks, config.n_threads);
        let memory_share = fills.then_some(self.memory_share);
        let gpu = |device| gpu::Gpu {
            device: Box::new(device),
            memory_share,
            graphs: !self.synchronous,
            overlap: self.overlap && !self.synchronous,
        };
        if n_ranks < 2 {
            return Context::on_gpu(checkpoint, config, gpu(self.open(0, n_threads)?));
        }
        let n_devices = self.find()?.info.devices.len();
        if self.ordinal + n_ranks > n_devices {
            let first = self.ordinal;
            return Err(unusable(format!(
                "tensor_parallel_size is {n_ranks} from GPU {first} on, but the number of GPUs is {n_devices}"
            )));
        }
        let nccl = Nccl::find(&self.folders).map_err(|why| unusable(why.to_string()))?;
        let members: Vec<_> =
            nccl.group(n_ranks)?.into_iter().map(|member| Mutex::new(Some(member))).collect();
        Context::on_gpus(checkpoint, config, &|rank| {
            let member = members[rank].lock().unwrap_or_else(PoisonError::into_inner).take();
            let mut device = self.open(rank, (n_threads / n_ranks).max(1))?;
            device.join(member.expect("each rank is opened once"))?;
            Ok(gpu(device))
        })
    }

    fn find(&self) -> Result<Cuda, Error> {
        Cuda::find(&self.driver, &self.folders).map_err(|why| unusable(why.to_string()))
    }

    /// Opens the GPU of a rank.
    fn open(&self, rank: usize, n_threads: usize) -> Result<Nvidia, Error> {
        let settings = NvidiaSettings {
            ordinal: self.ordinal + rank,
            cubin_folder: self.cubin_folder.clone(),
            n_threads,
            synchronous: self.synchronous,
        };
        Ok(Nvidia::open(self.find()?, &settings)?)
    }
}

fn unusable(reason: String) -> Error {
    Unsupported::Device { name: "cuda", reason }.into()
}
