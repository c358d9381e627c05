//! The rotary embedding, and its scaling beyond the context of pre-training.
//!
//! Frequencies are those of transformers (`modeling_rope_utils`): f32 where it rounds to f32.

use crate::arch::bounds::bounded;
use crate::error::FormatError;
use crate::ops::RopeTable;
use std::f64::consts::TAU;

/// How the models of an architecture rotate queries and keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeRules {
    /// Base of the frequencies where `config.json` has none.
    pub theta_default: f64,
    /// The rotated share of each head where `config.json` has none. None: whole heads, and a file with another share
    /// is rejected.
    pub partial_default: Option<f64>,
    /// Every n-th layer is not rotated where `config.json` does not list the layers. None: all layers are rotated.
    pub unrotated_every: Option<usize>,
    /// The rotary embedding of layers with a window.
    pub local: LocalRope,
    /// Rotated queries are multiplied by a factor that grows with the position. A folder without its keys is rejected; a
    /// GGUF file without them has a factor of 1.
    pub scaled_queries: bool,
    /// The ends of YaRN's ramp are rounded to whole pairs in a GGUF file, which has no key for it.
    pub gguf_yarn_truncates: bool,
}

impl RopeRules {
    /// Whole heads of all layers are rotated alike.
    pub const PLAIN: Self = Self {
        theta_default: 10_000.0,
        partial_default: None,
        unrotated_every: None,
        local: LocalRope::Same,
        scaled_queries: false,
        gguf_yarn_truncates: true,
    };
}

/// The rotary embedding of layers with a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LocalRope {
    /// That of the other layers.
    Same,
    /// One without scaling, of a base with its own key; this is the default.
    Base(f64),
    /// That of the other layers without their scaling.
    Unscaled,
}

/// Scaling of rotated queries at position p by `1 + beta ln(1 + floor(p / original))`. Keys are not scaled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryScaling {
    /// Growth of the factor.
    pub beta: f64,
    /// Positions of the original context.
    pub original: f64,
}

impl QueryScaling {
    /// Checks that all numbers are within their bounds.
    pub(crate) fn check(&self) -> Result<(), FormatError> {
        bounded("the scaling of queries", self.beta, BETA.0, BETA.1)?;
        bounded("the rope's original context", self.original, POSITIONS.0, POSITIONS.1)
    }

    /// Computes the factor at each position, rounded once. `positions`, `factors`: `[n]`.
    pub fn factors(&self, positions: &[i32], factors: &mut [f32]) {
        for (factor, &position) in factors.iter_mut().zip(positions) {
            *factor = (1.0 + self.beta * (f64::from(position) / self.original).floor().ln_1p()) as f32;
        }
    }
}

/// The rotary embedding of contexts that are longer than the original one (LongRoPE, arXiv:2402.13753). It applies to
/// all positions of such a context, the first ones included.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    /// Positions of the original context.
    pub original: usize,
    /// The rotary embedding.
    pub rope: RopeConfig,
}

/// The rotary embedding of some layers.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
}

/// Scaling of the frequencies `theta^(-2i / d_rope)`.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// None.
    None,
    /// All frequencies are divided.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Slow frequencies are divided, fast ones kept, and those in between interpolated (Llama 3.1).
    Llama3 {
        /// Divisor.
        factor: f64,
        /// Rotations within the original context up to which a frequency is slow.
        low: f64,
        /// Rotations from which it is fast.
        high: f64,
        /// Positions of the original context.
        original: f64,
    },
    /// YaRN (arXiv:2309.00071): slow frequencies are divided and fast ones kept, with a ramp over the pairs in between.
    Yarn {
        /// Divisor.
        factor: f64,
        /// Rotations within the original context at which a pair is fast.
        beta_fast: f64,
        /// Rotations at which it is slow.
        beta_slow: f64,
        /// Positions of the original context.
        original: f64,
        /// The ends of the ramp are rounded to whole pairs.
        truncate: bool,
        /// Cosine and sine are multiplied by this.
        amplitude: f64,
    },
    /// The frequency of each pair is divided by its own factor; pairs with a factor of [`NOT_TURNED`] are not rotated.
    PerPair {
        /// `[d_rope / 2]`; empty until the tensor with the factors is read.
        factors: Vec<f32>,
        /// Cosine and sine are multiplied by this.
        amplitude: f64,
    },
}

