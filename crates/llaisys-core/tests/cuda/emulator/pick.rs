//! Selects the device of the parity tests: the emulator, or with `LLAISYS_TEST_DEVICE=gpu` the first GPU (`gpu-small`:
//! only the emulator's cases). The tests, their references and their tolerances are the same.

use super::Emulator;
use llaisys_core::cuda::device::{Device, Element};
use llaisys_core::cuda::driver::nvidia::{Nvidia, NvidiaSettings};
use llaisys_core::cuda::driver::probe::{Cuda, DRIVER};
use std::path::PathBuf;
use std::rc::Rc;

thread_local! {
    /// A GPU is opened once for all cases of a test, and its memory is freed at the end.
    static GPU: Rc<Nvidia> = Rc::new(open_gpu());
}

/// The device that the tests run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Picked {
    Emulator,
    Gpu,
    /// A GPU under a tool that makes it as slow as the emulator.
    GpuSmall,
}

fn picked() -> Picked {
    match setting("LLAISYS_TEST_DEVICE").as_deref() {
        None | Some("emulator") => Picked::Emulator,
        Some("gpu") => Picked::Gpu,
        Some("gpu-small") => Picked::GpuSmall,
        Some(other) => panic!("LLAISYS_TEST_DEVICE={other}: emulator, gpu or gpu-small"),
    }
}

/// Returns whether the tests run on a GPU. Panics on an unknown device.
pub(crate) fn is_gpu() -> bool {
    picked() != Picked::Emulator
}

/// Returns a new emulator, or the GPU. Prints its name, which `benches/gpu/phase1_parity.py` reads.
pub(crate) fn test_device() -> Rc<dyn Device> {
    let device: Rc<dyn Device> = if is_gpu() { GPU.with(Rc::clone) } else { Rc::new(Emulator::new()) };
    println!("device: {}", device.facts().name);
    device
}

/// Prints the next case. Each line is a row of the parity table, and on a failure the last one is the case that failed.
pub(crate) fn case(op: &str, element: Element, shape: impl std::fmt::Display) {
    println!("case: {op} {} {shape}", format!("{element:?}").to_lowercase());
}

/// Returns cases that are too slow for the emulator if the tests run on a GPU. Otherwise returns none and prints their
/// number.
pub(crate) fn gpu_only<T>(op: &str, cases: impl IntoIterator<Item = T>) -> Vec<T> {
    let cases: Vec<T> = cases.into_iter().collect();
    if picked() == Picked::Gpu {
        return cases;
    }
    println!("left for a GPU: {op}, {} cases", cases.len());
    Vec::new()
}

/// Opens the first GPU. The libraries are searched in each folder of `LLAISYS_CUDA_LIB_DIR`. The folder for temporary
/// files has the disk cache of machine code.
fn open_gpu() -> Nvidia {
    let folders: Vec<PathBuf> = match setting("LLAISYS_CUDA_LIB_DIR") {
        Some(folders) => std::env::split_paths(&folders).collect(),
        None => Vec::new(),
    };
    let cuda = Cuda::find(DRIVER, &folders).unwrap_or_else(|e| panic!("LLAISYS_TEST_DEVICE=gpu: {e}"));
    let cubin_folder = Some(std::env::temp_dir().join("llaisys-test-cubins"));
    let settings = NvidiaSettings { ordinal: 0, cubin_folder, n_threads: 1, synchronous: false };
    Nvidia::open(cuda, &settings).unwrap_or_else(|e| panic!("LLAISYS_TEST_DEVICE=gpu: {e}"))
}

#[allow(
    clippy::disallowed_methods,
    reason = "the caller selects the device of the tests; it is not a setting of the core"
)]
fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
