//! `argmax`: the greedy choice. Meaning: `ops/reference/argmax.rs`.
//!
//! Needs no instruction set: comparing is exact, and one pass over the vocabulary is bound by memory. Each part is
//! looked at while it is in the nearest cache; the value is searched in the part that holds it.

/// Elements that are searched again once the largest value is known.
const PART: usize = 1024;
/// Numbers side by side, so that the compiler can use vector instructions.
const LANES: usize = 16;

/// Index of the largest of `logits`, the lowest on ties (0 and -0 tie). NaN is never chosen, unless there is
/// nothing else: then 0.
///
/// Panics if there are no logits.
pub fn argmax(logits: &[f32]) -> usize {
    best_place(logits, |_| ())
}

/// As [`argmax`]; None if a logit is NaN or infinite. One pass does both.
///
/// Panics if there are no logits.
pub fn argmax_finite(logits: &[f32]) -> Option<usize> {
    let mut finite = true;
    let best = best_place(logits, |part| finite &= all_finite(part));
    finite.then_some(best)
}

/// The place of the largest element; calls `look` with each part.
fn best_place(logits: &[f32], mut look: impl FnMut(&[f32])) -> usize {
    assert!(!logits.is_empty(), "nothing to choose from");
    let (mut best, mut best_part) = (f32::NEG_INFINITY, None);
    for (i, part) in logits.chunks(PART).enumerate() {
        look(part);
        let max = largest(part);
        if max > best || (best_part.is_none() && part.contains(&max)) {
            (best, best_part) = (max, Some(i));
        }
    }
    let start = best_part.unwrap_or(0) * PART;
    let place = logits[start..].iter().position(|&x| x == best);
    place.map_or(0, |i| start + i)
}

/// Zero times a number is a zero if it is finite, and NaN otherwise, which a sum keeps.
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

/// The largest element that is not NaN; -infinity if there is none.
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