/// The factor of pairs that are not rotated.
pub const NOT_TURNED: f32 = 1e30;

const FACTOR: (f64, f64) = (1e-3, 1e6);
const POSITIONS: (f64, f64) = (1.0, (1 << 24) as f64);
const ROTATIONS: (f64, f64) = (1e-6, 1e6);
const AMPLITUDE: (f64, f64) = (1e-3, 1e3);
const THETA: (f64, f64) = (1.0, 1e12);
const BETA: (f64, f64) = (1e-6, 1e3);

impl RopeConfig {
    /// A rotary embedding without scaling.
    pub fn plain(theta: f64) -> Self {
        Self { theta, scaling: RopeScaling::None }
    }

    /// Checks that all numbers are within their bounds.
    pub(crate) fn check(&self, d_rope: usize) -> Result<(), FormatError> {
        let within = |what, got, (min, max)| bounded(what, got, min, max);
        within("the rope base", self.theta, THETA)?;
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => within("the rope's factor", *factor, FACTOR),
            RopeScaling::Llama3 { factor, low, high, original } => {
                within("the rope's factor", *factor, FACTOR)?;
                within("the rope's low_freq_factor", *low, ROTATIONS)?;
                // The interpolation divides by their distance.
                within("the rope's high_freq_factor", *high, (*low + 1e-6, ROTATIONS.1))?;
                within("the rope's original context", *original, POSITIONS)
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original, amplitude, .. } => {
                within("the rope's factor", *factor, FACTOR)?;
                within("the rope's beta_fast", *beta_fast, ROTATIONS)?;
                within("the rope's beta_slow", *beta_slow, ROTATIONS)?;
                within("the rope's original context", *original, POSITIONS)?;
                // The ramp divides by its logarithm.
                within("the rope base", self.theta, (1.0 + 1e-6, THETA.1))?;
                within("the rope's attention factor", *amplitude, AMPLITUDE)
            }
            RopeScaling::PerPair { factors, amplitude } => {
                within("the rope's attention factor", *amplitude, AMPLITUDE)?;
                let (got, want) = (factors.len(), d_rope / 2);
                if got != 0 && got != want {
                    let (what, other) = ("the number of rope factors", "half the rotated width of a head");
                    return Err(FormatError::Disagree { what, got: got as u64, other, want: want as u64 });
                }
                let mut turned = factors.iter().filter(|&&factor| factor != NOT_TURNED);
                turned.try_for_each(|&factor| within("a rope factor", f64::from(factor), FACTOR))
            }
        }
    }

    /// The frequency table for heads of which `d_rope` elements are rotated.
    pub fn table(&self, d_rope: usize) -> RopeTable {
        let plain = RopeTable::new(d_rope, self.theta);
        match &self.scaling {
            RopeScaling::None => plain,
            RopeScaling::Linear { factor } => plain.scaled(1.0, |_, f| f / factor),
            RopeScaling::Llama3 { factor, low, high, original } => plain.scaled(1.0, |_, f| {
                let rotations = original * f / TAU;
                let keep = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
                f * keep + f / factor * (1.0 - keep)
            }),
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original, truncate, amplitude } => {
                let pair = |rotations: f64| {
                    d_rope as f64 * (original / (rotations * TAU)).ln() / (2.0 * self.theta.ln())
                };
                let (first, last) = (pair(*beta_fast), pair(*beta_slow));
                let (first, last) = if *truncate { (first.floor(), last.ceil()) } else { (first, last) };
                let (first, last) = (first.max(0.0), last.min((d_rope - 1) as f64));
                let last = if first == last { last + 0.001 } else { last };
                plain.scaled(*amplitude as f32, |i, f| {
                    let slow = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
                    f / factor * slow + f * (1.0 - slow)
                })
            }
            RopeScaling::PerPair { factors, amplitude } => {
                let is_turned = |i: usize| factors[i] != NOT_TURNED;
                plain.scaled(
                    *amplitude as f32,
                    |i, f| if is_turned(i) { f / f64::from(factors[i]) } else { 0.0 },
                )
            }
        }
    }
}

/// Returns the amplitude of YaRN where the file has none: `0.1 m ln(factor) + 1`.
pub(crate) fn yarn_amplitude(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

/// Returns the amplitude of LongRoPE where the file has none: `sqrt(1 + ln(factor) / ln(original))`.
pub(crate) fn longrope_amplitude(factor: f64, original: usize) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() }
}
