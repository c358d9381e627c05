//! `pruned_argmax` compared with `argmax` of `linear`, also where the 8-bit copy alone would be wrong, and where it
//! must not decide.

use llaisys_core::dtype::DType;
use llaisys_core::ops::argmax_bounds::ArgmaxBounds;
use llaisys_core::ops::cases::{Size, SplitMix64};
use llaisys_core::ops::dispatch::{IsaName, Kernels};
use llaisys_core::ops::packed::{PackedFormat, PackedMatrix};
use llaisys_core::ops::{LinearPart, OpContext, PrunedArgmaxScratch, argmax, linear, pruned_argmax};
use llaisys_core::tensor::RowView;
use llaisys_core::threads::Pool;

const FORMATS: [PackedFormat; 2] = [PackedFormat::F32, PackedFormat::BF16];
/// Outputs: whole panels and a part of one; enough that an eighth of the panels is several.
const N: usize = 40 * 32 + 7;
const K: usize = 96;

/// A context for every instruction set of the machine.
fn contexts(n_threads: usize) -> impl Iterator<Item = OpContext> {
    let kernels = IsaName::available().into_iter().map(|isa| Kernels::select(Some(isa)).unwrap());
    kernels.map(move |kernels| OpContext::new(kernels, Pool::new(n_threads).unwrap(), 70, K).unwrap())
}

fn packed(pool: &Pool, format: PackedFormat, weights: &[f32]) -> PackedMatrix {
    let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
    let row = |n: usize| RowView { dtype: DType::F32, bytes: &bytes[n * K * 4..(n + 1) * K * 4] };
    PackedMatrix::pack(pool, format, weights.len() / K, K, &row).unwrap()
}

/// The ids of the rows `x` from all products.
fn by_argmax(cx: &mut OpContext, x: &[f32], matrix: &PackedMatrix) -> Vec<u32> {
    let mut out = vec![0.0; x.len() / K * matrix.n_rows()];
    linear(cx, x, &[LinearPart { weight: matrix, bias: None }], &mut [&mut out]);
    out.chunks(matrix.n_rows()).map(|row| argmax(row) as u32).collect()
}

fn by_bounds(cx: &mut OpContext, x: &[f32], matrix: &PackedMatrix) -> Vec<Option<u32>> {
    let bounds = ArgmaxBounds::new(&cx.pool, matrix).unwrap().expect("finite numbers");
    pruned_argmax(cx, x, matrix, &bounds, &mut PrunedArgmaxScratch::default()).collect()
}

/// Asserts that every id that was found is right, and returns their number.
fn n_right(cx: &mut OpContext, x: &[f32], matrix: &PackedMatrix, what: &str) -> usize {
    let (want, got) = (by_argmax(cx, x, matrix), by_bounds(cx, x, matrix));
    assert_eq!(want.len(), got.len(), "{what}");
    for (row, (want, got)) in want.iter().zip(&got).enumerate() {
        assert!(got.is_none_or(|got| got == *want), "{what}, row {row}: {got:?} instead of {want}");
    }
    got.iter().flatten().count()
}

#[test]
fn agrees_with_argmax_of_linear() {
    for n_threads in [1, 2] {
        for mut cx in contexts(n_threads) {
            for format in FORMATS {
                for (seed, n_rows) in [(1, 1), (2, 2), (3, 5), (4, 16), (5, 33), (6, 70)] {
                    let draw = &mut SplitMix64::new(seed);
                    let matrix = packed(&cx.pool, format, &draw.values(Size::Unit, N * K));
                    let mut x = draw.values(Size::Unit, n_rows * K);
                    for (i, row) in x.chunks_mut(K).enumerate() {
                        // One input is many times larger than the others, which is bad for the 8-bit integers of its
                        // group of 32.
                        row[i % K] *= if i % 3 == 1 { 1000.0 } else { 1.0 };
                    }
                    let what = format!("{format:?}, {n_rows} rows, seed {seed}");
                    let n = n_right(&mut cx, &x, &matrix, &what);
                    assert!(2 * n >= n_rows, "{what}: {n} rows found");
                }
            }
        }
    }
}

