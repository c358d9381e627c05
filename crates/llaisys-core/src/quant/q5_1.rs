//! Q5_1: `scale` f16, `min` f16, 4 bytes of high bits, 16 bytes of nibbles; `value = scale * q + min`. 24 bytes per
//! block, 6 bits per element.

use super::{Block, f16_at, five_bits};

/// Decodes the block in `bytes`. Panics unless there are 24 bytes.
pub fn parse(bytes: &[u8]) -> Block {
    assert_eq!(bytes.len(), 24, "a Q5_1 block has 24 bytes");
    Block::with_min(f16_at(bytes), f16_at(&bytes[2..]), five_bits(&bytes[4..]))
}
