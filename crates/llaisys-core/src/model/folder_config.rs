//! `config.json` of a Hugging Face folder -> [`ModelConfig`], old and new spellings.
//!
//! What would change the output and is not implemented is refused by name; keys that do not are not looked at.

mod options;
mod window;

use crate::error::{Result, Unsupported};
use crate::formats::FormatError;
use crate::formats::folder::ModelFolder;
use crate::model::config::{Experts, ModelConfig, add_ids};
use crate::model::family::{self, FamilyFacts, SoftCap};
use crate::model::fields::Fields;
use crate::model::generation::GenerationConfig;
use crate::model::quantized::Quantization;
use crate::model::rope::{self, RopeConfig};
use serde_json::Value;

const FILE: &str = "config.json";
/// Both spellings of the number of experts: published files of a family have one of them, transformers 5 writes the
/// second for all.
const EXPERT_COUNT_KEYS: [&str; 2] = ["num_experts", "num_local_experts"];
/// transformers' default where a file names no base.
const ROPE_THETA_DEFAULT: f64 = 10_000.0;
/// transformers' default of all families here.
const RMS_EPS_DEFAULT: f64 = 1e-6;

/// Reads `config.json`, and how matrices are quantised; ids that end an answer are the union of `generation`'s and
/// its own.
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
    options::refuse_unsupported(&fields, family)?;

    let n_layers = fields.required_size("num_hidden_layers")?;
    let n_heads = fields.required_size("num_attention_heads")?;
    let d_model = fields.required_size("hidden_size")?;
    let d_head = d_head(&fields, family, d_model, n_heads)?;
    let stated_positions = fields.required_size("max_position_embeddings")?;
    let ropes = ropes(&fields, family, stated_positions)?;
    let mut eos = generation.eos.clone();
    add_ids(&mut eos, &fields.token_ids("eos_token_id")?);
    let mut config = ModelConfig {
        family,
        names: family.folder_names,
        norm_offset: family.folder_norm_offset,
        n_layers,
        d_model,
        n_heads,
        n_kv_heads: fields.size("num_key_value_heads")?.unwrap_or(n_heads),
        d_head,
        d_ff: fields.required_size(family.experts.map_or("intermediate_size", |keys| keys.d_ff))?,
        vocab_size: fields.required_size("vocab_size")?,
        max_positions: ropes.max_positions,
        rms_eps: fields.number("rms_norm_eps")?.unwrap_or(RMS_EPS_DEFAULT) as f32,
        rope: ropes.rope,
        local_rope: ropes.local,
        window: None,
        windowed: Vec::new(),
        score_scale: score_scale(&fields, family, d_head)?,
        attn_soft_cap: soft_cap(&fields, "attn_logit_softcapping", family.attn_soft_cap)?,
        logit_soft_cap: soft_cap(&fields, "final_logit_softcapping", family.logit_soft_cap)?,
        embed_scale: if family.embed_sqrt {
            (d_model as f32).sqrt()
        } else {
            multiplier(&fields, family, "embedding_multiplier")?
        },
        residual_scale: multiplier(&fields, family, "residual_multiplier")?,
        logit_scale: 1.0 / multiplier(&fields, family, "logits_scaling")?,
        experts: experts(&fields, family)?,
        tied_head: fields.flag("tie_word_embeddings")?.unwrap_or(family.tied_default),
        qkv_bias: family.qkv_bias,
        qk_norm: family.qk_norm != family::QkNorm::None,
        bos: fields.token_ids("bos_token_id")?.first().copied(),
        eos,
    };
    config.check()?;
    (config.window, config.windowed) = window::read(&fields, &config)?;
    config.check()?;
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

/// Rotations, and for how many positions they are good.
struct Ropes {
    rope: RopeConfig,
    local: Option<RopeConfig>,
    max_positions: usize,
}

