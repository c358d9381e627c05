//! The disk cache of machine code, with the real compiler of the pip package, which needs no GPU.

use crate::c_library::nvrtc_folder;
use crate::model_files::TempFolder;
use llaisys_core::cuda::driver::compile::Cubins;
use llaisys_core::cuda::driver::nvrtc::{Nvrtc, Source};
use std::path::{Path, PathBuf};

fn nvrtc() -> Nvrtc {
    Nvrtc::open(&nvrtc_folder().join("libnvrtc.so.13")).unwrap()
}

fn source(name: &str, factor: u32) -> Source {
    let text = "extern \"C\" __global__ void scale(float* x) { x[threadIdx.x] *= FACTOR; }";
    Source { name: name.to_owned(), text: text.to_owned(), options: vec![format!("-DFACTOR={factor}")] }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn compiled_sources_are_found_in_the_cache() {
    let folder = TempFolder::new();
    let sources: Vec<_> = (1..=3).map(|factor| source(&format!("scale_{factor}"), factor)).collect();
    let first = Cubins::new(nvrtc(), 90, Some(folder.path())).unwrap();
    let cubins = first.get(&sources, 2).unwrap();
    assert_eq!((first.n_compiled(), cubins.len()), (3, 3));
    assert!(cubins.iter().all(|cubin| cubin.starts_with(b"\x7fELF")));
    assert!(cubins[0] != cubins[1] && cubins[1] != cubins[2], "each has its own constants");
    assert_eq!(entries(folder.path()).len(), 3, "and no temporary file is left");
    let second = Cubins::new(nvrtc(), 90, Some(folder.path())).unwrap();
    assert_eq!(second.get(&sources, 2).unwrap(), cubins, "in the order of the sources");
    assert_eq!(second.n_compiled(), 0);
    let other_device = Cubins::new(nvrtc(), 80, Some(folder.path())).unwrap();
    assert!(other_device.get(&sources[..1], 1).unwrap()[0] != cubins[0]);
    assert_eq!(other_device.n_compiled(), 1);
}

#[test]
fn a_damaged_entry_is_compiled_again() {
    let folder = TempFolder::new();
    let sources = [source("scale", 2)];
    let whole = Cubins::new(nvrtc(), 90, Some(folder.path())).unwrap().get(&sources, 1).unwrap();
    let path = entries(folder.path()).remove(0);
    let bytes = std::fs::read(&path).unwrap();
    let mut flipped = bytes.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for damaged in [&bytes[..0], &bytes[..31], &bytes[..32], &bytes[..bytes.len() - 1], &flipped] {
        std::fs::write(&path, damaged).unwrap();
        let cubins = Cubins::new(nvrtc(), 90, Some(folder.path())).unwrap();
        assert_eq!(cubins.get(&sources, 1).unwrap(), whole);
        assert_eq!(cubins.n_compiled(), 1, "of {} bytes", damaged.len());
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "the entry is written again");
    }
}

#[test]
fn compilation_works_without_a_writable_folder() {
    let folder = TempFolder::new();
    let file = folder.path().join("a file");
    std::fs::write(&file, b"").unwrap();
    for place in [None, Some(file.join("below"))] {
        let cubins = Cubins::new(nvrtc(), 90, place.as_deref()).unwrap();
        assert!(cubins.get(&[source("scale", 2)], 4).unwrap()[0].starts_with(b"\x7fELF"));
        assert_eq!(cubins.n_compiled(), 1);
    }
}

#[test]
fn errors_name_the_source_and_the_architecture_and_quote_the_compiler() {
    let text = "extern \"C\" __global__ void broken(int* x) { *x = undefined_thing; }".to_owned();
    let broken = Source { name: "broken__T1".to_owned(), text, options: Vec::new() };
    let cubins = Cubins::new(nvrtc(), 90, None).unwrap();
    let text = cubins.get(&[source("scale", 1), broken], 2).unwrap_err().to_string();
    for part in ["broken__T1", "sm_90", "NVRTC 13.0", "NVRTC_ERROR_COMPILATION (6)", "undefined_thing"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    let zero = Source { text: "\0".to_owned(), ..source("zero", 1) };
    assert!(cubins.get(&[zero], 1).unwrap_err().to_string().contains("nul byte"));
}

#[test]
fn the_architecture_is_the_devices_or_the_highest_that_it_runs() {
    let nvrtc = nvrtc();
    assert_eq!([80, 90, 120].map(|capability| nvrtc.arch(capability)), [80, 90, 120].map(Some));
    assert_eq!(nvrtc.arch(99), Some(90), "code of 9.0 runs on every 9.x");
    assert_eq!(nvrtc.arch(139), None);
    let error = Cubins::new(nvrtc, 139, None).unwrap_err().to_string();
    assert!(error.contains("139") && error.contains("nvidia-cuda-nvrtc"), "{error}");
}
