//! Block-quantized types: decoding of the bytes of a file.
//!
//! Every type is decoded to [`Block`]s of 32 consecutive elements of a row. A block has unsigned integers, as the
//! kernels need them: `value[i] = scale * (q[i] - offset) + min`, with one scale (and minimum) for each half of the
//! block. The K types store 256 elements together (a super-block of eight [`Block`]s). Their scales are small integers
//! with one f16 unit for all; a block's scale is the product, which is exact in f32.
//!
//! Each type has one file. Source: GGUF, the `block_*` structures of ggml-common.h; bytes are little endian.

pub mod fp8;
pub mod int4;
pub mod int8;
pub mod iq4_nl;
pub mod mxfp4;
pub mod q2_k;
pub mod q3_k;
pub mod q4_0;
pub mod q4_1;
pub mod q4_k;
pub mod q5_0;
pub mod q5_1;
pub mod q5_k;
pub mod q6_k;
pub mod q8_0;
pub mod quantize;

use crate::dtype::DType;
use crate::tensor::RowView;
use half::{bf16, f16};

/// Elements in a block, of every type.
pub const BLOCK_LEN: usize = 32;
/// Elements in a half block, the fewest that share a scale.
pub const HALF_LEN: usize = BLOCK_LEN / 2;

/// One block as integers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Block {
    /// Distance between neighboring values, for each half of the block.
    pub scale: [f32; 2],
    /// Added to every value of a half; zero for types without one.
    pub min: [f32; 2],
    /// The integer that represents `min`: 0 for types with minima.
    pub offset: u8,
    /// The integers, in order of the elements.
    pub q: [u8; BLOCK_LEN],
}

impl Block {
    /// Decodes block `i` of the `dtype.block_len() / 32` in `bytes`. `None` if `dtype` is not a block type. The numbers
    /// of [`DType::Fp8`] are rounded to integers ([`fp8::parse`]); the other types have integers.
    ///
    /// Panics if `bytes` has another length than one stored block: rows are checked when a file is parsed.
    pub fn parse(dtype: DType, bytes: &[u8], i: usize) -> Option<Self> {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => None,
            DType::I8 | DType::U8 | DType::I32 | DType::I64 | DType::F8E4M3 => None,
            DType::Q8_0 => Some(q8_0::parse(bytes)),
            DType::Q4_0 => Some(q4_0::parse(bytes)),
            DType::Q4_1 => Some(q4_1::parse(bytes)),
            DType::Q5_0 => Some(q5_0::parse(bytes)),
            DType::Q5_1 => Some(q5_1::parse(bytes)),
            DType::IQ4_NL => Some(iq4_nl::parse(bytes)),
            DType::MXFP4 => Some(mxfp4::parse(bytes)),
            DType::Q2_K => Some(q2_k::parse(bytes, i)),
            DType::Q3_K => Some(q3_k::parse(bytes, i)),
            DType::Q4_K => Some(q4_k::parse(bytes, i)),
            DType::Q5_K => Some(q5_k::parse(bytes, i)),
            DType::Q6_K => Some(q6_k::parse(bytes, i)),
            DType::Int4 => Some(int4::parse(bytes)),
            DType::Int8 => Some(int8::parse(bytes)),
            DType::Fp8 => Some(fp8::parse(bytes)),
        }
    }

    /// Calls `each` with the index of every block of `row` and the block, in order. Panics if the row's type has no
    /// blocks.
    pub fn for_each(row: RowView<'_>, mut each: impl FnMut(usize, &Self)) {
        let n_parts = row.dtype.block_len() / BLOCK_LEN;
        for (i, bytes) in row.bytes.chunks_exact(row.dtype.block_bytes()).enumerate() {
            for part in 0..n_parts {
                let block = Self::parse(row.dtype, bytes, part).expect("the row's type has blocks");
                each(i * n_parts + part, &block);
            }
        }
    }

    /// The value of element `i`: product, then sum, each rounded to f32.
    pub fn value(&self, i: usize) -> f32 {
        let half = i / HALF_LEN;
        let scaled = self.scale[half] * f32::from(i16::from(self.q[i]) - i16::from(self.offset));
        if self.offset == 0 { scaled + self.min[half] } else { scaled }
    }

    /// A block without minima and with one scale.
    #[inline(always)]
    fn scaled(scale: f32, offset: u8, q: [u8; BLOCK_LEN]) -> Self {
        Self { scale: [scale; 2], min: [0.0; 2], offset, q }
    }

    /// A block with one scale and one minimum.
    #[inline(always)]
    fn with_min(scale: f32, min: f32, q: [u8; BLOCK_LEN]) -> Self {
        Self { scale: [scale; 2], min: [min; 2], offset: 0, q }
    }
}

