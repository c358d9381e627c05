//! Random tests that print how to replay them.

use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};
use std::hash::{BuildHasher, RandomState};

/// Runs `test` on `n_cases` random inputs. A failure prints the smallest input found and the seed of the run. The same
/// test with `PROPTEST_RNG_SEED` set to the seed repeats the run.
pub(crate) fn check<S: Strategy>(
    n_cases: u32,
    input: S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(n_cases) };
    if matches!(config.rng_seed, RngSeed::Random) {
        config.rng_seed = RngSeed::Fixed(RandomState::new().hash_one(0));
    }
    let seed = config.rng_seed;
    if let Err(failure) = TestRunner::new(config).run(&input, test) {
        panic!("replay with PROPTEST_RNG_SEED={seed}\n{failure}");
    }
}
