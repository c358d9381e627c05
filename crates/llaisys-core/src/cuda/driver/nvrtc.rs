//! NVIDIA's run-time compiler (NVRTC): compiles kernel source to machine code for one architecture.
//!
//! The few functions that are needed (`nvrtc.h`) are loaded here, so that a missing function is an error and not a
//! panic.

use super::library::{CudaUnavailable, Version, keep, open, symbol};
use crate::error::DeviceError;
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

/// Lines of the compiler's log in an error.
const LOG_LINES: usize = 20;
/// A library in NVRTC's folder, which NVRTC opens by its bare name. Its name ends with the minor version.
const BUILTINS: &str = "libnvrtc-builtins.so.";

type Status = c_int;
type Program = *mut c_void;
type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> Status;
type BytesOf = unsafe extern "C" fn(Program, *mut c_char) -> Status;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Status;

/// The compiler, loaded.
#[derive(Debug)]
pub struct Nvrtc {
    version: u32,
    /// Supported architectures as in `sm_90`, ascending.
    archs: Vec<u32>,
    create: Create,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    cubin_size: SizeOf,
    cubin: BytesOf,
    log_size: SizeOf,
    log: BytesOf,
    error: unsafe extern "C" fn(Status) -> *const c_char,
    /// Keeps the functions loaded.
    _library: Library,
}

/// A source to compile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Its name in errors and in the compiler's log.
    pub name: String,
    /// The whole text.
    pub text: String,
    /// Compiler options such as `-DNAME=VALUE`.
    pub options: Vec<String>,
}

/// Machine code, and the compiler's log with registers and spills (`--ptxas-options=-v`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// An ELF image.
    pub cubin: Vec<u8>,
    /// The compiler's log.
    pub log: String,
}

