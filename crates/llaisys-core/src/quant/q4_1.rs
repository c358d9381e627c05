//! Q4_1: `scale` f16, `min` f16, then 16 bytes of nibbles; `value = scale * nibble + min`. 20 bytes per block,
//! 5 bits per element.

use super::{BLOCK_LEN, Block, f16_at, nibbles};

/// Decodes the block in `bytes`. Panics unless there are 20 bytes.
#[inline(always)]
pub fn parse(bytes: &[u8]) -> Block {
    assert_eq!(bytes.len(), 4 + BLOCK_LEN / 2, "a Q4_1 block has 20 bytes");
    Block::with_min(f16_at(bytes), f16_at(&bytes[2..]), nibbles(&bytes[4..]))
}