/// Decodes `row` to f32: exactly for plain types, as [`Block::value`] for block types. The exceptions are
/// [`DType::Fp8`] and [`DType::Int4`]: their products of scale and number are rounded to f32 once.
///
/// Panics if `row` does not have `out.len()` elements: rows are checked when a file is parsed.
pub fn dequantize_row(row: RowView<'_>, out: &mut [f32]) {
    assert_eq!(row.dtype.bytes_of(out.len()), Some(row.bytes.len()), "row of another length");
    match row.dtype {
        DType::F32 => plain(row.bytes, out, f32::from_le_bytes),
        DType::F16 => plain(row.bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        DType::BF16 => plain(row.bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        DType::Fp8 => fp8::dequantize(row.bytes, out),
        DType::Int4 => int4::dequantize(row.bytes, out),
        DType::I8 | DType::U8 | DType::I32 | DType::I64 | DType::F8E4M3 => {
            unreachable!("the loader rejects weights of this type")
        }
        _ => Block::for_each(row, |i, block| {
            for (j, value) in out[i * BLOCK_LEN..][..BLOCK_LEN].iter_mut().enumerate() {
                *value = block.value(j);
            }
        }),
    }
}

fn plain<const N: usize>(bytes: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (value, &element) in out.iter_mut().zip(elements) {
        *value = decode(element);
    }
}

/// The f16 at the start of `bytes`.
#[inline(always)]
fn f16_at(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// 32 bytes, four to a word: compilers vectorize shifts of words, not of bytes.
type Words = [u32; BLOCK_LEN / 4];

/// The low half of each byte of a word.
pub(crate) const LOW_NIBBLES: u32 = 0x0f0f_0f0f;

/// Part `i` of `bytes`, 32 bytes each.
#[inline(always)]
fn words(bytes: &[u8], i: usize) -> Words {
    let (words, _) = bytes.as_chunks::<BLOCK_LEN>().0[i].as_chunks::<4>();
    std::array::from_fn(|k| u32::from_le_bytes(words[k]))
}

/// The bytes of words.
#[inline(always)]
fn from_words(words: Words) -> [u8; BLOCK_LEN] {
    let mut bytes = [0; BLOCK_LEN];
    for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    bytes
}

/// 16 bytes as 32 nibbles: byte `j` holds element `j` in its low half and element `j + 16` in its high half.
#[inline(always)]
fn nibbles(bytes: &[u8]) -> [u8; BLOCK_LEN] {
    let mut q = [0; BLOCK_LEN];
    for (j, byte) in bytes.iter().enumerate() {
        q[j] = byte & 15;
        q[j + BLOCK_LEN / 2] = byte >> 4;
    }
    q
}

/// 20 bytes as 32 integers of 5 bits: the high bit of element `j` is bit `j` of the first four bytes, then [`nibbles`].
fn five_bits(bytes: &[u8]) -> [u8; BLOCK_LEN] {
    let mut q = nibbles(&bytes[4..]);
    for (j, q) in q.iter_mut().enumerate() {
        *q |= (bytes[j / 8] >> (j % 8) & 1) << 4;
    }
    q
}

/// Part `i` (32 elements) of 256 integers of 2 bits in 64 bytes. 32 consecutive bytes have four parts, the first in the
/// lowest bits.
#[inline(always)]
fn two_bits(bytes: &[u8], i: usize) -> Words {
    words(bytes, i / 4).map(|word| word >> (2 * (i % 4)) & 0x0303_0303)
}

/// Scale and minimum `i` of the eight pairs of 6 bits in the 12 bytes of Q4_K and Q5_K. The first four pairs are in the
/// low bits of bytes 0..4 and 4..8. The low nibbles of the others share bytes 8..12, and their high bits are the upper
/// two of bytes 0..4 and 4..8.
#[inline(always)]
fn six_bit_pair(bytes: &[u8], i: usize) -> [f32; 2] {
    let pair = if i < 4 {
        [bytes[i] & 63, bytes[i + 4] & 63]
    } else {
        [bytes[i + 4] & 15 | bytes[i - 4] >> 6 << 4, bytes[i + 4] >> 4 | bytes[i] >> 6 << 4]
    };
    pair.map(f32::from)
}
