//! The rotary embedding in `config.json`: `rope_scaling` or `rope_parameters`.

use crate::arch::bounds::bounded;
use crate::arch::rope::{
    LongRope, NOT_TURNED, QueryScaling, RopeConfig, RopeRules, RopeScaling, longrope_amplitude,
    yarn_amplitude,
};
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
    /// Those of the architecture.
    pub(super) rules: &'a RopeRules,
    /// The width of heads where a set may state which share of their pairs turns; None: it may not.
    pub(super) proportional: Option<usize>,
}

impl Context<'_> {
    /// Reads the original context of a set: its own key, or the file's.
    fn original(&self, set: &Fields<'_>) -> Result<Option<usize>, FormatError> {
        const KEY: &str = "original_max_position_embeddings";
        Ok(set.size(KEY)?.or(self.fields.size(KEY)?))
    }
}

/// One set of `rope_scaling` or `rope_parameters`.
pub(super) struct RopeSet {
    pub(super) rope: RopeConfig,
    pub(super) long: Option<LongRope>,
    /// The rotated share of each head, if the set has it.
    pub(super) partial: Option<f64>,
    pub(super) query_scaling: Option<QueryScaling>,
}

/// Reads one set. `theta` is the default base. Errors: a type that is not implemented; a missing or wrong key.
pub(super) fn read_set(set: &Fields<'_>, theta: f64, context: Context<'_>) -> Result<RopeSet> {
    let theta = set.number("rope_theta")?.unwrap_or(theta);
    let missing = |key| FormatError::KeyMissing { file: set.file, key };
    let required = |key| -> Result<f64> { Ok(set.number(key)?.ok_or_else(|| missing(key))?) };
    let kind = set.text("rope_type")?.or(set.text("type")?);
    let max_positions = context.max_positions;
    let mut long = None;
    let original = |key| -> Result<usize> { Ok(context.original(set)?.ok_or_else(|| missing(key))?) };
    const ORIGINAL: &str = "original_max_position_embeddings";
    // A set without a type and without a factor is the default one.
    let stated = if set.get("factor").is_some() { "factor without a type" } else { "default" };
    // Old names of longrope in Phi-3.
    let is_longrope = matches!(kind, Some("su" | "yarn")) && set.get("short_factor").is_some();
    let scaling = match if is_longrope { "longrope" } else { kind.unwrap_or(stated) } {
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
            let derived = longrope_amplitude(factor, original);
            let amplitude = set.number("attention_factor")?.unwrap_or(derived);
            let factors = |key| -> Result<RopeScaling> {
                let factors = numbers(set, key)?.ok_or_else(|| missing(key))?;
                // An empty list stands for a tensor that is still to be read.
                bounded(key, factors.len() as f64, 1.0, f64::from(u32::MAX))?;
                Ok(RopeScaling::PerPair { factors, amplitude })
            };
            long = Some(LongRope { original, rope: RopeConfig { theta, scaling: factors("long_factor")? } });
            factors("short_factor")?
        }
        "proportional" if let Some(width) = context.proportional => proportional(set, width)?,
        other => {
            let supported = "default, linear, llama3, yarn, longrope";
            return Err(
                Unsupported::Feature { what: "the rope type", value: other.to_owned(), supported }.into()
            );
        }
    };
    Ok(RopeSet {
        rope: RopeConfig { theta, scaling },
        long,
        partial: if kind == Some("proportional") { None } else { partial_rotation(set, context.rules)? },
        query_scaling: query_scaling(set, context)?,
    })
}

/// Reads which pairs of a head of `width` elements turn: the first ones, with the frequencies of the whole head.
/// Errors: a share that is not above 0 and up to 1.
fn proportional(set: &Fields<'_>, width: usize) -> Result<RopeScaling> {
    const KEY: &str = "partial_rotary_factor";
    let share = set.number(KEY)?.unwrap_or(1.0);
    bounded(KEY, share, 1e-3, 1.0)?;
    bounded("global_head_dim", width as f64, 2.0, f64::from(1 << 10))?;
    let n_turned = (share * width as f64 / 2.0) as usize;
    let divisor = set.number("factor")?.unwrap_or(1.0) as f32;
    let factors = (0..width / 2).map(|pair| if pair < n_turned { divisor } else { NOT_TURNED }).collect();
    Ok(RopeScaling::PerPair { factors, amplitude: 1.0 })
}

/// Reads the scaling of queries by position; a `beta` of 0 means none. Errors: one in an architecture without it; none
/// in an architecture with it.
fn query_scaling(set: &Fields<'_>, context: Context<'_>) -> Result<Option<QueryScaling>> {
    const KEY: &str = "llama_4_scaling_beta";
    let stated = set.number(KEY)?;
    if !context.rules.scaled_queries {
        return match stated.filter(|&beta| beta != 0.0) {
            Some(beta) => Err(Unsupported::feature(KEY, beta, "none in this family").into()),
            None => Ok(None),
        };
    }
    let missing = |key| FormatError::KeyMissing { file: set.file, key };
    let beta = stated.ok_or_else(|| missing(KEY))?;
    let original = context.original(set)?.ok_or_else(|| missing("original_max_position_embeddings"))?;
    Ok((beta != 0.0).then_some(QueryScaling { beta, original: original as f64 }))
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

/// Reads the rotated share of each head. Errors: a part in an architecture that rotates whole heads; a share that is
/// not above 0 and up to 1.
pub(super) fn partial_rotation(fields: &Fields<'_>, rules: &RopeRules) -> Result<Option<f64>> {
    const KEY: &str = "partial_rotary_factor";
    let Some(share) = fields.number(KEY)? else { return Ok(None) };
    if share != 1.0 && rules.partial_default.is_none() {
        return Err(Unsupported::feature(KEY, share, "1.0 (the whole head is rotated)").into());
    }
    bounded(KEY, share, 1e-3, 1.0)?;
    Ok(Some(share))
}

/// Reads which layers are rotated: those with a 1 in `no_rope_layers`, or all except every n-th.
///
/// Errors: layers without rotation in an architecture that rotates all; a list of another length.
pub(super) fn rotated_layers(fields: &Fields<'_>, rules: &RopeRules, n_layers: usize) -> Result<Vec<bool>> {
    const KEY: &str = "no_rope_layers";
    let flags = fields.list(KEY)?;
    let is_rotated = |flag: &Value| match flag.as_u64() {
        Some(flag @ (0 | 1)) => Ok(flag == 1),
        _ => Err(FormatError::KeyType { file: fields.file, key: KEY, expected: "a list of 0 and 1" }),
    };
    let Some(every) = rules.unrotated_every else {
        return match flags.map(|flags| flags.iter().filter(|flag| flag.as_u64() != Some(1)).count()) {
            None | Some(0) => Ok(vec![true; n_layers]),
            Some(n) => Err(Unsupported::feature(KEY, format!("{n} layers"), "all layers are rotated").into()),
        };
    };
    if let Some(flags) = flags {
        // Longer lists are valid: only the first ones are used.
        if flags.len() < n_layers {
            let (what, other) = ("the number of no_rope_layers", "num_hidden_layers");
            let (got, want) = (flags.len() as u64, n_layers as u64);
            return Err(FormatError::Disagree { what, got, other, want }.into());
        }
        return Ok(flags[..n_layers].iter().map(is_rotated).collect::<Result<_, _>>()?);
    }
    const INTERVAL: &str = "no_rope_layer_interval";
    let every = fields.size(INTERVAL)?.unwrap_or(every);
    bounded(INTERVAL, every as f64, 1.0, f64::from(u32::MAX))?;
    Ok((0..n_layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect())
}
