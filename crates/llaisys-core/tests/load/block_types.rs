//! Block types, byte by byte according to the GGUF definitions.

use crate::model_files::scaled::e4m3;
use half::f16;
use llaisys_core::dtype::DType;
use llaisys_core::quant::{BLOCK_LEN, Block, dequantize_row, fp8};
use llaisys_core::tensor::RowView;
use proptest::prelude::*;

fn dequantize(dtype: DType, bytes: &[u8], n: usize) -> Vec<f32> {
    let mut values = vec![f32::NAN; n];
    dequantize_row(RowView { dtype, bytes }, &mut values);
    values
}

/// Computes element `i` from the definition of its block type, in f32.
fn definition(dtype: DType, block: &[u8], i: usize) -> f32 {
    let f16_at = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    let nibble = |at: usize| f32::from(if i < 16 { block[at + i] & 15 } else { block[at + i - 16] >> 4 });
    match dtype {
        DType::Q8_0 => f16_at(0) * f32::from(block[2 + i] as i8),
        DType::Q4_0 => f16_at(0) * (nibble(2) - 8.0),
        DType::Q4_1 => f16_at(0) * nibble(4) + f16_at(2),
        _ => unreachable!("block types only"),
    }
}

#[test]
fn handmade_blocks_are_dequantized() {
    // Scale 0.5 (0x3800), values -128, -1, 0, 127 and zeros.
    let mut q8_0 = vec![0x00, 0x38, 0x80, 0xff, 0x00, 0x7f];
    q8_0.resize(34, 0);
    assert_eq!(dequantize(DType::Q8_0, &q8_0, 32)[..5], [-64.0, -0.5, 0.0, 63.5, 0.0]);

    // Scale 2: byte 0 has elements 0 (low, 15) and 16 (high, 0); the other nibbles are 8, which is zero.
    let mut q4_0 = vec![0x00, 0x40, 0x0f];
    q4_0.resize(18, 0x88);
    let mut want = vec![0.0; 32];
    (want[0], want[16]) = (14.0, -16.0);
    assert_eq!(dequantize(DType::Q4_0, &q4_0, 32), want);

    // Scale 2, minimum -1: byte 15 has elements 15 (1) and 31 (3).
    let mut q4_1 = vec![0x00, 0x40, 0x00, 0xbc];
    q4_1.resize(19, 0);
    q4_1.push(0x31);
    let mut want = vec![-1.0; 32];
    (want[15], want[31]) = (1.0, 5.0);
    assert_eq!(dequantize(DType::Q4_1, &q4_1, 32), want);
}

#[test]
fn plain_types_are_exact() {
    let bytes: Vec<u8> = [1.5_f32, -0.0, f32::MIN_POSITIVE].iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(dequantize(DType::F32, &bytes, 3), [1.5, -0.0, f32::MIN_POSITIVE]);
    assert_eq!(dequantize(DType::F16, &[0x00, 0x3c, 0x01, 0x80], 2), [1.0, -(2.0_f32.powi(-24))]);
    assert_eq!(dequantize(DType::BF16, &[0x80, 0x3f, 0x49, 0xc0], 2), [1.0, -3.140_625]);
}

#[test]
fn plain_types_have_no_blocks() {
    for dtype in DType::ALL.into_iter().filter(|dtype| !dtype.is_quantized()) {
        assert_eq!(Block::parse(dtype, &[0; 34], 0), None);
    }
}

/// Random blocks and their values from the PyPI package gguf (`tests/data/quants/regenerate.py`), bit for bit.
#[test]
fn gguf_types_agree_with_the_gguf_package() {
    const N_VALUES: usize = 2048;
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/quants");
    let is_ours = |dtype: &DType| matches!(dtype, DType::Int4 | DType::Int8 | DType::Fp8);
    let types: Vec<DType> =
        DType::ALL.into_iter().filter(|dtype| dtype.is_quantized() && !is_ours(dtype)).collect();
    assert_eq!(types.len(), 12);
    for dtype in types {
        let file = std::fs::read(format!("{folder}/{}.bin", dtype.name())).unwrap();
        let (blocks, values) = file.split_at(dtype.bytes_of(N_VALUES).unwrap());
        let want: Vec<f32> = values.as_chunks().0.iter().map(|&value| f32::from_le_bytes(value)).collect();
        assert_eq!(want.len(), N_VALUES);
        for (i, (got, want)) in dequantize(dtype, blocks, N_VALUES).into_iter().zip(want).enumerate() {
            assert_eq!(got.to_bits(), want.to_bits(), "{dtype:?} element {i}: {got:e} instead of {want:e}");
        }
    }
}

