//! Q8_0: `scale` f16, then 32 signed bytes; `value = scale * byte`. 34 bytes per block, 8.5 bits per element.

use super::{BLOCK_LEN, Block, f16_at};

/// Decodes the block in `bytes`; the signed bytes become `byte + 128`. Panics unless there are 34 bytes.
#[inline(always)]
pub fn parse(bytes: &[u8]) -> Block {
    assert_eq!(bytes.len(), 2 + BLOCK_LEN, "a Q8_0 block has 34 bytes");
    Block::scaled(f16_at(bytes), 128, std::array::from_fn(|j| bytes[2 + j] ^ 0x80))
}
