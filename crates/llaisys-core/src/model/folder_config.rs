//! `config.json` of a Hugging Face folder -> [`ModelConfig`], old and new spellings.
//!
//! What would change the output and is not implemented is refused by name; keys that do not are not looked at.

use crate::error::{Result, Unsupported};
use crate::formats::FormatError;
use crate::formats::folder::ModelFolder;
use crate::model::config::{ModelConfig, add_ids};
use crate::model::family::{self, FamilyFacts};
use crate::model::fields::Fields;
use crate::model::generation::GenerationConfig;
use crate::model::quantized::Quantization;
use serde_json::Value;

const FILE: &str = "config.json";
/// transformers' default where a file names no base.
const ROPE_THETA_DEFAULT: f64 = 10_000.0;
/// transformers' default of all families here.
const RMS_EPS_DEFAULT: f64 = 1e-6;
/// `Qwen2Config.sliding_window`, used if the switch is on and the window is not stated.
const WINDOW_DEFAULT: usize = 4096;

/// Reads `config.json`, and how matrices are quantised; ids that end an answer are the union of `generation`'s and its own.
///
/// Errors: damage, a missing or wrong key; [`Unsupported`] for what the forward pass lacks.
pub(super) fn read(
    folder: &ModelFolder,
    generation: &GenerationConfig,
) -> Result<(ModelConfig, Option<Quantization>)> {
    let missing = || FormatError::FileMissing { folder: folder.path().to_owned(), name: FILE };
    let map = folder.object(FILE)?.ok_or_else(missing)?;
    let fields = Fields { file: FILE, map: &map };
    let family = family_of(&fields)?;
    refuse_unsupported(&fields, family)?;

    let n_heads = fields.required_size("num_attention_heads")?;
    let d_model = fields.required_size("hidden_size")?;
    let mut eos = generation.eos.clone();
    add_ids(&mut eos, &fields.token_ids("eos_token_id")?);
    let config = ModelConfig {
        family,
        n_layers: fields.required_size("num_hidden_layers")?,
        d_model,
        n_heads,
        n_kv_heads: fields.size("num_key_value_heads")?.unwrap_or(n_heads),
        d_head: d_head(&fields, family, d_model, n_heads)?,
        d_ff: fields.required_size("intermediate_size")?,
        vocab_size: fields.required_size("vocab_size")?,
        max_positions: fields.required_size("max_position_embeddings")?,
        rms_eps: fields.number("rms_norm_eps")?.unwrap_or(RMS_EPS_DEFAULT) as f32,
        rope_theta: rope_theta(&fields)?,
        tied_head: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: family.qkv_bias,
        qk_norm: family.qk_norm,
        bos: fields.token_ids("bos_token_id")?.first().copied(),
        eos,
    };
    config.check()?;
    refuse_window(&fields, &config)?;
    Ok((config, Quantization::read(&fields)?))
}

/// The first of `architectures`, or `model_type` if there are none.
fn family_of(fields: &Fields<'_>) -> Result<&'static FamilyFacts> {
    let key = "architectures";
    if let Some(first) = fields.list(key)?.and_then(<[Value]>::first) {
        let wrong = FormatError::KeyType { file: FILE, key, expected: "a list of strings" };
        let name = first.as_str().ok_or(wrong)?;
        return Ok(family::find(name, |family| family.architecture)?);
    }
    let missing = FormatError::KeyMissing { file: FILE, key };
    let name = fields.text("model_type")?.ok_or(missing)?;
    Ok(family::find(name, |family| family.model_type)?)
}

fn d_head(
    fields: &Fields<'_>,
    family: &FamilyFacts,
    d_model: usize,
    n_heads: usize,
) -> Result<usize, FormatError> {
    if let Some(d_head) = fields.size("head_dim")?.or(family.d_head_default) {
        return Ok(d_head);
    }
    let uneven = FormatError::NotAMultiple {
        what: "hidden_size",
        got: d_model,
        of: "num_attention_heads",
        divisor: n_heads,
    };
    d_model.checked_div(n_heads).filter(|_| d_model.is_multiple_of(n_heads)).ok_or(uneven)
}

/// New spelling: `rope_parameters.rope_theta`; old: `rope_theta` beside `rope_scaling`.
fn rope_theta(fields: &Fields<'_>) -> Result<f64> {
    let mut theta = fields.number("rope_theta")?;
    refuse_partial_rotation(fields)?;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(rope) = fields.object(key)? else { continue };
        if rope.map.values().any(Value::is_object) {
            return Err(unsupported(key, "one set for each layer type", "one set for all layers").into());
        }
        refuse_partial_rotation(&rope)?;
        let kind = rope.text("rope_type")?.or(rope.text("type")?);
        // A set without a type is the default one as long as it scales nothing.
        let kind =
            kind.unwrap_or(if rope.get("factor").is_some() { "factor without a type" } else { "default" });
        if kind != "default" {
            return Err(unsupported("the rope type", kind, "default").into());
        }
        theta = rope.number("rope_theta")?.or(theta);
    }
    Ok(theta.unwrap_or(ROPE_THETA_DEFAULT))
}

fn refuse_partial_rotation(fields: &Fields<'_>) -> Result<()> {
    match fields.number("partial_rotary_factor")? {
        Some(factor) if factor != 1.0 => {
            Err(unsupported("partial_rotary_factor", factor, "1.0 (the whole head is rotated)").into())
        }
        _ => Ok(()),
    }
}

fn refuse_unsupported(fields: &Fields<'_>, family: &FamilyFacts) -> Result<()> {
    for key in ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"] {
        if let Some(n_experts) = fields.get(key).filter(|value| value.as_u64() != Some(0)) {
            return Err(
                unsupported("a mixture of experts", format!("{key} = {n_experts}"), "dense models").into()
            );
        }
    }
    let act = fields.text("hidden_act")?.unwrap_or("silu");
    if !matches!(act, "silu" | "swish") {
        return Err(unsupported("hidden_act", act, "silu").into());
    }
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
    for key in ["dtype", "torch_dtype"] {
        if let Some(dtype) = fields.text(key)?
            && !matches!(dtype.trim_start_matches("torch."), "float32" | "float16" | "bfloat16")
        {
            return Err(unsupported("the checkpoint's dtype", dtype, "float32, float16, bfloat16").into());
        }
    }
    Ok(())
}

/// A window that is at least as long as the context hides nothing; any other would be needed.
fn refuse_window(fields: &Fields<'_>, config: &ModelConfig) -> Result<()> {
    const FULL: &str = "full_attention";
    for kind in fields.list("layer_types")?.unwrap_or_default() {
        if kind.as_str() != Some(FULL) {
            return Err(unsupported("the layer type", kind.as_str().unwrap_or("not a string"), FULL).into());
        }
    }
    let stated = fields.size("sliding_window")?;
    let window = match fields.flag("use_sliding_window")? {
        Some(false) => None,
        Some(true) => Some(stated.unwrap_or(WINDOW_DEFAULT)),
        None if config.family.window_needs_switch => None,
        None => stated,
    };
    match window {
        Some(window) if window < config.max_positions => Err(unsupported(
            "a sliding window of attention",
            format!("sliding_window = {window}, max_position_embeddings = {}", config.max_positions),
            "attention over the whole context",
        )
        .into()),
        _ => Ok(()),
    }
}

fn unsupported(what: &'static str, value: impl ToString, supported: &'static str) -> Unsupported {
    Unsupported::Feature { what, value: value.to_string(), supported }
}
