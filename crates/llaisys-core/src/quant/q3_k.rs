//! Q3_K: 32 bytes of high bits, 64 bytes of the low two, 12 bytes of 16 scales, `d` f16;
//! `value = d * (scale - 32) * (q - 4)`. 110 bytes for 256 elements, 3.4375 bits per element.

use super::{Block, f16_at, from_words, two_bits, words};

/// Decodes block `i` of 8 in `bytes`. Panics unless there are 110 bytes.
#[inline(always)]
pub fn parse(bytes: &[u8], i: usize) -> Block {
    assert_eq!(bytes.len(), 110, "a Q3_K block has 110 bytes");
    let d = f16_at(&bytes[108..]);
    let mut q = two_bits(&bytes[32..96], i);
    for (q, high) in q.iter_mut().zip(words(bytes, 0)) {
        *q |= (high >> i & 0x0101_0101) << 2;
    }
    let scale = [2 * i, 2 * i + 1].map(|half| d * scale(&bytes[96..108], half));
    Block { scale, min: [0.0; 2], offset: 4, q: from_words(q) }
}

/// Scale `i` of 16, minus its offset of 32. The low nibbles are in bytes 0..8, those of scales 0..8 in the low halves.
/// The high pairs of bits are in bytes 8..12, four per byte from the lowest bits up.
fn scale(bytes: &[u8], i: usize) -> f32 {
    let low = bytes[i % 8] >> (4 * (i / 8)) & 15;
    let high = bytes[8 + i % 4] >> (2 * (i / 4)) & 3;
    f32::from(low | high << 4) - 32.0
}
