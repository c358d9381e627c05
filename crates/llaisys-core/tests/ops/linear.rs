//! `linear` on every instruction set of the machine, in every format and odd shapes: compared with the f64 reference,
//! and bit for bit with other batches and numbers of threads.

use crate::stored::{Rng, Stored, block_len, f16_places};
use llaisys_core::ops::dispatch::{IsaName, Kernels};
use llaisys_core::ops::packed::{PackedFormat, PackedMatrix};
use llaisys_core::ops::{
    Gate, GateBias, GatedPart, LinearPart, OpContext, cases, gate_up_row, gate_up_rows, linear, linear_add,
    linear_gated, reference,
};
use llaisys_core::threads::Pool;

/// Rows from one tile to several, across the boundaries of every tile height (1, 2, 4, 6, 12), of dynamic chunks and of
/// the rows of threads.
const N_ROWS: [usize; 15] = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 25, 31, 33, 70];

fn context(isa: IsaName, n_threads: usize) -> OpContext {
    let kernels = Kernels::select(Some(isa)).unwrap();
    OpContext::new(kernels, Pool::new(n_threads).unwrap(), 100, 1536).unwrap()
}

/// Outputs and inputs of the test matrices: tails of panels, odd K for plain formats, and whole blocks for others.
/// Panels have every size with its own kind of prefetch (BF16 of 577 and 8 bits of 864: to the second-level cache).
fn shapes(format: PackedFormat) -> &'static [(usize, usize)] {
    match block_len(format) {
        1 => &[(1, 1), (5, 2), (31, 3), (32, 31), (33, 64), (100, 65), (65, 577)],
        32 => &[(1, 32), (31, 64), (32, 96), (33, 32), (100, 288), (65, 576), (65, 864)],
        _ => &[(1, 256), (31, 512), (33, 768), (65, 256)],
    }
}

/// The next multiple of the block length of the format's type, from `k` inputs on.
fn whole(format: PackedFormat, k: usize) -> usize {
    k.next_multiple_of(block_len(format))
}

/// `x W^T + b` by the reference on inputs rounded as in the format's product. Also returns for each output the sum of
/// `|x w|` and `|b|`, to which rounding errors are relative.
fn expected(format: PackedFormat, x: &[f32], weight: &Stored, bias: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let k = weight.n_columns;
    let x = match format {
        PackedFormat::F32 => x.iter().map(|&x| f64::from(x)).collect(),
        PackedFormat::BF16 => reference::linear::round_bf16(x),
        _ => reference::linear::round_groups(x),
    };
    let bias: Vec<f64> = bias.iter().map(|&b| f64::from(b)).collect();
    let y = reference::linear::linear(&x, k, &weight.values(), &bias);
    let x_size: Vec<f64> = x.iter().map(|x| x.abs()).collect();
    let bias_size: Vec<f64> = bias.iter().map(|b| b.abs()).collect();
    (y, reference::linear::linear(&x_size, k, &weight.sizes(), &bias_size))
}

/// The largest number of f32 roundings of an output's terms. A sum of K products has one for each k, or two for scalar,
/// which also rounds products. Groups have exact integer sums and five roundings for each scale (its two scalings, the
/// product of the minimum, two additions). Then the column's unit and the bias are rounded.
fn n_roundings(format: PackedFormat, k: usize) -> f64 {
    // These formats have a scale for 16 elements.
    let is_halved = matches!(format, PackedFormat::Q6_K | PackedFormat::Q3_K | PackedFormat::Q2_K);
    let n_scales = if is_halved { k / 16 } else { k / 32 };
    let sums = if format.is_grouped() { n_scales * 5 + 1 } else { k + 1 };
    (sums + 2) as f64
}

fn assert_close(format: PackedFormat, k: usize, got: &[f32], expected: &(Vec<f64>, Vec<f64>), what: &str) {
    let (want, size) = expected;
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&got, (want, size))) in got.iter().zip(want.iter().zip(size)).enumerate() {
        let bound =
            n_roundings(format, k) * f64::from(f32::EPSILON) / 2.0 * size + f64::from(f32::MIN_POSITIVE);
        let error = (f64::from(got) - want).abs();
        assert!(error <= bound, "{what}, output {i}: {got} instead of {want}, off by {error:e} > {bound:e}");
    }
}