/// Scale 0.5, zero point 9: nibbles 0, 9 and 15. The second half of the block is in the high nibbles.
#[test]
fn handmade_int4_blocks_are_dequantized() {
    let mut block = 0.5_f32.to_le_bytes().to_vec();
    block.extend([9, 0x90, 0xf9]);
    block.resize(21, 0x99);
    let mut want = vec![0.0; 32];
    (want[0], want[17]) = (-4.5, 3.0);
    assert_eq!(dequantize(DType::Int4, &block, 32), want);
}

/// Scale 0.3: bytes -128, 0 and 127.
#[test]
fn handmade_int8_blocks_are_dequantized() {
    let mut block = 0.3_f32.to_le_bytes().to_vec();
    block.extend([0x80, 0, 127]);
    block.resize(36, 0);
    let mut want = vec![0.0; 32];
    (want[0], want[2]) = (0.3 * -128.0, 0.3 * 127.0);
    assert_eq!(dequantize(DType::Int8, &block, 32), want);
}

fn fp8_block(scale: f32, numbers: &[u8]) -> Vec<u8> {
    [&scale.to_le_bytes()[..], numbers].concat()
}

#[test]
fn every_number_of_e4m3_is_decoded() {
    assert_eq!(
        [0x00, 0x01, 0x07, 0x08, 0x38, 0x7e, 0xfe].map(e4m3),
        [0.0, 1.0 / 512.0, 7.0 / 512.0, 1.0 / 64.0, 1.0, 448.0, -448.0]
    );
    for first in (0..=255).step_by(32) {
        let numbers: Vec<u8> = (first..=first + 31).map(|byte: u16| byte as u8).collect();
        let got = dequantize(DType::Fp8, &fp8_block(0.3, &numbers), 32);
        for (&byte, got) in numbers.iter().zip(got) {
            assert_eq!(fp8::is_nan(byte), e4m3(byte).is_nan());
            let want = 0.3 * e4m3(byte);
            assert!(got == want || got.is_nan() && want.is_nan(), "{byte:#x}: {got} instead of {want}");
        }
    }
}

proptest! {
    /// The integers of an FP8 block, in float64: whole multiples of a 64th of the largest power of two.
    #[test]
    fn fp8_is_rounded_to_integers(
        numbers in prop::collection::vec((0_u8..0x7f, any::<bool>()), 32),
        // Blocks with large and with small numbers only.
        largest in 0_u8..0x7f,
    ) {
        let numbers: Vec<u8> =
            numbers.into_iter().map(|(byte, sign)| byte.min(largest) | u8::from(sign) << 7).collect();
        let exact = dequantize(DType::Fp8, &fp8_block(1.0, &numbers), 32);
        let top = exact.iter().fold(0.0, |top: f32, x| top.max(x.abs()));
        let block = Block::parse(DType::Fp8, &fp8_block(1.0, &numbers), 0).unwrap();
        let mut power = 2_f64.powi(10);
        while power > f64::from(top) && power > 2_f64.powi(-20) {
            power /= 2.0;
        }
        for (i, &x) in exact.iter().enumerate() {
            let want = if top == 0.0 { 0.0 } else { (f64::from(x) / (power / 64.0)).round_ties_even() };
            prop_assert_eq!(f64::from(block.q[i]) - 128.0, want);
            let error = (block.value(i) - x).abs();
            prop_assert!(error <= top / 128.0);
            prop_assert!(error == 0.0 || x.abs() < top / 8.0);
        }
    }
}

#[test]
#[should_panic(expected = "row of another length")]
fn row_of_another_length_panics() {
    dequantize(DType::Q8_0, &[0; 34], 64);
}

proptest! {
    #[test]
    fn any_bytes_are_dequantized_by_the_definition(
        dtype in prop::sample::select(vec![DType::Q8_0, DType::Q4_0, DType::Q4_1]),
        mut bytes in prop::collection::vec(any::<u8>(), 3 * 34),
    ) {
        bytes.truncate(3 * dtype.block_bytes());
        let got = dequantize(dtype, &bytes, 3 * BLOCK_LEN);
        for (i, got) in got.into_iter().enumerate() {
            let block = &bytes[i / BLOCK_LEN * dtype.block_bytes()..][..dtype.block_bytes()];
            let want = definition(dtype, block, i % BLOCK_LEN);
            prop_assert!(got == want || got.is_nan() && want.is_nan(), "{dtype:?} element {i}: {got} {want}");
        }
    }
}
