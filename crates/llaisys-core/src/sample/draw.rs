//! The draw of a token from a row of logits. Only the weights that can matter are computed and listed: a vocabulary has
//! a hundred thousand, of which the filters usually keep a few.

use super::filters::{self, Candidate, NucleusScratch};
use super::philox;
use super::spec::SamplerSpec;
use crate::ops::dispatch::Kernels;
use crate::ops::{NEGLIGIBLE, SoftmaxWeights, WEIGHT_PART, largest};

/// Buffers that are reused between draws.
#[derive(Debug)]
pub(super) struct DrawScratch {
    kernels: Kernels,
    candidates: Vec<Candidate>,
    keyed: Vec<(f64, Candidate)>,
    nucleus: NucleusScratch,
    sums: Vec<f64>,
}

impl DrawScratch {
    pub(super) fn new(kernels: Kernels) -> Self {
        let (candidates, keyed, nucleus, sums) = Default::default();
        Self { kernels, candidates, keyed, nucleus, sums }
    }
}

/// Draws a token. `best` is the largest logit and is finite. `position` is the number of tokens before the drawn one.
pub(super) fn draw(
    scratch: &mut DrawScratch,
    logits: &[f32],
    best: f32,
    spec: &SamplerSpec,
    position: u32,
) -> u32 {
    let scale = 1.0 / f64::from(spec.temperature);
    let weights = SoftmaxWeights { kernels: scratch.kernels, best, scale };
    let u = philox::uniform(spec.seed, spec.choice, position);
    if !spec.has_filters() {
        return draw_from_all(&mut scratch.sums, logits, weights, u);
    }
    let is_nucleus = spec.top_p < 1.0 && spec.top_k == 0 && spec.min_p == 0.0;
    let total = is_nucleus.then(|| sum_parts(&mut scratch.sums, logits, weights));
    let candidates = &mut scratch.candidates;
    collect(candidates, logits, weights, spec, total);
    filters::min_p(candidates, spec.min_p);
    filters::top_k(candidates, spec.top_k);
    filters::top_p(candidates, spec.top_p, total, &mut scratch.nucleus);
    filters::typical_p(candidates, spec.typical_p, &mut scratch.keyed);
    filters::draw(candidates, u)
}

/// Returns the sum of all weights, and leaves those of the parts in `sums`.
fn sum_parts(sums: &mut Vec<f64>, logits: &[f32], weights: SoftmaxWeights) -> f64 {
    sums.clear();
    weights.sums(logits, sums);
    sums.iter().sum()
}

/// The token at share `u` (in `[0, 1)`) of the summed weights of all tokens: finds its part, then the token.
fn draw_from_all(sums: &mut Vec<f64>, logits: &[f32], weights: SoftmaxWeights, u: f64) -> u32 {
    let wanted = u * sum_parts(sums, logits, weights);
    let (mut part, mut before, mut reached) = (0, 0.0, 0.0);
    // Rounding may leave `reached` slightly below `wanted`, here and in the part: then the last weight is drawn.
    for (i, &sum) in sums.iter().enumerate().filter(|&(_, &sum)| sum > 0.0) {
        (part, before, reached) = (i, reached, reached + sum);
        if reached > wanted {
            break;
        }
    }
    let start = part * WEIGHT_PART;
    let mut of_part = [0.0; WEIGHT_PART];
    weights.of_part(&logits[start..logits.len().min(start + WEIGHT_PART)], &mut of_part);
    let (mut drawn, mut reached) = (0, before);
    for (i, &weight) in of_part.iter().enumerate().filter(|&(_, &weight)| weight > 0.0) {
        (drawn, reached) = (i, reached + weight);
        if reached > wanted {
            break;
        }
    }
    (start + drawn) as u32
}

/// Fills `candidates` with all tokens that `min_p`, `top_k`, and `top_p` of a known `total` can keep.
fn collect(
    candidates: &mut Vec<Candidate>,
    logits: &[f32],
    weights: SoftmaxWeights,
    spec: &SamplerSpec,
    total: Option<f64>,
) {
    candidates.clear();
    let mut floor = floor(logits.len(), spec, total);
    let k = spec.top_k as usize;
    let mut of_part = [0.0; WEIGHT_PART];
    for (first, part) in (0..).step_by(WEIGHT_PART).zip(logits.chunks(WEIGHT_PART)) {
        if weights.exponent(largest(part)) <= floor {
            continue;
        }
        weights.of_part(part, &mut of_part);
        candidates.extend((first..).zip(part).zip(of_part).filter_map(|((id, &logit), weight)| {
            (weights.exponent(logit) > floor).then_some(Candidate { id, weight })
        }));
        if k > 0 && candidates.len() > 2 * k + WEIGHT_PART {
            filters::top_k(candidates, spec.top_k);
            // The last one kept; of later tokens with its logit none is kept, because ties go to lower ids.
            floor = weights.exponent(logits[candidates[k - 1].id as usize]);
        }
    }
}

/// The exponent above which the weights of all tokens are that `min_p` and `top_p` can keep.
fn floor(n_tokens: usize, spec: &SamplerSpec, total: Option<f64>) -> f64 {
    // Far more than the roundings of a weight.
    const MARGIN: f64 = 1e-9;
    if let Some(total) = total {
        // The tokens below it together have at most half of the share that top_p leaves out.
        return NEGLIGIBLE.max(((1.0 - f64::from(spec.top_p)) * total / (2 * n_tokens) as f64).ln());
    }
    if spec.min_p > 0.0 { NEGLIGIBLE.max(f64::from(spec.min_p).ln() - MARGIN) } else { NEGLIGIBLE }
}
