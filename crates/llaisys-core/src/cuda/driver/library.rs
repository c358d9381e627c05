//! Loads shared libraries, and names the reasons why CUDA cannot be used.

use libloading::Library;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The CUDA version that the driver must support: 13.0 (driver 580), that of the other libraries.
pub const DRIVER_VERSION_MIN: u32 = 13_000;

/// The reason why CUDA cannot be used. The text says what to do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the error text names each field")]
pub enum CudaUnavailable {
    /// The driver's library does not exist.
    #[error("no NVIDIA driver: {cause}")]
    NoDriver { cause: String },
    /// A library without an expected function.
    #[error("{library} lacks {symbol}: it is damaged, or another library; install it again")]
    MissingSymbol { library: PathBuf, symbol: &'static str },
    /// The driver is too old.
    #[error(
        "the driver supports CUDA {}, {} is needed (driver 580 or newer): update the driver",
        Version(*got), Version(DRIVER_VERSION_MIN)
    )]
    DriverTooOld { got: u32 },
    /// A call of the driver or of a library failed.
    #[error("{library} fails: {op} returned {status}")]
    Call { library: PathBuf, op: &'static str, status: String },
    /// The driver finds no GPU.
    #[error(
        "the driver finds no GPU (CUDA {}): check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
        Version(*driver_version)
    )]
    NoDevice { driver_version: u32 },
    /// The GPU is too old.
    #[error("{name} has compute capability {}.{}, 8.0 is needed", capability / 10, capability % 10)]
    DeviceTooOld { name: String, capability: u32 },
    /// A library of a pip package is missing.
    #[error(
        "there is a driver for CUDA {} with {device}, but no {library} (searched {looked_in}): \
         `pip install 'llaisys[cuda]'` installs it (package {package}), or LLAISYS_CUDA_LIB_DIR names its folder",
        Version(*driver_version)
    )]
    LibraryMissing {
        driver_version: u32,
        device: String,
        library: &'static str,
        package: &'static str,
        looked_in: String,
    },
    /// The library that several GPUs need is missing.
    #[error(
        "a model on several GPUs needs {library} (searched {looked_in}): `pip install 'llaisys[cuda-tp]'` installs \
         it (package {package}), or LLAISYS_CUDA_LIB_DIR names its folder"
    )]
    ExchangesMissing { library: &'static str, package: &'static str, looked_in: String },
    /// That library is too old.
    #[error("{library} is NCCL {}.{}, {needed} or newer is needed", got / 10_000, got / 100 % 100)]
    ExchangesTooOld { library: PathBuf, got: u32, needed: &'static str },
    /// A library exists and cannot be loaded.
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

/// The type of a C function's address. Only `unsafe` code can call it, and each call names the header that has the
/// signature.
///
/// # Safety
/// Implementers are function pointers, for which any address except null is a value.
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

/// Returns the function `name` of a library. Errors: the library does not have it.
pub(super) fn symbol<F: CFunction>(
    library: &Library,
    path: &Path,
    name: &'static str,
) -> Result<F, CudaUnavailable> {
    // SAFETY: a symbol that is found has an address, which is a value of every `CFunction`.
    let found = unsafe { library.get::<F>(name) };
    let missing = |_| CudaUnavailable::MissingSymbol { library: path.to_owned(), symbol: name };
    found.map(|found| *found).map_err(missing)
}

/// Returns the path of `name` in the first of `folders` that has it, or the bare name.
pub(super) fn locate(name: &str, folders: &[PathBuf]) -> PathBuf {
    let mut paths = folders.iter().map(|folder| folder.join(name));
    paths.find(|path| path.is_absolute() && path.is_file()).unwrap_or_else(|| PathBuf::from(name))
}

/// Returns a text that names where [`locate`] and the loader search.
pub(super) fn searched(folders: &[PathBuf]) -> String {
    match folders {
        [] => "the system's loader path".to_owned(),
        _ => format!("{folders:?} and the system's loader path"),
    }
}

/// Loads a library. Errors: it does not exist, or the loader refuses it.
pub(super) fn open(path: &Path) -> Result<Library, CudaUnavailable> {
    // SAFETY: these are NVIDIA's libraries, or the files that the user names for them; loading them runs only their own
    // initializers.
    let library = unsafe { Library::new(path) };
    library.map_err(|e| CudaUnavailable::LibraryBroken { library: path.to_owned(), cause: e.to_string() })
}

/// Leaves a library loaded until the process ends.
pub(super) fn keep(library: Library) {
    std::mem::forget(library);
}
