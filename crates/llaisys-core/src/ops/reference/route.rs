//! Reference for `route`.

use crate::ops::Routing;

/// For each row the `n_used` experts with the largest scores plus bias (of equal ones the lower), ascending, with their
/// weights in f64. Scores are the softmax over all experts, or sigmoids. Weights are the scores, divided by their sum
/// (of sigmoids: plus 1e-6) if `normalize`, times the scale and that of the expert.
///
/// - `logits`: `[n, n_experts]`; returns `[n][n_used]`
pub fn route(logits: &[f32], routing: Routing<'_>) -> Vec<Vec<(usize, f64)>> {
    let Routing { n_experts, n_used, sigmoid, bias, normalize, scale, expert_scale } = routing;
    let row = |logits: &[f32]| {
        let e: Vec<f64> = logits.iter().map(|&x| f64::from(x - logits[0]).exp()).collect();
        let softmax = |i: usize| e[i] / e.iter().sum::<f64>();
        let score = |i: usize| if sigmoid { 1.0 / (1.0 + f64::from(-logits[i]).exp()) } else { softmax(i) };
        let rank = |i: usize| bias.map_or(f64::from(logits[i]), |bias| score(i) + f64::from(bias[i]));
        let above =
            |i: usize| (0..n_experts).filter(|&j| rank(j) > rank(i) || (rank(j) == rank(i) && j < i)).count();
        let chosen: Vec<usize> = (0..n_experts).filter(|&i| above(i) < n_used).collect();
        let sum: f64 = chosen.iter().map(|&i| score(i)).sum();
        let divisor = if normalize { sum + if sigmoid { 1e-6 } else { 0.0 } } else { 1.0 };
        let factor = |i: usize| f64::from(scale) * expert_scale.map_or(1.0, |factors| f64::from(factors[i]));
        chosen.into_iter().map(|i| (i, score(i) / divisor * factor(i))).collect()
    };
    logits.chunks_exact(n_experts).map(row).collect()
}
