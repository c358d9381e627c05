//! The weights of a draw: compared with the reference, and bit for bit between instruction sets.

use llaisys_core::ops::cases::SplitMix64;
use llaisys_core::ops::dispatch::{IsaName, Kernels};
use llaisys_core::ops::reference::softmax_weights::softmax_weights;
use llaisys_core::ops::{NEGLIGIBLE, SoftmaxWeights, WEIGHT_PART};

/// Rows of many lengths: near the best logit, far below it, masked, and with exponents around the borders of the
/// rounding to powers of two.
fn rows() -> Vec<(Vec<f32>, f64)> {
    let mut rows = Vec::new();
    for n in [1, 2, 7, 8, 63, 64, 65, 1000] {
        for (spread, scale) in [(1e-6, 1.0), (3.0, 0.01), (12.0, 1.0), (50.0, 1.0 / 0.7), (90.0, 1e5)] {
            let draw = &mut SplitMix64::new(n as u64);
            let mut uniform = || (draw.bits() >> 40) as f64 / 16_777_216.0;
            let mut row: Vec<f32> = (0..n).map(|_| (-spread * uniform()) as f32).collect();
            row[n / 2] = 0.0;
            row[n - 1] = if n > 2 { f32::NEG_INFINITY } else { 0.0 };
            rows.push((row, scale));
        }
    }
    let borders = (0..=116).map(|halves| (-f64::from(halves) / 2.0 * std::f64::consts::LN_2) as f32);
    rows.push((borders.collect(), 1.0));
    rows
}

fn spec(isa: IsaName, scale: f64) -> SoftmaxWeights {
    let kernels = Kernels::select(Some(isa)).expect("the machine has the instruction set");
    SoftmaxWeights { kernels, best: 0.0, scale }
}

/// The weights of all parts.
fn weights(spec: SoftmaxWeights, row: &[f32]) -> Vec<f64> {
    let mut all = Vec::new();
    for part in row.chunks(WEIGHT_PART) {
        let mut of_part = [f64::NAN; WEIGHT_PART];
        spec.of_part(part, &mut of_part);
        assert!(of_part[part.len()..].iter().all(|&weight| weight == 0.0), "zeros after the part");
        all.extend_from_slice(&of_part[..part.len()]);
    }
    all
}

#[test]
fn weights_agree_with_the_reference_within_rounding() {
    for isa in IsaName::available() {
        for (row, scale) in rows() {
            let want = softmax_weights(&row, 0.0, scale, NEGLIGIBLE);
            for (i, (got, want)) in weights(spec(isa, scale), &row).into_iter().zip(want).enumerate() {
                // A rounding is at most 2^-53. The last step of the series has two, the steps before it and `r` less
                // than one more, of results of at least exp(-ln(2) / 2) = 0.7; the reference has one.
                let tolerance = 6.0 * 2_f64.powi(-53) * want;
                assert!((got - want).abs() <= tolerance, "{isa:?}, {}: {got:e}, {want:e}", row[i]);
                assert!(row[i] != 0.0 || got == 1.0, "the best has the weight 1");
            }
        }
    }
}

#[test]
fn weights_and_sums_have_the_same_bits_with_every_instruction_set() {
    for (row, scale) in rows() {
        let of_scalar = weights(spec(IsaName::Scalar, scale), &row);
        let mut sums_of_scalar = Vec::new();
        spec(IsaName::Scalar, scale).sums(&row, &mut sums_of_scalar);
        for (sum, part) in sums_of_scalar.iter().zip(of_scalar.chunks(WEIGHT_PART)) {
            // Each of the additions rounds once.
            let want: f64 = part.iter().sum();
            assert!((sum - want).abs() <= 64.0 * 2_f64.powi(-53) * want);
        }
        for isa in IsaName::available() {
            let mut sums = Vec::new();
            spec(isa, scale).sums(&row, &mut sums);
            assert_eq!(sums, sums_of_scalar, "{isa:?}");
            assert_eq!(weights(spec(isa, scale), &row), of_scalar, "{isa:?}");
        }
    }
}
