//! Whether CUDA can be used here, and with what. Asked with plain `dlopen`, so that whatever is missing is an
//! answer and never a panic: cudarc is called only after [`Cuda::find`] has said yes.

use super::nvrtc::Nvrtc;
use libloading::Library;
use serde::Serialize;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The driver's library, found by the system's loader.
pub const DRIVER: &str = "libcuda.so.1";
/// What the driver must know: CUDA 13.0 (driver 580), of which the libraries are.
pub const DRIVER_VERSION_MIN: u32 = 13_000;
/// bf16 and asynchronous copies to shared memory begin with 8.0.
pub const CAPABILITY_MIN: u32 = 80;

const NVRTC: &str = "libnvrtc.so.13";
const CUBLAS_LT: &str = "libcublasLt.so.13";

/// A GPU as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceInfo {
    /// The product's name.
    pub name: String,
    /// Compute capability: 90 is 9.0.
    pub capability: u32,
    /// Memory, bytes.
    pub total_bytes: usize,
}

/// What CUDA computes with on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CudaInfo {
    /// Of CUDA, that the driver knows: 13000 is 13.0.
    pub driver_version: u32,
    /// In the driver's order.
    pub devices: Vec<DeviceInfo>,
    /// Of NVRTC, as the driver's.
    pub nvrtc_version: u32,
    /// The libraries' files; a bare name is one that the system's loader found.
    pub libraries: Vec<PathBuf>,
}

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

/// A usable CUDA: the proof that the driver and all libraries are loaded.
#[derive(Debug)]
pub struct Cuda {
    /// What was found.
    pub info: CudaInfo,
    pub(super) nvrtc: Nvrtc,
}

impl Cuda {
    /// Asks the driver's library `driver` ([`DRIVER`], but in tests) and loads the others from the first of
    /// `folders` that has them, else as the system's loader finds them. What is loaded stays loaded.
    ///
    /// Errors: the first thing that stands against it. Never panics, creates no context on a device.
    pub fn find(driver: &str, folders: &[PathBuf]) -> Result<Self, CudaUnavailable> {
        let (driver_version, devices) = ask_driver(driver)?;
        let missing = |library, package| CudaUnavailable::LibraryMissing {
            driver_version,
            device: devices[0].name.clone(),
            library,
            package,
            looked_in: searched(folders),
        };
        let absent = |path: &Path, error, name, package| match error {
            CudaUnavailable::LibraryBroken { .. } if !path.is_absolute() => missing(name, package),
            other => other,
        };
        let path = locate(NVRTC, folders);
        let nvrtc = Nvrtc::open(&path).map_err(|e| absent(&path, e, NVRTC, "nvidia-cuda-nvrtc"))?;
        let cublas = locate(CUBLAS_LT, folders);
        keep(open(&cublas).map_err(|e| absent(&cublas, e, CUBLAS_LT, "nvidia-cublas"))?);
        let (nvrtc_version, libraries) = (nvrtc.version(), vec![path, cublas]);
        Ok(Self { info: CudaInfo { driver_version, devices, nvrtc_version, libraries }, nvrtc })
    }
}

/// The version that the driver knows, and its devices, one at least.
fn ask_driver(name: &str) -> Result<(u32, Vec<DeviceInfo>), CudaUnavailable> {
    let path = Path::new(name);
    let library = open(path).map_err(|e| CudaUnavailable::NoDriver { cause: e.to_string() })?;
    let driver = Driver { library: &library, path };
    let asked = driver.ask();
    // A driver that has begun to work must not be unloaded: threads of its own may run.
    keep(library);
    asked
}

struct Driver<'a> {
    library: &'a Library,
    path: &'a Path,
}

type Status = c_uint;
const NO_DEVICE: Status = 100;
/// CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
const CAPABILITY: [c_int; 2] = [75, 76];

