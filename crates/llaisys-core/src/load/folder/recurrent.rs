//! The recurrent layers of a folder's model, and the shared expert.

use crate::arch::bounds::bounded;
use crate::arch::delta_net::DeltaNet;
use crate::arch::recurrent::{RecurrentKind, RecurrentLayer};
use crate::arch::short_conv::ShortConv;
use crate::arch::spec::ArchSpec;
use crate::error::{FormatError, Result, Unsupported};
use crate::load::folder::CONFIG_FILE;
use crate::load::folder::fields::Fields;
use crate::ops::{DeltaHeads, ValueOrder};

const INTERVAL: &str = "full_attention_interval";
/// transformers' default of it.
const INTERVAL_DEFAULT: usize = 4;

/// The list of layers with attention in LFM2; the others are recurrent.
const ATTENTION_LAYERS: &str = "full_attn_idxs";

/// Reads the sizes of recurrent layers. Errors: a missing key; a part of a layer that is not implemented.
pub(super) fn layer(fields: &Fields<'_>, arch: &ArchSpec, d_model: usize) -> Result<Option<RecurrentLayer>> {
    Ok(match arch.recurrent {
        None => None,
        Some(RecurrentKind::DeltaNet) => Some(RecurrentLayer::DeltaNet(delta_net(fields)?)),
        Some(RecurrentKind::ShortConv) => {
            if fields.flag("conv_bias")? == Some(true) {
                return Err(Unsupported::feature("conv_bias", true, "false in this family").into());
            }
            let n_taps = fields.required_size("conv_L_cache")?;
            Some(RecurrentLayer::ShortConv(ShortConv { channels: d_model, n_taps }))
        }
    })
}

/// Reads the sizes of Gated DeltaNet layers. Errors: a missing key; attention without a gate.
fn delta_net(fields: &Fields<'_>) -> Result<DeltaNet> {
    if fields.flag("attn_output_gate")? == Some(false) {
        return Err(Unsupported::feature("attn_output_gate", false, "true in this family").into());
    }
    let heads = DeltaHeads {
        n_keys: fields.required_size("linear_num_key_heads")?,
        n_values: fields.required_size("linear_num_value_heads")?,
        d_key: fields.required_size("linear_key_head_dim")?,
        d_value: fields.required_size("linear_value_head_dim")?,
        order: ValueOrder::Grouped,
    };
    Ok(DeltaNet { heads, n_taps: fields.required_size("linear_conv_kernel_dim")? })
}

/// Reads which layers are recurrent: those of the architecture's type, or all except the listed ones or every n-th.
/// Errors: a list of another length, or of other numbers; no layer with attention. Unknown types are rejected with the
/// windows.
pub(super) fn layers(fields: &Fields<'_>, arch: &ArchSpec, n_layers: usize) -> Result<Vec<bool>> {
    let Some(kind) = arch.recurrent else { return Ok(vec![false; n_layers]) };
    let recurrent: Vec<bool> = if let Some(kinds) = fields.list("layer_types")? {
        if kinds.len() != n_layers {
            let (what, other) = ("the number of layer_types", "num_hidden_layers");
            let (got, want) = (kinds.len() as u64, n_layers as u64);
            return Err(FormatError::Disagree { what, got, other, want }.into());
        }
        kinds.iter().map(|stated| stated.as_str() == Some(kind.layer_type())).collect()
    } else if kind == RecurrentKind::ShortConv {
        all_except_listed(fields, n_layers)?
    } else {
        let every = fields.size(INTERVAL)?.unwrap_or(INTERVAL_DEFAULT);
        bounded(INTERVAL, every as f64, 1.0, f64::from(u32::MAX))?;
        (0..n_layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect()
    };
    let n_attention = recurrent.iter().filter(|&&recurrent| !recurrent).count();
    bounded("the number of layers with attention", n_attention as f64, 1.0, n_layers as f64)?;
    Ok(recurrent)
}

/// Returns true for the layers that the list of those with attention does not contain.
/// Errors: no list; something else in it than numbers of layers.
fn all_except_listed(fields: &Fields<'_>, n_layers: usize) -> Result<Vec<bool>> {
    let missing = FormatError::KeyMissing { file: CONFIG_FILE, key: ATTENTION_LAYERS };
    let mut recurrent = vec![true; n_layers];
    for listed in fields.list(ATTENTION_LAYERS)?.ok_or(missing)? {
        let expected = "a list of layer numbers";
        let wrong = FormatError::KeyType { file: CONFIG_FILE, key: ATTENTION_LAYERS, expected };
        let index = listed.as_u64().ok_or(wrong)?;
        bounded("a layer in full_attn_idxs", index as f64, 0.0, n_layers as f64 - 1.0)?;
        recurrent[index as usize] = false;
    }
    Ok(recurrent)
}

/// Reads the inner width of the shared expert.
pub(super) fn d_shared(fields: &Fields<'_>, arch: &ArchSpec) -> Result<Option<usize>> {
    const KEY: &str = "shared_expert_intermediate_size";
    Ok(if arch.shared_expert { Some(fields.required_size(KEY)?) } else { None })
}
