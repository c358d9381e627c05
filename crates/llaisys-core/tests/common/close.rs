//! Numbers beside what they should be.

/// Each number is within its tolerance of what it should be; `what` names the case.
pub(crate) fn assert_close(got: &[f32], want: &[f64], tolerance: impl Fn(usize, f64) -> f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let (error, bound) = ((f64::from(got) - want).abs(), tolerance(i, want));
        // A NaN is no smaller than the bound.
        assert!(
            error <= bound,
            "{what}, number {i}: {got:e} instead of {want:e}, off by {error:e} > {bound:e}"
        );
    }
}
