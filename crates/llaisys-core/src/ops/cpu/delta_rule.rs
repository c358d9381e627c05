//! `delta_rule`: the gated delta rule. Reference: `ops/reference/delta_rule.rs`.
//!
//! One recurrence in position order defines the bits: prompts are not computed in blocks. Each matrix is processed in
//! tiles of 4 vectors of columns, which are independent; a tile stays in the first-level cache over all rows of its
//! sequence. The sums over the key's elements run in ascending order. Threads divide sequences and heads.

use super::isa::lanes::{Kernel, Lanes};
use super::rows::for_row_runs;
use crate::ops::OpContext;
use crate::ops::recurrent::{DeltaHeads, RecurrentRows, StatesMut};

/// Vectors of a tile.
const TILE: usize = 4;

/// The inputs of [`delta_rule`], by row.
#[derive(Debug, Clone, Copy)]
pub struct DeltaInputs<'a> {
    /// Normalized and scaled queries, `[n, n_keys, d_key]`.
    pub q: &'a [f32],
    /// Normalized keys, `[n, n_keys, d_key]`.
    pub k: &'a [f32],
    /// `[n, n_values, d_value]`
    pub v: &'a [f32],
    /// Write strengths, `[n, n_values]`.
    pub beta: &'a [f32],
    /// Factors of the state, `[n, n_values]`.
    pub decay: &'a [f32],
}

/// The heads, rows and states of [`delta_rule`].
#[derive(Debug)]
pub struct Recurrence<'a> {
    /// Heads and their widths.
    pub heads: DeltaHeads,
    /// The rows of each sequence.
    pub rows: RecurrentRows<'a>,
    /// A matrix `[d_key, d_value]` for each value head of each state.
    pub states: StatesMut<'a>,
}

/// For each value head, over the rows of each sequence in order: S = decay S, S += k (x) beta (v - S^T k), o = S^T q.
///
/// - `scratch`, `out`: `[n, n_values, d_value]`; the result is in `out`
///
/// Panics if shapes disagree. Source: arXiv:2412.06464.
pub fn delta_rule(
    cx: &OpContext,
    inputs: DeltaInputs<'_>,
    recurrence: Recurrence<'_>,
    scratch: &mut [f32],
    out: &mut [f32],
) {
    let Recurrence { heads, rows, states } = recurrence;
    let (n, width, d_value) = (rows.order.len(), heads.value_width(), heads.d_value);
    assert_eq!(states.len, heads.matrices_len(), "states of wrong shape");
    assert!(inputs.q.len() == n * heads.key_width() && inputs.k.len() == inputs.q.len(), "queries or keys");
    assert!(inputs.v.len() == n * width && scratch.len() == n * width && out.len() == n * width, "values");
    assert!(inputs.beta.len() == n * heads.n_values && inputs.decay.len() == inputs.beta.len(), "gates");
    let mut jobs = Vec::with_capacity(rows.sequences.len() * heads.n_values);
    let mut rest = &mut *scratch;
    for job in states.jobs(&rows) {
        let of_head = heads.d_key * d_value;
        for (head, after) in job.after.chunks_exact_mut(of_head).enumerate() {
            let before = job.before.map(|before| &before[head * of_head..][..of_head]);
            let (out, others) = std::mem::take(&mut rest).split_at_mut(job.sequence.n_rows * d_value);
            rest = others;
            jobs.push(Head { inputs, heads, rows: rows.of(&job.sequence), head, before, after, out });
        }
    }
    let isa = cx.kernels.proof();
    cx.pool.run_chunks(&mut jobs, 1, &|_, heads| heads.iter_mut().for_each(|head| isa.run(head)));
    drop(jobs);
    // From sequence, head and row to row and head.
    let mut from = vec![(0, 0); n];
    for sequence in rows.sequences {
        for (index, &row) in rows.of(sequence).iter().enumerate() {
            from[row as usize] = (sequence.start * width + index * d_value, sequence.n_rows * d_value);
        }
    }
    for_row_runs(&cx.pool, out, width, &|first, out| {
        for (&(start, stride), out) in from[first..].iter().zip(out.chunks_exact_mut(width)) {
            for (head, out) in out.chunks_exact_mut(d_value).enumerate() {
                out.copy_from_slice(&scratch[start + head * stride..][..d_value]);
            }
        }
    });
}

/// One value head of one sequence.
struct Head<'a> {
    inputs: DeltaInputs<'a>,
    heads: DeltaHeads,
    rows: &'a [u32],
    head: usize,
    /// The matrix before the first row; None: it is in `after`.
    before: Option<&'a [f32]>,
    after: &'a mut [f32],
    /// `[n_rows, d_value]`
    out: &'a mut [f32],
}

impl Kernel for &mut Head<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (mut column, columns) = (0, TILE * L::N);
        while column + columns <= self.heads.d_value {
            self.tile::<L, TILE>(lanes, column, columns);
            column += columns;
        }
        while column < self.heads.d_value {
            self.tile::<L, 1>(lanes, column, L::N.min(self.heads.d_value - column));
            column += L::N;
        }
    }
}

impl Head<'_> {
    /// Computes `width` columns from `column` on, in `T` vectors.
    #[inline(always)]
    fn tile<L: Lanes, const T: usize>(&mut self, lanes: L, column: usize, width: usize) {
        let DeltaHeads { n_values, d_key, d_value, .. } = self.heads;
        let DeltaInputs { q, k, v, beta, decay } = self.inputs;
        let (keys, key) = (self.heads.key_width(), self.heads.key_of(self.head) * d_key);
        let zeros = [lanes.splat(0.0); T];
        let mut before = self.before;
        for (index, &row) in self.rows.iter().enumerate() {
            let row = row as usize;
            let at = row * n_values + self.head;
            let (q, k) = (&q[row * keys + key..][..d_key], &k[row * keys + key..][..d_key]);
            let (decay, beta) = (lanes.splat(decay[at]), lanes.splat(beta[at]));
            let mut seen = zeros;
            for (i, &k) in k.iter().enumerate() {
                let k = lanes.splat(k);
                let to = &mut self.after[i * d_value + column..][..width];
                for (t, seen) in seen.iter_mut().enumerate() {
                    let s = match before {
                        Some(before) => {
                            lanes.load_first(&before[i * d_value + column..][..width][t * L::N..])
                        }
                        None => lanes.load_first(&to[t * L::N..]),
                    };
                    let s = lanes.mul(s, decay);
                    *seen = lanes.mul_add(k, s, *seen);
                    lanes.store_first(s, &mut to[t * L::N..]);
                }
            }
            before = None;
            let v = &v[at * d_value + column..][..width];
            let mut written = zeros;
            for (t, written) in written.iter_mut().enumerate() {
                *written = lanes.mul(beta, lanes.sub(lanes.load_first(&v[t * L::N..]), seen[t]));
            }
            let mut sums = zeros;
            for (i, (&k, &q)) in k.iter().zip(q).enumerate() {
                let (k, q) = (lanes.splat(k), lanes.splat(q));
                let to = &mut self.after[i * d_value + column..][..width];
                for (t, sum) in sums.iter_mut().enumerate() {
                    let s = lanes.mul_add(k, written[t], lanes.load_first(&to[t * L::N..]));
                    *sum = lanes.mul_add(q, s, *sum);
                    lanes.store_first(s, &mut to[t * L::N..]);
                }
            }
            let out = &mut self.out[index * d_value + column..][..width];
            for (t, sum) in sums.iter().enumerate() {
                lanes.store_first(*sum, &mut out[t * L::N..]);
            }
        }
    }
}
