//! Packed matrices: values are preserved in every format, shape and conversion.

use crate::stored::{Rng, Stored, as_packed, block_len};
use half::bf16;
use llaisys_core::dtype::DType;
use llaisys_core::error::{DeviceError, Error};
use llaisys_core::ops::packed::{PackedFormat, PackedMatrix, Panels};
use llaisys_core::quant::quantize::{QuantizedRow, quantize};
use llaisys_core::quant::{BLOCK_LEN, Block, HALF_LEN, dequantize_row};
use llaisys_core::tensor::RowView;
use llaisys_core::threads::Pool;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::yield_now;

/// Outputs and inputs; types with larger blocks have the same number of blocks. The last has more groups than are
/// written at a time.
const SHAPES: [(usize, usize); 6] = [(1, 32), (31, 64), (32, 96), (33, 32), (100, 320), (33, 1312)];
/// Sizes that only plain types have. The last has more pairs than are written at a time.
const ODD_SHAPES: [(usize, usize); 5] = [(1, 1), (33, 7), (64, 31), (5, 65), (33, 261)];

fn pool() -> Pool {
    Pool::new(2).unwrap()
}

/// Every type that weights have.
fn dtypes() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|dtype| dtype.is_weight())
}

/// `k` elements of a type with blocks of 32, or the same number of blocks of another type.
fn columns(dtype: DType, k: usize) -> usize {
    if dtype.is_quantized() { k / BLOCK_LEN * dtype.block_len() } else { k }
}

fn values(row: RowView<'_>, n: usize) -> Vec<f32> {
    let mut values = vec![0.0; n];
    dequantize_row(row, &mut values);
    values
}

fn read(matrix: &PackedMatrix, n: usize) -> Vec<f32> {
    let mut values = vec![f32::NAN; matrix.n_columns()];
    matrix.read_row(n, &mut values);
    values
}

/// The values of a row in the format of its type: with scales and minima rounded to f16.
fn packed_values(row: RowView<'_>) -> Vec<f32> {
    let mut values = Vec::new();
    Block::for_each(row, |_, block| {
        let block = as_packed(block);
        values.extend((0..BLOCK_LEN).map(|i| block.value(i)));
    });
    values
}

fn assert_holds(matrix: &PackedMatrix, stored: &Stored) {
    let format = matrix.format();
    for n in 0..stored.n_rows {
        let mut want = if format.is_grouped() {
            packed_values(stored.row(n))
        } else {
            values(stored.row(n), stored.n_columns)
        };
        if format == PackedFormat::BF16 {
            want.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
        let got = read(matrix, n);
        let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{:?} in {format:?}, row {n} of {}: {got:?} {want:?}", stored.dtype, stored.n_rows);
    }
}

fn has_f32_scales(dtype: DType) -> bool {
    matches!(dtype, DType::Int4 | DType::Int8 | DType::Fp8)
}

#[test]
fn packed_rows_read_back() {
    let pool = pool();
    for dtype in dtypes() {
        for format in PackedFormat::ALL {
            if format.is_grouped() && PackedFormat::of(dtype) != format {
                continue;
            }
            let odd = if dtype.is_quantized() { &[][..] } else { &ODD_SHAPES[..] };
            for (i, &(n, k)) in SHAPES.iter().chain(odd).enumerate() {
                let k = columns(dtype, k);
                let stored = Stored::random(&mut Rng(i as u64), dtype, n, k);
                let matrix = stored.pack(&pool, format);
                assert_eq!((matrix.n_rows(), matrix.n_columns(), matrix.format()), (n, k, format));
                assert_holds(&matrix, &stored);
            }
        }
    }
}

#[test]
fn quantized_rows_read_back() {
    let pool = pool();
    for format in PackedFormat::ALL.into_iter().filter(|format| format.grid().is_some()) {
        for (i, &(n, k)) in SHAPES.iter().enumerate() {
            let stored = Stored::of(&mut Rng(i as u64), format, n, k);
            let matrix = stored.pack(&pool, format);
            assert_eq!((matrix.n_rows(), matrix.n_columns(), matrix.format()), (n, k, format));
            for row in 0..n {
                assert_eq!(read(&matrix, row), values(stored.row(row), k), "{format:?} row {row}");
            }
        }
    }
}

/// Weights of every plain type, and of Fp8, are packed as `quant::quantize` quantizes their values.
#[test]
fn plain_weights_are_quantized_while_packed() {
    let pool = pool();
    for format in PackedFormat::ALL {
        let Some(grid) = format.grid() else { continue };
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::Fp8] {
            let stored = Stored::random(&mut Rng(8), dtype, 33, 96);
            let matrix = stored.pack(&pool, format);
            let mut fitted = QuantizedRow::default();
            for n in 0..33 {
                quantize(grid, &values(stored.row(n), 96), &mut fitted);
                assert_eq!(read(&matrix, n), fitted.values(grid), "{dtype:?} in {format:?}");
            }
        }
    }
}

