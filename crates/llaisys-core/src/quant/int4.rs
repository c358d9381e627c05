//! Int4: `scale` f32, `zero` u8, then 16 bytes of nibbles; `value = scale * (nibble - zero)`. 21 bytes per block.
//!
//! GPTQ and AWQ tensors with zero points are converted to it without loss while they are loaded.

use super::{BLOCK_LEN, Block, nibbles};

/// Bytes in a block.
pub const BYTES: usize = 5 + BLOCK_LEN / 2;

/// Decodes the block in `bytes`. The product of an f16 or bf16 scale with an integer below 32 is exact in f32, and so
/// is the value. Panics unless there are 21 bytes.
pub fn parse(bytes: &[u8]) -> Block {
    assert_eq!(bytes.len(), BYTES, "an Int4 block has 21 bytes");
    let scale = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    Block::with_min(scale, -(scale * f32::from(bytes[4])), nibbles(&bytes[5..]))
}
