//! Q4_0: `scale` f16, then 16 bytes of nibbles; `value = scale * (nibble - 8)`. 18 bytes per block, 4.5 bits per
//! element.

use super::{BLOCK_LEN, Block, f16_at, nibbles};

/// Decodes the block in `bytes`. Panics unless there are 18 bytes.
#[inline(always)]
pub fn parse(bytes: &[u8]) -> Block {
    assert_eq!(bytes.len(), 2 + BLOCK_LEN / 2, "a Q4_0 block has 18 bytes");
    Block::scaled(f16_at(bytes), 8, nibbles(&bytes[2..]))
}
