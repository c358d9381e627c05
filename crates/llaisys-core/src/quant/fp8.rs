//! Fp8: `scale` f32, then 32 numbers in E4M3; `value = scale * number`. 36 bytes per block.
//!
//! Matrices in FP8 are converted to it without loss while they are loaded. No kernel multiplies E4M3, so it is packed
//! as Q8_0 ([`parse`]) unless the mode asks for floats.
//!
//! E4M3 is sign, exponent `e` of 4 bits, mantissa `m` of 3: `(8 + m) / 8 * 2^(e - 7)`, or `m / 8 * 2^-6` if `e` is 0.
//! 0x7f and 0xff are NaN; the largest number is 448. Source: the Open Compute Project's OFP8 specification.

use super::{BLOCK_LEN, Block};

/// Bytes in a block.
pub const BYTES: usize = 4 + BLOCK_LEN;

/// The numbers of all bytes.
const NUMBERS: [f32; 256] = numbers();

/// True if `byte` is a NaN of E4M3.
pub const fn is_nan(byte: u8) -> bool {
    byte & 0x7f == 0x7f
}

const fn numbers() -> [f32; 256] {
    let mut numbers = [f32::NAN; 256];
    let mut byte = 0;
    while byte < 0x7f {
        let (exponent, mantissa) = (byte >> 3, byte & 7);
        // In units of 2^-9, the smallest number.
        let units = if exponent == 0 { mantissa } else { (8 + mantissa) << (exponent - 1) };
        numbers[byte] = units as f32 / 512.0;
        numbers[byte | 0x80] = -numbers[byte];
        byte += 1;
    }
    numbers
}

/// Rounds the block in `bytes` to integers of 8 bits. Panics unless there are 36 bytes. A NaN becomes zero: the loader
/// rejects it before.
///
/// The step is `scale * 2^(e - 6)`, where the largest magnitude of the numbers is in `2^e..2^(e + 1)`. Numbers of 4
/// significant bits from `2^(e - 3)` on are then integers up to 120, so everything from an eighth of the largest
/// magnitude on is exact. Smaller numbers are rounded to the nearest step, with an error of up to 1/128 of the largest.
pub fn parse(bytes: &[u8]) -> Block {
    let (scale, numbers) = split(bytes);
    let largest = numbers.iter().map(|&byte| NUMBERS[usize::from(byte)].abs()).fold(0.0, f32::max);
    if largest == 0.0 {
        return Block::scaled(0.0, 128, [128; BLOCK_LEN]);
    }
    // The bits of the exponent alone are the power of two: no number of E4M3 is a subnormal f32.
    let power = f32::from_bits(largest.to_bits() & 0x7f80_0000);
    let (step, per_step) = (power / 64.0, 64.0 / power);
    let q = |byte: u8| ((NUMBERS[usize::from(byte)] * per_step).round_ties_even() + 128.0) as u8;
    Block::scaled(scale * step, 128, std::array::from_fn(|j| q(numbers[j])))
}

/// Decodes blocks to f32. Panics unless there are 36 bytes for each 32 elements of `out`.
pub fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(BYTES).zip(out.chunks_exact_mut(BLOCK_LEN)) {
        let (scale, numbers) = split(block);
        for (value, &byte) in out.iter_mut().zip(numbers) {
            *value = scale * NUMBERS[usize::from(byte)];
        }
    }
}

fn split(bytes: &[u8]) -> (f32, &[u8]) {
    assert_eq!(bytes.len(), BYTES, "an Fp8 block has 36 bytes");
    let (scale, numbers) = bytes.split_at(4);
    (f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]), numbers)
}
