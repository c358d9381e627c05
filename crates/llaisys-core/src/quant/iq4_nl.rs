//! IQ4_NL: `scale` f16, then 16 bytes of nibbles; `value = scale * TABLE[nibble]`. 18 bytes per block, 4.5 bits per
//! element.

use super::{BLOCK_LEN, Block, f16_at, nibbles};

/// The number of each nibble: ggml's `kvalues_iq4nl`, dense around zero as weights are.
const TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Decodes the block in `bytes`. Its integers are the table's numbers plus 128, as those of a Q8_0 block. Panics unless
/// there are 18 bytes.
pub fn parse(bytes: &[u8]) -> Block {
    assert_eq!(bytes.len(), 2 + BLOCK_LEN / 2, "an IQ4_NL block has 18 bytes");
    let byte = |nibble: u8| TABLE[usize::from(nibble)].cast_unsigned() ^ 0x80;
    Block::scaled(f16_at(bytes), 128, nibbles(&bytes[2..]).map(byte))
}