#[test]
fn linear_agrees_with_the_reference_within_rounding() {
    for isa in IsaName::available() {
        let mut cx = context(isa, 2);
        for format in PackedFormat::ALL {
            for (i, &(n, k)) in shapes(format).iter().enumerate() {
                let rng = &mut Rng(i as u64);
                let stored = Stored::of(rng, format, n, k);
                let weight = stored.pack(&cx.pool, format);
                for m in N_ROWS {
                    let (x, bias) = (rng.units(m * k), rng.units(n));
                    let mut y = vec![f32::NAN; m * n];
                    linear(&mut cx, &x, &[LinearPart { weight: &weight, bias: Some(&bias) }], &mut [&mut y]);
                    let what = format!("{isa:?} {format:?} {m} x {n} x {k}");
                    assert_close(format, k, &y, &expected(format, &x, &stored, &bias), &what);
                }
            }
        }
    }
}

#[test]
fn integer_kernels_do_not_saturate() {
    let ends = [-1.0, 1.0, 0.5, -0.5];
    for isa in IsaName::available() {
        let mut cx = context(isa, 1);
        for format in PackedFormat::ALL.into_iter().filter(|format| format.is_grouped()) {
            for byte in [0x00_u8, 0x7f, 0x80, 0xff] {
                // A unit of 1 (and no minimum), then one extreme byte everywhere.
                let dtype = format.dtype();
                let mut block = vec![byte; dtype.block_bytes()];
                for (number, &at) in [0x3c00_u16, 0].iter().zip(f16_places(dtype)) {
                    block[at..at + 2].copy_from_slice(&number.to_le_bytes());
                }
                if format == PackedFormat::MXFP4 {
                    block[0] = 128;
                }
                if format.grid().is_some() {
                    block = f32::from(byte as i8).to_le_bytes().repeat(block_len(format));
                }
                let (row, k) = (block.repeat(2), 2 * block_len(format));
                let view = llaisys_core::tensor::RowView { dtype, bytes: &row };
                let weight = PackedMatrix::pack(&cx.pool, format, 32, k, &|_| view).unwrap();
                let mut w = vec![0.0; k];
                weight.read_row(0, &mut w);
                for end in ends {
                    let (x, mut y) = (vec![end; 4 * k], vec![0.0; 4 * 32]);
                    linear(&mut cx, &x, &[LinearPart { weight: &weight, bias: None }], &mut [&mut y]);
                    let want: f32 = w.iter().map(|w| w * end).sum();
                    let size: f32 = w.iter().map(|w| (w * end).abs()).sum();
                    assert!(
                        y.iter().all(|y| (y - want).abs() <= size * 1e-5),
                        "{isa:?} {format:?} {byte:#x} x {end}: {y:?} instead of {want}"
                    );
                }
            }
        }
    }
}

/// The bits of a row's outputs depend neither on other rows nor on the number of threads.
#[test]
fn bits_of_a_row_do_not_depend_on_batch_or_threads() {
    let batches: Vec<usize> = (1..=33).chain([63, 64, 65, 100]).collect();
    for isa in IsaName::available() {
        for format in PackedFormat::ALL {
            let (n, k) = (100, if format.is_grouped() { whole(format, 160) } else { 37 });
            let rng = &mut Rng(7);
            let x = rng.units(100 * k);
            let stored = Stored::of(rng, format, n, k);
            let mut alone = Vec::new();
            for n_threads in 1..=3 {
                let mut cx = context(isa, n_threads);
                let weight = stored.pack(&cx.pool, format);
                let part = [LinearPart { weight: &weight, bias: None }];
                if alone.is_empty() {
                    alone = vec![0.0; 100 * n];
                    for (x, y) in x.chunks_exact(k).zip(alone.chunks_exact_mut(n)) {
                        linear(&mut cx, x, &part, &mut [y]);
                    }
                }
                for &m in &batches {
                    let mut y = vec![f32::NAN; m * n];
                    linear(&mut cx, &x[(100 - m) * k..], &part, &mut [&mut y]);
                    let same = y.iter().zip(&alone[(100 - m) * n..]).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(
                        same,
                        "{isa:?} {format:?}: {m} rows on {n_threads} threads differ from single rows"
                    );
                }
            }
        }
    }
}

