//! Settings of checkpoints by compressed-tensors (llm-compressor): FP8, and integers of 8 or 4 bits.
//!
//! `ignore` needs no attention: such matrices are stored in a plain type. The settings of activations concern only how
//! a kernel rounds them.

use super::fp8::{block, columns};
use super::scaled::{Numbers, Scheme, Strategy};
use crate::error::{FormatError, Result, Unsupported};
use crate::load::folder::fields::Fields;
use serde_json::Value;

/// Reads the settings. Errors: several groups; a format, a strategy or a number of bits that is not supported; sparse,
/// rotated or reordered weights; a quantized KV cache.
pub(super) fn read(config: &Fields<'_>) -> Result<Scheme> {
    let rejected = |what, value: &str, supported| Err(Unsupported::feature(what, value, supported).into());
    if config.get("kv_cache_scheme").is_some() {
        return rejected("compressed-tensors with", "kv_cache_scheme", "null; set kv_cache_dtype instead");
    }
    if let Some(sparsity) = config.object("sparsity_config")?
        && let Some(format) = sparsity.text("format")?.filter(|&format| format != "dense")
    {
        return rejected("the sparsity of compressed-tensors", format, "dense");
    }
    if config.object("transform_config")?.is_some_and(|transforms| !transforms.map.is_empty()) {
        return rejected("compressed-tensors with", "transform_config", "weights that are not rotated");
    }
    const GROUPS: &str = "config_groups";
    let missing = |key| FormatError::KeyMissing { file: config.file, key };
    let groups = config.object(GROUPS)?.ok_or_else(|| missing(GROUPS))?;
    let names: Vec<&String> = groups.map.keys().collect();
    let [name] = names[..] else {
        return rejected("compressed-tensors with config_groups", &names.len().to_string(), "one group");
    };
    let wrong = FormatError::KeyType { file: config.file, key: GROUPS, expected: "an object of objects" };
    let group = Fields { file: config.file, map: groups.map[name].as_object().ok_or(wrong)? };
    let weights = group.object("weights")?.ok_or_else(|| missing("weights"))?;
    // What stands in for an activation order: none, or one that only the quantizer used.
    let order = match weights.get("actorder") {
        None | Some(Value::Bool(false)) => None,
        Some(Value::String(order)) if order == "weight" || order == "static" => None,
        Some(other) => Some(other.to_string()),
    };
    if let Some(order) = order {
        return rejected("compressed-tensors with actorder", &order, "null, weight, static");
    }
    let format = match group.text("format")? {
        Some(format) => format,
        None => config.text("format")?.ok_or_else(|| missing("format"))?,
    };
    let (kind, bits) = (weights.text("type")?.unwrap_or("int"), weights.number("num_bits")?.unwrap_or(8.0));
    let numbers = match (format, kind, bits) {
        ("float-quantized" | "naive-quantized", "float", 8.0) => Numbers::Fp8,
        ("int-quantized" | "naive-quantized", "int", 8.0) => Numbers::Bytes,
        ("pack-quantized", "int", 8.0) => Numbers::Packed8,
        ("pack-quantized", "int", 4.0) => Numbers::Packed4,
        _ => {
            let supported = "float-quantized float 8, int-quantized int 8, naive-quantized of both, \
                             pack-quantized int 8 and int 4";
            return rejected(
                "the format of compressed-tensors",
                &format!("{format} {kind} {bits}"),
                supported,
            );
        }
    };
    let has_zeros = weights.flag("symmetric")? == Some(false);
    if has_zeros && numbers != Numbers::Packed4 {
        return rejected("compressed-tensors with 8 bits and symmetric", "false", "true");
    }
    Ok(Scheme { numbers, strategy: strategy(&weights)?, has_zeros })
}

/// Reads which weights share a scale. Without `strategy`, it follows from `group_size`, as in compressed-tensors.
fn strategy(weights: &Fields<'_>) -> Result<Strategy> {
    let group_size = weights.integer("group_size")?;
    let stated = weights.text("strategy")?.unwrap_or(match group_size {
        Some(1..) => "group",
        _ => "channel",
    });
    match stated {
        "tensor" | "channel" => Ok(Strategy::MatrixOrRow),
        "group" => {
            let size = group_size.and_then(|size| usize::try_from(size).ok()).unwrap_or(0);
            columns("group_size", size)?;
            Ok(Strategy::Block { n_rows: 1, n_columns: size })
        }
        "block" => {
            const KEY: &str = "block_structure";
            let sizes = weights.list(KEY)?;
            block(weights, KEY, sizes.ok_or(FormatError::KeyMissing { file: weights.file, key: KEY })?)
        }
        other => {
            let supported = "tensor, channel, group, block";
            Err(Unsupported::feature("the strategy of compressed-tensors", other, supported).into())
        }
    }
}
