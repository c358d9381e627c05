//! `argmax`: greedy sampling. Reference: `ops/reference/argmax.rs`.
//!
//! It needs no instruction set: comparisons are exact, and one pass over the vocabulary is bound by memory. `visit`
//! sees each part while the part is in the first-level cache. The index is searched in the part with the largest value.

/// Elements that are searched again after the largest value is found.
const PART: usize = 1024;
/// Independent maxima, so that the compiler can use vector instructions.
const LANES: usize = 16;

/// Index of the largest of `logits`, the lowest of equal ones (0 and -0 are equal). NaN is never chosen; if all logits
/// are NaN, returns 0.
///
/// Panics if there are no logits.
pub fn argmax(logits: &[f32]) -> usize {
    best_place(logits, |_| ())
}

/// As [`argmax`]; `None` if a logit is NaN or infinite. One pass does both.
///
/// Panics if there are no logits.
pub fn argmax_finite(logits: &[f32]) -> Option<usize> {
    let mut finite = true;
    let best = best_place(logits, |part| finite &= all_finite(part));
    finite.then_some(best)
}

/// Index of the largest element; calls `visit` with each part.
fn best_place(logits: &[f32], mut visit: impl FnMut(&[f32])) -> usize {
    assert!(!logits.is_empty(), "no logits");
    let (mut best, mut best_part) = (f32::NEG_INFINITY, None);
    for (i, part) in logits.chunks(PART).enumerate() {
        visit(part);
        let max = largest(part);
        if max > best || (best_part.is_none() && part.contains(&max)) {
            (best, best_part) = (max, Some(i));
        }
    }
    let start = best_part.unwrap_or(0) * PART;
    let place = logits[start..].iter().position(|&x| x == best);
    place.map_or(0, |i| start + i)
}

/// True if all elements are finite: `0 * x` is zero for a finite `x` and NaN otherwise, and a sum keeps NaN.
fn all_finite(x: &[f32]) -> bool {
    let mut lanes = [0.0; LANES];
    let (groups, tail) = x.as_chunks::<LANES>();
    for group in groups {
        for (sum, x) in lanes.iter_mut().zip(group) {
            *sum += x * 0.0;
        }
    }
    lanes.iter().chain(tail).all(|x| x.is_finite())
}

/// Returns the largest element that is not NaN; -infinity if there is none.
pub fn largest(x: &[f32]) -> f32 {
    let pick = |max: f32, x: f32| if x > max { x } else { max };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (groups, tail) = x.as_chunks::<LANES>();
    for group in groups {
        for (max, &x) in lanes.iter_mut().zip(group) {
            *max = pick(*max, x);
        }
    }
    lanes.iter().chain(tail).fold(f32::NEG_INFINITY, |max, &x| pick(max, x))
}
