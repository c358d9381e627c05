//! Reads [`ModelConfig`] from `config.json` of a Hugging Face folder, in old and new spellings.
//!
//! Unimplemented keys that would change the output are rejected by name; other keys are ignored.

use crate::arch::config::{ModelConfig, add_ids};
use crate::arch::rope::{LocalRope, LongRope, QueryScaling, RopeConfig};
use crate::arch::spec::{self, ArchSpec, SoftCap};
use crate::arch::wrapper::WRAPPERS;
use crate::error::{FormatError, Result, Unsupported};
use crate::load::folder::fields::Fields;
use crate::load::folder::generation_config::GenerationConfig;
use crate::load::folder::quantization::Quantization;
use crate::load::folder::rope;
use crate::load::folder::text_config::{self, TextConfig};
use crate::load::folder::{CONFIG_FILE as FILE, ModelFolder};
use crate::load::folder::{experts, gemma4, options, recurrent, window};
use serde_json::Value;

/// Reads `config.json`, including how matrices are quantized. The ids that end a completion are its own and those of
/// `generation`.
///
/// Errors: damage, a missing or wrong key; [`Unsupported`] for what the forward pass does not implement.
pub(crate) fn read(
    folder: &ModelFolder,
    generation: &GenerationConfig,
) -> Result<(ModelConfig, Option<Quantization>)> {
    let whole = Fields { file: FILE, map: folder.config()? };
    let TextConfig { map, wrapper } = text_config::read(&whole)?;
    let fields = Fields { file: FILE, map: &map };
    let arch = gemma4::row(&fields, architecture_of(&fields)?)?;
    options::reject_unsupported(&fields, arch)?;

    let n_layers = fields.required_size("num_hidden_layers")?;
    let n_heads = fields.required_size("num_attention_heads")?;
    let d_model = fields.required_size("hidden_size")?;
    let d_head = d_head(&fields, arch, d_model, n_heads)?;
    let n_kv_heads = fields.size("num_key_value_heads")?.unwrap_or(n_heads);
    let max_positions = fields.required_size("max_position_embeddings")?;
    let ropes = ropes(&fields, arch, d_head, max_positions)?;
    let mut eos = generation.eos.clone();
    for fields in [fields, whole] {
        add_ids(&mut eos, &fields.token_ids("eos_token_id")?);
    }
    let mut config = ModelConfig {
        arch,
        names: arch.folder_names,
        wrapper,
        norm_offset: arch.folder_norm_offset,
        n_layers,
        d_model,
        n_heads,
        n_kv_heads,
        d_head,
        d_ff: options::d_ff(&fields, arch)?,
        vocab_size: fields.required_size("vocab_size")?,
        max_positions,
        rms_eps: fields.number(arch.rms_eps_key)?.unwrap_or(arch.rms_eps_default) as f32,
        d_rope: (d_head as f64 * ropes.partial) as usize,
        rope: ropes.rope,
        long_rope: ropes.long,
        local_rope: ropes.local,
        rotated: Vec::new(),
        query_scaling: ropes.query_scaling,
        window: None,
        windowed: Vec::new(),
        recurrent_layer: recurrent::layer(&fields, arch, d_model)?,
        recurrent: Vec::new(),
        score_scale: score_scale(&fields, arch, d_head)?,
        attn_soft_cap: soft_cap(&fields, "attn_logit_softcapping", arch.attn_soft_cap)?,
        logit_soft_cap: soft_cap(&fields, "final_logit_softcapping", arch.logit_soft_cap)?,
        embed_scale: if arch.embed_sqrt {
            (d_model as f32).sqrt()
        } else {
            multiplier(&fields, arch, "embedding_multiplier")?
        },
        residual_scale: multiplier(&fields, arch, "residual_multiplier")?,
        logit_scale: 1.0 / multiplier(&fields, arch, "logits_scaling")?,
        gate: options::gate(&fields, arch)?,
        experts: experts::read(&fields, arch)?,
        d_shared: recurrent::d_shared(&fields, arch)?,
        gemma4: gemma4::read(&fields, &whole, arch, n_kv_heads)?,
        tied_head: options::is_tied(&fields, arch)?,
        qkv_bias: options::has_bias(&fields, arch.biases.qkv)?,
        o_bias: options::has_bias(&fields, arch.biases.o)?,
        mlp_bias: options::has_bias(&fields, arch.biases.mlp)?,
        qk_norm: arch.qk_norm != spec::QkNorm::None,
        bos: fields.token_ids("bos_token_id")?.first().copied(),
        eos,
    };
    config.check()?;
    config.recurrent = recurrent::layers(&fields, arch, n_layers)?;
    (config.window, config.windowed) = window::read(&fields, &config)?;
    if let Some(gemma4) = config.gemma4 {
        gemma4.check_layers(&config.windowed)?;
    }
    config.rotated = rope::rotated_layers(&fields, &arch.rope, n_layers)?;
    config.check()?;
    options::expect_rotation(&fields, arch)?;
    Ok((config, Quantization::read(&fields)?))
}

