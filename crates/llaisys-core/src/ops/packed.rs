//! Weights packed once for the CPU, the same bytes for one row and for many.
//!
//! The `n_rows` outputs of a matrix lie in panels of 32; a panel is one sequential stream of bytes and panels
//! follow each other. Missing outputs of the last panel are zero weights with zero scales. With panel
//! `p = n / 32`, column `c = n % 32`, and everything on 64-byte lines:
//!
//! ```text
//! F32   element (n, k) at (p*K + k)*32 + c                    one k = 128 bytes
//! BF16  element (n, k) at ((p*(K'/2) + k/2)*32 + c)*2 + k%2   K' = K rounded up to even, the odd one zero
//! Q*    per 32 k a group: f16 scale[32] for each half of the group that has its own, minima likewise, then the
//!       integers, unsigned; i = k % 32, B bits:
//!   B = 8   byte (i/4)*128 + c*4 + i%4
//!   B >= 4  low four bits: byte (i/8)*128 + c*4 + i%4, low nibble for even i/4, high for odd
//!           then each higher bit a plane of 128 bytes: byte c*4 + i%4, bit i/4
//!   B < 4   each bit such a plane, lowest first
//! I*    per 32 k a group: u8 scale[32] (I4: then u8 zero[32]), then the integers as above; after the last group
//!       f32 unit[32], by which the columns' sums are multiplied
//! ```
//!
//! | format | B | scales, minima | value | lines a group | bits an element |
//! | --- | --- | --- | --- | --- | --- |
//! | Q8_0 | 8 | 1, 0 | `scale * (q - 128)` | 17 | 8.5 |
//! | Q4_0, Q4_1 | 4 | 1, 0 and 1, 1 | `scale * (q - 8)`, `scale * q + min` | 9, 10 | 4.5, 5 |
//! | Q5_0, Q5_1 | 5 | 1, 0 and 1, 1 | `scale * (q - 16)`, `scale * q + min` | 11, 12 | 5.5, 6 |
//! | Q6_K | 6 | 2, 0 | `scale * (q - 32)` | 14 | 7 |
//! | Q3_K | 3 | 2, 0 | `scale * (q - 4)` | 8 | 4 |
//! | Q2_K | 2 | 2, 2 | `scale * q + min` | 8 | 4 |
//! | I8 | 8 | 1, 0 | `unit * scale * (q - 128)` | 16.5 | 8.25 |
//! | I6 | 6 | 1, 0 | `unit * scale * (q - 32)` | 12.5 | 6.25 |
//! | I4 | 4 | 1, 1 | `unit * scale * (q - zero / 16)` | 9 | 4.5 |
//!
//! Integers are kept as the file has them. Scales and minima of the types with 32 elements are f16 in the file
//! and kept too; those of the K types (and of Int4) are products of 15 to 19 significant bits and rounded to f16,
//! each off by at most 2^-11 of itself. So no value is off by more than a 64th of the distance to its neighbor
//! and 2^-11 of the minimum: a quarter of what rounding activations to 8 bits does. A product beyond f16's 65504
//! becomes infinite, and so does what is computed from it.
//!
//! The I formats hold what `quant::quantize` made of plain weights while they were packed. Their scales and zero points
//! take a byte each: as I4 has both in the two bytes of Q4_0's scale, it costs as much as Q4_0 and is as close as Q4_1.

mod fill;
mod pages;
mod read;

pub(crate) use read::{read_block, read_unit};

use crate::dtype::DType;
use crate::error::DeviceError;
use crate::quant::BLOCK_LEN;
use crate::quant::quantize::Grid;
use crate::tensor::{AlignedBuf, RowView};
use crate::threads::Pool;
use std::ops::Range;

/// Outputs of a panel.
pub(crate) const PANEL: usize = 32;

