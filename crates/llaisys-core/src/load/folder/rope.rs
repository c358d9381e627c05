//! The rotary embedding in `config.json`: `rope_scaling` or `rope_parameters`.

use crate::arch::bounds::bounded;
use crate::arch::rope::{RopeConfig, RopeScaling, longrope_amplitude, yarn_amplitude};
use crate::error::{FormatError, Result, Unsupported};
use crate::load::folder::fields::Fields;
use serde_json::Value;

/// Bounds of the factor that stretches a base.
const ALPHA: (f64, f64) = (1.0, 1e6);

/// The parts of `config.json` outside of the set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Context<'a> {
    /// The whole file.
    pub(super) fields: Fields<'a>,
    /// `max_position_embeddings`.
    pub(super) max_positions: usize,
}

impl Context<'_> {
    /// Reads the original context of a set: its own key, or the file's.
    fn original(&self, set: &Fields<'_>) -> Result<Option<usize>, FormatError> {
        const KEY: &str = "original_max_position_embeddings";
        Ok(set.size(KEY)?.or(self.fields.size(KEY)?))
    }
}

/// Reads one set of `rope_scaling` or `rope_parameters`. `theta` is the default base. Also returns the number of
/// positions that it is valid for. Errors: a type that is not implemented; a missing or wrong key.
pub(super) fn read_set(set: &Fields<'_>, theta: f64, context: Context<'_>) -> Result<(RopeConfig, usize)> {
    reject_partial_rotation(set)?;
    let theta = set.number("rope_theta")?.unwrap_or(theta);
    let missing = |key| FormatError::KeyMissing { file: set.file, key };
    let required = |key| -> Result<f64> { Ok(set.number(key)?.ok_or_else(|| missing(key))?) };
    let kind = set.text("rope_type")?.or(set.text("type")?);
    let mut max_positions = context.max_positions;
    let original = |key| -> Result<usize> { Ok(context.original(set)?.ok_or_else(|| missing(key))?) };
    const ORIGINAL: &str = "original_max_position_embeddings";
    // A set without a type and without a factor is the default one.
    let stated = if set.get("factor").is_some() { "factor without a type" } else { "default" };
    let scaling = match kind.unwrap_or(stated) {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: required("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: required("factor")?,
            low: required("low_freq_factor")?,
            high: required("high_freq_factor")?,
            original: original(ORIGINAL)? as f64,
        },
        "yarn" => {
            // Old files omit the original context and mean `max_position_embeddings`.
            let original = context.original(set)?.unwrap_or(max_positions) as f64;
            let factor = set.number("factor")?.unwrap_or(max_positions as f64 / original);
            let m = |key| -> Result<Option<f64>> { Ok(set.number(key)?.filter(|&m| m != 0.0)) };
            let derived = match (m("mscale")?, m("mscale_all_dim")?) {
                (Some(m), Some(all)) => yarn_amplitude(factor, m) / yarn_amplitude(factor, all),
                _ => yarn_amplitude(factor, 1.0),
            };
            RopeScaling::Yarn {
                factor,
                beta_fast: m("beta_fast")?.unwrap_or(32.0),
                beta_slow: m("beta_slow")?.unwrap_or(1.0),
                original,
                truncate: set.flag("truncate")?.unwrap_or(true),
                amplitude: set.number("attention_factor")?.unwrap_or(derived),
            }
        }
        "longrope" => {
            let original = original(ORIGINAL)?;
            let factor = set.number("factor")?.unwrap_or(max_positions as f64 / original as f64);
            // A longer context would need other factors at all positions.
            max_positions = max_positions.min(original);
            let derived = longrope_amplitude(factor, original);
            let factors = numbers(set, "short_factor")?.ok_or_else(|| missing("short_factor"))?;
            RopeScaling::PerPair { factors, amplitude: set.number("attention_factor")?.unwrap_or(derived) }
        }
        other => {
            let supported = "default, linear, llama3, yarn, longrope";
            return Err(
                Unsupported::Feature { what: "the rope type", value: other.to_owned(), supported }.into()
            );
        }
    };
    Ok((RopeConfig { theta, scaling }, max_positions))
}

/// Returns the base of a dynamic set with `alpha`: `theta * alpha^(d / (d - 2))`, for sequences of every length. None for
/// other sets. Errors: a key of another type, or out of bounds.
pub(super) fn stretched_base(set: &Fields<'_>, theta: f64, d_head: usize) -> Result<Option<f64>> {
    let kind = set.text("rope_type")?.or(set.text("type")?);
    // transformers takes 0 for none.
    let Some(alpha) = set.number("alpha")?.filter(|&alpha| alpha != 0.0 && kind == Some("dynamic")) else {
        return Ok(None);
    };
    bounded("the rope's alpha", alpha, ALPHA.0, ALPHA.1)?;
    let theta = set.number("rope_theta")?.unwrap_or(theta);
    let width = d_head as f64;
    Ok(Some(theta * alpha.powf(width / (width - 2.0))))
}

fn numbers(set: &Fields<'_>, key: &'static str) -> Result<Option<Vec<f32>>, FormatError> {
    let wrong = || FormatError::KeyType { file: set.file, key, expected: "a list of numbers" };
    let number = |value: &Value| value.as_f64().map(|x| x as f32).ok_or_else(wrong);
    set.list(key)?.map(|values| values.iter().map(number).collect()).transpose()
}

/// Rejects rotary embeddings of a part of each head.
pub(super) fn reject_partial_rotation(fields: &Fields<'_>) -> Result<()> {
    match fields.number("partial_rotary_factor")? {
        Some(factor) if factor != 1.0 => Err(Unsupported::Feature {
            what: "partial_rotary_factor",
            value: factor.to_string(),
            supported: "1.0 (the whole head is rotated)",
        }
        .into()),
        _ => Ok(()),
    }
}
