//! Reference for `embed`.

/// `y[t] = table[tokens[t]]`, exactly.
///
/// - `table`: `[vocab_size, d_model]`; `tokens`: `[n]`; returns `[n, d_model]`
pub fn embed(table: &[f64], d_model: usize, tokens: &[i32]) -> Vec<f64> {
    tokens.iter().flat_map(|&token| &table[token as usize * d_model..][..d_model]).copied().collect()
}