/// New spelling: `rope_parameters`, one set or, where layers with a window turn otherwise, one for each type of
/// layer; old: `rope_theta` and `rope_local_base_freq` beside `rope_scaling`, which is for the other layers.
fn ropes(fields: &Fields<'_>, family: &FamilyFacts, max_positions: usize) -> Result<Ropes> {
    rope::refuse_partial_rotation(fields)?;
    // The base of layers without a window: transformers' default for Gemma 3 is another.
    let theta_default = if family.local_theta.is_some() { 1e6 } else { ROPE_THETA_DEFAULT };
    let theta = fields.number("rope_theta")?.unwrap_or(theta_default);
    let context = rope::Context { fields: *fields, max_positions };
    let mut ropes = Ropes { rope: RopeConfig::plain(theta), local: None, max_positions };
    if let Some(default) = family.local_theta {
        let theta = fields.number("rope_local_base_freq")?.unwrap_or(default);
        ropes.local = Some(RopeConfig::plain(theta));
    }
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(set) = fields.object(key)? else { continue };
        if !set.map.values().any(Value::is_object) {
            (ropes.rope, ropes.max_positions) = rope::read_set(&set, ropes.rope.theta, context)?;
            continue;
        }
        let Some(local) = &mut ropes.local else {
            return Err(unsupported(key, "one set for each layer type", "one set for all layers").into());
        };
        if let Some(set) = set.object("full_attention")? {
            (ropes.rope, ropes.max_positions) = rope::read_set(&set, ropes.rope.theta, context)?;
        }
        if let Some(set) = set.object("sliding_attention")? {
            *local = rope::read_set(&set, local.theta, context)?.0;
        }
    }
    Ok(ropes)
}

/// `1 / sqrt(d_head)` unless the family says otherwise.
fn score_scale(fields: &Fields<'_>, family: &FamilyFacts, d_head: usize) -> Result<f32> {
    if family.multipliers {
        return multiplier(fields, family, "attention_multiplier");
    }
    let Some(scalar) = family.query_scalar else { return Ok(1.0 / (d_head as f32).sqrt()) };
    let scalar = fields.number("query_pre_attn_scalar")?.unwrap_or(scalar.default as f64);
    Ok(scalar.powf(-0.5) as f32)
}

/// What the file multiplies with, in a family that does.
fn multiplier(fields: &Fields<'_>, family: &FamilyFacts, key: &'static str) -> Result<f32> {
    let stated = fields.number(key)?.unwrap_or(1.0);
    if family.multipliers || stated == 1.0 {
        return Ok(stated as f32);
    }
    Err(unsupported(key, stated, "1.0 in this family").into())
}

/// A cap that the file states; null means none.
fn soft_cap(fields: &Fields<'_>, key: &'static str, rule: SoftCap) -> Result<Option<f32>> {
    let stated = fields.number(key)?;
    match rule {
        SoftCap::Stated(default) if !fields.map.contains_key(key) => Ok(default.map(|cap| cap as f32)),
        SoftCap::Stated(_) => Ok(stated.map(|cap| cap as f32)),
        SoftCap::Refused => match stated {
            None => Ok(None),
            Some(cap) => Err(unsupported(key, cap, "null in this family").into()),
        },
    }
}

fn experts(fields: &Fields<'_>, family: &FamilyFacts) -> Result<Option<Experts>> {
    let Some(keys) = family.experts else { return Ok(None) };
    let [what, other] = EXPERT_COUNT_KEYS;
    let n = match (fields.size(what)?, fields.size(other)?) {
        (Some(got), Some(want)) if got != want => {
            let (got, want) = (got as u64, want as u64);
            return Err(FormatError::Disagree { what, got, other, want }.into());
        }
        (stated, other) => stated.or(other),
    };
    Ok(Some(Experts {
        n: n.ok_or(FormatError::KeyMissing { file: FILE, key: keys.n })?,
        n_used: fields.required_size("num_experts_per_tok")?,
        normalise: match keys.normalise {
            Some(key) => fields.flag(key)?.unwrap_or(false),
            None => true,
        },
    }))
}

fn unsupported(what: &'static str, value: impl ToString, supported: &'static str) -> Unsupported {
    Unsupported::Feature { what, value: value.to_string(), supported }
}