/// How a packed matrix holds its elements.
///
/// Grouped formats hold integers in groups of 32, and activations are rounded to 8 bits in groups of 32; the table
/// above tells them apart.
#[allow(non_camel_case_types, reason = "the block types keep the names of DType, which are GGUF's")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PackedFormat {
    /// IEEE binary32.
    F32,
    /// Pairs of bf16; activations are rounded to bf16, sums are f32.
    BF16,
    /// 8-bit integers; IQ4_NL too, whose table holds 8-bit numbers.
    Q8_0,
    /// 4-bit integers around 8.
    Q4_0,
    /// 4-bit integers above a minimum; Q4_K and Int4 too.
    Q4_1,
    /// 5-bit integers around 16.
    Q5_0,
    /// 5-bit integers above a minimum; Q5_K too.
    Q5_1,
    /// 6-bit integers around 32, a scale for each half group.
    Q6_K,
    /// 3-bit integers around 4, a scale for each half group.
    Q3_K,
    /// 2-bit integers, scale and minimum for each half group.
    Q2_K,
    /// Plain weights fitted with 8-bit integers.
    I8,
    /// Plain weights fitted with 6-bit integers.
    I6,
    /// Plain weights fitted with 4-bit integers above a zero point.
    I4,
}

impl PackedFormat {
    /// Every format.
    pub const ALL: [PackedFormat; 13] = [
        PackedFormat::F32,
        PackedFormat::BF16,
        PackedFormat::Q8_0,
        PackedFormat::Q4_0,
        PackedFormat::Q4_1,
        PackedFormat::Q5_0,
        PackedFormat::Q5_1,
        PackedFormat::Q6_K,
        PackedFormat::Q3_K,
        PackedFormat::Q2_K,
        PackedFormat::I8,
        PackedFormat::I6,
        PackedFormat::I4,
    ];

