//! Finds out whether CUDA can be used on this machine. It loads the libraries with plain `dlopen`, so that a missing
//! library is an error and never a panic. cudarc is called only after [`Cuda::find`] has succeeded.

use super::library::{CFunction, CudaUnavailable, DRIVER_VERSION_MIN, keep, locate, open, searched, symbol};
use super::nvrtc::Nvrtc;
use libloading::Library;
use serde::Serialize;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::path::{Path, PathBuf};

/// The driver's library, which the system's loader finds.
pub const DRIVER: &str = "libcuda.so.1";
/// The least compute capability: 8.0 is the first with bf16 and asynchronous copies to shared memory.
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

/// The driver, devices and libraries of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CudaInfo {
    /// The CUDA version that the driver supports: 13000 is 13.0.
    pub driver_version: u32,
    /// The GPUs, in the driver's order.
    pub devices: Vec<DeviceInfo>,
    /// The version of NVRTC, in the same format.
    pub nvrtc_version: u32,
    /// The paths of the libraries. The system's loader found those with a bare name.
    pub libraries: Vec<PathBuf>,
}

/// A usable CUDA. A value exists only while the driver and all libraries are loaded.
#[derive(Debug)]
pub struct Cuda {
    /// The driver, devices and libraries.
    pub info: CudaInfo,
    pub(super) nvrtc: Nvrtc,
}

impl Cuda {
    /// Queries the driver's library `driver` ([`DRIVER`] except in tests). Loads each other library from the first of
    /// `folders` that has it, otherwise from the system's loader path. Libraries stay loaded. It creates no context on
    /// a device.
    ///
    /// Errors: the first reason why CUDA cannot be used. Never panics.
    pub fn find(driver: &str, folders: &[PathBuf]) -> Result<Self, CudaUnavailable> {
        let (driver_version, devices) = query_driver(driver)?;
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

/// Returns the CUDA version that the driver supports, and its devices, at least one.
fn query_driver(name: &str) -> Result<(u32, Vec<DeviceInfo>), CudaUnavailable> {
    let path = Path::new(name);
    let library = open(path).map_err(|e| CudaUnavailable::NoDriver { cause: e.to_string() })?;
    let driver = Driver { library: &library, path };
    let found = driver.query();
    // An initialized driver must not be unloaded, because its own threads may run.
    keep(library);
    found
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
    fn query(&self) -> Result<(u32, Vec<DeviceInfo>), CudaUnavailable> {
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
        // SAFETY: the signature is cuda.h's; the driver writes at most 255 bytes, so the last byte stays 0.
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
        // SAFETY: the array's last byte is 0.
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
