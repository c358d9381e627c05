//! Q6_K: 128 bytes of low nibbles, 64 bytes of the high two bits, 16 signed bytes of scales, `d` f16;
//! `value = d * scale * (q - 32)`. 210 bytes for 256 elements, 6.5625 bits per element.

use super::{Block, LOW_NIBBLES, f16_at, from_words, two_bits, words};

/// Decodes block `i` of 8 in `bytes`. Panics unless there are 210 bytes.
#[inline(always)]
pub fn parse(bytes: &[u8], i: usize) -> Block {
    assert_eq!(bytes.len(), 210, "a Q6_K block has 210 bytes");
    let d = f16_at(&bytes[208..]);
    // 64 bytes of nibbles have four parts: two in the low halves, then two in the high halves.
    let low = words(&bytes[..128], i / 4 * 2 + i % 2).map(|word| word >> (4 * (i % 4 / 2)) & LOW_NIBBLES);
    let mut q = two_bits(&bytes[128..192], i);
    for (q, low) in q.iter_mut().zip(low) {
        *q = *q << 4 | low;
    }
    let scale = |half: usize| d * f32::from(bytes[192 + 2 * i + half].cast_signed());
    Block { scale: [scale(0), scale(1)], min: [0.0; 2], offset: 32, q: from_words(q) }
}
