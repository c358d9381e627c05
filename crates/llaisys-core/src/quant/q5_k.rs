//! Q5_K: `d` f16, `dmin` f16, 12 bytes of scales and minima, 32 bytes of high bits, 128 bytes of nibbles;
//! `value = d * scale * q - dmin * min`. 176 bytes for 256 elements, 5.5 bits per element.

use super::q4_k::nibbles_of;
use super::{Block, f16_at, from_words, six_bit_pair, words};

/// Decodes block `i` of 8 in `bytes`. Its high bits are bit `i` of their bytes. Panics unless there are 176 bytes.
#[inline(always)]
pub fn parse(bytes: &[u8], i: usize) -> Block {
    assert_eq!(bytes.len(), 176, "a Q5_K block has 176 bytes");
    let [scale, min] = six_bit_pair(&bytes[4..16], i);
    let mut q = nibbles_of(&bytes[48..], i);
    for (q, high) in q.iter_mut().zip(words(&bytes[16..48], 0)) {
        *q |= (high >> i & 0x0101_0101) << 4;
    }
    Block::with_min(f16_at(bytes) * scale, -(f16_at(&bytes[2..]) * min), from_words(q))
}
