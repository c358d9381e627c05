//! Block-quantised types: what the bytes of a file mean.
//!
//! 32 consecutive elements of a row form a block: integers and one or two f16 numbers. All three types are
//! read into one [`Block`], whose integers are unsigned as the kernels want them:
//! `value[i] = scale * (q[i] - offset) + min`.
//!
//! Source: GGUF, ggml `block_q8_0`, `block_q4_0`, `block_q4_1`; bytes are little endian.

pub mod q4_0;
pub mod q4_1;
pub mod q8_0;

use crate::dtype::DType;
use crate::tensor::RowView;
use half::{bf16, f16};

/// Elements of a block, of every type.
pub const BLOCK_LEN: usize = 32;

/// One block in integers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Block {
    /// Distance of two neighbouring values.
    pub scale: f16,
    /// Added to every value; zero for types without one.
    pub min: f16,
    /// The integer that stands for `min`: 128 for 8 bits, 8 for Q4_0, 0 for Q4_1.
    pub offset: u8,
    /// The integers, in order of the elements.
    pub q: [u8; BLOCK_LEN],
}

impl Block {
    /// The block that `bytes` holds, or `None` if `dtype` is not a block type.
    ///
    /// Panics if `bytes` is not one block long: rows are checked when a file is parsed.
    pub fn parse(dtype: DType, bytes: &[u8]) -> Option<Self> {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => None,
            DType::Q8_0 => Some(q8_0::parse(bytes)),
            DType::Q4_0 => Some(q4_0::parse(bytes)),
            DType::Q4_1 => Some(q4_1::parse(bytes)),
        }
    }

    /// The value that integer `q` of this block stands for: product, then sum, each rounded to f32.
    pub fn value(&self, q: u8) -> f32 {
        let scaled = self.scale.to_f32() * f32::from(i16::from(q) - i16::from(self.offset));
        if self.offset == 0 { scaled + self.min.to_f32() } else { scaled }
    }
}

/// The values of `row` as f32, exact for the plain types and as [`Block::value`] for block types.
///
/// Panics if `row` does not hold `out.len()` elements: rows are checked when a file is parsed.
pub fn dequantize_row(row: RowView<'_>, out: &mut [f32]) {
    assert_eq!(row.dtype.bytes_of(out.len()), Some(row.bytes.len()), "row of another length");
    match row.dtype {
        DType::F32 => plain(row.bytes, out, f32::from_le_bytes),
        DType::F16 => plain(row.bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        DType::BF16 => plain(row.bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        DType::Q8_0 | DType::Q4_0 | DType::Q4_1 => {
            let blocks = row.bytes.chunks_exact(row.dtype.block_bytes());
            for (bytes, values) in blocks.zip(out.chunks_exact_mut(BLOCK_LEN)) {
                let block = Block::parse(row.dtype, bytes).expect("the match arm names block types");
                for (value, &q) in values.iter_mut().zip(&block.q) {
                    *value = block.value(q);
                }
            }
        }
    }
}

fn plain<const N: usize>(bytes: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (value, &element) in out.iter_mut().zip(elements) {
        *value = decode(element);
    }
}

/// The f16 at the start of `bytes`.
fn f16_at(bytes: &[u8]) -> f16 {
    f16::from_le_bytes([bytes[0], bytes[1]])
}

/// 16 bytes as 32 nibbles: byte `j` holds element `j` in its low half and element `j + 16` in its high half.
fn nibbles(bytes: &[u8]) -> [u8; BLOCK_LEN] {
    let mut q = [0; BLOCK_LEN];
    for (j, byte) in bytes.iter().enumerate() {
        q[j] = byte & 15;
        q[j + BLOCK_LEN / 2] = byte >> 4;
    }
    q
}
