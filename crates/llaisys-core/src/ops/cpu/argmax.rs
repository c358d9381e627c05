//! `argmax`: the greedy choice. Meaning: `ops/reference/argmax.rs`.

/// Elements that are searched again once the largest value is known.
const PART: usize = 1024;

/// Index of the largest of `logits`, the lowest on ties (0 and -0 tie). NaN is never chosen, unless there is
/// nothing else: then 0. A row that may hold NaN is refused by the sampler before it gets here.
///
/// Needs no instruction set: comparing is exact, and one pass over the vocabulary is bound by memory. Finds the
/// first part that holds the largest value, then the value in it.
///
/// Panics if there are no logits.
pub fn argmax(logits: &[f32]) -> usize {
    assert!(!logits.is_empty(), "nothing to choose from");
    let (mut best, mut best_part) = (f32::NEG_INFINITY, None);
    for (i, part) in logits.chunks(PART).enumerate() {
        let max = largest(part);
        if max > best || (best_part.is_none() && part.contains(&max)) {
            (best, best_part) = (max, Some(i));
        }
    }
    let start = best_part.unwrap_or(0) * PART;
    let place = logits[start..].iter().position(|&x| x == best);
    place.map_or(0, |i| start + i)
}

/// The largest element that is not NaN; -infinity if there is none. In 16 lanes, so that the compiler can use
/// vector instructions.
fn largest(x: &[f32]) -> f32 {
    let pick = |max: f32, x: f32| if x > max { x } else { max };
    let mut lanes = [f32::NEG_INFINITY; 16];
    let groups = x.chunks_exact(16);
    let tail = groups.remainder().iter().fold(f32::NEG_INFINITY, |max, &x| pick(max, x));
    for group in groups {
        for (max, &x) in lanes.iter_mut().zip(group) {
            *max = pick(*max, x);
        }
    }
    lanes.into_iter().fold(tail, pick)
}
