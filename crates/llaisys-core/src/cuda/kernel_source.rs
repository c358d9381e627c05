//! Kernel sources. A [`KernelSource`] with the values of its compile-time constants is a [`KernelModule`], which has
//! one or more [`Function`]s. [`crate::cuda::ops::SOURCES`] lists all sources.

use crate::cuda::element::Element;
use std::fmt;
use std::hash::{Hash, Hasher};

/// Text in front of every kernel source.
const PRIM: &str = include_str!("kernels/prim.cuh");

/// A `.cu` file: its text, the constants that it is compiled with, and the resource limits of its kernels.
#[derive(Debug)]
pub struct KernelSource {
    /// `kernels/<name>.cu`
    pub name: &'static str,
    /// The file's text.
    pub text: &'static str,
    /// The constants of each module compiled from it.
    pub variants: fn() -> Vec<Vec<(&'static str, u32)>>,
    /// Its `extern "C"` functions.
    pub kernels: &'static [Kernel],
}

/// A kernel and its resource limits. `tests/cuda/test_compile.py` compares the compiler's numbers with them for every
/// architecture, and the emulator checks every launch.
#[derive(Debug)]
pub struct Kernel {
    /// Its name in the text.
    pub name: &'static str,
    /// The most threads of a block: the number in its `__launch_bounds__`.
    pub max_threads: u32,
    /// The most registers of a thread.
    pub max_registers: u32,
    /// Returns the most dynamic shared memory of a block, bytes, with the module's constants.
    pub max_shared_bytes: fn(&KernelModule) -> u32,
}

impl Kernel {
    /// [`Kernel::max_shared_bytes`] of kernels that use no dynamic shared memory.
    pub const NO_SHARED: fn(&KernelModule) -> u32 = |_| 0;
}

impl KernelSource {
    /// Returns a kernel of this source, compiled with these constants.
    pub fn function(&'static self, constants: &[(&'static str, u32)], name: &'static str) -> Function {
        Function { module: KernelModule { source: self, constants: constants.to_vec() }, name }
    }

    /// Returns every module that is compiled from this source.
    pub fn modules(&'static self) -> impl Iterator<Item = KernelModule> {
        (self.variants)().into_iter().map(move |constants| KernelModule { source: self, constants })
    }

    /// Returns the text for the compiler. Line numbers in its messages are those of the original files.
    pub fn full_text(&self) -> String {
        format!("#line 1 \"prim.cuh\"\n{PRIM}\n#line 1 \"{}.cu\"\n{}", self.name, self.text)
    }
}

/// Returns the constant `LL_T` of a storage type.
///
/// Panics for F32, because kernels store activations in 16 bits.
pub fn storage(element: Element) -> (&'static str, u32) {
    match element {
        Element::Bf16 => ("LL_T", 1),
        Element::F16 => ("LL_T", 2),
        Element::F32 => panic!("kernels store bf16 or f16"),
    }
}

/// Returns the variants of a source that depends only on the storage type.
pub fn by_storage() -> Vec<Vec<(&'static str, u32)>> {
    [Element::Bf16, Element::F16].map(|element| vec![storage(element)]).into()
}

/// Returns the variants of a source that depends on the storage type and the head width.
pub fn by_storage_and_head() -> Vec<Vec<(&'static str, u32)>> {
    let heads = |element| HEAD_WIDTHS.map(|d| vec![storage(element), ("LL_D", d)]);
    [Element::Bf16, Element::F16].into_iter().flat_map(heads).collect()
}

/// The head widths that kernels are compiled for.
pub const HEAD_WIDTHS: [u32; 4] = [64, 80, 96, 128];

/// A kernel source with the values of its compile-time constants: a `CUmodule` once it is compiled and loaded.
#[derive(Debug, Clone)]
pub struct KernelModule {
    /// The source.
    pub source: &'static KernelSource,
    /// `-DNAME=VALUE`, in the order of [`KernelSource::variants`].
    pub constants: Vec<(&'static str, u32)>,
}

impl PartialEq for KernelModule {
    /// Sources are equal by name.
    fn eq(&self, other: &Self) -> bool {
        (self.source.name, &self.constants) == (other.source.name, &other.constants)
    }
}

impl Eq for KernelModule {}

impl Hash for KernelModule {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.source.name, &self.constants).hash(state);
    }
}

impl KernelModule {
    /// Returns the value of a constant. Panics if the module has none of this name.
    pub fn constant(&self, name: &str) -> u32 {
        let found = self.constants.iter().find(|(of, _)| *of == name);
        found.unwrap_or_else(|| panic!("{self} has no {name}")).1
    }
}

impl fmt::Display for KernelModule {
    /// `source__NAMEvalue_NAMEvalue`, which is also the name of its cubin.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.source.name)?;
        for (i, (name, value)) in self.constants.iter().enumerate() {
            write!(f, "{}{}{value}", if i == 0 { "__" } else { "_" }, name.trim_start_matches("LL_"))?;
        }
        Ok(())
    }
}

/// A kernel: an `extern "C"` function of a module.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Function {
    /// The module that defines it.
    pub module: KernelModule,
    /// Its name in the text.
    pub name: &'static str,
}

/// Returns a module as JSON: see [`crate::cuda::ops::sources_json`].
pub(super) fn module_json(module: &KernelModule) -> serde_json::Value {
    let kernel = |kernel: &Kernel| {
        serde_json::json!({
            "name": kernel.name,
            "max_threads": kernel.max_threads,
            "max_registers": kernel.max_registers,
            "max_shared_bytes": (kernel.max_shared_bytes)(module),
        })
    };
    serde_json::json!({
        "module": module.to_string(),
        "source": module.source.full_text(),
        "defines": module.constants.iter().copied().collect::<std::collections::BTreeMap<_, _>>(),
        "kernels": module.source.kernels.iter().map(kernel).collect::<Vec<_>>(),
    })
}
