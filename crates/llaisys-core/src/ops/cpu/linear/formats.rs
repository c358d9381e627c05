//! The grouped formats as types, so that one generic kernel is compiled for each of them.

use crate::ops::cpu::activations::GroupInput;
use crate::ops::packed::PackedFormat;
use crate::quant::BLOCK_LEN;
use std::ops::Range;

/// Words of four inputs in a group.
pub(super) const QUADS: usize = BLOCK_LEN / 4;

/// The inputs of a block of rows for a grouped format.
#[derive(Clone, Copy)]
pub(super) struct GroupInputs<'a> {
    /// Integers, `[k/32][r][8]`.
    pub(super) words: &'a [u32],
    /// Scales and sums, `[k/32][r]`.
    pub(super) groups: &'a [GroupInput],
}

/// The inputs of one group of columns for `R` rows.
#[derive(Clone, Copy)]
pub(super) struct GroupOfRows<'a, const R: usize> {
    pub(super) words: &'a [[u32; QUADS]; R],
    pub(super) groups: &'a [GroupInput; R],
}

/// The properties of a grouped format at compile time; `ops/packed.rs` describes the layouts.
pub(super) trait Group {
    /// The format.
    const FORMAT: PackedFormat;
    /// Bits in a stored weight.
    const BITS: usize = Self::FORMAT.bits();
    /// The integers of nibbles that index a table.
    const TABLE: Option<&'static [u8; 16]> = Self::FORMAT.table();
    /// The integers have up to 4 bits.
    const IS_SMALL: bool = Self::BITS <= 4 && Self::TABLE.is_none();
    /// Scales per column: parts of a group that are summed and scaled separately.
    const PARTS: usize = Self::FORMAT.n_scales();
    /// Weights have minima, which are multiplied by the sums of the inputs.
    const HAS_MIN: bool = Self::FORMAT.has_min();
    /// Bytes in a group.
    const BYTES: usize = Self::FORMAT.group_bytes();
    /// Bytes of its scales and minima, which are at the start.
    const HEADER: usize = Self::FORMAT.header_bytes();
    /// Scales are powers of two, stored as exponents of one byte.
    const HAS_EXPONENTS: bool = Self::FORMAT.has_exponents();
    /// Scales are bytes, minima are zero points in 16ths, and each column has a unit.
    const HAS_UNITS: bool = Self::FORMAT.has_units();

    /// The pairs of quads of part `part`.
    #[inline(always)]
    fn pairs(part: usize) -> Range<usize> {
        let n = QUADS / 2 / Self::PARTS;
        part * n..(part + 1) * n
    }

    /// Index of the sum in [`GroupInput`] that belongs to part `part`.
    #[inline(always)]
    fn sum(part: usize) -> usize {
        if Self::PARTS == 2 { 1 + part } else { 0 }
    }
}

/// Defines a type for each format, and the macro that calls a kernel's instance for a format.
macro_rules! groups {
    ($($name:ident)*) => {
        $(
            #[doc = concat!("[`PackedFormat::", stringify!($name), "`].")]
            #[allow(non_camel_case_types, reason = "the formats' names")]
            pub(super) struct $name;

            impl Group for $name {
                const FORMAT: PackedFormat = PackedFormat::$name;
            }
        )*

        /// Calls `$kernel::<G>($args)` with the type of `$format`, which is grouped.
        macro_rules! for_group {
            ($format:expr, $kernel:ident $args:tt) => {
                match $format {
                    $(PackedFormat::$name => $kernel::<formats::$name> $args,)*
                    PackedFormat::F32 | PackedFormat::BF16 => unreachable!("a plain format has no groups"),
                }
            };
        }
    };
}

groups!(Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q6_K Q3_K Q2_K MXFP4 I8 I6 I4);

/// Calls `$kernel::<R, G>($args)` for `$n_rows` rows, one of `$rows`, with the type of `$format`, which has 8 bits.
macro_rules! for_bytes {
    ($format:expr, $n_rows:expr, [$($rows:literal)*], $kernel:ident $args:tt) => {
        match ($format, $n_rows) {
            $(
                (PackedFormat::Q8_0, $rows) => $kernel::<$rows, formats::Q8_0> $args,
                (PackedFormat::I8, $rows) => $kernel::<$rows, formats::I8> $args,
            )*
            (format, n) => unreachable!("no tile of {n} rows of {format:?}"),
        }
    };
}

pub(super) use {for_bytes, for_group};