/// Rows of weights whose differences from the best one are below the resolution of 8 bits.
#[test]
fn resolves_near_ties_with_the_full_matrix() {
    let mut n_misled = 0;
    for mut cx in contexts(2) {
        for format in FORMATS {
            for seed in 0..20 {
                let draw = &mut SplitMix64::new(seed);
                let x = draw.values(Size::Unit, K);
                let mut weights = draw.values(Size::Unit, N * K);
                for row in [5, 36, 700, 701, N - 1] {
                    for k in 0..K {
                        weights[row * K + k] = x[k] * (2.0 + 0.001 * draw.values(Size::Unit, 1)[0]);
                    }
                }
                let matrix = packed(&cx.pool, format, &weights);
                assert_eq!(n_right(&mut cx, &x, &matrix, &format!("{format:?}, seed {seed}")), 1);
                let copy = packed(&cx.pool, PackedFormat::Q8_0, &weights);
                n_misled += usize::from(by_argmax(&mut cx, &x, &copy) != by_argmax(&mut cx, &x, &matrix));
            }
        }
    }
    assert!(n_misled > 10, "the copy alone was wrong only {n_misled} times: no near ties");
}

#[test]
fn returns_the_lowest_of_equal_products() {
    for mut cx in contexts(2) {
        for format in FORMATS {
            for (first, second) in [(3, 4), (31, 32), (0, N - 1), (600, 640)] {
                let draw = &mut SplitMix64::new(9);
                let x = draw.values(Size::Unit, K);
                let mut weights = draw.values(Size::Unit, N * K);
                for row in [second, first] {
                    weights[row * K..(row + 1) * K].copy_from_slice(&x);
                }
                let matrix = packed(&cx.pool, format, &weights);
                assert_eq!(by_bounds(&mut cx, &x, &matrix), [Some(first as u32)], "{format:?}");
                assert_eq!(by_argmax(&mut cx, &x, &matrix), [first as u32], "{format:?}");
            }
        }
    }
}

/// If no output is clearly the largest, or an input is NaN, the caller computes all products.
#[test]
fn returns_none_when_undecided() {
    for mut cx in contexts(2) {
        for format in FORMATS {
            let draw = &mut SplitMix64::new(4);
            let row = draw.values(Size::Unit, K);
            let weights = draw.values(Size::Unit, N * K);
            let equal = packed(&cx.pool, format, &row.repeat(N));
            assert_eq!(by_bounds(&mut cx, &row, &equal), [None], "{format:?}, equal outputs");
            let matrix = packed(&cx.pool, format, &weights);
            let mut x = row.repeat(6);
            x[K..2 * K].fill(0.0);
            x[2 * K + 7] = f32::NAN;
            x[3 * K + 7] = f32::NEG_INFINITY;
            x[4 * K + 7] = 1e30;
            let got = by_bounds(&mut cx, &x, &matrix);
            let want = by_argmax(&mut cx, &row, &matrix)[0];
            assert_eq!(got, [Some(want), None, None, None, None, Some(want)], "{format:?}");
        }
    }
}

#[test]
fn unsupported_matrix_has_no_bounds() {
    let pool = Pool::new(2).unwrap();
    for format in FORMATS {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, -1e20] {
            let mut weights = SplitMix64::new(4).values(Size::Unit, N * K);
            weights[N * K - 1] = odd;
            assert!(ArgmaxBounds::new(&pool, &packed(&pool, format, &weights)).unwrap().is_none(), "{odd}");
        }
    }
    let weights = SplitMix64::new(4).values(Size::Unit, 32 * K);
    assert!(ArgmaxBounds::new(&pool, &packed(&pool, PackedFormat::Q8_0, &weights)).unwrap().is_none());
    assert!(
        ArgmaxBounds::can_have(PackedFormat::BF16, 64) && !ArgmaxBounds::can_have(PackedFormat::BF16, 65)
    );
}

#[test]
fn reports_its_bytes() {
    let pool = Pool::new(1).unwrap();
    for n in [1, 32, 33, 100] {
        let matrix = packed(&pool, PackedFormat::BF16, &SplitMix64::new(4).values(Size::Unit, n * K));
        let bounds = ArgmaxBounds::new(&pool, &matrix).unwrap().unwrap();
        assert_eq!(bounds.n_bytes(), ArgmaxBounds::bytes_for(n, K));
    }
}
