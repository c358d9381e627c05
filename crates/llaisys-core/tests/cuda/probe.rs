//! The probe's results on a machine without a driver, and with fake drivers: each is a shared object of a few lines of
//! C.

use crate::c_library::build;
use crate::model_files::TempFolder;
use llaisys_core::cuda::driver::library::{CudaUnavailable, DRIVER_VERSION_MIN};
use llaisys_core::cuda::driver::probe::Cuda;
use std::path::PathBuf;

/// A driver with `N_DEVICES` GPUs of compute capability 9.0. Macros change its behavior.
const DRIVER: &str = r#"
#include <stddef.h>
#include <string.h>
#ifndef VERSION
#define VERSION 13000
#endif
#ifndef N_DEVICES
#define N_DEVICES 1
#endif
#ifndef INIT
#define INIT 0
#endif
#ifndef MAJOR
#define MAJOR 9
#endif
int cuDriverGetVersion(int *v) { *v = VERSION; return 0; }
#ifndef WITHOUT_INIT
int cuInit(unsigned flags) { return flags ? 1 : INIT; }
#endif
int cuDeviceGetCount(int *n) { *n = N_DEVICES; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < N_DEVICES ? 0 : 101; }
int cuDeviceGetName(char *name, int n, int device) { strncpy(name, "Test GPU", n); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? MAJOR : 0;
  return 0;
}
int cuDeviceTotalMem_v2(size_t *n, int device) { *n = 80ull << 30; return 0; }
#ifndef WITHOUT_NAMES
int cuGetErrorName(int status, const char **name) {
  *name = status == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : NULL;
  return *name ? 0 : 1;
}
#endif
"#;

/// An NVRTC that can be loaded and queried.
const NVRTC: &str = r"
int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
int nvrtcGetNumSupportedArchs(int *n) { *n = 4; return 0; }
int nvrtcGetSupportedArchs(int *archs) { archs[0] = 80; archs[1] = 86; archs[2] = 90; archs[3] = 100; return 0; }
int nvrtcCreateProgram(void) { return 1; }
int nvrtcDestroyProgram(void) { return 1; }
int nvrtcCompileProgram(void) { return 1; }
int nvrtcGetCUBINSize(void) { return 1; }
int nvrtcGetCUBIN(void) { return 1; }
int nvrtcGetProgramLogSize(void) { return 1; }
int nvrtcGetProgramLog(void) { return 1; }
const char *nvrtcGetErrorString(int status) { return 0; }
";

/// Returns the error for a driver with `defines` if the loader finds no other library.
fn with_driver(defines: &[&str]) -> CudaUnavailable {
    let folder = TempFolder::new();
    let driver = build(folder.path(), "libcuda-test.so.1", DRIVER, defines);
    Cuda::find(driver.to_str().unwrap(), &[folder.path().to_owned()]).unwrap_err()
}

#[test]
fn a_missing_driver_is_an_error() {
    let error = Cuda::find("libcuda-missing.so.1", &[]).unwrap_err();
    assert!(matches!(error, CudaUnavailable::NoDriver { .. }), "{error:?}");
    assert!(error.to_string().contains("libcuda-missing.so.1"), "{error}");
}

#[test]
fn a_file_that_is_not_a_library_is_an_error() {
    let folder = TempFolder::new();
    let path = folder.path().join("libcuda.so.1");
    std::fs::write(&path, b"not an object").unwrap();
    let error = Cuda::find(path.to_str().unwrap(), &[]).unwrap_err();
    assert!(matches!(error, CudaUnavailable::NoDriver { .. }), "{error:?}");
}

#[test]
fn an_old_driver_is_refused_with_both_versions() {
    let error = with_driver(&["VERSION=12080"]);
    assert_eq!(error, CudaUnavailable::DriverTooOld { got: 12_080 });
    assert_eq!(DRIVER_VERSION_MIN, 13_000);
    assert!(error.to_string().contains("12.8") && error.to_string().contains("13.0"), "{error}");
}

