//! `route`: selects the experts of each token, and their weights. Reference: `ops/reference/route.rs`.
//!
//! A row of logits is small compared with the experts' matrices, so plain f32 loops on the calling thread are enough.

use std::cmp::Ordering;

/// The experts of some rows. Its memory is reused from layer to layer.
#[derive(Debug, Default)]
pub struct Routes {
    /// Chosen experts, `[n, n_used]`, ascending.
    experts: Vec<u32>,
    /// Their weights, `[n, n_used]`.
    weights: Vec<f32>,
    n_used: usize,
    order: Vec<u32>,
}

impl Routes {
    /// The rows that chose `expert`, ascending, with its weight in each.
    pub fn of(&self, expert: usize) -> impl Iterator<Item = (usize, f32)> {
        let chosen = self.experts.iter().zip(&self.weights).enumerate();
        chosen.filter(move |(_, (e, _))| **e as usize == expert).map(|(i, (_, w))| (i / self.n_used, *w))
    }
}

/// Selects for each row the `n_used` experts with the largest logits; of equal ones those with lower numbers. Their
/// weights are the softmax over all experts, divided by their sum if `normalize`.
///
/// - `logits`: `[n, n_experts]`, with `n_experts` at least `n_used`; NaN is selected last
///
/// Source: arXiv:2401.04088.
pub fn route(logits: &[f32], n_experts: usize, n_used: usize, normalize: bool, routes: &mut Routes) {
    routes.experts.clear();
    routes.weights.clear();
    routes.n_used = n_used;
    for logits in logits.chunks_exact(n_experts) {
        let order = &mut routes.order;
        order.clear();
        order.extend(0..n_experts as u32);
        order.sort_unstable_by(|&a, &b| descending(logits[a as usize], logits[b as usize]).then(a.cmp(&b)));
        let max = logits[order[0] as usize];
        let e = |i: u32| (logits[i as usize] - max).exp();
        let chosen = &mut order[..n_used];
        chosen.sort_unstable();
        let total: f32 =
            if normalize { chosen.iter().map(|&i| e(i)).sum() } else { (0..n_experts as u32).map(e).sum() };
        routes.weights.extend(chosen.iter().map(|&i| e(i) / total));
        routes.experts.extend_from_slice(chosen);
    }
}

fn descending(a: f32, b: f32) -> Ordering {
    b.partial_cmp(&a).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}
