//! `softmax_weights`: the weights of a draw, and their sums. Reference: `ops/reference/softmax_weights.rs`.
//!
//! Only additions and multiplications in f64, each rounded by itself, in the same order with every instruction set: so
//! each weight and each sum has the same bits everywhere. The compiler makes vectors of the plain loops.

use super::argmax::largest;
use super::dispatch::Kernels;
use super::isa::lanes::{Kernel, Lanes};
use std::f64::consts::LOG2_E;

/// Exponents up to this one have the weight 0. A whole vocabulary of weights below e^-40 = 4e-18 is below the rounding
/// of a sum that has the weight 1 in it.
pub const NEGLIGIBLE: f64 = -40.0;

/// Logits whose weights are added first. Parts without a weight are skipped.
pub const WEIGHT_PART: usize = 64;

/// Sums in a part that can be added at the same time.
const LANES: usize = 8;

/// How a logit becomes a weight: `exp((logit - best) * scale)`.
#[derive(Debug, Clone, Copy)]
pub struct SoftmaxWeights {
    /// The instruction set.
    pub kernels: Kernels,
    /// The largest logit, which has the weight 1. Finite.
    pub best: f32,
    /// One divided by the temperature.
    pub scale: f64,
}

impl SoftmaxWeights {
    /// The exponent of a logit's weight.
    pub fn exponent(&self, logit: f32) -> f64 {
        (f64::from(logit) - f64::from(self.best)) * self.scale
    }

    /// Writes the weights of up to [`WEIGHT_PART`] logits, and zeros after them.
    ///
    /// Panics if there are more logits.
    pub fn of_part(&self, logits: &[f32], weights: &mut [f64; WEIGHT_PART]) {
        self.kernels.proof().run(Part { spec: self, logits, weights });
    }

    /// Appends the sum of the weights of each [`WEIGHT_PART`] logits to `sums`.
    pub fn sums(&self, logits: &[f32], sums: &mut Vec<f64>) {
        self.kernels.proof().run(Sums { spec: self, logits, sums });
    }
}

struct Part<'a> {
    spec: &'a SoftmaxWeights,
    logits: &'a [f32],
    weights: &'a mut [f64; WEIGHT_PART],
}

impl Kernel for Part<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        weigh(self.spec, self.logits, self.weights);
    }
}

struct Sums<'a> {
    spec: &'a SoftmaxWeights,
    logits: &'a [f32],
    sums: &'a mut Vec<f64>,
}

impl Kernel for Sums<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let mut weights = [0.0; WEIGHT_PART];
        for part in self.logits.chunks(WEIGHT_PART) {
            let mut lanes = [0.0; LANES];
            if self.spec.exponent(largest(part)) > NEGLIGIBLE {
                weigh(self.spec, part, &mut weights);
                for group in weights.as_chunks::<LANES>().0 {
                    for (sum, weight) in lanes.iter_mut().zip(group) {
                        *sum += weight;
                    }
                }
            }
            self.sums.push(lanes.iter().sum());
        }
    }
}

#[inline(always)]
fn weigh(spec: &SoftmaxWeights, logits: &[f32], weights: &mut [f64; WEIGHT_PART]) {
    let (best, scale) = (f64::from(spec.best), spec.scale);
    let (used, rest) = weights.split_at_mut(logits.len());
    for (weight, &logit) in used.iter_mut().zip(logits) {
        *weight = exp((f64::from(logit) - best) * scale);
    }
    rest.fill(0.0);
}

/// 1.5 * 2^52: a small number added to it is rounded to an integer, whose low bits are those of the sum.
const TO_INTEGER: f64 = 6_755_399_441_055_744.0;
/// ln 2 in two parts: the first has 21 zeros at its end, so its products with small integers are exact.
const LN_2_HIGH: f64 = f64::from_bits(0x3FE6_2E42_FEE0_0000);
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// exp(x) for `NEGLIGIBLE < x <= 0`, 0 for smaller ones: `2^n * exp(r)` with `r = x - n ln 2`, and the Taylor series of
/// exp(r) up to r^13 / 13!, whose rest is below 4e-18 for |r| <= ln(2) / 2. Method: Cody and Waite, Software Manual for
/// the Elementary Functions, 1980.
#[inline(always)]
fn exp(x: f64) -> f64 {
    let bounded = if x > NEGLIGIBLE { x } else { NEGLIGIBLE };
    let shifted = bounded * LOG2_E + TO_INTEGER;
    let n = shifted - TO_INTEGER;
    let r = (bounded - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut y = TAYLOR[0];
    for coefficient in &TAYLOR[1..] {
        y = y * r + coefficient;
    }
    // 2^n, between 2^-58 and 1: n is added to the exponent of 1.
    let power = f64::from_bits((shifted.to_bits() << 52).wrapping_add(1_f64.to_bits()));
    if x > NEGLIGIBLE { y * power } else { 0.0 }
}

/// 1 / 13!, ..., 1 / 1!, 1 / 0!.
const TAYLOR: [f64; 14] = {
    let mut inverse = [1.0; 14];
    let (mut i, mut factorial) = (13, 1.0);
    while i > 0 {
        factorial *= (14 - i) as f64;
        inverse[i - 1] = 1.0 / factorial;
        i -= 1;
    }
    inverse
};