impl Driver<'_> {
    fn ask(&self) -> Result<(u32, Vec<DeviceInfo>), CudaUnavailable> {
        let mut version: c_int = 0;
        let get_version: unsafe extern "C" fn(*mut c_int) -> Status = self.symbol("cuDriverGetVersion")?;
        // SAFETY: the signature is cuda.h's; the driver writes one int.
        self.check("cuDriverGetVersion", unsafe { get_version(&mut version) })?;
        let version = version.unsigned_abs();
        if version < DRIVER_VERSION_MIN {
            return Err(CudaUnavailable::DriverTooOld { got: version });
        }
        let init: unsafe extern "C" fn(c_uint) -> Status = self.symbol("cuInit")?;
        // SAFETY: the signature is cuda.h's; flags must be 0.
        let status = unsafe { init(0) };
        let none = CudaUnavailable::NoDevice { driver_version: version };
        if status == NO_DEVICE {
            return Err(none);
        }
        self.check("cuInit", status)?;
        let mut n: c_int = 0;
        let get_count: unsafe extern "C" fn(*mut c_int) -> Status = self.symbol("cuDeviceGetCount")?;
        // SAFETY: the signature is cuda.h's; the driver writes one int.
        self.check("cuDeviceGetCount", unsafe { get_count(&mut n) })?;
        let devices = (0..n).map(|ordinal| self.device(ordinal)).collect::<Result<Vec<_>, _>>()?;
        match devices.iter().max_by_key(|device| device.capability) {
            None => Err(none),
            Some(DeviceInfo { name, capability, .. }) if *capability < CAPABILITY_MIN => {
                Err(CudaUnavailable::DeviceTooOld { name: name.clone(), capability: *capability })
            }
            Some(_) => Ok((version, devices)),
        }
    }

    fn device(&self, ordinal: c_int) -> Result<DeviceInfo, CudaUnavailable> {
        let mut device: c_int = 0;
        let get: unsafe extern "C" fn(*mut c_int, c_int) -> Status = self.symbol("cuDeviceGet")?;
        // SAFETY: the signature is cuda.h's (CUdevice is an int); the ordinal is below the count.
        self.check("cuDeviceGet", unsafe { get(&mut device, ordinal) })?;
        let mut name: [c_char; 256] = [0; 256];
        let get_name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Status =
            self.symbol("cuDeviceGetName")?;
        // SAFETY: the signature is cuda.h's; at most 255 bytes are written, so that a zero ends them.
        self.check("cuDeviceGetName", unsafe { get_name(name.as_mut_ptr(), 255, device) })?;
        let attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> Status =
            self.symbol("cuDeviceGetAttribute")?;
        let mut capability = [0; 2];
        for (value, number) in capability.iter_mut().zip(CAPABILITY) {
            // SAFETY: the signature is cuda.h's; the driver writes one int.
            self.check("cuDeviceGetAttribute", unsafe { attribute(value, number, device) })?;
        }
        let mut total_bytes = 0;
        let total: unsafe extern "C" fn(*mut usize, c_int) -> Status = self.symbol("cuDeviceTotalMem_v2")?;
        // SAFETY: the signature is cuda.h's; the driver writes one size_t.
        self.check("cuDeviceTotalMem", unsafe { total(&mut total_bytes, device) })?;
        // SAFETY: the array's last byte is 0, whatever the driver wrote before it.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let [major, minor] = capability.map(c_int::unsigned_abs);
        Ok(DeviceInfo { name, capability: major * 10 + minor, total_bytes })
    }

    fn symbol<F: CFunction>(&self, name: &'static str) -> Result<F, CudaUnavailable> {
        symbol(self.library, self.path, name)
    }

    fn check(&self, op: &'static str, status: Status) -> Result<(), CudaUnavailable> {
        if status == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        let get: Option<unsafe extern "C" fn(Status, *mut *const c_char) -> Status> =
            self.symbol("cuGetErrorName").ok();
        // SAFETY: the signature is cuda.h's; the driver writes one pointer.
        let known = get.is_some_and(|get| unsafe { get(status, &mut name) } == 0) && !name.is_null();
        let status = if known {
            // SAFETY: the driver's names are static strings that end with a zero.
            format!("{} ({status})", unsafe { CStr::from_ptr(name) }.to_string_lossy())
        } else {
            format!("error {status}")
        };
        Err(CudaUnavailable::Call { library: self.path.to_owned(), op, status })
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
