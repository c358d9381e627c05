//! `route`: selects the experts of each token, and their weights. Reference: `ops/reference/route.rs`.
//!
//! A row of logits is small compared with the experts' matrices, so plain f32 loops on the calling thread are enough.

use std::cmp::Ordering;
use std::ops::Range;

/// The experts of some rows. Its memory is reused from layer to layer.
#[derive(Debug, Default)]
pub struct Routes {
    /// Chosen experts, `[n, n_used]`, ascending.
    chosen: Vec<u32>,
    /// Their weights, `[n, n_used]`.
    weights_of_chosen: Vec<f32>,
    order: Vec<u32>,
    groups: Vec<ExpertRows>,
    rows: Vec<u32>,
    weights: Vec<f32>,
}

/// The rows that use an expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertRows {
    /// The expert.
    pub expert: usize,
    /// Its part of [`Routes::rows`].
    pub rows: Range<usize>,
}

impl Routes {
    /// The experts that rows use, ascending.
    pub fn groups(&self) -> &[ExpertRows] {
        &self.groups
    }

    /// The rows of the first group, ascending, then those of the second, and so on: `[n * n_used]`.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// The expert's weight in each of [`Routes::rows`].
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Sorts the chosen experts of all rows by expert.
    fn group(&mut self, n_used: usize) {
        let chosen = &self.chosen;
        self.order.clear();
        self.order.extend(0..chosen.len() as u32);
        self.order.sort_unstable_by_key(|&i| (chosen[i as usize], i));
        self.groups.clear();
        for (at, &i) in self.order.iter().enumerate() {
            let expert = chosen[i as usize] as usize;
            match self.groups.last_mut() {
                Some(group) if group.expert == expert => group.rows.end = at + 1,
                _ => self.groups.push(ExpertRows { expert, rows: at..at + 1 }),
            }
        }
        self.rows.clear();
        self.rows.extend(self.order.iter().map(|i| i / n_used as u32));
        self.weights.clear();
        self.weights.extend(self.order.iter().map(|&i| self.weights_of_chosen[i as usize]));
    }
}

/// How the experts of a row are selected and weighted.
#[derive(Debug, Clone, Copy)]
pub struct Routing<'a> {
    /// Experts.
    pub n_experts: usize,
    /// Experts that are selected, at most `n_experts`.
    pub n_used: usize,
    /// Scores are sigmoids of the logits instead of their softmax.
    pub sigmoid: bool,
    /// Added to the scores before the selection; the weights are without it. `[n_experts]`
    pub bias: Option<&'a [f32]>,
    /// The weights are divided by their sum.
    pub normalize: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// Another factor of the weight of each expert. `[n_experts]`
    pub expert_scale: Option<&'a [f32]>,
}

/// Added to the sum of sigmoids by which weights are divided, as transformers does in LFM2.
const SUM_EPS: f32 = 1e-6;

/// Selects for each row the experts with the largest scores; of equal ones those with lower numbers. Their weights are
/// the scores.
///
/// - `logits`: `[n, n_experts]`; NaN is selected last
///
/// Source: arXiv:2401.04088; sigmoids with a bias: arXiv:2408.15664.
pub fn route(logits: &[f32], routing: Routing<'_>, routes: &mut Routes) {
    let Routing { n_experts, n_used, sigmoid, bias, normalize, scale, expert_scale } = routing;
    routes.chosen.clear();
    routes.weights_of_chosen.clear();
    for logits in logits.chunks_exact(n_experts) {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let score = |i: u32| match sigmoid {
            true => 1.0 / (1.0 + (-logits[i as usize]).exp()),
            false => (logits[i as usize] - largest).exp(),
        };
        // Without a bias, logits have the order of scores, and differ where these are equal by rounding.
        let rank = |i: u32| bias.map_or(logits[i as usize], |bias| score(i) + bias[i as usize]);
        let order = &mut routes.order;
        order.clear();
        order.extend(0..n_experts as u32);
        order.sort_unstable_by(|&a, &b| descending(rank(a), rank(b)).then(a.cmp(&b)));
        let chosen = &mut order[..n_used];
        chosen.sort_unstable();
        let total: f32 = match (sigmoid, normalize) {
            (_, true) => chosen.iter().map(|&i| score(i)).sum(),
            (false, false) => (0..n_experts as u32).map(score).sum(),
            (true, false) => 1.0,
        };
        let total = if sigmoid && normalize { total + SUM_EPS } else { total };
        let of_expert = |i: u32| expert_scale.map_or(1.0, |factors| factors[i as usize]);
        routes.weights_of_chosen.extend(chosen.iter().map(|&i| score(i) / total * scale * of_expert(i)));
        routes.chosen.extend_from_slice(chosen);
    }
    routes.group(n_used);
}

fn descending(a: f32, b: f32) -> Ordering {
    b.partial_cmp(&a).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}
