//! Options of `config.json` that are refused by name where they are switched on.

use super::{EXPERT_COUNT_KEYS, unsupported};
use crate::error::Result;
use crate::model::family::{Activation, FamilyFacts};
use crate::model::fields::Fields;

/// Refuses keys that change the forward pass in ways it lacks.
pub(super) fn refuse_unsupported(fields: &Fields<'_>, family: &FamilyFacts) -> Result<()> {
    refuse_experts(fields, family)?;
    refuse_activation(fields, family)?;
    // In Llama and Qwen3 this adds a bias to the output projection too; Qwen2 has no such key.
    if fields.flag("attention_bias")? == Some(true) && !family.qkv_bias {
        return Err(unsupported("attention_bias", true, "false").into());
    }
    if fields.flag("mlp_bias")? == Some(true) {
        return Err(unsupported("mlp_bias", true, "false").into());
    }
    if fields.flag("is_causal")? == Some(false) {
        return Err(unsupported("is_causal", false, "true").into());
    }
    if fields.flag("use_bidirectional_attention")? == Some(true) {
        return Err(unsupported("use_bidirectional_attention", true, "false").into());
    }
    for key in ["dtype", "torch_dtype"] {
        if let Some(dtype) = fields.text(key)?
            && !matches!(dtype.trim_start_matches("torch."), "float32" | "float16" | "bfloat16")
        {
            return Err(unsupported("the checkpoint's dtype", dtype, "float32, float16, bfloat16").into());
        }
    }
    Ok(())
}

/// Experts are a family's own; every layer has them.
fn refuse_experts(fields: &Fields<'_>, family: &FamilyFacts) -> Result<()> {
    let own: &[&str] = if family.experts.is_some() { &EXPERT_COUNT_KEYS } else { &[] };
    for key in ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"] {
        let n_experts = fields.get(key).filter(|value| value.as_u64() != Some(0));
        if let Some(n_experts) = n_experts.filter(|_| !own.contains(&key)) {
            let value = format!("{key} = {n_experts}");
            return Err(unsupported("a mixture of experts", value, "dense models").into());
        }
    }
    if own.is_empty() {
        return Ok(());
    }
    if let Some(step) = fields.size("decoder_sparse_step")?.filter(|&step| step != 1) {
        return Err(unsupported("decoder_sparse_step", step, "1 (experts in every layer)").into());
    }
    match fields.list("mlp_only_layers")? {
        Some(layers) if !layers.is_empty() => {
            let value = format!("{} layers", layers.len());
            Err(unsupported("mlp_only_layers", value, "none (experts in every layer)").into())
        }
        _ => Ok(()),
    }
}

/// Gemma's own key wins over the one that its first files had besides.
fn refuse_activation(fields: &Fields<'_>, family: &FamilyFacts) -> Result<()> {
    match family.activation {
        Activation::Silu => match fields.text("hidden_act")?.unwrap_or("silu") {
            "silu" | "swish" => Ok(()),
            other => Err(unsupported("hidden_act", other, "silu").into()),
        },
        Activation::GeluTanh => match fields.text("hidden_activation")?.unwrap_or("gelu_pytorch_tanh") {
            "gelu_pytorch_tanh" => Ok(()),
            other => Err(unsupported("hidden_activation", other, "gelu_pytorch_tanh").into()),
        },
    }
}