/// All instruction sets except scalar add the same products in the same order: integers exactly and floats by fused
/// multiply-adds. `vdpbf16ps` is the only other exception.
#[test]
fn instruction_sets_with_fused_multiply_add_give_the_same_bits() {
    let sets = IsaName::available().into_iter().filter(|isa| *isa != IsaName::Scalar);
    let mut contexts: Vec<OpContext> = sets.map(|isa| context(isa, 1)).collect();
    for format in PackedFormat::ALL {
        for m in 1..=13 {
            let (rng, n, k) = (&mut Rng(m as u64), 33, whole(format, 160));
            let x = rng.units(m * k);
            let stored = Stored::of(rng, format, n, k);
            let mut first: Option<Vec<f32>> = None;
            for cx in &mut contexts {
                let isa = cx.kernels.isa();
                if format == PackedFormat::BF16 && isa == IsaName::Avx512Bf16 {
                    continue;
                }
                let weight = stored.pack(&cx.pool, format);
                let mut y = vec![f32::NAN; m * n];
                linear(cx, &x, &[LinearPart { weight: &weight, bias: None }], &mut [&mut y]);
                let first = first.get_or_insert_with(|| y.clone());
                let same = y.iter().zip(first).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{isa:?} {format:?}: {m} rows differ from those of the sets above");
            }
        }
    }
}

#[test]
fn parts_of_one_call_equal_separate_calls() {
    for isa in IsaName::available() {
        let mut cx = context(isa, 2);
        let rng = &mut Rng(11);
        let formats = [PackedFormat::Q4_1, PackedFormat::F32, PackedFormat::BF16, PackedFormat::Q6_K];
        let (x, k) = (rng.units(5 * 256), 256);
        let weights: Vec<PackedMatrix> = formats
            .iter()
            .zip([40, 33, 7, 64])
            .map(|(&format, n)| Stored::of(rng, format, n, k).pack(&cx.pool, format))
            .collect();
        let bias = rng.units(33);
        let parts: Vec<LinearPart<'_>> = weights
            .iter()
            .map(|weight| LinearPart { weight, bias: (weight.n_rows() == 33).then_some(&bias[..]) })
            .collect();
        let mut ys: Vec<Vec<f32>> = weights.iter().map(|w| vec![f32::NAN; 5 * w.n_rows()]).collect();
        let mut outs: Vec<&mut [f32]> = ys.iter_mut().map(|y| &mut y[..]).collect();
        linear(&mut cx, &x, &parts, &mut outs);
        for (part, y) in parts.iter().zip(&ys) {
            let mut alone = vec![0.0; y.len()];
            linear(&mut cx, &x, &[*part], &mut [&mut alone]);
            assert_eq!(&alone, y, "{isa:?} {:?}", part.weight.format());
        }
    }
}

/// Compares `linear_gated` with `linear`, whose bias has the order of the interleaved rows, and the gate's reference.
fn assert_gated(cx: &mut OpContext, x: &[f32], part: GatedPart<'_>, d_ff: usize, what: &str) {
    let (n, m) = (gate_up_rows(d_ff), x.len() / part.gate_up.n_columns());
    let of = |GateBias { gate, up }: GateBias<'_>| -> Vec<f32> {
        let row = |(is_up, row): (bool, usize)| if is_up { up[row] } else { gate[row] };
        (0..n).map(|i| gate_up_row(d_ff, i).map_or(0.0, row)).collect()
    };
    let bias = part.bias.map(of);
    let (mut sums, mut y) = (vec![0.0; m * n], vec![f32::NAN; m * d_ff]);
    linear(cx, x, &[LinearPart { weight: part.gate_up, bias: bias.as_deref() }], &mut [&mut sums]);
    linear_gated(cx, x, part, &mut y);
    for (i, &y) in y.iter().enumerate() {
        let place = |is_up| (0..n).find(|&n| gate_up_row(d_ff, n) == Some((is_up, i % d_ff)));
        let of = |is_up| sums[i / d_ff * n + place(is_up).unwrap()];
        let want = reference::swiglu::swiglu(&[of(false)], &[of(true)])[0];
        let bound = cases::swiglu_tolerance(f64::from(of(true)), want);
        let error = (f64::from(y) - want).abs();
        assert!(error <= bound, "{what}, {i}: {y} for {want}");
    }
}