/// Types with f16 scales are exact. Scales and minima of the others have a relative error of up to 2^-11, which is a
/// 64th of a step where an integer is 32 steps from its zero, and a 16th where it is 128 steps.
#[test]
fn grouped_formats_are_exact_except_for_rounded_scales() {
    let pool = pool();
    for dtype in dtypes().filter(|dtype| dtype.is_quantized()) {
        let is_exact = dtype.block_len() == BLOCK_LEN && !has_f32_scales(dtype);
        let stored = Stored::random(&mut Rng(2), dtype, 40, 512);
        let matrix = stored.pack(&pool, PackedFormat::of(dtype));
        let mut n_off = 0;
        for n in 0..40 {
            let got = read(&matrix, n);
            Block::for_each(stored.row(n), |i, block| {
                for j in 0..BLOCK_LEN {
                    let (scale, min) = (block.scale[j / HALF_LEN], block.min[j / HALF_LEN]);
                    let (exact, got) = (block.value(j), got[i * BLOCK_LEN + j]);
                    let n_steps = if PackedFormat::of(dtype) == PackedFormat::Q8_0 { 128.0 } else { 32.0 };
                    let rounding = (scale.abs() * n_steps + min.abs()) / 2048.0;
                    let bound = if is_exact { 0.0 } else { rounding };
                    assert!((got - exact).abs() <= bound * 1.001, "{dtype:?}: {got} instead of {exact}");
                    n_off += usize::from(got != exact);
                }
            });
        }
        assert_eq!(n_off == 0, is_exact, "{dtype:?}");
    }
}

#[test]
fn rows_can_be_packed_in_any_order() {
    let (pool, stored) = (pool(), Stored::random(&mut Rng(3), DType::Q4_1, 70, 64));
    let from = |n: usize| (n * 37) % 70;
    let matrix = PackedMatrix::pack(&pool, PackedFormat::Q4_1, 70, 64, &|n| stored.row(from(n))).unwrap();
    for n in 0..70 {
        assert_eq!(read(&matrix, n), values(stored.row(from(n)), 64));
    }
}

/// Gate and up may have two types that one format stores, and Q8_0 also stores plain rows.
#[test]
fn a_panel_can_have_rows_of_several_types() {
    let pool = pool();
    let types =
        [(PackedFormat::Q4_1, [DType::Q4_1, DType::Q4_K]), (PackedFormat::Q8_0, [DType::Q8_0, DType::BF16])];
    for (format, dtypes) in types {
        let stored = dtypes.map(|dtype| Stored::random(&mut Rng(7), dtype, 40, 256));
        let whole = stored.each_ref().map(|stored| stored.pack(&pool, format));
        let matrix = PackedMatrix::pack(&pool, format, 40, 256, &|n| stored[n % 2].row(n)).unwrap();
        for n in 0..40 {
            assert_eq!(read(&matrix, n), read(&whole[n % 2], n), "{format:?} row {n}");
        }
    }
}

#[test]
fn rows_without_bytes_are_zero() {
    let pool = pool();
    for format in PackedFormat::ALL {
        let k = 64_usize.next_multiple_of(block_len(format));
        let stored = Stored::of(&mut Rng(5), format, 40, k);
        let padding = RowView { dtype: format.dtype(), bytes: &[] };
        let row = |n: usize| if n % 3 == 1 { padding } else { stored.row(n) };
        let matrix = PackedMatrix::pack(&pool, format, 40, k, &row).unwrap();
        let whole = stored.pack(&pool, format);
        for n in 0..40 {
            let want = if n % 3 == 1 { vec![0.0; k] } else { read(&whole, n) };
            assert_eq!(read(&matrix, n), want, "{format:?}");
        }
    }
}

#[test]
fn pieces_pack_the_same_matrix() {
    let four = Pool::new(4).unwrap();
    for format in PackedFormat::ALL {
        let stored = Stored::of(&mut Rng(3), format, 300, 256);
        let whole = stored.pack(&pool(), format);
        for at_once in [32, 96, 320] {
            let mut matrix = PackedMatrix::zeroed(format, 300, 256).unwrap();
            let job = |i: usize, panels: Panels<'_>| {
                assert_eq!(panels.rows(), at_once * i..300.min(at_once * (i + 1)), "{format:?}");
                panels.fill(&Pool::new(1)?, &|n| stored.row(n));
                Ok::<_, Error>(())
            };
            matrix.fill_in_pieces(&four, at_once, &job).unwrap();
            for n in 0..300 {
                assert_eq!(read(&matrix, n), read(&whole, n), "{format:?}, {at_once} rows at once, row {n}");
            }
        }
    }
}

