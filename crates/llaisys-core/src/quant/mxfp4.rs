//! MXFP4: `exponent` of one byte, then 16 bytes of nibbles; `value = 2^(exponent - 127) * number`, with numbers in E2M1.
//! 17 bytes per block, 4.25 bits per element.
//!
//! E2M1 is sign, exponent of 2 bits, mantissa of 1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Twice a number is an integer, so a
//! block has the scale `2^(exponent - 128)`. An exponent of 0 counts as a scale of 0 (its values are below the normal
//! numbers of f32), and 255, which is NaN in the specification, as an infinite one. Source: the Open Compute Project's
//! specification of MX formats; the layout is GGUF's.

use super::{BLOCK_LEN, Block, nibbles};

/// Bytes in a block.
pub const BYTES: usize = 1 + BLOCK_LEN / 2;
/// The integer of zero.
pub const OFFSET: u8 = 16;
/// The exponent that is NaN in the specification.
pub const NAN: u8 = 255;

/// The integer of each nibble: twice the number, plus [`OFFSET`].
pub const INTEGERS: [u8; 16] = [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4];

/// Decodes the block in `bytes`. Panics unless there are 17 bytes.
pub fn parse(bytes: &[u8]) -> Block {
    assert_eq!(bytes.len(), BYTES, "an MXFP4 block has 17 bytes");
    let integer = |nibble: u8| INTEGERS[usize::from(nibble)];
    Block::scaled(scale(bytes[0]), OFFSET, nibbles(&bytes[1..]).map(integer))
}

/// The scale of an exponent.
pub const fn scale(exponent: u8) -> f32 {
    f32::from_bits((exponent as u32) << 23) * 0.5
}

/// The exponent of a scale.
pub const fn exponent(scale: f32) -> u8 {
    ((2.0 * scale).to_bits() >> 23) as u8
}

/// The nibble of an integer in [`INTEGERS`]; the positive one of zero.
pub const fn nibble(integer: u8) -> u8 {
    let mut nibble = 0;
    while INTEGERS[nibble as usize] != integer && nibble < 15 {
        nibble += 1;
    }
    nibble
}
