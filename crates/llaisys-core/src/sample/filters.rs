//! Filters that narrow the candidates of a draw. A candidate is `(id, weight)` with `weight = exp(logit - max)`, so the
//! best has weight 1. Ties are ordered by id, so that every result depends only on the logits.

use std::cmp::Ordering;

/// A token that may be drawn. `weight` is its probability up to a common factor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub id: u32,
    pub weight: f64,
}

/// Orders by falling weight, then by rising id.
fn by_weight(a: &Candidate, b: &Candidate) -> Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

fn total(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|c| c.weight).sum()
}

/// Removes candidates below `min_p` times the weight of the best.
pub(super) fn min_p(candidates: &mut Vec<Candidate>, min_p: f32) {
    if min_p > 0.0 {
        let best = candidates.iter().map(|c| c.weight).fold(0.0, f64::max);
        candidates.retain(|c| c.weight >= best * f64::from(min_p));
    }
}

/// Keeps the `k` candidates with the largest weights (all if `k` is 0), by selection instead of sorting the vocabulary.
pub(super) fn top_k(candidates: &mut Vec<Candidate>, k: u32) {
    let k = k as usize;
    if k > 0 && k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, by_weight);
        candidates.truncate(k);
    }
}

/// Weights of one octave are in this many buckets, as a power of two.
const BUCKETS_PER_OCTAVE: u32 = 5;
/// Weights are between 2^-58 and 1.
const N_BUCKETS: usize = 59 << BUCKETS_PER_OCTAVE;

/// The bucket of a weight of at most 1; larger weights are in earlier ones. The bits of a positive float are in its order.
fn bucket(candidate: &Candidate) -> usize {
    let below_one = 1_f64.to_bits() - candidate.weight.to_bits();
    (below_one >> (f64::MANTISSA_DIGITS - 1 - BUCKETS_PER_OCTAVE)) as usize
}

/// Buffers of [`top_p`].
#[derive(Debug, Default)]
pub(super) struct NucleusScratch {
    sums: Vec<f64>,
    last: Vec<Candidate>,
}

/// Keeps the candidates with the largest weights until their share reaches `p`, including the one that reaches it, in
/// the order in which they are. `of_all`: the sum of all weights, if the candidates are only the largest.
///
/// The weights are added by buckets, and only the candidates of the bucket that reaches the share are sorted.
pub(super) fn top_p(
    candidates: &mut Vec<Candidate>,
    p: f32,
    of_all: Option<f64>,
    scratch: &mut NucleusScratch,
) {
    if p >= 1.0 {
        return;
    }
    let wanted = of_all.unwrap_or_else(|| total(candidates)) * f64::from(p);
    let NucleusScratch { sums, last } = scratch;
    sums.clear();
    sums.resize(N_BUCKETS, 0.0);
    for candidate in candidates.iter() {
        sums[bucket(candidate)] += candidate.weight;
    }
    let (mut border, mut reached) = (0, 0.0);
    while border < N_BUCKETS && reached + sums[border] < wanted {
        reached += sums[border];
        border += 1;
    }
    // The sum of all may be slightly below, too.
    if border == N_BUCKETS {
        return;
    }
    last.clear();
    last.extend(candidates.iter().filter(|c| bucket(c) == border));
    last.sort_unstable_by(by_weight);
    let end = last.iter().position(|candidate| {
        reached += candidate.weight;
        reached >= wanted
    });
    // Rounding may leave the sum of the bucket slightly below: then all of it is kept.
    let end = last[end.unwrap_or(last.len() - 1)];
    candidates.retain(|c| bucket(c) < border || (bucket(c) == border && by_weight(c, &end).is_le()));
}

/// Keeps the candidates whose surprise is closest to the entropy until their share reaches `p`. `keyed` is scratch.
/// Source: Meister et al., arXiv:2202.00666.
pub(super) fn typical_p(candidates: &mut Vec<Candidate>, p: f32, keyed: &mut Vec<(f64, Candidate)>) {
    if p >= 1.0 {
        return;
    }
    let sum = total(candidates);
    let surprise = |c: &Candidate| -(c.weight / sum).ln();
    let entropy: f64 =
        candidates.iter().filter(|c| c.weight > 0.0).map(|c| c.weight / sum * surprise(c)).sum();
    keyed.clear();
    keyed.extend(candidates.iter().map(|c| ((surprise(c) - entropy).abs(), *c)));
    keyed.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.id.cmp(&b.1.id)));
    candidates.clear();
    let mut reached = 0.0;
    for (_, candidate) in keyed.iter() {
        candidates.push(*candidate);
        reached += candidate.weight;
        if reached >= sum * f64::from(p) {
            break;
        }
    }
}

/// The candidate at share `u` (in `[0, 1)`) of the summed weights, in id order.
pub(super) fn draw(candidates: &mut [Candidate], u: f64) -> u32 {
    candidates.sort_unstable_by_key(|c| c.id);
    let wanted = u * total(candidates);
    let mut reached = 0.0;
    for candidate in candidates.iter() {
        reached += candidate.weight;
        if reached > wanted {
            return candidate.id;
        }
    }
    // Rounding may leave the sum slightly below `wanted`: then the last candidate with a weight is drawn.
    candidates.iter().rev().find(|c| c.weight > 0.0).expect("the best candidate has weight 1").id
}
