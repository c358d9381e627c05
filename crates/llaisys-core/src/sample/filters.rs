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

/// Keeps the candidates with the largest weights until their share reaches `p`, including the one that reaches it.
pub(super) fn top_p(candidates: &mut Vec<Candidate>, p: f32) {
    if p < 1.0 {
        let wanted = total(candidates) * f64::from(p);
        keep_until(candidates, wanted, by_weight);
    }
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

/// Orders the front of `candidates` and cuts it where the running weight reaches `wanted`. The front is selected in
/// chunks that double, so a distribution with most weight on few candidates is never sorted completely.
fn keep_until(candidates: &mut Vec<Candidate>, wanted: f64, order: fn(&Candidate, &Candidate) -> Ordering) {
    let (mut sorted, mut reached, mut chunk) = (0, 0.0, 64);
    while sorted < candidates.len() {
        let end = candidates.len().min(sorted + chunk);
        if end < candidates.len() {
            candidates[sorted..].select_nth_unstable_by(end - sorted - 1, order);
        }
        candidates[sorted..end].sort_unstable_by(order);
        for i in sorted..end {
            reached += candidates[i].weight;
            if reached >= wanted {
                candidates.truncate(i + 1);
                return;
            }
        }
        (sorted, chunk) = (end, chunk * 2);
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
