//! Quantizing plain weights: never worse than rounding to nearest, unchanged for quantized values, and finite for any
//! finite weights.

use llaisys_core::quant::BLOCK_LEN;
use llaisys_core::quant::quantize::{Grid, QuantizedRow, quantize};
use proptest::prelude::*;

const GRIDS: [Grid; 3] = [Grid::Symmetric { bits: 8 }, Grid::Symmetric { bits: 6 }, Grid::ZeroPoint];

fn fitted(grid: Grid, values: &[f32]) -> QuantizedRow {
    let mut out = QuantizedRow::default();
    quantize(grid, values, &mut out);
    out
}

/// The sum of squared differences of each group.
fn errors(values: &[f32], fitted: &[f32]) -> Vec<f64> {
    let of = |(a, b): (&[f32], &[f32])| a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    values.chunks(BLOCK_LEN).zip(fitted.chunks(BLOCK_LEN)).map(of).collect()
}

/// Rounds to nearest according to the definition: the smallest scale that covers every weight, and for each weight the
/// nearest value of the grid.
fn nearest(grid: Grid, values: &[f32], unit: f32) -> Vec<f32> {
    let mut out = Vec::new();
    for group in values.chunks(BLOCK_LEN) {
        let low = group.iter().fold(0.0_f32, |low, &w| low.min(w));
        let high = group.iter().fold(0.0_f32, |high, &w| high.max(w));
        let (levels, reach) = match grid {
            Grid::Symmetric { bits } => {
                let most = f32::from((1_u8 << (bits - 1)) - 1);
                ((-most, most), high.max(-low) / most)
            }
            Grid::ZeroPoint => ((0.0, 15.0), high / 15.0 - low / 15.0),
        };
        let step = (reach / unit).ceil().clamp(1.0, 255.0) * unit;
        let zero = match grid {
            Grid::Symmetric { .. } => 0.0,
            // In a group without positive weights, zero is the largest integer.
            Grid::ZeroPoint if high == 0.0 => 15.0,
            Grid::ZeroPoint => (-low / step * 16.0).round_ties_even().min(240.0) / 16.0,
        };
        let value = |w: f32| ((w / step + zero).round_ties_even().clamp(levels.0, levels.1) - zero) * step;
        out.extend(group.iter().map(|&w| if unit > 0.0 { value(w) } else { 0.0 }));
    }
    out
}

/// Rows of three groups with sizes between these powers of two. Weights are sums of uniform numbers (nearly normal), or
/// all of one sign, or constant, or with six kinds also with an outlier.
fn rows(powers: std::ops::Range<i32>, kinds: u8) -> impl Strategy<Value = Vec<f32>> {
    let group = (prop::collection::vec(-1.0_f32..1.0, 4 * BLOCK_LEN), powers, 0..kinds);
    let group = group.prop_map(|(parts, power, kind)| {
        let mut group: Vec<f32> =
            parts.chunks(4).map(|w| w.iter().sum::<f32>() * 2_f32.powi(power)).collect();
        match kind {
            1 => group.iter_mut().for_each(|w| *w = w.abs()),
            2 => group.iter_mut().for_each(|w| *w = -w.abs()),
            3 => group.fill(parts[0]),
            5 => group[7] *= 40.0,
            _ => {}
        }
        group
    });
    prop::collection::vec(group, 3).prop_map(|groups| groups.concat())
}

proptest! {
    #[test]
    fn no_group_is_worse_than_rounding_to_nearest(values in rows(-12..3, 6)) {
        for grid in GRIDS {
            let fitted = fitted(grid, &values);
            let ours = errors(&values, &fitted.values(grid));
            let plain = errors(&values, &nearest(grid, &values, fitted.unit));
            for (g, (ours, plain)) in ours.iter().zip(&plain).enumerate() {
                // Both are sums of 32 squares in f32, and a tie may round either way.
                prop_assert!(ours <= &(plain * 1.001 + 1e-12), "{grid:?} group {g}: {ours:e} > {plain:e}");
            }
        }
    }

    #[test]
    fn quantized_values_stay_unchanged(values in rows(-2..3, 5)) {
        for grid in GRIDS {
            let first = fitted(grid, &values).values(grid);
            let again = fitted(grid, &first).values(grid);
            prop_assert_eq!(&first, &again, "{:?}", grid);
        }
    }

    #[test]
    fn any_finite_numbers_give_finite_values(bits in prop::collection::vec(any::<u32>(), 2 * BLOCK_LEN)) {
        let finite = |bits| Some(f32::from_bits(bits)).filter(|w: &f32| w.is_finite()).unwrap_or(0.0);
        let values: Vec<f32> = bits.into_iter().map(|bits| finite(bits) / 2.0).collect();
        for grid in GRIDS {
            let fitted = fitted(grid, &values).values(grid);
            prop_assert!(fitted.iter().all(|w| w.is_finite()), "{:?}: {:?}", grid, fitted);
        }
    }
}

/// The gain of the search on normal weights. The bounds are measured errors of this quantizer, so that a regression
/// fails.
#[test]
fn errors_on_normal_weights() {
    let mut state = 1_u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1_u32 << 24) as f32
    };
    let mut normal = || (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
    let values: Vec<f32> = (0..1024 * BLOCK_LEN).map(|_| normal()).collect();
    let size: f64 = values.iter().map(|&w| f64::from(w).powi(2)).sum();
    for (grid, at_most) in GRIDS.into_iter().zip([0.0050, 0.0206, 0.072]) {
        let (mut ours, mut plain) = (0.0, 0.0);
        for row in values.chunks(32 * BLOCK_LEN) {
            let fitted = fitted(grid, row);
            ours += errors(row, &fitted.values(grid)).iter().sum::<f64>();
            plain += errors(row, &nearest(grid, row, fitted.unit)).iter().sum::<f64>();
        }
        let [ours, plain] = [ours, plain].map(|error| (error / size).sqrt());
        println!("{grid:?}: relative rms {ours:.5}, rounded to nearest {plain:.5}");
        assert!(ours < plain && ours <= at_most, "{grid:?}: {ours} of {plain}");
    }
}

#[test]
fn zeros_stay_zero() {
    for grid in GRIDS {
        assert_eq!(fitted(grid, &[0.0; 64]).values(grid), [0.0; 64]);
        let mut values = [0.0; 64];
        values[3] = 1.0;
        assert_eq!(fitted(grid, &values).values(grid)[32..], [0.0; 32]);
    }
}
