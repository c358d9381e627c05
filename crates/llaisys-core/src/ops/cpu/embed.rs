//! `embed`: rows of the token table. Reference: `ops/reference/embed.rs`.

use super::rows::for_row_runs;
use crate::ops::OpContext;
use crate::ops::packed::PackedMatrix;

/// `out[t] = table[tokens[t]]`, dequantized: the same values that a tied output head multiplies with.
///
/// - `table`: `[vocab_size, d_model]`; `tokens`: `[n]`; `out`: `[n, d_model]`
///
/// Panics if a token is not a row of the table (batches are checked when they are built), or if shapes disagree.
pub fn embed(cx: &OpContext, table: &PackedMatrix, tokens: &[i32], out: &mut [f32]) {
    let d_model = table.n_columns();
    assert_eq!(out.len(), tokens.len() * d_model, "output of wrong shape");
    for_row_runs(&cx.pool, out, d_model, &|first, rows| {
        for (token, row) in tokens[first..].iter().zip(rows.chunks_exact_mut(d_model)) {
            let token = usize::try_from(*token).expect("token ids are not negative");
            table.read_row(token, row);
        }
    });
}
