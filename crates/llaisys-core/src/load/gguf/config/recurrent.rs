//! The recurrent layers of a GGUF file's model, and the shared expert.

use super::Keys;
use crate::arch::bounds::bounded;
use crate::arch::delta_net::DeltaNet;
use crate::arch::spec::ArchSpec;
use crate::error::{FormatError, Result, Unsupported};
use crate::ops::DeltaHeads;

/// llama.cpp's default of `full_attention_interval`.
const INTERVAL_DEFAULT: usize = 4;

/// Reads the sizes of Gated DeltaNet layers. Errors: a missing key; an inner size that is not one of whole heads; layers
/// that predict several tokens.
pub(super) fn delta_net(keys: &Keys<'_>, arch: &ArchSpec) -> Result<Option<DeltaNet>> {
    if !arch.delta_net {
        return Ok(None);
    }
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
    Ok(Some(DeltaNet { heads, n_taps: keys.required_size("ssm.conv_kernel")? }))
}

/// Reads which layers are recurrent: all except every n-th. Errors: no layer with attention.
pub(super) fn layers(keys: &Keys<'_>, arch: &ArchSpec, n_layers: usize) -> Result<Vec<bool>> {
    if !arch.delta_net {
        return Ok(vec![false; n_layers]);
    }
    const KEY: &str = "full_attention_interval";
    let every = keys.size(KEY)?.unwrap_or(INTERVAL_DEFAULT);
    bounded(KEY, every as f64, 1.0, n_layers as f64)?;
    Ok((0..n_layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect())
}

/// Reads the inner width of the shared expert.
pub(super) fn d_shared(keys: &Keys<'_>, arch: &ArchSpec) -> Result<Option<usize>> {
    const KEY: &str = "expert_shared_feed_forward_length";
    Ok(if arch.shared_expert { Some(keys.required_size(KEY)?) } else { None })
}
