//! Kernel modules as shared objects: `emu.h` and the kernels' source, compiled by the machine's C++ compiler and cached
//! by the digest of text, flags and compiler version.

use libloading::{Library, Symbol};
use llaisys_core::cuda::kernel_source::KernelModule;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex};

const NO_COMPILER: &str = "a C++ compiler named c++ (Debian: apt install g++; Fedora: dnf install gcc-c++)";
/// The version that the compiler prints.
static COMPILER: LazyLock<Vec<u8>> =
    LazyLock::new(|| Command::new("c++").arg("--version").output().expect(NO_COMPILER).stdout);

/// An argument, as in `emu_abi.h`.
#[repr(C)]
pub(crate) struct EmuArg {
    pub(crate) kind: u32,
    pub(crate) bits: u64,
}

/// A launch, as in `emu_abi.h`.
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

const _: () =
    assert!(size_of::<EmuArg>() == 16 && size_of::<Request>() == 560, "emu_abi.h asserts the same sizes");

/// Runs a kernel; returns 0 if it succeeded.
pub(crate) type Start = unsafe extern "C" fn(*mut Request) -> i32;

/// Modules are never unloaded, because their signal handlers stay installed.
static LOADED: LazyLock<Mutex<HashMap<String, &'static Library>>> = LazyLock::new(Mutex::default);

/// The compiler's flags. The compiler reads the same file. The sanitizer's checks end in a trap, which the emulator
/// reports.
const FLAGS: &str = include_str!("flags.txt");
const FLAGS_FILE: &str = concat!("@", env!("CARGO_MANIFEST_DIR"), "/tests/cuda/emulator/flags.txt");

/// Returns the function that starts `kernel` of a module, which is compiled on a cache miss.
pub(crate) fn start_of(module: &KernelModule, kernel: &str) -> Symbol<'static, Start> {
    let library = load(module);
    let name = format!("ll_emu_{kernel}");
    // SAFETY: `text` ends with this function for every kernel of the source, and emu.h defines it with this signature.
    let found = unsafe { library.get(name.as_bytes()) };
    found.unwrap_or_else(|e| panic!("{module} has no {kernel}: {e}"))
}

fn load(module: &KernelModule) -> &'static Library {
    let text = text(module);
    let mut loaded = LOADED.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(library) = loaded.get(&text) {
        return library;
    }
    let path = build(module, &text);
    // SAFETY: the object was compiled from `text`, which has no initializers with side effects.
    let library = unsafe { Library::new(&path) }.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let library: &'static Library = Box::leak(Box::new(library));
    loaded.insert(text, library);
    library
}

fn text(module: &KernelModule) -> String {
    let mut text = String::new();
    for (name, value) in &module.constants {
        text += &format!("#define {name} {value}\n");
    }
    text += &include_str!("emu.h")
        .replace("#include \"emu_abi.h\"\n", include_str!("emu_abi.h"))
        .replace("#include \"emu_functions.h\"\n", include_str!("emu_functions.h"));
    text += &module.source.full_text();
    text += "\n#line 1 \"footer\"\n";
    for kernel in module.source.kernels {
        text += &format!("LL_EMU_KERNEL({})\n", kernel.name);
    }
    text.replace("#pragma once\n", "")
}

/// Compiles a text once. Later calls, in any test process, find the object in `CARGO_TARGET_TMPDIR`.
fn build(module: &KernelModule, text: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_emulator");
    std::fs::create_dir_all(&folder).expect("the target folder is writable");
    let digest = Sha256::new().chain_update(text).chain_update(FLAGS).chain_update(&*COMPILER).finalize();
    let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let path = folder.join(format!("{module}-{digest}.so"));
    if path.exists() {
        return path;
    }
    let stem = folder.join(format!("{module}-{}", std::process::id()));
    let (source, object) = (stem.with_extension("cc"), stem.with_extension("tmp"));
    std::fs::write(&source, text).expect("the target folder is writable");
    let run = Command::new("c++").arg(FLAGS_FILE).arg(&source).arg("-o").arg(&object).output();
    let run = run.expect(NO_COMPILER);
    let errors = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{module} does not compile ({}):\n{errors}", source.display());
    // Another test process may have compiled the same text: then the rename replaces equal bytes.
    std::fs::rename(&object, &path).expect("the compiled module gets its name");
    std::fs::remove_file(&source).expect("the source was written above");
    path
}
