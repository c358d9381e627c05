//! Int8: `scale` f32, then 32 signed bytes; `value = scale * byte`. 36 bytes per block.
//!
//! Matrices of signed bytes are converted to it without loss while they are loaded. Q8_0 is the same with an f16 scale.

use super::{BLOCK_LEN, Block};

/// Bytes in a block.
pub const BYTES: usize = 4 + BLOCK_LEN;

/// Decodes the block in `bytes`; the signed bytes become `byte + 128`. Panics unless there are 36 bytes.
pub fn parse(bytes: &[u8]) -> Block {
    assert_eq!(bytes.len(), BYTES, "an Int8 block has 36 bytes");
    let scale = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    Block::scaled(scale, 128, std::array::from_fn(|j| bytes[4 + j] ^ 0x80))
}
