//! The recurrent layers of a GGUF file's model, and the shared expert.

use super::{Keys, expect_length, required};
use crate::arch::bounds::bounded;
use crate::arch::delta_net::DeltaNet;
use crate::arch::recurrent::{RecurrentKind, RecurrentLayer};
use crate::arch::short_conv::ShortConv;
use crate::arch::spec::ArchSpec;
use crate::error::{FormatError, Result, Unsupported};
use crate::ops::DeltaHeads;

/// llama.cpp's default of `full_attention_interval`.
const INTERVAL_DEFAULT: usize = 4;

/// A list with 0 for each recurrent layer of LFM2.
const KV_HEADS: &str = "attention.head_count_kv";

/// Reads the sizes of recurrent layers. Errors: as `delta_net`; a missing key.
pub(super) fn layer(keys: &Keys<'_>, arch: &ArchSpec, d_model: usize) -> Result<Option<RecurrentLayer>> {
    Ok(match arch.recurrent {
        None => None,
        Some(RecurrentKind::DeltaNet) => Some(RecurrentLayer::DeltaNet(delta_net(keys, arch)?)),
        Some(RecurrentKind::ShortConv) => {
            let n_taps = keys.required_size("shortconv.l_cache")?;
            Some(RecurrentLayer::ShortConv(ShortConv { channels: d_model, n_taps }))
        }
    })
}

/// Reads the sizes of Gated DeltaNet layers. Errors: a missing key; an inner size that is not one of whole heads; layers
/// that predict several tokens.
fn delta_net(keys: &Keys<'_>, arch: &ArchSpec) -> Result<DeltaNet> {
    const PREDICTING: &str = "nextn_predict_layers";
    if let Some(n) = keys.size(PREDICTING)?.filter(|&n| n > 0) {
        let supported = "0 (convert the model without them, or use a file without them)";
        return Err(Unsupported::feature("layers that predict several tokens", n, supported).into());
    }
    let (inner, n_values) =
        (keys.required_size("ssm.inner_size")?, keys.required_size("ssm.time_step_rank")?);
    let what = "ssm.inner_size";
    let uneven = FormatError::NotAMultiple { what, got: inner, of: "ssm.time_step_rank", divisor: n_values };
    let heads = DeltaHeads {
        n_keys: keys.required_size("ssm.group_count")?,
        n_values,
        d_key: keys.required_size("ssm.state_size")?,
        d_value: inner.checked_div(n_values).filter(|_| inner.is_multiple_of(n_values)).ok_or(uneven)?,
        order: arch.gguf_value_order,
    };
    Ok(DeltaNet { heads, n_taps: keys.required_size("ssm.conv_kernel")? })
}

/// Reads which layers are recurrent: those without key-value heads, or all except every n-th.
/// Errors: no layer with attention.
pub(super) fn layers(keys: &Keys<'_>, arch: &ArchSpec, n_layers: usize) -> Result<Vec<bool>> {
    match arch.recurrent {
        None => return Ok(vec![false; n_layers]),
        Some(RecurrentKind::ShortConv) => {
            let recurrent: Vec<bool> = kv_heads(keys, n_layers)?.into_iter().map(|n| n == 0).collect();
            let n_attention = recurrent.iter().filter(|&&recurrent| !recurrent).count();
            bounded("the number of layers with attention", n_attention as f64, 1.0, n_layers as f64)?;
            return Ok(recurrent);
        }
        Some(RecurrentKind::DeltaNet) => {}
    }
    const KEY: &str = "full_attention_interval";
    let every = keys.size(KEY)?.unwrap_or(INTERVAL_DEFAULT);
    bounded(KEY, every as f64, 1.0, n_layers as f64)?;
    Ok((0..n_layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect())
}

/// Reads the number of key-value heads of the layers with attention.
pub(super) fn n_kv_heads(keys: &Keys<'_>, arch: &ArchSpec, n_layers: usize) -> Result<Option<usize>> {
    if arch.recurrent != Some(RecurrentKind::ShortConv) {
        return keys.size_of_layers(KV_HEADS, n_layers);
    }
    let mut of_attention = kv_heads(keys, n_layers)?.into_iter().filter(|&n| n > 0);
    let first = of_attention.next();
    if of_attention.any(|n| Some(n) != first) {
        let supported = "one number for all layers with attention";
        return Err(Unsupported::feature("a size for each layer", keys.full(KV_HEADS), supported).into());
    }
    Ok(first.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
}

/// Reads the number of key-value heads of each layer. Errors: no list, or one of another length.
fn kv_heads(keys: &Keys<'_>, n_layers: usize) -> Result<Vec<u64>> {
    let key = keys.full(KV_HEADS);
    let listed = required(keys.metadata.uints(&key)?, &key)?;
    expect_length("the length of head_count_kv", listed.len(), n_layers)?;
    Ok(listed)
}

/// Reads the inner width of the shared expert.
pub(super) fn d_shared(keys: &Keys<'_>, arch: &ArchSpec) -> Result<Option<usize>> {
    const KEY: &str = "expert_shared_feed_forward_length";
    Ok(if arch.shared_expert { Some(keys.required_size(KEY)?) } else { None })
}
