//! Q4_K: `d` f16, `dmin` f16, 12 bytes of scales and minima, 128 bytes of nibbles;
//! `value = d * scale * q - dmin * min`. 144 bytes for 256 elements, 4.5 bits per element.

use super::{BLOCK_LEN, Block, f16_at, six_bit_pair};

/// Decodes block `i` of 8 in `bytes`. Panics unless there are 144 bytes.
pub fn parse(bytes: &[u8], i: usize) -> Block {
    assert_eq!(bytes.len(), 144, "a Q4_K block has 144 bytes");
    let [scale, min] = six_bit_pair(&bytes[4..16], i);
    let q = nibbles_of(&bytes[16..], i);
    Block::with_min(f16_at(bytes) * scale, -(f16_at(&bytes[2..]) * min), q)
}

/// The nibbles of part `i` of 8: 32 bytes have two parts, the first in their low halves. Q5_K uses the same layout.
pub(super) fn nibbles_of(bytes: &[u8], i: usize) -> [u8; BLOCK_LEN] {
    std::array::from_fn(|j| bytes[i / 2 * BLOCK_LEN + j] >> (4 * (i % 2)) & 15)
}
