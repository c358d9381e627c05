//! How a model scales its rotation beyond the context that it was first trained on.
//!
//! Frequencies are those of transformers (`modeling_rope_utils`): f32 where it rounds to f32.

use crate::error::{Result, Unsupported};
use crate::formats::FormatError;
use crate::model::config::bounded;
use crate::model::fields::Fields;
use crate::ops::RopeTable;
use serde_json::Value;
use std::f64::consts::TAU;

/// The rotation of some layers.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// What is done to them.
    pub scaling: RopeScaling,
}

/// What is done to the frequencies `theta^(-2i / d_head)`.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Nothing.
    None,
    /// All are divided.
    Linear {
        /// By this.
        factor: f64,
    },
    /// Slow ones are divided, fast ones kept, those between interpolated (Llama 3.1).
    Llama3 {
        /// By this.
        factor: f64,
        /// Turns in the original context up to which a frequency is slow.
        low: f64,
        /// Turns from which it is fast.
        high: f64,
        /// Positions of the original context.
        original: f64,
    },
    /// YaRN (arXiv:2309.00071): slow ones divided, fast ones kept, a ramp over the pairs between.
    Yarn {
        /// By this.
        factor: f64,
        /// Turns in the original context at which a pair is fast.
        beta_fast: f64,
        /// Turns at which it is slow.
        beta_slow: f64,
        /// Positions of the original context.
        original: f64,
        /// The ramp's ends are whole pairs.
        truncate: bool,
        /// Cosine and sine are multiplied by this.
        amplitude: f64,
    },
    /// Each pair is divided by a factor of its own.
    PerPair {
        /// `[d_head / 2]`; empty until the tensor that holds them is read.
        factors: Vec<f32>,
        /// Cosine and sine are multiplied by this.
        amplitude: f64,
    },
}

const FACTOR: (f64, f64) = (1e-3, 1e6);
const POSITIONS: (f64, f64) = (1.0, (1 << 24) as f64);
const TURNS: (f64, f64) = (1e-6, 1e6);
const AMPLITUDE: (f64, f64) = (1e-3, 1e3);
const THETA: (f64, f64) = (1.0, 1e12);

impl RopeConfig {
    /// The unscaled rotation.
    pub fn plain(theta: f64) -> Self {
        Self { theta, scaling: RopeScaling::None }
    }

    /// Refuses numbers out of their bounds.
    pub(super) fn check(&self, d_head: usize) -> Result<(), FormatError> {
        let within = |what, got, (min, max)| bounded(what, got, min, max);
        within("the rope base", self.theta, THETA)?;
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => within("the rope's factor", *factor, FACTOR),
            RopeScaling::Llama3 { factor, low, high, original } => {
                within("the rope's factor", *factor, FACTOR)?;
                within("the rope's low_freq_factor", *low, TURNS)?;
                // The interpolation divides by their distance.
                within("the rope's high_freq_factor", *high, (*low + 1e-6, TURNS.1))?;
                within("the rope's original context", *original, POSITIONS)
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original, amplitude, .. } => {
                within("the rope's factor", *factor, FACTOR)?;
                within("the rope's beta_fast", *beta_fast, TURNS)?;
                within("the rope's beta_slow", *beta_slow, TURNS)?;
                within("the rope's original context", *original, POSITIONS)?;
                // The ramp divides by its logarithm.
                within("the rope base", self.theta, (1.0 + 1e-6, THETA.1))?;
                within("the rope's attention factor", *amplitude, AMPLITUDE)
            }
            RopeScaling::PerPair { factors, amplitude } => {
                within("the rope's attention factor", *amplitude, AMPLITUDE)?;
                let (got, want) = (factors.len(), d_head / 2);
                if got != 0 && got != want {
                    let (what, other) = ("the number of rope factors", "half the head width");
                    return Err(FormatError::Disagree { what, got: got as u64, other, want: want as u64 });
                }
                factors.iter().try_for_each(|&factor| within("a rope factor", f64::from(factor), FACTOR))
            }
        }
    }

    /// The frequencies of heads of `d_head`.
    pub fn table(&self, d_head: usize) -> RopeTable {
        let plain = RopeTable::new(d_head, self.theta);
        match &self.scaling {
            RopeScaling::None => plain,
            RopeScaling::Linear { factor } => plain.scaled(1.0, |_, f| f / factor),
            RopeScaling::Llama3 { factor, low, high, original } => plain.scaled(1.0, |_, f| {
                let turns = original * f / TAU;
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                f * keep + f / factor * (1.0 - keep)
            }),
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original, truncate, amplitude } => {
                let pair =
                    |turns: f64| d_head as f64 * (original / (turns * TAU)).ln() / (2.0 * self.theta.ln());
                let (first, last) = (pair(*beta_fast), pair(*beta_slow));
                let (first, last) = if *truncate { (first.floor(), last.ceil()) } else { (first, last) };
                let (first, last) = (first.max(0.0), last.min((d_head - 1) as f64));
                let last = if first == last { last + 0.001 } else { last };
                plain.scaled(*amplitude as f32, |i, f| {
                    let slow = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
                    f / factor * slow + f * (1.0 - slow)
                })
            }
            RopeScaling::PerPair { factors, amplitude } => {
                plain.scaled(*amplitude as f32, |i, f| f / f64::from(factors[i]))
            }
        }
    }
}

