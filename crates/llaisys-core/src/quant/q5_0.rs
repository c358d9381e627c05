//! Q5_0: `scale` f16, 4 bytes of high bits, 16 bytes of nibbles; `value = scale * (q - 16)`. 22 bytes per block,
//! 5.5 bits per element.

use super::{Block, f16_at, five_bits};

/// Decodes the block in `bytes`. Panics unless there are 22 bytes.
pub fn parse(bytes: &[u8]) -> Block {
    assert_eq!(bytes.len(), 22, "a Q5_0 block has 22 bytes");
    Block::scaled(f16_at(bytes), 16, five_bits(&bytes[2..]))
}
