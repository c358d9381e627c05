//! The ops on a device. `../kernels/<op>.cu` is the kernel; `<op>.rs` checks its arrays and launches it on a
//! [`Device`](crate::cuda::device::Device). `ops/reference/<op>.rs` defines what the op computes, as for the CPU.

#[allow(unsafe_code, reason = "launches a kernel")]
pub mod add_rms_norm;
pub mod attention;
#[allow(unsafe_code, reason = "launches a kernel")]
pub mod attn_decode;
#[allow(unsafe_code, reason = "launches a kernel")]
pub mod attn_prefill;
#[allow(unsafe_code, reason = "launches a kernel")]
pub mod embed;
#[allow(unsafe_code, reason = "launches a kernel")]
pub mod gate;
#[allow(unsafe_code, reason = "launches a kernel")]
pub mod gather;
#[allow(unsafe_code, reason = "launches a kernel")]
pub mod gemv;
#[allow(unsafe_code, reason = "launches a kernel")]
pub mod join_columns;
#[allow(unsafe_code, reason = "launches a kernel")]
pub mod rope_kv_store;
#[allow(unsafe_code, reason = "launches a kernel")]
pub mod sample;
pub mod sample_tables;
#[allow(unsafe_code, reason = "launches a kernel")]
pub mod step;

use super::kernel_source::{KernelSource, module_json};

/// Every kernel source. `tests/cuda/test_compile.py` compiles these and no others.
pub static SOURCES: &[&KernelSource] = &[
    &add_rms_norm::SOURCE,
    &attn_decode::SOURCE,
    &attn_prefill::SOURCE,
    &embed::SOURCE,
    &gate::SOURCE,
    &gemv::SOURCE,
    &join_columns::SOURCE,
    &rope_kv_store::SOURCE,
    &sample::SOURCE,
    &step::SOURCE,
];

/// Returns every module as JSON, for `tests/cuda/test_compile.py`: an array of
/// `{module, source, defines: {NAME: value}, kernels: [{name, max_threads, max_registers, max_shared_bytes}]}`.
pub fn sources_json() -> String {
    let modules = SOURCES.iter().flat_map(|source| source.modules());
    serde_json::Value::Array(modules.map(|module| module_json(&module)).collect()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_cu_file_is_listed_once() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/kernels");
        let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        let files = names.filter_map(|name| name.to_str()?.strip_suffix(".cu").map(str::to_owned));
        let listed: Vec<String> = SOURCES.iter().map(|source| source.name.to_owned()).collect();
        assert_eq!(files.collect::<BTreeSet<_>>(), listed.iter().cloned().collect());
        assert_eq!(listed.iter().collect::<BTreeSet<_>>().len(), listed.len());
    }

    #[test]
    fn every_kernel_of_a_source_is_listed_with_its_number_of_threads() {
        for source in SOURCES {
            let declared = source.text.matches("extern \"C\" __global__").count();
            assert_eq!(declared, source.kernels.len(), "kernels of {}.cu", source.name);
            for kernel in source.kernels {
                let bounds = format!("__launch_bounds__({}) {}(", kernel.max_threads, kernel.name);
                let with_blocks = format!("__launch_bounds__({}, ", kernel.max_threads);
                let found = source.text.contains(&bounds)
                    || source.text.lines().any(|line| {
                        line.contains(&with_blocks) && line.contains(&format!(" {}(", kernel.name))
                    });
                assert!(found, "{}.cu has no `{bounds}`", source.name);
            }
        }
    }

    #[test]
    fn modules_have_different_names() {
        let modules = SOURCES.iter().flat_map(|source| source.modules());
        let mut names: Vec<_> = modules.map(|module| module.to_string()).collect();
        names.sort();
        let n = names.len();
        names.dedup();
        assert_eq!(names.len(), n);
    }
}