#[test]
fn a_driver_without_a_gpu_is_an_error() {
    let none = CudaUnavailable::NoDevice { driver_version: 13_010 };
    assert_eq!(with_driver(&["VERSION=13010", "N_DEVICES=0"]), none);
    assert_eq!(with_driver(&["VERSION=13010", "INIT=100"]), none, "cuInit may report it as well");
}

#[test]
fn a_failed_driver_call_is_reported_with_its_status() {
    let error = with_driver(&["INIT=803"]);
    assert!(error.to_string().contains("cuInit returned CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"), "{error}");
    let error = with_driver(&["INIT=12345"]);
    assert!(error.to_string().contains("cuInit returned error 12345"), "{error}");
    let error = with_driver(&["INIT=803", "WITHOUT_NAMES"]);
    assert!(error.to_string().contains("cuInit returned error 803"), "{error}");
}

#[test]
fn a_missing_function_is_named() {
    let error = with_driver(&["WITHOUT_INIT"]);
    assert!(matches!(error, CudaUnavailable::MissingSymbol { symbol: "cuInit", .. }), "{error:?}");
}

#[test]
fn an_old_gpu_is_refused_with_its_name_and_capability() {
    let error = with_driver(&["MAJOR=7"]);
    let text = error.to_string();
    assert!(text.contains("Test GPU") && text.contains("7.0") && text.contains("8.0"), "{text}");
}

#[test]
fn a_missing_library_is_reported_with_its_package_and_the_searched_folders() {
    let folder = TempFolder::new();
    let driver = build(folder.path(), "libcuda-test.so.1", DRIVER, &[]);
    build(folder.path(), "libnvrtc.so.13", NVRTC, &[]);
    // No machine that runs this test has a cublasLt in its loader's path.
    let error = Cuda::find(driver.to_str().unwrap(), &[folder.path().to_owned()]).unwrap_err();
    let text = error.to_string();
    for part in ["libcublasLt.so.13", "nvidia-cublas", "llaisys[cuda]", "Test GPU"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    assert!(text.contains(folder.path().to_str().unwrap()), "{text}");
    assert!(matches!(error, CudaUnavailable::LibraryMissing { .. }), "{error:?}");
}

#[test]
fn a_broken_library_is_an_error() {
    let folder = TempFolder::new();
    let driver = build(folder.path(), "libcuda-test.so.1", DRIVER, &[]);
    std::fs::write(folder.path().join("libnvrtc.so.13"), b"not an object").unwrap();
    let error = Cuda::find(driver.to_str().unwrap(), &[folder.path().to_owned()]).unwrap_err();
    assert!(matches!(error, CudaUnavailable::LibraryBroken { .. }), "{error:?}");
}

#[test]
fn each_library_is_loaded_from_the_first_folder_that_has_it() {
    let (first, second) = (TempFolder::new(), TempFolder::new());
    let driver = build(first.path(), "libcuda-test.so.1", DRIVER, &["N_DEVICES=2"]);
    let nvrtc = build(first.path(), "libnvrtc.so.13", NVRTC, &[]);
    build(second.path(), "libnvrtc.so.13", "int nothing;", &[]);
    let cublas = build(second.path(), "libcublasLt.so.13", "int nothing;", &[]);
    build(second.path(), "libnvrtc-builtins.so.13.0", "int nothing;", &[]);
    let folders = [PathBuf::from("/nowhere"), first.path().to_owned(), second.path().to_owned()];
    let info = Cuda::find(driver.to_str().unwrap(), &folders).unwrap().info;
    assert_eq!(info.libraries, [nvrtc, cublas]);
    assert_eq!((info.driver_version, info.nvrtc_version), (13_000, 13_000));
    assert_eq!(info.devices.len(), 2);
    assert_eq!((info.devices[0].name.as_str(), info.devices[0].capability), ("Test GPU", 90));
    assert_eq!(info.devices[0].total_bytes, 80 << 30);
}
