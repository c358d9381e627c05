//! Shared objects: builds those for tests, and finds the real ones.
#![allow(dead_code, reason = "each test binary uses its own part of this file")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds `name` in `folder` from C, with `defines`. Panics without a C compiler, which the build needs anyway.
pub fn build(folder: &Path, name: &str, text: &str, defines: &[&str]) -> PathBuf {
    let (source, library) = (folder.join(format!("{name}.c")), folder.join(name));
    std::fs::write(&source, text).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-w", &format!("-Wl,-soname,{name}"), "-o"]).arg(&library).arg(&source);
    let made = cc.args(defines.iter().map(|define| format!("-D{define}"))).status();
    assert!(made.expect("cc is missing: apt-get install build-essential").success());
    library
}

/// The folder of NVRTC: the one in the environment variable, or the one that `make setup` installs.
#[allow(clippy::disallowed_methods, reason = "the environment names the folder of a library for tests")]
pub fn nvrtc_folder() -> PathBuf {
    if let Ok(named) = std::env::var("LLAISYS_CUDA_LIB_DIR") {
        return named.into();
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let pythons = root.read_dir().into_iter().flatten().filter_map(Result::ok);
    let mut folders = pythons.map(|python| python.path().join("site-packages/nvidia/cu13/lib"));
    folders.find(|folder| folder.join("libnvrtc.so.13").is_file()).expect("`make setup` installs NVRTC")
}