    /// The format that holds a type as it is: the same integers, scales and minima (those of K types and Int4
    /// rounded to f16).
    pub const fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 | DType::F16 | DType::I32 => PackedFormat::F32,
            DType::BF16 => PackedFormat::BF16,
            DType::Q8_0 | DType::IQ4_NL => PackedFormat::Q8_0,
            DType::Q4_0 => PackedFormat::Q4_0,
            DType::Q4_1 | DType::Q4_K | DType::Int4 => PackedFormat::Q4_1,
            DType::Q5_0 => PackedFormat::Q5_0,
            DType::Q5_1 | DType::Q5_K => PackedFormat::Q5_1,
            DType::Q6_K => PackedFormat::Q6_K,
            DType::Q3_K => PackedFormat::Q3_K,
            DType::Q2_K => PackedFormat::Q2_K,
        }
    }

    /// The type after which the format is named; F32 for those that fit plain weights.
    pub const fn dtype(self) -> DType {
        match self {
            PackedFormat::F32 => DType::F32,
            PackedFormat::BF16 => DType::BF16,
            PackedFormat::Q8_0 => DType::Q8_0,
            PackedFormat::Q4_0 => DType::Q4_0,
            PackedFormat::Q4_1 => DType::Q4_1,
            PackedFormat::Q5_0 => DType::Q5_0,
            PackedFormat::Q5_1 => DType::Q5_1,
            PackedFormat::Q6_K => DType::Q6_K,
            PackedFormat::Q3_K => DType::Q3_K,
            PackedFormat::Q2_K => DType::Q2_K,
            PackedFormat::I8 | PackedFormat::I6 | PackedFormat::I4 => DType::F32,
        }
    }

    /// The name used in errors.
    pub const fn name(self) -> &'static str {
        match self {
            PackedFormat::I8 => "int8",
            PackedFormat::I6 => "int6",
            PackedFormat::I4 => "int4",
            _ => self.dtype().name(),
        }
    }

    /// How plain weights are fitted, in the formats that do.
    pub const fn grid(self) -> Option<Grid> {
        match self {
            PackedFormat::I8 => Some(Grid::Symmetric { bits: 8 }),
            PackedFormat::I6 => Some(Grid::Symmetric { bits: 6 }),
            PackedFormat::I4 => Some(Grid::ZeroPoint),
            _ => None,
        }
    }

    /// True for the formats of integers in groups.
    pub const fn is_grouped(self) -> bool {
        self.bits() > 0
    }

    /// Bits of an integer; 0 for plain formats.
    pub(crate) const fn bits(self) -> usize {
        match self {
            PackedFormat::F32 | PackedFormat::BF16 => 0,
            PackedFormat::Q2_K => 2,
            PackedFormat::Q3_K => 3,
            PackedFormat::Q4_0 | PackedFormat::Q4_1 | PackedFormat::I4 => 4,
            PackedFormat::Q5_0 | PackedFormat::Q5_1 => 5,
            PackedFormat::Q6_K | PackedFormat::I6 => 6,
            PackedFormat::Q8_0 | PackedFormat::I8 => 8,
        }
    }

    /// The integer that stands for zero, or for the minimum.
    pub(crate) const fn offset(self) -> u8 {
        match self {
            PackedFormat::Q3_K | PackedFormat::Q4_0 | PackedFormat::Q5_0 => 1 << (self.bits() - 1),
            PackedFormat::Q6_K | PackedFormat::Q8_0 | PackedFormat::I8 | PackedFormat::I6 => {
                1 << (self.bits() - 1)
            }
            _ => 0,
        }
    }

    /// True if weights have a minimum.
    pub(crate) const fn has_min(self) -> bool {
        self.is_grouped() && self.offset() == 0
    }

    /// Scales of a column in a group: 2 if each half has its own. As many minima, if there are any.
    pub(crate) const fn n_scales(self) -> usize {
        match self {
            PackedFormat::Q6_K | PackedFormat::Q3_K | PackedFormat::Q2_K => 2,
            _ => 1,
        }
    }

    /// Bytes of a scale, and of a minimum or zero point.
    const fn number_bytes(self) -> usize {
        if self.has_units() { 1 } else { 2 }
    }

    /// True if scales are small integers of a unit that a column has, and a minimum is a zero point in 16ths.
    pub(crate) const fn has_units(self) -> bool {
        self.grid().is_some()
    }

    /// Bytes of scales and minima in front of a group's integers; 0 for plain formats.
    pub(crate) const fn header_bytes(self) -> usize {
        let n_numbers = if self.has_min() { 2 * self.n_scales() } else { self.n_scales() };
        if self.is_grouped() { PANEL * self.number_bytes() * n_numbers } else { 0 }
    }

    /// Bytes of a group with its header; 0 for plain formats.
    pub(crate) const fn group_bytes(self) -> usize {
        self.header_bytes() + PANEL * BLOCK_LEN / 8 * self.bits()
    }

    /// Bytes of a matrix in panels, padding included.
    pub(crate) const fn matrix_bytes(self, n_rows: usize, n_columns: usize) -> usize {
        n_rows.div_ceil(PANEL).saturating_mul(self.panel_bytes(n_columns))
    }

    /// Bytes of a panel of `n_columns` inputs, a multiple of 64.
    const fn panel_bytes(self, n_columns: usize) -> usize {
        match self {
            PackedFormat::F32 => n_columns.saturating_mul(PANEL * 4),
            PackedFormat::BF16 => n_columns.div_ceil(2).saturating_mul(PANEL * 4),
            _ => {
                let units = if self.has_units() { PANEL * 4 } else { 0 };
                let groups = (n_columns / BLOCK_LEN).saturating_mul(self.group_bytes());
                groups.saturating_add(units).div_ceil(64).saturating_mul(64)
            }
        }
    }

    /// Where the units of a panel's columns lie in its bytes, `f32[32]`: behind the last group.
    pub(crate) const fn units_at(self, n_columns: usize) -> usize {
        n_columns / BLOCK_LEN * self.group_bytes()
    }
}

