//! Reference for `route`.

/// For each row the `n_used` experts with the largest logits (of equal ones the lower), ascending. Their weights are
/// their shares of the softmax over all experts, or over the chosen ones if `normalize`, in f64.
///
/// - `logits`: `[n, n_experts]`; returns `[n][n_used]`
pub fn route(logits: &[f32], n_experts: usize, n_used: usize, normalize: bool) -> Vec<Vec<(usize, f64)>> {
    let row = |logits: &[f32]| {
        let e: Vec<f64> = logits.iter().map(|&x| f64::from(x - logits[0]).exp()).collect();
        let above = |i: usize| {
            (0..n_experts).filter(|&j| logits[j] > logits[i] || (logits[j] == logits[i] && j < i)).count()
        };
        let chosen: Vec<usize> = (0..n_experts).filter(|&i| above(i) < n_used).collect();
        let total: f64 = if normalize { chosen.iter().map(|&i| e[i]).sum() } else { e.iter().sum() };
        chosen.into_iter().map(|i| (i, e[i] / total)).collect()
    };
    logits.chunks_exact(n_experts).map(row).collect()
}
