//! Which device the parity tests run on: the emulator, or with `LLAISYS_TEST_DEVICE=gpu` the first GPU (`gpu-small`: the
//! emulator's cases on it). The tests, their references and their tolerances are the same.

use super::Emulator;
use llaisys_core::cuda::device::{Device, Element};
use llaisys_core::cuda::driver::nvidia::{Nvidia, NvidiaSettings};
use llaisys_core::cuda::driver::probe::{Cuda, DRIVER};
use std::path::PathBuf;
use std::rc::Rc;

thread_local! {
    /// A GPU is opened once for all cases of a test: its memory is freed at the end.
    static GPU: Rc<Nvidia> = Rc::new(open_gpu());
}

/// Where the tests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Picked {
    Emulator,
    Gpu,
    /// Under a tool that makes a GPU as slow as an emulator.
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

/// Whether the tests run on a GPU. Panics on a device that is neither.
pub(crate) fn is_gpu() -> bool {
    picked() != Picked::Emulator
}

/// A new emulator, or the GPU. Its name is printed: `benches/gpu/phase1_parity.py` reads it.
pub(crate) fn test_device() -> Rc<dyn Device> {
    let device: Rc<dyn Device> = if is_gpu() { GPU.with(Rc::clone) } else { Rc::new(Emulator::new()) };
    println!("device: {}", device.facts().name);
    device
}

/// Prints what is compared next: a line for each row of the parity table, and on a failure the case that it is.
pub(crate) fn case(op: &str, element: Element, shape: impl std::fmt::Display) {
    println!("case: {op} {} {shape}", format!("{element:?}").to_lowercase());
}

/// Cases that take an emulator too long: themselves on a GPU, else none, and a line that counts them.
pub(crate) fn gpu_only<T>(op: &str, cases: impl IntoIterator<Item = T>) -> Vec<T> {
    let cases: Vec<T> = cases.into_iter().collect();
    if picked() == Picked::Gpu {
        return cases;
    }
    println!("left for a GPU: {op}, {} cases", cases.len());
    Vec::new()
}

/// The libraries are looked for in each folder of `LLAISYS_CUDA_LIB_DIR`. Machine code is kept between the tests'
/// processes in the folder for temporary files.
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
    reason = "where tests run is the caller's to say, not a setting of the core"
)]
fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
