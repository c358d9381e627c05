//! Q2_K: 16 bytes with scale (low nibble) and minimum (high) for each 16 elements, 64 bytes of 2-bit integers, `d` f16,
//! `dmin` f16; `value = d * scale * q - dmin * min`. 84 bytes for 256 elements, 2.625 bits per element.

use super::{Block, f16_at, from_words, two_bits};

/// Decodes block `i` of 8 in `bytes`. Panics unless there are 84 bytes.
#[inline(always)]
pub fn parse(bytes: &[u8], i: usize) -> Block {
    assert_eq!(bytes.len(), 84, "a Q2_K block has 84 bytes");
    let (d, dmin) = (f16_at(&bytes[80..]), f16_at(&bytes[82..]));
    let pairs = [bytes[2 * i], bytes[2 * i + 1]];
    Block {
        scale: pairs.map(|pair| d * f32::from(pair & 15)),
        min: pairs.map(|pair| -(dmin * f32::from(pair >> 4))),
        offset: 0,
        q: from_words(two_bits(&bytes[16..80], i)),
    }
}