/// The first of `architectures`, or `model_type` if there are none.
fn architecture_of(fields: &Fields<'_>) -> Result<&'static ArchSpec> {
    let key = "architectures";
    if let Some(first) = fields.list(key)?.and_then(<[Value]>::first) {
        let wrong = FormatError::KeyType { file: FILE, key, expected: "a list of strings" };
        let name = first.as_str().ok_or(wrong)?;
        return Ok(spec::find(name, |arch| arch.architecture).map_err(with_wrappers)?);
    }
    let missing = FormatError::KeyMissing { file: FILE, key };
    let name = fields.text("model_type")?.ok_or(missing)?;
    Ok(spec::find(name, |arch| arch.model_type)?)
}

/// Adds the supported multimodal architectures to the error of an unknown one.
fn with_wrappers(error: Unsupported) -> Unsupported {
    let Unsupported::Architecture { name, supported } = error else { return error };
    let wrappers = WRAPPERS.iter().map(|wrapper| wrapper.architecture).collect::<Vec<_>>().join(", ");
    let supported = format!("{supported}; and the same text models in {wrappers}");
    Unsupported::Architecture { name, supported }
}

fn d_head(
    fields: &Fields<'_>,
    arch: &ArchSpec,
    d_model: usize,
    n_heads: usize,
) -> Result<usize, FormatError> {
    if let Some(d_head) = fields.size("head_dim")?.or(arch.d_head_default) {
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

/// Rotary embeddings.
struct Ropes {
    rope: RopeConfig,
    long: Option<LongRope>,
    local: Option<RopeConfig>,
    /// The rotated share of each head.
    partial: f64,
    query_scaling: Option<QueryScaling>,
}

impl Ropes {
    /// Replaces the rotary embedding of layers without a window.
    fn set(&mut self, set: rope::RopeSet) {
        (self.rope, self.long, self.query_scaling) = (set.rope, set.long, set.query_scaling);
        self.partial = set.partial.unwrap_or(self.partial);
    }
}

/// Reads the rotary embeddings. The new spelling is `rope_parameters`: one set, or one for each type of layer where
/// layers with a window differ. The old one is `rope_theta` and `rope_local_base_freq`, with `rope_scaling` for layers
/// without a window.
fn ropes(fields: &Fields<'_>, arch: &ArchSpec, d_head: usize, max_positions: usize) -> Result<Ropes> {
    let rules = &arch.rope;
    let theta = fields.number("rope_theta")?.unwrap_or(rules.theta_default);
    let local_theta = match rules.local {
        LocalRope::Same => None,
        LocalRope::Base(default) => Some(fields.number("rope_local_base_freq")?.unwrap_or(default)),
        LocalRope::Unscaled => Some(theta),
    };
    let partial = rope::partial_rotation(fields, rules)?.or(rules.partial_default).unwrap_or(1.0);
    let mut ropes = Ropes {
        rope: RopeConfig::plain(theta),
        long: None,
        local: local_theta.map(RopeConfig::plain),
        partial,
        query_scaling: None,
    };
    let d_head_full = gemma4::d_head_full(fields, arch)?;
    let context = rope::Context { fields: *fields, max_positions, rules, proportional: None };
    let mut has_set = false;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(set) = fields.object(key)? else { continue };
        has_set = true;
        if arch.rope_alpha
            && let Some(theta) = rope::stretched_base(&set, theta, d_head)?
        {
            ropes.rope = RopeConfig::plain(theta);
            continue;
        }
        if !arch.gemma4 && !set.map.values().any(Value::is_object) {
            ropes.set(rope::read_set(&set, ropes.rope.theta, context)?);
            if rules.local == LocalRope::Unscaled {
                ropes.local = Some(RopeConfig::plain(ropes.rope.theta));
            }
            continue;
        }
        let Some(local_theta) = ropes.local.as_ref().map(|local| local.theta) else {
            return Err(
                Unsupported::feature(key, "one set for each layer type", "one set for all layers").into()
            );
        };
        if let Some(set) = set.object("full_attention")? {
            let context = rope::Context { proportional: d_head_full, ..context };
            ropes.set(rope::read_set(&set, ropes.rope.theta, context)?);
        } else if arch.gemma4 {
            return Err(FormatError::KeyMissing { file: FILE, key: "rope_parameters.full_attention" }.into());
        }
        if let Some(set) = set.object("sliding_attention")? {
            ropes.local = Some(rope::read_set(&set, local_theta, context)?.rope);
        }
    }
    if (rules.scaled_queries || arch.gemma4) && !has_set {
        return Err(FormatError::KeyMissing { file: FILE, key: "rope_parameters" }.into());
    }
    Ok(ropes)
}

/// Returns the scale of scores: `1 / sqrt(d_head)`, except in architectures with a key for it.
fn score_scale(fields: &Fields<'_>, arch: &ArchSpec, d_head: usize) -> Result<f32> {
    if arch.multipliers {
        return multiplier(fields, arch, "attention_multiplier");
    }
    if arch.gemma4 {
        return Ok(1.0);
    }
    let Some(scalar) = arch.query_scalar else { return Ok(1.0 / (d_head as f32).sqrt()) };
    let scalar = fields.number("query_pre_attn_scalar")?.unwrap_or(scalar.default as f64);
    Ok(scalar.powf(-0.5) as f32)
}

/// Reads a multiplier. Errors: one other than 1 in an architecture without multipliers.
fn multiplier(fields: &Fields<'_>, arch: &ArchSpec, key: &'static str) -> Result<f32> {
    let stated = fields.number(key)?.unwrap_or(1.0);
    if arch.multipliers || stated == 1.0 {
        return Ok(stated as f32);
    }
    Err(Unsupported::feature(key, stated, "1.0 in this family").into())
}

/// Reads a soft cap; null means none. Errors: one in an architecture without it.
fn soft_cap(fields: &Fields<'_>, key: &'static str, rule: SoftCap) -> Result<Option<f32>> {
    let stated = fields.number(key)?;
    match rule {
        SoftCap::Stated(default) if !fields.map.contains_key(key) => Ok(default.map(|cap| cap as f32)),
        SoftCap::Stated(_) => Ok(stated.map(|cap| cap as f32)),
        SoftCap::Unsupported => match stated {
            None => Ok(None),
            Some(cap) => Err(Unsupported::feature(key, cap, "null in this family").into()),
        },
    }
}
