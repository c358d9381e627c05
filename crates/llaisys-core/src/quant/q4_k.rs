//! Q4_K: `d` f16, `dmin` f16, 12 bytes of scales and minima, 128 bytes of nibbles;
//! `value = d * scale * q - dmin * min`. 144 bytes for 256 elements, 4.5 bits per element.

use super::{Block, LOW_NIBBLES, Words, f16_at, from_words, six_bit_pair, words};

/// Decodes block `i` of 8 in `bytes`. Panics unless there are 144 bytes.
#[inline(always)]
pub fn parse(bytes: &[u8], i: usize) -> Block {
    assert_eq!(bytes.len(), 144, "a Q4_K block has 144 bytes");
    let [scale, min] = six_bit_pair(&bytes[4..16], i);
    let q = from_words(nibbles_of(&bytes[16..], i));
    Block::with_min(f16_at(bytes) * scale, -(f16_at(&bytes[2..]) * min), q)
}

/// The nibbles of part `i` of 8: 32 bytes have two parts, the first in their low halves. Q5_K uses the same layout.
#[inline(always)]
pub(super) fn nibbles_of(bytes: &[u8], i: usize) -> Words {
    words(bytes, i / 2).map(|word| word >> (4 * (i % 2)) & LOW_NIBBLES)
}
