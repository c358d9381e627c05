//! Options of `config.json` that are rejected if they are switched on.

use crate::arch::bias::{BIAS_KEYS, Bias};
use crate::arch::bounds::bounded;
use crate::arch::spec::{Activation, ArchSpec};
use crate::error::{Result, Unsupported};
use crate::load::folder::fields::Fields;
use crate::load::folder::gemma4;
use crate::ops::{ClampedSilu, Gate};

/// Both spellings of the number of experts. Published files have one of them, depending on the architecture;
/// transformers 5 writes the second one for all.
pub(super) const EXPERT_COUNT_KEYS: [&str; 2] = ["num_experts", "num_local_experts"];

/// The width of LFM2's feed-forward block before it is adjusted. It takes precedence over the key that others have.
const STATED_D_FF: &str = "block_ff_dim";

/// Rejects keys that would need a forward pass that is not implemented.
pub(super) fn reject_unsupported(fields: &Fields<'_>, arch: &ArchSpec) -> Result<()> {
    reject_experts(fields, arch)?;
    reject_activation(fields, arch)?;
    for key in BIAS_KEYS {
        if fields.flag(key)? == Some(true) && !arch.biases.reads(key) {
            return Err(Unsupported::feature(key, true, "false in this family").into());
        }
    }
    if fields.flag("is_causal")? == Some(false) {
        return Err(Unsupported::feature("is_causal", false, "true").into());
    }
    // Hunyuan's second key is for layers that share keys and values.
    for key in ["use_bidirectional_attention", "use_cla"] {
        if arch.gemma4 {
            gemma4::reject_bidirectional(fields)?;
        } else if fields.flag(key)? == Some(true) {
            return Err(Unsupported::feature(key, true, "false").into());
        }
    }
    for key in ["dtype", "torch_dtype"] {
        if let Some(dtype) = fields.text(key)?
            && !matches!(dtype.trim_start_matches("torch."), "float32" | "float16" | "bfloat16")
        {
            return Err(
                Unsupported::feature("the checkpoint's dtype", dtype, "float32, float16, bfloat16").into()
            );
        }
    }
    Ok(())
}

/// Rejects a model without a rotary embedding, in an architecture that can do without.
pub(super) fn expect_rotation(fields: &Fields<'_>, arch: &ArchSpec) -> Result<()> {
    const KEY: &str = "position_embedding_type";
    match fields.text(KEY)? {
        Some("rope") => Ok(()),
        stated if arch.rope_switch => Err(Unsupported::feature(KEY, stated.unwrap_or("null"), "rope").into()),
        _ => Ok(()),
    }
}

/// Returns whether the file's projections have the bias.
pub(super) fn has_bias(fields: &Fields<'_>, bias: Bias) -> Result<bool> {
    match bias {
        Bias::Never => Ok(false),
        Bias::Always => Ok(true),
        Bias::Stated { key, default } => Ok(fields.flag(key)?.unwrap_or(default)),
    }
}

/// Returns whether the head is the embedding matrix.
pub(super) fn is_tied(fields: &Fields<'_>, arch: &ArchSpec) -> Result<bool> {
    for &key in arch.tied_keys {
        if let Some(is_tied) = fields.flag(key)? {
            return Ok(is_tied);
        }
    }
    Ok(arch.tied_default)
}

/// Reads the inner width of the feed-forward block, or of one expert. Errors: a missing key, a factor out of bounds.
pub(super) fn d_ff(fields: &Fields<'_>, arch: &ArchSpec) -> Result<usize> {
    if let Some(experts) = arch.experts {
        return Ok(fields.required_size(experts.d_ff)?);
    }
    if !arch.adjusts_d_ff {
        return Ok(fields.required_size(arch.d_ff_key)?);
    }
    let stated = match fields.size(STATED_D_FF)? {
        Some(stated) => stated,
        None => fields.required_size(arch.d_ff_key)?,
    };
    if fields.flag("block_auto_adjust_ff_dim")? == Some(false) {
        return Ok(stated);
    }
    adjusted_d_ff(fields, stated)
}

