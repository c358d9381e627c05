//! The keys of `config.json` that only Gemma 4 has.

use crate::arch::gemma4::{Gemma4, Placeholders};
use crate::arch::spec::ArchSpec;
use crate::error::{FormatError, Result, Unsupported};
use crate::load::folder::CONFIG_FILE;
use crate::load::folder::fields::Fields;
use crate::ops::KvHeads;
use serde_json::Value;

/// transformers' default of `global_head_dim`.
const D_HEAD_FULL_DEFAULT: usize = 512;
const BIDIRECTIONAL: &str = "use_bidirectional_attention";

/// Returns the row of the architecture with or without experts, which have one name.
pub(super) fn row(fields: &Fields<'_>, arch: &'static ArchSpec) -> Result<&'static ArchSpec, FormatError> {
    if !arch.gemma4 {
        return Ok(arch);
    }
    let has_experts = fields.flag("enable_moe_block")?.unwrap_or(false);
    Ok(crate::arch::spec::with_experts(arch, has_experts))
}

/// Returns the width of heads in layers without a window, where the architecture has its own.
pub(super) fn d_head_full(fields: &Fields<'_>, arch: &ArchSpec) -> Result<Option<usize>, FormatError> {
    if !arch.gemma4 {
        return Ok(None);
    }
    Ok(Some(fields.size("global_head_dim")?.unwrap_or(D_HEAD_FULL_DEFAULT)))
}

/// Reads the sizes of a model with `n_kv_heads` in layers with a window. `whole` is the file, `fields` its text model.
///
/// Errors: a missing key; sizes that disagree; key-value heads that only some layers may have.
pub(super) fn read(
    fields: &Fields<'_>,
    whole: &Fields<'_>,
    arch: &ArchSpec,
    n_kv_heads: usize,
) -> Result<Option<Gemma4>> {
    let Some(d_head) = d_head_full(fields, arch)? else { return Ok(None) };
    const D_INPUT: &str = "hidden_size_per_layer_input";
    if !fields.map.contains_key(D_INPUT) {
        return Err(FormatError::KeyMissing { file: CONFIG_FILE, key: D_INPUT }.into());
    }
    let d_input = fields.size(D_INPUT)?.unwrap_or(0);
    if d_input > 0 {
        let (what, other) = ("vocab_size_per_layer_input", "vocab_size");
        let (got, want) = (fields.required_size(what)? as u64, fields.required_size(other)? as u64);
        if got != want {
            return Err(FormatError::Disagree { what, got, other, want }.into());
        }
    }
    const GLOBAL: &str = "num_global_key_value_heads";
    let values_are_keys = fields.flag("attention_k_eq_v")?.unwrap_or(false);
    let n_full = fields.size(GLOBAL)?.unwrap_or(n_kv_heads);
    if n_full != n_kv_heads && !values_are_keys {
        let supported = "as many as num_key_value_heads without attention_k_eq_v";
        return Err(Unsupported::feature(GLOBAL, n_full, supported).into());
    }
    Ok(Some(Gemma4 {
        full_heads: KvHeads { n_kv_heads: n_full, d_head },
        values_are_keys,
        n_shared: fields.size("num_kv_shared_layers")?.unwrap_or(0),
        widens_shared: fields.flag("use_double_wide_mlp")?.unwrap_or(false),
        d_input,
        placeholders: placeholders(fields, whole)?,
    }))
}

/// Reads the tokens that stand for images, sound and video. They are outside of `text_config`, and a text model alone has
/// none. Errors: more than one id for a key.
fn placeholders(fields: &Fields<'_>, whole: &Fields<'_>) -> Result<Placeholders, FormatError> {
    if whole.get("text_config").is_none() {
        return Ok(Placeholders::default());
    }
    let first = |fields: &Fields<'_>, key| fields.token_ids(key).map(|ids| ids.first().copied());
    let mut ids = [None; 3];
    for (id, key) in ids.iter_mut().zip(["image_token_id", "audio_token_id", "video_token_id"]) {
        *id = first(whole, key)?;
    }
    Ok(Placeholders { ids, embeds_as: first(fields, "pad_token_id")?.unwrap_or(0) })
}

/// Rejects attention in both directions, except between the tokens of an image, which a text model never has.
pub(super) fn reject_bidirectional(fields: &Fields<'_>) -> Result<()> {
    match fields.get(BIDIRECTIONAL) {
        None | Some(Value::Bool(false)) => Ok(()),
        Some(Value::String(kind)) if kind == "vision" => Ok(()),
        Some(other) => Err(Unsupported::feature(BIDIRECTIONAL, other, "null, or \"vision\"").into()),
    }
}