impl Nvrtc {
    /// Loads the library at `path`. Before it loads the library that NVRTC opens by a bare name, because the loader
    /// finds loaded libraries by their names.
    ///
    /// Errors: the library cannot be loaded, a function is missing, or a call fails.
    pub fn open(path: &Path) -> Result<Self, CudaUnavailable> {
        if let Some(builtins) = path.parent().and_then(builtins_in) {
            keep(open(&builtins)?);
        }
        let library = open(path)?;
        let fails = |op| {
            move |status| {
                let (library, status) = (path.to_owned(), format!("error {status}"));
                CudaUnavailable::Call { library, op, status }
            }
        };
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status =
            symbol(&library, path, "nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the signature is nvrtc.h's; it writes two ints.
        ok(unsafe { version(&mut major, &mut minor) }).map_err(fails("nvrtcVersion"))?;
        let n_archs: unsafe extern "C" fn(*mut c_int) -> Status =
            symbol(&library, path, "nvrtcGetNumSupportedArchs")?;
        let get_archs: unsafe extern "C" fn(*mut c_int) -> Status =
            symbol(&library, path, "nvrtcGetSupportedArchs")?;
        let mut n = 0;
        // SAFETY: the signature is nvrtc.h's; it writes one int.
        ok(unsafe { n_archs(&mut n) }).map_err(fails("nvrtcGetNumSupportedArchs"))?;
        let mut archs = vec![0; n.unsigned_abs() as usize];
        // SAFETY: the signature is nvrtc.h's; the array has as many ints as the library returned.
        ok(unsafe { get_archs(archs.as_mut_ptr()) }).map_err(fails("nvrtcGetSupportedArchs"))?;
        Ok(Self {
            version: major.unsigned_abs() * 1000 + minor.unsigned_abs() * 10,
            archs: archs.into_iter().map(c_int::unsigned_abs).collect(),
            create: symbol(&library, path, "nvrtcCreateProgram")?,
            destroy: symbol(&library, path, "nvrtcDestroyProgram")?,
            compile: symbol(&library, path, "nvrtcCompileProgram")?,
            cubin_size: symbol(&library, path, "nvrtcGetCUBINSize")?,
            cubin: symbol(&library, path, "nvrtcGetCUBIN")?,
            log_size: symbol(&library, path, "nvrtcGetProgramLogSize")?,
            log: symbol(&library, path, "nvrtcGetProgramLog")?,
            error: symbol(&library, path, "nvrtcGetErrorString")?,
            _library: library,
        })
    }

    /// Returns the version: 13000 is 13.0.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Returns the architecture to compile for: the device's, otherwise the highest supported one of the same major
    /// version, whose code the device runs. `None`: the compiler is older than the device's generation.
    pub fn arch(&self, capability: u32) -> Option<u32> {
        let runs = |&&arch: &&u32| arch <= capability && arch / 10 == capability / 10;
        self.archs.iter().filter(runs).max().copied()
    }

    /// Compiles for `sm_<arch>`. Several threads may call it (NVRTC allows that since 11.0).
    ///
    /// Errors: the compiler's, with the first lines of its log.
    pub fn compile(&self, source: &Source, arch: u32) -> Result<Compiled, DeviceError> {
        let fail = |why: String| DeviceError::Cuda {
            op: format!("compile {} for sm_{arch} with NVRTC {}", source.name, Version(self.version)),
            status: why,
        };
        let c_string = |text: &str| CString::new(text).map_err(|e| fail(e.to_string()));
        let (name, text) = (c_string(&source.name)?, c_string(&source.text)?);
        let mut options = vec![
            "--std=c++17".to_owned(),
            "-default-device".to_owned(),
            format!("--gpu-architecture=sm_{arch}"),
            "--ptxas-options=-v".to_owned(),
        ];
        options.extend_from_slice(&source.options);
        let options = options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = OwnedProgram { raw: ptr::null_mut(), nvrtc: self };
        // SAFETY: both strings end with a zero and live until the end of this function; there are no headers.
        let status = unsafe {
            (self.create)(&mut program.raw, text.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null())
        };
        ok(status).map_err(|status| fail(self.describe(status)))?;
        // SAFETY: the program was created; the number of options is right, and they live until the end of this
        // function.
        let status = unsafe { (self.compile)(program.raw, pointers.len() as c_int, pointers.as_ptr()) };
        let log = program.bytes(self.log_size, self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        let first = || log.lines().take(LOG_LINES).collect::<Vec<_>>().join("\n");
        ok(status).map_err(|status| fail(format!("{}\n{}", self.describe(status), first())))?;
        let cubin = program.bytes(self.cubin_size, self.cubin);
        Ok(Compiled { cubin: cubin.map_err(|status| fail(self.describe(status)))?, log })
    }

    fn describe(&self, status: Status) -> String {
        // SAFETY: the library's texts are static strings that end with a zero, for unknown numbers too.
        let text = unsafe { CStr::from_ptr((self.error)(status)) };
        format!("{} ({status})", text.to_string_lossy())
    }
}

/// A program that is destroyed on drop.
struct OwnedProgram<'a> {
    raw: Program,
    nvrtc: &'a Nvrtc,
}

impl OwnedProgram<'_> {
    fn bytes(&self, size: SizeOf, get: BytesOf) -> Result<Vec<u8>, Status> {
        let mut n = 0;
        // SAFETY: the program lives; the library writes one size_t.
        ok(unsafe { size(self.raw, &mut n) })?;
        let mut bytes = vec![0_u8; n];
        // SAFETY: the array has as many bytes as the library returned.
        ok(unsafe { get(self.raw, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: this library created the program, and nothing else uses it.
            unsafe { (self.nvrtc.destroy)(&mut self.raw) };
        }
    }
}

/// Returns the builtins library in `folder`; of several versions the last by name.
fn builtins_in(folder: &Path) -> Option<PathBuf> {
    let entries = folder.read_dir().ok()?.filter_map(Result::ok).map(|entry| entry.path());
    let is_ours = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(BUILTINS))
    };
    entries.filter(is_ours).max()
}

fn ok(status: Status) -> Result<(), Status> {
    if status == 0 { Ok(()) } else { Err(status) }
}
