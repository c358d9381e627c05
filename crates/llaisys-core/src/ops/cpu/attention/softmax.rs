//! The running softmax of attention: weights of a block, and merging of spans.

use super::{Job, MAX_SPANS};
use crate::ops::cpu::isa::lanes::{Kernel, Lanes, exp};
use std::ops::Range;

/// Numbers in the result of a separately computed span before its values: m and l.
pub(super) const STATE: usize = 2;

/// A running softmax: the maximum score, the sum of the weights relative to it, the sum of the weighted values.
pub(super) struct Softmax<'a> {
    pub(super) m: f32,
    pub(super) l: f32,
    pub(super) v: &'a [f32],
}

/// A mutable [`Softmax`].
pub(super) struct SoftmaxMut<'a> {
    pub(super) m: &'a mut f32,
    pub(super) l: &'a mut f32,
    pub(super) v: &'a mut [f32],
}

/// Computes the output from the weighted values and the sum of weights, to which a sink adds its own.
#[inline(always)]
pub(super) fn finish<L: Lanes>(lanes: L, softmax: Softmax<'_>, sink: Option<f32>, out: &mut [f32]) {
    let Softmax { m, l, v } = softmax;
    let mut factor = 1.0 / l;
    if let Some(sink) = sink {
        let new_m = if m > sink { m } else { sink };
        let (a, b) = (exp(lanes, lanes.splat(m - new_m)), exp(lanes, lanes.splat(sink - new_m)));
        let l = lanes.mul_add(lanes.splat(l), a, b);
        lanes.store_first(lanes.div(a, l), std::slice::from_mut(&mut factor));
    }
    for (out, v) in out.iter_mut().zip(v) {
        *out = v * factor;
    }
}

/// The lanes of vector `v` that are in `seen` from `x`, the other lanes from `other`. If `ALL`, every lane is.
#[inline(always)]
fn keep<L: Lanes, const ALL: bool>(lanes: L, x: L::F, seen: &Range<usize>, v: usize, other: L::F) -> L::F {
    if ALL || (seen.start <= v * L::N && (v + 1) * L::N <= seen.end) {
        return x;
    }
    let x = lanes.keep_first(x, seen.end - v * L::N, other);
    if seen.start > v * L::N { lanes.keep_first(other, seen.start - v * L::N, x) } else { x }
}

/// The largest of the scores in `seen`; `-inf` if there are none.
#[inline(always)]
pub(super) fn largest<L: Lanes>(lanes: L, scores: &[f32], seen: Range<usize>) -> f32 {
    if seen == (0..scores.len()) {
        largest_of::<L, true>(lanes, scores, seen)
    } else {
        largest_of::<L, false>(lanes, scores, seen)
    }
}

#[inline(always)]
fn largest_of<L: Lanes, const ALL: bool>(lanes: L, scores: &[f32], seen: Range<usize>) -> f32 {
    let least = lanes.splat(f32::NEG_INFINITY);
    let mut max = least;
    for (v, part) in scores.chunks_exact(L::N).enumerate() {
        max = lanes.max(max, keep::<L, ALL>(lanes, lanes.load(part), &seen, v, least));
    }
    lanes.largest(max)
}

/// Replaces the scores in `seen` by e^(score - m), the others by zeros. Returns the sum.
#[inline(always)]
pub(super) fn weights<L: Lanes>(lanes: L, scores: &mut [f32], seen: Range<usize>, m: f32) -> f32 {
    if seen == (0..scores.len()) {
        weights_of::<L, true>(lanes, scores, seen, m)
    } else {
        weights_of::<L, false>(lanes, scores, seen, m)
    }
}

#[inline(always)]
fn weights_of<L: Lanes, const ALL: bool>(lanes: L, scores: &mut [f32], seen: Range<usize>, m: f32) -> f32 {
    let (m, zero) = (lanes.splat(m), lanes.splat(0.0));
    let mut sum = zero;
    for (v, part) in scores.chunks_exact_mut(L::N).enumerate() {
        let weight = exp(lanes, lanes.sub(lanes.load(part), m));
        let weight = keep::<L, ALL>(lanes, weight, &seen, v, zero);
        lanes.store(weight, part);
        sum = lanes.add(sum, weight);
    }
    lanes.sum(sum)
}

/// Multiplies weights by the scales of their values.
#[inline(always)]
pub(super) fn multiply<L: Lanes>(lanes: L, weights: &mut [f32], scales: &[f32]) {
    for (weights, scales) in weights.chunks_exact_mut(L::N).zip(scales.chunks_exact(L::N)) {
        lanes.store(lanes.mul(lanes.load(weights), lanes.load(scales)), weights);
    }
}

/// Merges the softmax of later cells into that of earlier ones.
#[inline(always)]
pub(super) fn merge<L: Lanes>(lanes: L, earlier: SoftmaxMut<'_>, later: Softmax<'_>) {
    let SoftmaxMut { m, l, v } = earlier;
    let Softmax { m: later_m, l: later_l, v: later_v } = later;
    let new_m = if *m > later_m { *m } else { later_m };
    let (a, b) = (exp(lanes, lanes.splat(*m - new_m)), exp(lanes, lanes.splat(later_m - new_m)));
    let sum = lanes.mul_add(lanes.splat(*l), a, lanes.mul(lanes.splat(later_l), b));
    lanes.store_first(sum, std::slice::from_mut(l));
    *m = new_m;
    for (v, later) in v.chunks_mut(L::N).zip(later_v.chunks(L::N)) {
        let later = lanes.mul(lanes.load_first(later), b);
        lanes.store_first(lanes.mul_add(lanes.load_first(v), a, later), v);
    }
}

/// Merges separately computed spans in their order, and writes the output.
pub(super) struct MergeSpans<'a, T> {
    pub(super) job: &'a Job<'a, T>,
    /// `[row][head][span][STATE + d_head]`
    pub(super) partials: &'a mut [f32],
    pub(super) out: &'a mut [f32],
}

impl<T> Kernel for MergeSpans<'_, T> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (heads, rows) = (self.job.heads, self.job.rows.rows);
        let len = heads.d_head + STATE;
        let spans = self.partials.chunks_exact_mut(MAX_SPANS * len);
        for (i, (out, spans)) in self.out.chunks_exact_mut(heads.d_head).zip(spans).enumerate() {
            let seen = self.job.rows.spans(rows[i / heads.n_heads]);
            let (total, later) = spans[seen.start * len..seen.end * len].split_at_mut(len);
            let [m, l, v @ ..] = total else { unreachable!("a state has m, l and values") };
            for later in later.chunks_exact(len) {
                let later = Softmax { m: later[0], l: later[1], v: &later[STATE..] };
                merge(lanes, SoftmaxMut { m: &mut *m, l: &mut *l, v: &mut *v }, later);
            }
            let sink = self.job.sinks.map(|sinks| sinks[i % heads.n_heads]);
            finish(lanes, Softmax { m: *m, l: *l, v }, sink, out);
        }
    }
}
