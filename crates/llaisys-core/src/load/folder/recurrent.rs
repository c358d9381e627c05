//! The recurrent layers of a folder's model, and the shared expert.

use crate::arch::bounds::bounded;
use crate::arch::delta_net::DeltaNet;
use crate::arch::spec::ArchSpec;
use crate::error::{FormatError, Result, Unsupported};
use crate::load::folder::fields::Fields;
use crate::ops::{DeltaHeads, ValueOrder};

const INTERVAL: &str = "full_attention_interval";
/// transformers' default of it.
const INTERVAL_DEFAULT: usize = 4;

/// Reads the sizes of Gated DeltaNet layers. Errors: a missing key; attention without a gate.
pub(super) fn delta_net(fields: &Fields<'_>, arch: &ArchSpec) -> Result<Option<DeltaNet>> {
    if !arch.delta_net {
        return Ok(None);
    }
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
    Ok(Some(DeltaNet { heads, n_taps: fields.required_size("linear_conv_kernel_dim")? }))
}

/// Reads which layers are recurrent: those of type `linear_attention`, or all except every n-th.
/// Errors: a list of another length; no layer with attention. Unknown types are rejected with the windows.
pub(super) fn layers(fields: &Fields<'_>, arch: &ArchSpec, n_layers: usize) -> Result<Vec<bool>> {
    if !arch.delta_net {
        return Ok(vec![false; n_layers]);
    }
    let recurrent: Vec<bool> = if let Some(kinds) = fields.list("layer_types")? {
        if kinds.len() != n_layers {
            let (what, other) = ("the number of layer_types", "num_hidden_layers");
            let (got, want) = (kinds.len() as u64, n_layers as u64);
            return Err(FormatError::Disagree { what, got, other, want }.into());
        }
        kinds.iter().map(|kind| kind.as_str() == Some("linear_attention")).collect()
    } else {
        let every = fields.size(INTERVAL)?.unwrap_or(INTERVAL_DEFAULT);
        bounded(INTERVAL, every as f64, 1.0, f64::from(u32::MAX))?;
        (0..n_layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect()
    };
    let n_attention = recurrent.iter().filter(|&&recurrent| !recurrent).count();
    bounded("the number of layers with attention", n_attention as f64, 1.0, n_layers as f64)?;
    Ok(recurrent)
}

/// Reads the inner width of the shared expert.
pub(super) fn d_shared(fields: &Fields<'_>, arch: &ArchSpec) -> Result<Option<usize>> {
    const KEY: &str = "shared_expert_intermediate_size";
    Ok(if arch.shared_expert { Some(fields.required_size(KEY)?) } else { None })
}
