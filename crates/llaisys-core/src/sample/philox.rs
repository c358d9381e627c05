//! Philox4x32-10: a counter-based random number generator (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as
//! easy as 1, 2, 3", SC 2011). A draw depends only on its counter and key. A request's tokens therefore depend on its
//! seed and positions, and not on the other rows of a batch.
//!
//! Implemented here because the crates that offer it are tiny or unmaintained. The known-answer vectors of Random123
//! verify it.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// One block: 128 random bits of a 128-bit counter under a 64-bit key.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for _ in 0..ROUNDS {
        let (hi0, lo0) = wide_product(MULTIPLIERS[0], c[0]);
        let (hi1, lo1) = wide_product(MULTIPLIERS[1], c[2]);
        c = [hi1 ^ c[1] ^ k[0], lo1, hi0 ^ c[3] ^ k[1], lo0];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

fn wide_product(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

/// Returns a uniform draw in `[0, 1)`: 53 bits of the block at counter `(position, choice, 0, 0)`.
pub fn uniform(seed: u64, choice: u32, position: u32) -> f64 {
    let block = philox4x32([position, choice, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(block[0]) << 32 | u64::from(block[1])) >> 11;
    bits as f64 * (1.0 / (1_u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random123's `kat_vectors`, rows `philox4x32 10`.
    #[test]
    fn known_answers() {
        let ones = u32::MAX;
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32([ones; 4], [ones; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_is_in_the_unit_interval_and_spread() {
        let n = 10_000;
        let draws: Vec<f64> = (0..n).map(|position| uniform(42, 0, position)).collect();
        assert!(draws.iter().all(|u| (0.0..1.0).contains(u)));
        // The mean of n uniform draws has the standard deviation sqrt(1/12n) = 0.0029; this allows five of them.
        let mean = draws.iter().sum::<f64>() / f64::from(n);
        assert!((mean - 0.5).abs() < 0.0145, "mean {mean}");
        assert_ne!(uniform(42, 1, 0), uniform(42, 0, 0));
        assert_ne!(uniform(43, 0, 0), uniform(42, 0, 0));
    }
}
