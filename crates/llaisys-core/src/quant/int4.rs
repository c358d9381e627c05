//! Int4: `scale` f32, `zero` u8, then 16 bytes of nibbles; `value = scale * (nibble - zero)`. 21 bytes per block.
//!
//! Matrices of 4 bits in folders, with zero points or with scales that f16 does not represent, are converted to it
//! without loss while they are loaded.

use super::{BLOCK_LEN, Block, nibbles};

/// Bytes in a block.
pub const BYTES: usize = 5 + BLOCK_LEN / 2;

/// Decodes the block in `bytes`. The product of an f16 or bf16 scale with an integer below 32 is exact in f32, and so
/// is the value. Panics unless there are 21 bytes.
pub fn parse(bytes: &[u8]) -> Block {
    let (scale, zero, q) = split(bytes);
    Block::with_min(scale, -(scale * zero), q)
}

/// Decodes blocks to f32. With an f32 scale, the sum of product and minimum in [`parse`] would be rounded twice. Panics
/// unless there are 21 bytes for each 32 elements of `out`.
pub fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(BYTES).zip(out.chunks_exact_mut(BLOCK_LEN)) {
        let (scale, zero, q) = split(block);
        for (value, &q) in out.iter_mut().zip(&q) {
            *value = scale * (f32::from(q) - zero);
        }
    }
}

fn split(bytes: &[u8]) -> (f32, f32, [u8; BLOCK_LEN]) {
    assert_eq!(bytes.len(), BYTES, "an Int4 block has 21 bytes");
    let scale = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    (scale, f32::from(bytes[4]), nibbles(&bytes[5..]))
}