/// The sums of `linear`, through the gate, with every division of the work, with and without biases.
#[test]
fn linear_gated_equals_linear_and_a_gate() {
    for isa in IsaName::available() {
        for n_threads in [1, 3] {
            let mut cx = context(isa, n_threads);
            for format in PackedFormat::ALL {
                let (rng, k) = (&mut Rng(19), whole(format, 64));
                for (m, d_ff) in [(1, 48), (5, 20), (40, 33), (70, 7)] {
                    let n = gate_up_rows(d_ff);
                    let weight = Stored::of(rng, format, n, k).pack(&cx.pool, format);
                    let x = rng.units(m * k);
                    let (gate, up) = (rng.units(d_ff), rng.units(d_ff));
                    for bias in [None, Some(GateBias { gate: &gate, up: &up })] {
                        let part = GatedPart { gate_up: &weight, bias, gate: Gate::Silu };
                        let what = format!("{isa:?} {format:?} {m} x {d_ff}, bias {}", bias.is_some());
                        assert_gated(&mut cx, &x, part, d_ff, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn linear_add_adds_to_the_output() {
    for isa in IsaName::available() {
        let mut cx = context(isa, 2);
        for format in PackedFormat::ALL {
            let rng = &mut Rng(13);
            let (m, n, k) = (9, 70, whole(format, 64));
            let weight = Stored::of(rng, format, n, k).pack(&cx.pool, format);
            let (x, residual) = (rng.units(m * k), rng.units(m * n));
            let mut y = vec![0.0; m * n];
            linear(&mut cx, &x, &[LinearPart { weight: &weight, bias: None }], &mut [&mut y]);
            let want: Vec<f32> = residual.iter().zip(&y).map(|(r, y)| r + y).collect();
            let mut got = residual;
            linear_add(&mut cx, &x, &weight, &mut got);
            assert_eq!(got, want, "{isa:?} {format:?}");
        }
    }
}

/// A row with a non-finite number has no finite result and does not affect other rows. Zeros and the smallest numbers
/// give zeros or almost zeros.
#[test]
fn extreme_numbers_affect_only_their_row() {
    for isa in IsaName::available() {
        let mut cx = context(isa, 1);
        for format in PackedFormat::ALL {
            let rng = &mut Rng(17);
            let (m, n, k) = (8, 33, whole(format, 64));
            let stored = Stored::of(rng, format, n, k);
            let weight = stored.pack(&cx.pool, format);
            let part = [LinearPart { weight: &weight, bias: None }];
            let clean = rng.units(m * k);
            let mut want = vec![0.0; m * n];
            linear(&mut cx, &clean, &part, &mut [&mut want]);
            let mut x = clean;
            x[2 * k + 40] = f32::NAN;
            x[3 * k + 1] = f32::INFINITY;
            x[4 * k + 63] = f32::NEG_INFINITY;
            x[5 * k..6 * k].fill(0.0);
            x[6 * k..7 * k].fill(1e-40);
            let mut y = vec![0.0; m * n];
            linear(&mut cx, &x, &part, &mut [&mut y]);
            let row = |r: usize| &y[r * n..(r + 1) * n];
            for r in 2..5 {
                assert!(row(r).iter().all(|y| !y.is_finite()), "{isa:?} {format:?} row {r}: {:?}", row(r));
            }
            assert!(row(5).iter().all(|&y| y == 0.0), "{isa:?} {format:?}");
            assert!(row(6).iter().all(|y| y.abs() < 1e-37), "{isa:?} {format:?}");
            for r in [0, 1, 7] {
                assert_eq!(row(r), &want[r * n..(r + 1) * n], "{isa:?} {format:?} row {r}");
            }
        }
    }
}

#[test]
fn empty_input_is_accepted() {
    let mut cx = context(IsaName::available()[0], 2);
    let weight = Stored::of(&mut Rng(1), PackedFormat::F32, 40, 8).pack(&cx.pool, PackedFormat::F32);
    linear(&mut cx, &[], &[LinearPart { weight: &weight, bias: None }], &mut [&mut []]);
    linear(&mut cx, &[1.0], &[], &mut []);
}

#[test]
#[should_panic(expected = "the context has capacity for")]
fn more_rows_than_the_capacity_panic() {
    let mut cx = context(IsaName::Scalar, 1);
    let weight = Stored::of(&mut Rng(1), PackedFormat::F32, 1, 8).pack(&cx.pool, PackedFormat::F32);
    linear_add(&mut cx, &[0.0; 101 * 8], &weight, &mut [0.0; 101]);
}

#[test]
fn instruction_sets_have_names() {
    let available = IsaName::available();
    assert_eq!(available.last(), Some(&IsaName::Scalar));
    assert_eq!(Kernels::select(None).unwrap().isa(), available[0]);
    for isa in available {
        assert_eq!(IsaName::parse(isa.name()).unwrap(), isa);
        assert_eq!(Kernels::select(Some(isa)).unwrap().isa(), isa);
    }
    assert!(IsaName::parse("mmx").unwrap_err().to_string().contains("scalar"));
}
