//! Tests of the bound: no exact product differs from its approximation by more than B.

use super::*;
use crate::dtype::DType;
use crate::ops::cases::{Size, SplitMix64};
use crate::ops::cpu::dispatch::{IsaName, Kernels};
use crate::ops::cpu::linear::{LinearPart, linear};
use crate::ops::packed::PackedFormat;
use crate::tensor::RowView;
use crate::threads::Pool;

/// Weights, their format and rows of inputs.
struct Case {
    format: PackedFormat,
    k: usize,
    weights: Vec<f32>,
    x: Vec<f32>,
}

/// Random numbers of every size, in groups that differ by powers of two, with single outliers far above the others.
fn case(seed: u64) -> Case {
    let draw = &mut SplitMix64::new(seed);
    let format = [PackedFormat::F32, PackedFormat::BF16][draw.below(2)];
    let (n, k, n_rows) = (1 + draw.below(150), 32 * (1 + draw.below(40)), 1 + draw.below(15));
    let mut numbers = |n: usize, powers: [i32; 6]| -> Vec<f32> {
        let mut values = draw.values(Size::Unit, n);
        let (size, spread) = (powers[draw.below(6)], draw.below(7) as i32);
        for group in values.chunks_mut(32) {
            let power = 2_f32.powi(size + spread - draw.below(2 * spread as usize + 1) as i32);
            group.iter_mut().for_each(|x| *x *= power);
            if draw.below(8) == 0 {
                group[draw.below(32)] *= 1000.0;
            }
        }
        values
    };
    // Weights within the scales of Q8_0 and below them. Inputs as large as allowed, and so small that sums are below
    // the normal numbers.
    let weights = numbers(n * k, [-30, 0, 0, 0, 3, 5]);
    let x = numbers(n_rows * k, [-110, -40, 0, 0, 20, 40]);
    Case { format, k, weights, x }
}

impl Case {
    fn matrix(&self, pool: &Pool) -> PackedMatrix {
        let bytes: Vec<u8> = self.weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        let row =
            |n: usize| RowView { dtype: DType::F32, bytes: &bytes[n * self.k * 4..(n + 1) * self.k * 4] };
        PackedMatrix::pack(pool, self.format, self.weights.len() / self.k, self.k, &row).unwrap()
    }
}

fn products(cx: &mut OpContext, x: &[f32], weight: &PackedMatrix) -> Vec<f32> {
    let mut out = vec![0.0; x.len() / weight.n_columns() * weight.n_rows()];
    linear(cx, x, &[LinearPart { weight, bias: None }], &mut [&mut out]);
    out
}

fn length(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

#[test]
fn exact_products_are_within_the_bound_of_the_approximation() {
    let (mut n_products, mut n_tight) = (0, 0);
    for isa in IsaName::available() {
        let kernels = Kernels::select(Some(isa)).unwrap();
        let mut cx = OpContext::new(kernels, Pool::new(2).unwrap(), 16, 1280).unwrap();
        for seed in 0..60 {
            let case = case(seed);
            let matrix = case.matrix(&cx.pool);
            let bounds = ArgmaxBounds::new(&cx.pool, &matrix).unwrap().expect("finite numbers");
            let exact = products(&mut cx, &case.x, &matrix);
            let approximate = products(&mut cx, &case.x, bounds.copy());
            let mut scratch = PrunedArgmaxScratch::default();
            drop(pruned_argmax(&mut cx, &case.x, &matrix, &bounds, &mut scratch));
            let rows = exact.chunks(matrix.n_rows()).zip(approximate.chunks(matrix.n_rows()));
            for ((row, (exact, approximate)), factors) in rows.enumerate().zip(&scratch.factors) {
                let factors = factors.expect("finite inputs");
                let x = length(case.x[row * case.k..][..case.k].iter().map(|&x| f64::from(x)));
                for (n, (&exact, &approximate)) in exact.iter().zip(approximate).enumerate() {
                    let Lengths { errors, copies } = bounds.lengths(n / PANEL);
                    let [error, of_copy] = [errors, copies].map(|of| f64::from(of[n % PANEL]));
                    let bound = error * f64::from(factors.errors)
                        + of_copy * f64::from(factors.copies)
                        + f64::from(factors.least);
                    let off = (f64::from(exact) - f64::from(approximate)).abs();
                    assert!(off <= bound, "{isa:?}, seed {seed}, row {row}, output {n}: {off:e} > {bound:e}");
                    n_products += 1;
                    // A bound that is much too wide would hide a wrong one.
                    let w = length(case.weights[n * case.k..][..case.k].iter().map(|&w| f64::from(w)));
                    n_tight += usize::from(bound <= 0.05 * w * x);
                }
            }
        }
    }
    assert!(n_tight * 2 > n_products, "only {n_tight} of {n_products} bounds are tight");
}

#[test]
fn stored_norms_are_upper_bounds() {
    let pool = Pool::new(2).unwrap();
    for seed in 0..60 {
        let case = case(seed);
        let matrix = case.matrix(&pool);
        let bounds = ArgmaxBounds::new(&pool, &matrix).unwrap().expect("finite numbers");
        let (mut values, mut copied) = (vec![0.0; case.k], vec![0.0; case.k]);
        for n in 0..matrix.n_rows() {
            matrix.read_row(n, &mut values);
            bounds.copy().read_row(n, &mut copied);
            let Lengths { errors, copies } = bounds.lengths(n / PANEL);
            let pairs = values.iter().zip(&copied);
            let error = length(pairs.map(|(&w, &c)| f64::from(w) - f64::from(c)));
            let of_copy = length(copied.iter().map(|&c| f64::from(c)));
            assert!(f64::from(errors[n % PANEL]) >= error, "seed {seed}, row {n}");
            assert!(f64::from(copies[n % PANEL]) >= of_copy, "seed {seed}, row {n}");
            let longest = length(values.iter().map(|&w| f64::from(w))).max(of_copy);
            assert!(bounds.longest() >= longest, "seed {seed}, row {n}");
        }
    }
}