/// A weight matrix `[n_rows outputs, n_columns inputs]` in panels.
#[derive(Debug)]
pub struct PackedMatrix {
    format: PackedFormat,
    n_rows: usize,
    n_columns: usize,
    panels: AlignedBuf,
}

impl PackedMatrix {
    /// Whether a matrix of `n_columns` inputs can have this format: groups take whole blocks of 32.
    pub const fn can_pack(format: PackedFormat, n_columns: usize) -> bool {
        !format.is_grouped() || n_columns.is_multiple_of(BLOCK_LEN)
    }

    /// Packs a matrix, its panels in parallel. `source(n)` is the stored row of output `n`; a row without bytes
    /// stands for zeros (padding). Plain types convert to either plain format (to bf16 rounding to nearest
    /// even), block types dequantize to them, and a grouped format takes only the types that it is
    /// [`PackedFormat::of`], or if it [fits](PackedFormat::grid) (Q8_0 does too), plain types of finite values.
    ///
    /// Errors: [`DeviceError::Allocation`]. Panics if [`Self::can_pack`] says no, if a row has another length,
    /// or a grouped format another type: the loader has chosen the format by the tensor's type.
    pub fn pack<'s>(
        pool: &Pool,
        format: PackedFormat,
        n_rows: usize,
        n_columns: usize,
        source: &(dyn Fn(usize) -> RowView<'s> + Sync),
    ) -> Result<Self, DeviceError> {
        let mut matrix = Self::zeroed(format, n_rows, n_columns)?;
        matrix.fill(pool, 0..n_rows, source);
        Ok(matrix)
    }

    /// A matrix of zeros, to be packed by [`Self::fill`]. Errors and panics: as [`Self::pack`].
    pub fn zeroed(format: PackedFormat, n_rows: usize, n_columns: usize) -> Result<Self, DeviceError> {
        assert!(Self::can_pack(format, n_columns), "{format:?} cannot hold rows of {n_columns}");
        let panels = AlignedBuf::zeroed("packed weights", format.matrix_bytes(n_rows, n_columns))?;
        Ok(Self { format, n_rows, n_columns, panels })
    }

    /// Packs `rows` as [`Self::pack`] does, each row once and the last one last.
    ///
    /// Panics as it does, and if `rows` do not begin with a panel, or end neither with one nor with the matrix.
    pub fn fill<'s>(
        &mut self,
        pool: &Pool,
        rows: Range<usize>,
        source: &(dyn Fn(usize) -> RowView<'s> + Sync),
    ) {
        let is_last = rows.end == self.n_rows;
        assert!(
            rows.start.is_multiple_of(PANEL) && (is_last || rows.end.is_multiple_of(PANEL)),
            "rows {rows:?} of {} are not whole panels",
            self.n_rows
        );
        if self.panels.is_empty() {
            return;
        }
        let panels = rows.start / PANEL..rows.end.div_ceil(PANEL);
        let (format, n_columns, end) = (self.format, self.n_columns, rows.end);
        fill::fill(pool, format, n_columns, fill::Panels { panels: &mut self.panels, at: panels }, &|n| {
            (n < end).then(|| source(n))
        });
        if is_last {
            pages::use_huge_pages(&self.panels);
        }
    }

    /// Outputs.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Inputs.
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// How elements are held.
    pub fn format(&self) -> PackedFormat {
        self.format
    }

    /// Bytes held, padding included.
    pub fn n_bytes(&self) -> usize {
        self.panels.len()
    }

    /// Panels of 32 outputs.
    pub(crate) fn n_panels(&self) -> usize {
        self.n_rows.div_ceil(PANEL)
    }

    /// The bytes from panel `p` to the end of the matrix, on a 64-byte boundary; the panel itself comes first.
    pub(crate) fn panels_from(&self, p: usize) -> &[u8] {
        &self.panels.as_slice()[p * self.panel_bytes()..]
    }

    /// Bytes of one panel.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.format.panel_bytes(self.n_columns)
    }
}
