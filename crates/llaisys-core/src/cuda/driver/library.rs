//! Loading of shared libraries, and the reasons why CUDA cannot be used.

use libloading::Library;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The CUDA version that the driver must support: 13.0 (driver 580), as the other libraries.
pub const DRIVER_VERSION_MIN: u32 = 13_000;

/// Why CUDA cannot be used: the text says what to do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the error text names each field")]
pub enum CudaUnavailable {
    /// No library of the driver.
    #[error("no NVIDIA driver: {cause}")]
    NoDriver { cause: String },
    /// A library that is not what its name says.
    #[error("{library} lacks {symbol}: it is damaged, or not what its name says")]
    MissingSymbol { library: PathBuf, symbol: &'static str },
    /// An old driver.
    #[error(
        "the driver knows CUDA {}, {} is needed (driver 580 or newer): update the driver",
        Version(*got), Version(DRIVER_VERSION_MIN)
    )]
    DriverTooOld { got: u32 },
    /// The driver or a library refused a call.
    #[error("{library} fails: {op} says {status}")]
    Call { library: PathBuf, op: &'static str, status: String },
    /// A driver with nothing to drive.
    #[error(
        "the driver finds no GPU (CUDA {}): look at `nvidia-smi`, and at CUDA_VISIBLE_DEVICES",
        Version(*driver_version)
    )]
    NoDevice { driver_version: u32 },
    /// An old GPU.
    #[error("{name} has compute capability {}.{}, 8.0 is needed", capability / 10, capability % 10)]
    DeviceTooOld { name: String, capability: u32 },
    /// A library that comes in a pip package.
    #[error(
        "there is a driver for CUDA {} with {device}, but no {library} (looked in {looked_in}): \
         `pip install 'llaisys[cuda]'` brings it (package {package}), or LLAISYS_CUDA_LIB_DIR names its folder",
        Version(*driver_version)
    )]
    LibraryMissing {
        driver_version: u32,
        device: String,
        library: &'static str,
        package: &'static str,
        looked_in: String,
    },
    /// The library that several GPUs need.
    #[error(
        "a model on several GPUs needs {library} (looked in {looked_in}): `pip install 'llaisys[cuda-tp]'` brings it \
         (package {package}), or LLAISYS_CUDA_LIB_DIR names its folder"
    )]
    ExchangesMissing { library: &'static str, package: &'static str, looked_in: String },
    /// That library, too old.
    #[error("{library} is NCCL {}.{}, {needed} or newer is needed", got / 10_000, got / 100 % 100)]
    ExchangesTooOld { library: PathBuf, got: u32, needed: &'static str },
    /// A library that is there and cannot be loaded.
    #[error("{library} cannot be loaded: {cause}")]
    LibraryBroken { library: PathBuf, cause: String },
}

/// 13000 is 13.0.
pub(super) struct Version(pub(super) u32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// The type of a C function's address. Only `unsafe` code can call it, and there each call names the header that it
/// trusts for the signature.
///
/// # Safety
/// Implementors are function pointers, for which any address but null is a value.
pub(super) unsafe trait CFunction: Copy {}

macro_rules! c_functions {
    ($($argument:ident)*) => {
        // SAFETY: a function pointer that is `unsafe` to call.
        unsafe impl<R, $($argument),*> CFunction for unsafe extern "C" fn($($argument),*) -> R {}
    };
}
c_functions!(A);
c_functions!(A B);
c_functions!(A B C);
c_functions!(A B C D);
c_functions!(A B C D E F);
c_functions!(A B C D E F G);

/// The address of the function `name` of a library.
pub(super) fn symbol<F: CFunction>(
    library: &Library,
    path: &Path,
    name: &'static str,
) -> Result<F, CudaUnavailable> {
    // SAFETY: what is found has an address, which is a value of every `CFunction`.
    let found = unsafe { library.get::<F>(name) };
    let missing = |_| CudaUnavailable::MissingSymbol { library: path.to_owned(), symbol: name };
    found.map(|found| *found).map_err(missing)
}

/// The first of `folders` that has `name`, or the bare name.
pub(super) fn locate(name: &str, folders: &[PathBuf]) -> PathBuf {
    let mut paths = folders.iter().map(|folder| folder.join(name));
    paths.find(|path| path.is_absolute() && path.is_file()).unwrap_or_else(|| PathBuf::from(name))
}

/// Where [`locate`] looks, in words.
pub(super) fn searched(folders: &[PathBuf]) -> String {
    match folders {
        [] => "the system's loader path".to_owned(),
        _ => format!("{folders:?} and the system's loader path"),
    }
}

/// Loads a library. Errors: it is not there, or the loader refuses it.
pub(super) fn open(path: &Path) -> Result<Library, CudaUnavailable> {
    // SAFETY: these are NVIDIA's libraries, or the file that the caller names for them; loading them runs no
    // more than their own initialisers.
    let library = unsafe { Library::new(path) };
    library.map_err(|e| CudaUnavailable::LibraryBroken { library: path.to_owned(), cause: e.to_string() })
}

/// Leaves a library loaded for the life of the process.
pub(super) fn keep(library: Library) {
    std::mem::forget(library);
}
