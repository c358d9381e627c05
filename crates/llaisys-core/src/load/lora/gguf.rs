//! A LoRA adapter in a GGUF file, as llama.cpp's `convert_lora_to_gguf.py` writes it: `general.type` is `adapter`,
//! `adapter.lora.alpha` the scale times the rank, and the matrices of tensor `T` are `T.lora_a` `[rank, n_in]` and
//! `T.lora_b` `[n_out, rank]`, with the rows of the model's GGUF file.

use super::config::LoraConfig;
use crate::arch::spec::ArchSpec;
use crate::error::{LoraError, Result, Unsupported};
use crate::load::gguf::GgufFile;
use crate::load::gguf::metadata::Metadata;
use crate::load::tensor_files::TensorFiles;
use std::path::Path;

/// Opens the file of an adapter for a model of `arch`. Errors: damage; a file that is not an adapter of this
/// architecture, or one of a kind that is not implemented.
pub(super) fn open(path: &Path, arch: &ArchSpec) -> Result<(LoraConfig, TensorFiles)> {
    let file = GgufFile::open(path)?;
    let (config, tensors) =
        file.with_header(|header| Ok((read(&header.metadata, arch)?, header.tensors()?)))?;
    Ok((config, file.into_files(tensors)))
}

fn read(metadata: &Metadata<'_>, arch: &ArchSpec) -> Result<LoraConfig> {
    for (key, supported) in [("general.type", "adapter"), ("adapter.type", "lora")] {
        let found = metadata.str(key)?.unwrap_or("none");
        if found != supported {
            let found = format!("{key} = {found:?}");
            return Err(Unsupported::feature("a GGUF file as an adapter with", found, supported).into());
        }
    }
    // Adapters that begin to act at certain tokens.
    const INVOCATION: &str = "adapter.alora.invocation_tokens";
    if metadata.get(INVOCATION).is_some() {
        return Err(Unsupported::feature("the LoRA setting", INVOCATION, "LoRA without it").into());
    }
    let (found, own) = (metadata.str("general.architecture")?.unwrap_or("none"), arch.gguf_architecture);
    if found != own {
        return Err(LoraError::Architecture { found: found.to_owned(), own }.into());
    }
    // In llama.cpp, 0 means a scale of 1.
    LoraConfig::of_alpha(metadata.float("adapter.lora.alpha")?.filter(|&alpha| alpha != 0.0))
}
