//! Compares numbers with their expected values.

/// Asserts that each number is within its tolerance of the expected one. `what` names the case.
pub(crate) fn assert_close(got: &[f32], want: &[f64], tolerance: impl Fn(usize, f64) -> f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let (error, bound) = ((f64::from(got) - want).abs(), tolerance(i, want));
        // A NaN fails too.
        assert!(
            error <= bound,
            "{what}, number {i}: {got:e} instead of {want:e}, off by {error:e} > {bound:e}"
        );
    }
}