#[test]
fn the_first_piece_that_fails_is_reported() {
    let mut matrix = PackedMatrix::zeroed(PackedFormat::F32, 320, 4).unwrap();
    let last_has_begun = AtomicBool::new(false);
    let failed = matrix.fill_in_pieces(&pool(), 32, &|i, _| match i {
        3 => {
            // The other thread has then reported the error of piece 5.
            while !last_has_begun.load(Ordering::Relaxed) {
                yield_now();
            }
            Err(i)
        }
        5 => Err(i),
        _ => {
            last_has_begun.fetch_or(i == 9, Ordering::Relaxed);
            Ok(())
        }
    });
    assert_eq!(failed, Err(3));
}

#[test]
fn sizes_follow_the_layout() {
    let pool = pool();
    // Two panels of 32 outputs, bits an element times four.
    let quarter_bits = [128, 64, 34, 18, 20, 22, 24, 28, 16, 16, 17];
    let (fits, files): (Vec<_>, Vec<_>) = PackedFormat::ALL.into_iter().partition(|f| f.grid().is_some());
    for (format, quarter_bits) in files.into_iter().zip(quarter_bits) {
        let matrix = Stored::random(&mut Rng(1), format.dtype(), 33, 256).pack(&pool, format);
        assert_eq!(matrix.n_bytes(), 64 * 256 * quarter_bits / 32, "{format:?}");
    }
    // Two panels of three groups (a scale of a byte, or two numbers of a byte; the integers) and 32 units of four
    // bytes.
    for (format, column) in fits.into_iter().zip([1 + 32, 1 + 24, 2 + 16]) {
        let matrix = Stored::of(&mut Rng(1), format, 33, 96).pack(&pool, format);
        assert_eq!(matrix.n_bytes(), 2 * (3 * 32 * column + 128_usize).next_multiple_of(64), "{format:?}");
    }
    // An odd number of inputs takes a whole pair in bf16.
    let odd = Stored::random(&mut Rng(1), DType::BF16, 32, 5).pack(&pool, PackedFormat::BF16);
    assert_eq!(odd.n_bytes(), 3 * 128);
}

#[test]
fn groups_need_whole_blocks() {
    for format in PackedFormat::ALL {
        assert!(PackedMatrix::can_pack(format, 64));
        assert_eq!(PackedMatrix::can_pack(format, 65), !format.is_grouped());
    }
}

#[test]
fn replaced_rows_read_back_and_others_are_unchanged() {
    let pool = pool();
    for format in [PackedFormat::F32, PackedFormat::BF16] {
        for (n, k) in [(70, 9), (33, 64)] {
            let rng = &mut Rng(9);
            let stored = Stored::random(rng, format.dtype(), n, k);
            let mut matrix = stored.pack(&pool, format);
            let (rows, new) = ([32, 0, 31], rng.units(3 * k));
            matrix.repack_rows(&rows, &new);
            for row in 0..n {
                let want = match rows.iter().position(|&r| r == row) {
                    Some(i) if format == PackedFormat::F32 => new[i * k..(i + 1) * k].to_vec(),
                    Some(i) => new[i * k..(i + 1) * k].iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
                    None => values(stored.row(row), k),
                };
                assert_eq!(read(&matrix, row), want, "{format:?} row {row}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "cannot be replaced")]
fn rows_of_groups_cannot_be_replaced() {
    let mut matrix = Stored::random(&mut Rng(1), DType::Q8_0, 4, 32).pack(&pool(), PackedFormat::Q8_0);
    matrix.repack_rows(&[0], &[0.0; 32]);
}

#[test]
#[should_panic(expected = "its own block types only")]
fn group_format_rejects_other_types() {
    Stored::random(&mut Rng(1), DType::Q4_0, 4, 32).pack(&pool(), PackedFormat::Q4_1);
}

#[test]
fn failed_allocation_is_an_error() {
    let none = RowView { dtype: DType::F32, bytes: &[] };
    for n_rows in [1 << 50, usize::MAX] {
        let rejected = PackedMatrix::pack(&pool(), PackedFormat::F32, n_rows, 1 << 20, &|_| none);
        assert!(matches!(rejected, Err(DeviceError::Allocation { what: "packed weights", .. })), "{n_rows}");
    }
}