/// YaRN's amplitude where a file states none: `0.1 m ln(factor) + 1`.
pub(super) fn yarn_amplitude(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

/// What is read of `config.json` besides the set itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Context<'a> {
    /// The whole file.
    pub(super) fields: Fields<'a>,
    /// `max_position_embeddings`.
    pub(super) max_positions: usize,
}

impl Context<'_> {
    /// The original context of a set: its own key, or the file's.
    fn original(&self, set: &Fields<'_>) -> Result<Option<usize>, FormatError> {
        const KEY: &str = "original_max_position_embeddings";
        Ok(set.size(KEY)?.or(self.fields.size(KEY)?))
    }
}

/// Reads one set of `rope_scaling` or `rope_parameters`; `theta` where it states no base. Returns also how many
/// positions it is good for. Errors: a type that is not implemented, by name; a missing or wrong key.
pub(super) fn read_set(set: &Fields<'_>, theta: f64, context: Context<'_>) -> Result<(RopeConfig, usize)> {
    refuse_partial_rotation(set)?;
    let theta = set.number("rope_theta")?.unwrap_or(theta);
    let missing = |key| FormatError::KeyMissing { file: set.file, key };
    let required = |key| -> Result<f64> { Ok(set.number(key)?.ok_or_else(|| missing(key))?) };
    let kind = set.text("rope_type")?.or(set.text("type")?);
    let mut max_positions = context.max_positions;
    let original = |key| -> Result<usize> { Ok(context.original(set)?.ok_or_else(|| missing(key))?) };
    const ORIGINAL: &str = "original_max_position_embeddings";
    // A set without a type is the default one as long as it scales nothing.
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
            // Old files leave the original context out and mean the one that they state.
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
            // Beyond the original context all positions turn otherwise, those before included.
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

/// LongRoPE's amplitude where a file states none: `sqrt(1 + ln(factor) / ln(original))`.
pub(super) fn longrope_amplitude(factor: f64, original: usize) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() }
}

fn numbers(set: &Fields<'_>, key: &'static str) -> Result<Option<Vec<f32>>, FormatError> {
    let wrong = || FormatError::KeyType { file: set.file, key, expected: "a list of numbers" };
    let number = |value: &Value| value.as_f64().map(|x| x as f32).ok_or_else(wrong);
    set.list(key)?.map(|values| values.iter().map(number).collect()).transpose()
}

/// Refuses a rotation of a part of each head.
pub(super) fn refuse_partial_rotation(fields: &Fields<'_>) -> Result<()> {
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
