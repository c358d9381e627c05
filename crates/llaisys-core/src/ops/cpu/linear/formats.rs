//! The grouped formats as types, so that one kernel text becomes a kernel for each.

use crate::ops::cpu::activations::GroupInput;
use crate::ops::packed::PackedFormat;
use crate::quant::BLOCK_LEN;

/// Words of four inputs in a group.
pub(super) const QUADS: usize = BLOCK_LEN / 4;

/// The inputs of a block for a grouped format: integers `[k/4][r]`, groups `[k/32][r]`.
pub(super) type GroupInputs<'a> = (&'a [u32], &'a [GroupInput]);

/// What a kernel knows of a grouped format when it is compiled.
pub(super) trait Group {
    /// Which one.
    const FORMAT: PackedFormat;
    /// Two weights a byte, low nibbles first; otherwise one.
    const NIBBLES: bool;
    /// Weights have a minimum, which meets the sum of the inputs.
    const HAS_MIN: bool;
    /// Bytes of a group.
    const BYTES: usize = Self::FORMAT.group_bytes();
    /// Bytes of its f16 numbers, which come first.
    const HEADER: usize = Self::FORMAT.header_bytes();

    /// Where the sum of `weight * input` starts, so that the stored weights may be unsigned.
    fn init(input: GroupInput) -> i32;
}

/// [`PackedFormat::Q8_0`].
pub(super) struct Q8_0;
/// [`PackedFormat::Q4_0`].
pub(super) struct Q4_0;
/// [`PackedFormat::Q4_1`].
pub(super) struct Q4_1;

impl Group for Q8_0 {
    const FORMAT: PackedFormat = PackedFormat::Q8_0;
    const NIBBLES: bool = false;
    const HAS_MIN: bool = false;

    fn init(input: GroupInput) -> i32 {
        input.init_8
    }
}

impl Group for Q4_0 {
    const FORMAT: PackedFormat = PackedFormat::Q4_0;
    const NIBBLES: bool = true;
    const HAS_MIN: bool = false;

    fn init(input: GroupInput) -> i32 {
        input.init_4
    }
}

impl Group for Q4_1 {
    const FORMAT: PackedFormat = PackedFormat::Q4_1;
    const NIBBLES: bool = true;
    const HAS_MIN: bool = true;

    fn init(_: GroupInput) -> i32 {
        0
    }
}
