//! Reference for `attention`.

use crate::ops::{AttentionRows, Queries};

/// Keys and values as numbers: `[cell][kv_head][d_head]` each.
#[derive(Debug, Clone, Copy)]
pub struct Cells<'a> {
    /// Heads of both.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub d_head: usize,
    /// Keys, rotated.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
}

/// `y[t, h] = sum_j w_j V[j] / (sum_j w_j + e^sink[h])` with `w_j = e^(cap(scale * q[t, h] . K[j]))` over the cells `j` that
/// row `t` sees, in f64. `cap(s) = c tanh(s / c)`, or `s` without a soft cap c. Query head `h` reads KV head
/// `h / (n_heads / n_kv_heads)`. Without sinks, their part is missing.
///
/// Returns as `queries.q`.
pub fn attention(queries: Queries<'_>, cells: Cells<'_>, rows: AttentionRows<'_>) -> Vec<f64> {
    let Queries { q, scoring, sinks } = queries;
    let d = cells.d_head;
    let n_heads = q.len() / rows.rows.len() / d;
    let mut y = Vec::with_capacity(q.len());
    for (i, q) in q.chunks_exact(d).enumerate() {
        let (row, kv_head) = (rows.rows[i / n_heads], i % n_heads * cells.n_kv_heads / n_heads);
        let seen = &rows.cells[row.start as usize..][row.n_hidden as usize..row.n_visible as usize];
        let place = |cell: u32| (cell as usize * cells.n_kv_heads + kv_head) * d;
        let cap = |score: f64| match scoring.soft_cap.map(f64::from) {
            Some(cap) => cap * (score / cap).tanh(),
            None => score,
        };
        let score = |&cell: &u32| cap(f64::from(scoring.scale) * dot(q, &cells.k[place(cell)..][..d]));
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let sink = sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[i % n_heads]));
        let max = scores.iter().copied().fold(sink, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = weights.iter().sum::<f64>() + (sink - max).exp();
        for c in 0..d {
            let values = seen.iter().map(|&cell| f64::from(cells.v[place(cell) + c]));
            y.push(values.zip(&weights).map(|(v, w)| v * w).sum::<f64>() / total);
        }
    }
    y
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}