/// Returns two thirds of the stated width, times a factor, rounded up to whole multiples: as LFM2 defines it, with its
/// defaults. Without a factor (null) nothing is rounded up.
fn adjusted_d_ff(fields: &Fields<'_>, stated: usize) -> Result<usize> {
    const FACTOR: &str = "block_ffn_dim_multiplier";
    const MULTIPLE: &str = "block_multiple_of";
    bounded(STATED_D_FF, stated as f64, 1.0, f64::from(u32::MAX))?;
    let d_ff = ((stated as u64).saturating_mul(2) / 3) as usize;
    let factor = match fields.number(FACTOR)? {
        Some(factor) => factor,
        None if fields.map.contains_key(FACTOR) => return Ok(d_ff),
        None => 1.0,
    };
    bounded(FACTOR, factor, 1e-3, 1e3)?;
    let multiple = fields.size(MULTIPLE)?.unwrap_or(256);
    bounded(MULTIPLE, multiple as f64, 1.0, f64::from(u32::MAX))?;
    Ok(((factor * d_ff as f64) as usize).next_multiple_of(multiple))
}

/// Rejects experts in an architecture without them, and layers without experts in one with them.
fn reject_experts(fields: &Fields<'_>, arch: &ArchSpec) -> Result<()> {
    let supported_keys: &[&str] = if arch.experts.is_some() { &EXPERT_COUNT_KEYS } else { &[] };
    for key in ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"] {
        let n_experts = fields.get(key).filter(|value| value.as_u64() != Some(0));
        if let Some(n_experts) = n_experts.filter(|_| !supported_keys.contains(&key)) {
            let value = format!("{key} = {n_experts}");
            return Err(Unsupported::feature("a mixture of experts", value, "dense models").into());
        }
    }
    if supported_keys.is_empty() {
        return Ok(());
    }
    if let Some(step) = fields.size("decoder_sparse_step")?.filter(|&step| step != 1) {
        return Err(Unsupported::feature("decoder_sparse_step", step, "1 (experts in every layer)").into());
    }
    match fields.list("mlp_only_layers")? {
        Some(layers) if !layers.is_empty() => {
            let value = format!("{} layers", layers.len());
            Err(Unsupported::feature("mlp_only_layers", value, "none (experts in every layer)").into())
        }
        _ => Ok(()),
    }
}

/// Returns the activation of gates, with its numbers.
pub(super) fn gate(fields: &Fields<'_>, arch: &ArchSpec) -> Result<Gate> {
    let Gate::ClampedSilu(default) = arch.activation.gate() else { return Ok(arch.activation.gate()) };
    let number = |key, default: f32| -> Result<f32> {
        Ok(fields.number(key)?.map_or(default, |stated| stated as f32))
    };
    Ok(Gate::ClampedSilu(ClampedSilu {
        limit: number("swiglu_limit", default.limit)?,
        alpha: number("swiglu_alpha", default.alpha)?,
    }))
}

/// Rejects other activations than the architecture's. Gemma's own key takes precedence over `hidden_act`, which its
/// first files also have.
fn reject_activation(fields: &Fields<'_>, arch: &ArchSpec) -> Result<()> {
    match arch.activation {
        Activation::Silu | Activation::ClampedSilu => match fields.text("hidden_act")?.unwrap_or("silu") {
            "silu" | "swish" => Ok(()),
            other => Err(Unsupported::feature("hidden_act", other, "silu").into()),
        },
        Activation::GeluTanh => match fields.text("hidden_activation")?.unwrap_or("gelu_pytorch_tanh") {
            "gelu_pytorch_tanh" => Ok(()),
            other => Err(Unsupported::feature("hidden_activation", other, "gelu_pytorch_tanh").into()),
        },
    }
}
