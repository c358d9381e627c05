//! Reference for `softmax_weights`.

/// `y[i] = exp((logits[i] - best) * scale)`, in f64; 0 where the exponent is `negligible` or less.
pub fn softmax_weights(logits: &[f32], best: f32, scale: f64, negligible: f64) -> Vec<f64> {
    let exponents = logits.iter().map(|&logit| (f64::from(logit) - f64::from(best)) * scale);
    exponents.map(|x| if x > negligible { x.exp() } else { 0.0 }).collect()
}
