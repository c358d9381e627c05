//! The one table of what is compiled: each unit is a kernel file with its constants, and has one or more functions.

use super::device::Element;
use std::fmt;

/// Text in front of every kernel file.
const PRIM: &str = include_str!("kernels/prim.cuh");

/// Every kernel file. A kernel that is not reached from here is neither compiled nor proved.
pub const FILES: &[&KernelFile] = &[
    &super::add_rms_norm::FILE,
    &super::attn_decode::FILE,
    &super::attn_prefill::FILE,
    &super::convert::FILE,
    &super::embed::FILE,
    &super::gate::FILE,
    &super::gemv::FILE,
    &super::gemv_quant::FILE,
    &super::join_columns::FILE,
    &super::rope_kv_store::FILE,
    &super::sample::FILE,
    &super::step::FILE,
];

/// A kernel file: its text, what it is compiled for, and the bounds that its kernels keep.
#[derive(Debug)]
pub struct KernelFile {
    /// `kernels/<name>.cu`
    pub name: &'static str,
    /// The file's text.
    pub text: &'static str,
    /// The constants of each unit made of it.
    pub variants: fn() -> Vec<Vec<(&'static str, u32)>>,
    /// Its `extern "C"` functions.
    pub kernels: &'static [Kernel],
}

/// What a kernel may use at most. The compile gate (`tests/cuda/test_compile.py`) holds the compiler to it on every
/// architecture, the emulator every launch.
#[derive(Debug)]
pub struct Kernel {
    /// Its name in the text.
    pub name: &'static str,
    /// Threads of a block: the number in its `__launch_bounds__`.
    pub max_threads: u32,
    /// Registers of a thread.
    pub max_registers: u32,
    /// Dynamic shared memory of a block, bytes, with these constants.
    pub max_shared_bytes: fn(&Unit) -> u32,
}

impl Kernel {
    /// For [`Kernel::max_shared_bytes`] of kernels that use none.
    pub const NO_SHARED: fn(&Unit) -> u32 = |_| 0;
}

impl KernelFile {
    /// The file of this name in [`FILES`].
    pub fn of(name: &str) -> Option<&'static Self> {
        FILES.iter().find(|file| file.name == name).copied()
    }

    /// A kernel of it, compiled with these constants.
    pub fn function(&self, defines: &[(&'static str, u32)], name: &'static str) -> Function {
        Function { unit: Unit { file: self.name, defines: defines.to_vec() }, name }
    }

    /// The units made of it.
    pub fn units(&self) -> impl Iterator<Item = Unit> {
        let file = self.name;
        (self.variants)().into_iter().map(move |defines| Unit { file, defines })
    }

    /// What is given to the compiler. Lines are counted in the files that they come from.
    pub fn source(&self) -> String {
        format!("#line 1 \"prim.cuh\"\n{PRIM}\n#line 1 \"{}.cu\"\n{}", self.name, self.text)
    }
}

/// `LL_T` of a storage type.
///
/// Panics for F32, which no activations are stored in.
pub fn storage(element: Element) -> (&'static str, u32) {
    match element {
        Element::Bf16 => ("LL_T", 1),
        Element::F16 => ("LL_T", 2),
        Element::F32 => panic!("kernels store bf16 or f16"),
    }
}

/// Variants of a file that only depends on the storage type.
pub fn by_storage() -> Vec<Vec<(&'static str, u32)>> {
    [Element::Bf16, Element::F16].map(|element| vec![storage(element)]).into()
}

/// Variants of a file by storage type and head width.
pub fn by_storage_and_head() -> Vec<Vec<(&'static str, u32)>> {
    let heads = |element| HEAD_WIDTHS.map(|d| vec![storage(element), ("LL_D", d)]);
    [Element::Bf16, Element::F16].into_iter().flat_map(heads).collect()
}

/// Widths of heads that kernels are compiled for.
pub const HEAD_WIDTHS: [u32; 4] = [64, 80, 96, 128];

/// A kernel file with the constants that it is compiled with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Unit {
    /// The file's name without `.cu`.
    pub file: &'static str,
    /// `-DNAME=VALUE`, in the file's order.
    pub defines: Vec<(&'static str, u32)>,
}

impl Unit {
    /// The value of a constant. Panics if the unit has none of this name.
    pub fn constant(&self, name: &str) -> u32 {
        let found = self.defines.iter().find(|(of, _)| *of == name);
        found.unwrap_or_else(|| panic!("{self} has no {name}")).1
    }
}

impl fmt::Display for Unit {
    /// `file__NAMEvalue_NAMEvalue`: also the name of its cubin.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file)?;
        for (i, (name, value)) in self.defines.iter().enumerate() {
            write!(f, "{}{}{value}", if i == 0 { "__" } else { "_" }, name.trim_start_matches("LL_"))?;
        }
        Ok(())
    }
}

/// A kernel: an `extern "C"` function of a unit.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Function {
    /// What it is compiled in.
    pub unit: Unit,
    /// Its name in the text.
    pub name: &'static str,
}

/// The table as JSON, for the compile gate: an array of
/// `{unit, source, defines: {NAME: value}, kernels: [{name, max_threads, max_registers, max_shared_bytes}]}`.
pub fn table_json() -> String {
    let units = FILES.iter().flat_map(|file| file.units().map(move |unit| unit_json(file, &unit)));
    serde_json::Value::Array(units.collect()).to_string()
}

fn unit_json(file: &KernelFile, unit: &Unit) -> serde_json::Value {
    let kernel = |kernel: &Kernel| {
        serde_json::json!({
            "name": kernel.name,
            "max_threads": kernel.max_threads,
            "max_registers": kernel.max_registers,
            "max_shared_bytes": (kernel.max_shared_bytes)(unit),
        })
    };
    serde_json::json!({
        "unit": unit.to_string(),
        "source": file.source(),
        "defines": unit.defines.iter().copied().collect::<std::collections::BTreeMap<_, _>>(),
        "kernels": file.kernels.iter().map(kernel).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_of_a_text_is_in_the_table_with_its_threads() {
        for file in FILES {
            let declared = file.text.matches("extern \"C\" __global__").count();
            assert_eq!(declared, file.kernels.len(), "kernels of {}.cu", file.name);
            for kernel in file.kernels {
                let of_text = format!("__launch_bounds__({}) {}(", kernel.max_threads, kernel.name);
                let with_blocks = format!("__launch_bounds__({}, ", kernel.max_threads);
                let found = file.text.contains(&of_text)
                    || file.text.lines().any(|line| {
                        line.contains(&with_blocks) && line.contains(&format!(" {}(", kernel.name))
                    });
                assert!(found, "{}.cu has no `{of_text}`", file.name);
            }
        }
    }

    #[test]
    fn units_have_different_names() {
        let mut names: Vec<_> =
            FILES.iter().flat_map(|file| file.units()).map(|unit| unit.to_string()).collect();
        names.sort();
        let n = names.len();
        names.dedup();
        assert_eq!(names.len(), n);
    }
}
