//! Kernel units as shared objects: the kernels' own text behind `emu.h`, compiled by the C++ compiler of the machine.

use libloading::{Library, Symbol};
use llaisys_core::ops::cuda::unit::{KernelFile, Unit};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex};

/// An argument as `emu.h` has it.
#[repr(C)]
pub(crate) struct EmuArg {
    pub(crate) kind: u32,
    pub(crate) bits: u64,
}

/// A launch as `emu.h` has it.
#[repr(C)]
pub(crate) struct Request {
    pub(crate) grid: [u32; 3],
    pub(crate) block: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) n_args: u32,
    pub(crate) args: *const EmuArg,
    pub(crate) seed: u64,
    pub(crate) fault_address: u64,
    pub(crate) message: [u8; 512],
}

/// Starts a kernel; 0 when it went through.
pub(crate) type Start = unsafe extern "C" fn(*mut Request) -> i32;

/// No unit is ever unloaded: its signal handler stays.
static LOADED: LazyLock<Mutex<HashMap<String, &'static Library>>> = LazyLock::new(Mutex::default);

/// What a unit is compiled with; the compiler reads the file, too. The sanitizer's checks end in a trap, which the
/// emulator names.
const FLAGS: &str = include_str!("flags.txt");
const FLAGS_FILE: &str = concat!("@", env!("CARGO_MANIFEST_DIR"), "/tests/cuda_emu/flags.txt");

/// The function that starts `kernel` of a unit of `file`, compiled if need be.
pub(crate) fn start_of(file: &KernelFile, unit: &Unit, kernel: &str) -> Symbol<'static, Start> {
    let library = load(file, unit);
    let name = format!("ll_emu_{kernel}");
    // SAFETY: `text` ends with this function for every kernel of the table, and emu.h gives it this signature.
    let found = unsafe { library.get(name.as_bytes()) };
    found.unwrap_or_else(|e| panic!("{unit} has no {kernel}: {e}"))
}

fn load(file: &KernelFile, unit: &Unit) -> &'static Library {
    let text = text(file, unit);
    let mut loaded = LOADED.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(library) = loaded.get(&text) {
        return library;
    }
    let path = build(unit, &text);
    // SAFETY: the object is the one just compiled, or its cached equal; it has no initialisers of its own.
    let library = unsafe { Library::new(&path) }.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let library: &'static Library = Box::leak(Box::new(library));
    loaded.insert(text, library);
    library
}

fn text(file: &KernelFile, unit: &Unit) -> String {
    let mut text = String::new();
    for (name, value) in &unit.defines {
        text += &format!("#define {name} {value}\n");
    }
    text += include_str!("emu.h").split("#include \"emu_functions.h\"").next().unwrap_or_default();
    text += include_str!("emu_functions.h");
    text += &file.source();
    text += "\n#line 1 \"footer\"\n";
    for kernel in file.kernels {
        text += &format!("LL_EMU_KERNEL({})\n", kernel.name);
    }
    text.replace("#pragma once\n", "")
}

/// Compiles into the folder for tests' files, once for each text.
fn build(unit: &Unit, text: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_emu");
    std::fs::create_dir_all(&folder).expect("the target folder takes files");
    let mut hasher = std::hash::DefaultHasher::new();
    std::hash::Hash::hash(&(text, FLAGS), &mut hasher);
    let path = folder.join(format!("{unit}-{:016x}.so", std::hash::Hasher::finish(&hasher)));
    if path.exists() {
        return path;
    }
    let stem = folder.join(format!("{unit}-{}", std::process::id()));
    let (source, object) = (stem.with_extension("cc"), stem.with_extension("tmp"));
    std::fs::write(&source, text).expect("the target folder takes files");
    let run = Command::new("c++").arg(FLAGS_FILE).arg(&source).arg("-o").arg(&object).output();
    let run = run.expect("a C++ compiler named c++ (Debian: apt install g++; Fedora: dnf install gcc-c++)");
    let errors = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{unit} does not compile ({}):\n{errors}", source.display());
    // Another test process may have been as quick: both made the same.
    std::fs::rename(&object, &path).expect("the compiled unit gets its name");
    std::fs::remove_file(&source).expect("the source was written above");
    path
}
