//! Reference for `delta_rule`.

use crate::ops::{DeltaHeads, DeltaInputs, ValueOrder};

/// The gated delta rule over the rows of one sequence, in f64, from the matrices `state`, which become those after the
/// last row. Returns `[n, n_values, d_value]`.
///
/// - `state`: `[n_values, d_key, d_value]`
pub fn delta_rule(inputs: DeltaInputs<'_>, heads: DeltaHeads, state: &mut [f64]) -> Vec<f64> {
    let DeltaHeads { n_keys, n_values, d_key, d_value, order } = heads;
    let n = inputs.beta.len() / n_values;
    let mut out = vec![0.0; n * n_values * d_value];
    for t in 0..n {
        for head in 0..n_values {
            let key_head = match order {
                ValueOrder::Grouped => head / (n_values / n_keys),
                ValueOrder::Alternating => head % n_keys,
            };
            let key = (t * n_keys + key_head) * d_key;
            let (q, k) = (&inputs.q[key..key + d_key], &inputs.k[key..key + d_key]);
            let at = t * n_values + head;
            let (beta, decay) = (f64::from(inputs.beta[at]), f64::from(inputs.decay[at]));
            let matrix = &mut state[head * d_key * d_value..(head + 1) * d_key * d_value];
            matrix.iter_mut().for_each(|s| *s *= decay);
            for c in 0..d_value {
                let seen: f64 = (0..d_key).map(|i| matrix[i * d_value + c] * f64::from(k[i])).sum();
                let written = beta * (f64::from(inputs.v[at * d_value + c]) - seen);
                for i in 0..d_key {
                    matrix[i * d_value + c] += f64::from(k[i]) * written;
                }
                out[at * d_value + c] = (0..d_key).map(|i| matrix[i * d_value + c] * f64::from(q[i])).sum();
            }
        }
    }
    out
}
