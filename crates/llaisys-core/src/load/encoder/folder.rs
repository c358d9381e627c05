//! The configuration of an encoder in a Hugging Face folder.

use crate::arch::encoder::{EncoderConfig, EncoderSpec, EncoderTask, PositionRule};
use crate::error::{Result, Unsupported};
use crate::load::folder::fields::Fields;
use serde_json::Value;

/// Reads the hyper-parameters. Errors: a missing or wrong key; an option that the forward pass does not implement.
pub(super) fn read_config(
    fields: &Fields<'_>,
    spec: &'static EncoderSpec,
    task: EncoderTask,
    architecture: &'static str,
) -> Result<EncoderConfig> {
    reject_unsupported(fields, spec)?;
    let d_model = fields.required_size("hidden_size")?;
    let stated = fields.required_size("max_position_embeddings")?;
    let first_position = match spec.positions {
        PositionRule::LearnedAfterPad => fields.size("pad_token_id")?.unwrap_or(1).saturating_add(1),
        PositionRule::Learned | PositionRule::Rotated => 0,
    };
    let config = EncoderConfig {
        spec,
        task,
        architecture,
        n_layers: fields.required_size("num_hidden_layers")?,
        d_model,
        n_heads: fields.required_size("num_attention_heads")?,
        d_ff: fields.required_size("intermediate_size")?,
        vocab_size: fields.required_size("vocab_size")?,
        max_positions: stated.saturating_sub(first_position),
        first_position,
        n_types: if spec.has_types { fields.size("type_vocab_size")?.unwrap_or(2) } else { 0 },
        eps: fields.number(spec.eps_key)?.unwrap_or(if spec.pre_norms { 1e-5 } else { 1e-12 }) as f32,
        theta: [
            theta(fields, "sliding_attention", "local_rope_theta", 10_000.0)?,
            theta(fields, "full_attention", "global_rope_theta", 160_000.0)?,
        ],
        window: fields.size("local_attention")?.unwrap_or(128) / 2,
        global_every: fields.size("global_attn_every_n_layers")?.unwrap_or(3),
        pools_mean: fields.text("classifier_pooling")? == Some("mean"),
    };
    config.check()?;
    check_layer_types(fields, &config)?;
    Ok(config)
}

/// The base of the rotary embedding of a kind of layers: `rope_parameters` of transformers 5, or the key of published
/// files. Errors: a scaled rotary embedding.
fn theta(fields: &Fields<'_>, kind: &'static str, key: &'static str, default: f64) -> Result<f64> {
    let set = match fields.object("rope_parameters")? {
        Some(sets) => sets.object(kind)?,
        None => None,
    };
    let Some(set) = set else { return Ok(fields.number(key)?.unwrap_or(default)) };
    match set.text("rope_type")?.unwrap_or("default") {
        "default" => Ok(set.number("rope_theta")?.unwrap_or(default)),
        other => Err(Unsupported::feature("rope_type", other, "default in an encoder").into()),
    }
}

/// Errors: `layer_types` lists other layers than every n-th without a window.
fn check_layer_types(fields: &Fields<'_>, config: &EncoderConfig) -> Result<()> {
    let Some(kinds) = fields.list("layer_types")? else { return Ok(()) };
    let kind = |index| if config.is_local(index) { "sliding_attention" } else { "full_attention" };
    let want: Vec<Value> = (0..config.n_layers).map(|index| kind(index).into()).collect();
    if kinds != want {
        let supported = "every n-th layer full_attention (global_attn_every_n_layers)";
        return Err(Unsupported::feature("layer_types", "another order", supported).into());
    }
    Ok(())
}

/// Rejects options that would need another forward pass.
fn reject_unsupported(fields: &Fields<'_>, spec: &EncoderSpec) -> Result<()> {
    let activation = fields.text(spec.activation_key)?.unwrap_or("gelu");
    if activation != "gelu" {
        return Err(Unsupported::feature(spec.activation_key, activation, "gelu").into());
    }
    const SWITCHES: [&str; 6] =
        ["is_decoder", "add_cross_attention", "attention_bias", "mlp_bias", "norm_bias", "classifier_bias"];
    for key in SWITCHES {
        if fields.flag(key)? == Some(true) {
            return Err(Unsupported::feature(key, true, "false").into());
        }
    }
    for (key, supported) in [
        ("position_embedding_type", &["absolute"][..]),
        ("classifier_pooling", &["cls", "mean"]),
        ("classifier_activation", &["gelu"]),
    ] {
        let stated = fields.text(key)?.unwrap_or(supported[0]);
        if !supported.contains(&stated) {
            return Err(Unsupported::Feature {
                what: key,
                value: stated.to_owned(),
                supported: if supported.len() > 1 { "cls, mean" } else { supported[0] },
            }
            .into());
        }
    }
    for key in ["rope_scaling", "quantization_config"] {
        if let Some(value) = fields.get(key) {
            return Err(Unsupported::feature(key, value, "null in an encoder").into());
        }
    }
    Ok(())
}
