//! Weights packed for the CPU kernels. One layout serves a single row and many rows.
//!
//! The `n_rows` outputs of a matrix are stored in panels of 32. A panel is one sequential stream of bytes, and panels
//! follow each other. Missing outputs of the last panel are zero weights with zero scales. Panel `p = n / 32`, column
//! `c = n % 32`; every part starts on a 64-byte line:
//!
//! ```text
//! F32   element (n, k) at (p*K + k)*32 + c                    one k = 128 bytes
//! BF16  element (n, k) at ((p*(K'/2) + k/2)*32 + c)*2 + k%2   K' = K rounded up to even, the extra one zero
//! Q*    per group of 32 k: f16 scale[32] for each half of the group that has its own scale, then the minima in the
//!       same way, then unsigned integers; i = k % 32, B bits:
//!   B = 8   byte (i/4)*128 + c*4 + i%4
//!   B >= 4  low four bits: byte (i/8)*128 + c*4 + i%4, low nibble for even i/4, high for odd
//!           then one plane of 128 bytes for each higher bit: byte c*4 + i%4, bit i/4
//!           MXFP4 has the nibbles of the file in place of integers
//!   B < 4   one such plane for each bit, lowest first
//! MXFP4 per group of 32 k: u8 exponent[32], then the nibbles as above
//! I*    per group of 32 k: u8 scale[32] (I4: then u8 zero[32]), then the integers as above; after the last group
//!       f32 unit[32], which multiply the sums of the columns
//! ```
//!
//! | format | B | scales, minima | value | lines per group | bits per element |
//! | --- | --- | --- | --- | --- | --- |
//! | Q8_0 | 8 | 1, 0 | `scale * (q - 128)` | 17 | 8.5 |
//! | Q4_0, Q4_1 | 4 | 1, 0 and 1, 1 | `scale * (q - 8)`, `scale * q + min` | 9, 10 | 4.5, 5 |
//! | Q5_0, Q5_1 | 5 | 1, 0 and 1, 1 | `scale * (q - 16)`, `scale * q + min` | 11, 12 | 5.5, 6 |
//! | Q6_K | 6 | 2, 0 | `scale * (q - 32)` | 14 | 7 |
//! | Q3_K | 3 | 2, 0 | `scale * (q - 4)` | 8 | 4 |
//! | Q2_K | 2 | 2, 2 | `scale * q + min` | 8 | 4 |
//! | MXFP4 | 4 | 1, 0 | `2^(exponent - 128) * (INTEGERS[nibble] - 16)` | 8.5 | 4.25 |
//! | I8 | 8 | 1, 0 | `unit * scale * (q - 128)` | 16.5 | 8.25 |
//! | I6 | 6 | 1, 0 | `unit * scale * (q - 32)` | 12.5 | 6.25 |
//! | I4 | 4 | 1, 1 | `unit * scale * (q - zero / 16)` | 9 | 4.5 |
//!
//! Integers are those of the file. So are the scales and minima of types with blocks of 32, which are f16 in the file.
//! Those of the K types (and of Int4) are products of 15 to 19 significant bits, and are rounded to f16 with a relative
//! error of at most 2^-11. The error of a value is then at most 1/64 of the distance to its neighbor plus 2^-11 of the
//! minimum: a quarter of the error that rounding activations to 8 bits causes. A product beyond f16's 65504 becomes
//! infinite, and so does everything computed from it.
//!
//! The f32 scales of Int8 and Fp8 are rounded to f16 too: by at most 2^-11 of a value, or by 2^-25 of its integer where
//! the scale is below f16's normal numbers. The loader bounds these scales, so that none becomes infinite.
//!
//! The I formats hold plain weights that `quant::quantize` quantized while they were packed. A scale and a zero point
//! take one byte each. I4 therefore takes as many bytes as Q4_0, which has one f16 scale, and is as accurate as Q4_1.

mod fill;
mod pages;
mod q8_0_copy;
mod read;

pub use fill::Panels;
pub(crate) use read::{read_block, read_unit};

use crate::dtype::DType;
use crate::error::DeviceError;
use crate::quant::quantize::Grid;
use crate::quant::{BLOCK_LEN, mxfp4};
use crate::tensor::{AlignedBuf, RowView};
use crate::threads::Pool;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Outputs in a panel.
pub(crate) const PANEL: usize = 32;
/// Columns of gate, and of up, in one panel of their interleaved matrix.
pub(crate) const HALF_PANEL: usize = PANEL / 2;

/// The format in which a packed matrix stores its elements; the table above compares the formats.
///
/// Grouped formats store integers in groups of 32, and their kernels round activations to 8 bits in groups of 32.
#[allow(non_camel_case_types, reason = "the block types keep the names of DType, which are GGUF's")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PackedFormat {
    /// IEEE binary32.
    F32,
    /// Pairs of bf16; activations are rounded to bf16, sums are f32.
    BF16,
    /// 8-bit integers. Also stores Int8, IQ4_NL, whose table has 8-bit numbers, and Fp8, which is rounded to them.
    Q8_0,
    /// 4-bit integers with offset 8.
    Q4_0,
    /// 4-bit integers and a minimum. Also stores Q4_K and Int4.
    Q4_1,
    /// 5-bit integers with offset 16.
    Q5_0,
    /// 5-bit integers and a minimum. Also stores Q5_K.
    Q5_1,
    /// 6-bit integers with offset 32, one scale for each half group.
    Q6_K,
    /// 3-bit integers with offset 4, one scale for each half group.
    Q3_K,
    /// 2-bit integers, one scale and minimum for each half group.
    Q2_K,
    /// Numbers of 4 bits that index a table of integers, with scales that are powers of two.
    MXFP4,
    /// Plain weights quantized to 8-bit integers.
    I8,
    /// Plain weights quantized to 6-bit integers.
    I6,
    /// Plain weights quantized to 4-bit integers with a zero point.
    I4,
}

impl PackedFormat {
    /// Every format.
    pub const ALL: [PackedFormat; 14] = [
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
        PackedFormat::MXFP4,
        PackedFormat::I8,
        PackedFormat::I6,
        PackedFormat::I4,
    ];

    /// The format that stores a type without quantizing it again: the same integers, scales and minima (those of
    /// K types, Int4 and Int8 are rounded to f16). Only the numbers of Fp8 are rounded, by
    /// [`fp8::parse`](crate::quant::fp8::parse).
    pub const fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 | DType::F16 => PackedFormat::F32,
            DType::I8 | DType::U8 | DType::I32 | DType::I64 | DType::F8E4M3 => PackedFormat::F32,
            DType::BF16 => PackedFormat::BF16,
            DType::Q8_0 | DType::IQ4_NL | DType::Int8 | DType::Fp8 => PackedFormat::Q8_0,
            DType::Q4_0 => PackedFormat::Q4_0,
            DType::Q4_1 | DType::Q4_K | DType::Int4 => PackedFormat::Q4_1,
            DType::Q5_0 => PackedFormat::Q5_0,
            DType::Q5_1 | DType::Q5_K => PackedFormat::Q5_1,
            DType::Q6_K => PackedFormat::Q6_K,
            DType::Q3_K => PackedFormat::Q3_K,
            DType::Q2_K => PackedFormat::Q2_K,
            DType::MXFP4 => PackedFormat::MXFP4,
        }
    }

    /// The type after which the format is named; F32 for the formats of quantized plain weights.
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
            PackedFormat::MXFP4 => DType::MXFP4,
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

    /// How plain weights are quantized; `None` for formats that store them otherwise.
    pub const fn grid(self) -> Option<Grid> {
        match self {
            PackedFormat::I8 => Some(Grid::Symmetric { bits: 8 }),
            PackedFormat::I6 => Some(Grid::Symmetric { bits: 6 }),
            PackedFormat::I4 => Some(Grid::ZeroPoint),
            _ => None,
        }
    }

    /// True for formats that store integers in groups.
    pub const fn is_grouped(self) -> bool {
        self.bits() > 0
    }

    /// Bits of an integer as it is stored; 0 for plain formats.
    pub(crate) const fn bits(self) -> usize {
        match self {
            PackedFormat::F32 | PackedFormat::BF16 => 0,
            PackedFormat::Q2_K => 2,
            PackedFormat::Q3_K => 3,
            PackedFormat::Q4_0 | PackedFormat::Q4_1 | PackedFormat::MXFP4 | PackedFormat::I4 => 4,
            PackedFormat::Q5_0 | PackedFormat::Q5_1 => 5,
            PackedFormat::Q6_K | PackedFormat::I6 => 6,
            PackedFormat::Q8_0 | PackedFormat::I8 => 8,
        }
    }

    /// The integers of the stored nibbles, where these index a table.
    pub(crate) const fn table(self) -> Option<&'static [u8; 16]> {
        match self {
            PackedFormat::MXFP4 => Some(&mxfp4::INTEGERS),
            _ => None,
        }
    }

    /// True if scales are powers of two, stored as exponents of one byte.
    pub(crate) const fn has_exponents(self) -> bool {
        matches!(self, PackedFormat::MXFP4)
    }

    /// The integer that represents zero, or the minimum.
    pub(crate) const fn offset(self) -> u8 {
        match self {
            PackedFormat::Q3_K | PackedFormat::Q4_0 | PackedFormat::Q5_0 => 1 << (self.bits() - 1),
            PackedFormat::Q6_K | PackedFormat::Q8_0 | PackedFormat::I8 | PackedFormat::I6 => {
                1 << (self.bits() - 1)
            }
            PackedFormat::MXFP4 => mxfp4::OFFSET,
            _ => 0,
        }
    }

    /// True if weights have a minimum.
    pub(crate) const fn has_min(self) -> bool {
        self.is_grouped() && self.offset() == 0
    }

    /// Scales per column and group: 2 if each half has its own. Minima, if there are any, are as many.
    pub(crate) const fn n_scales(self) -> usize {
        match self {
            PackedFormat::Q6_K | PackedFormat::Q3_K | PackedFormat::Q2_K => 2,
            _ => 1,
        }
    }

    /// Bytes of a scale; a minimum or zero point has the same size.
    const fn number_bytes(self) -> usize {
        if self.has_units() || self.has_exponents() { 1 } else { 2 }
    }

    /// True if scales are small integers in units of their column, and minima are zero points in 16ths.
    pub(crate) const fn has_units(self) -> bool {
        self.grid().is_some()
    }

    /// Bytes of scales and minima before a group's integers; 0 for plain formats.
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

    /// Offset of the units of a panel's columns, `f32[32]`: after the last group.
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
    /// Whether a matrix with `n_columns` inputs can have this format: grouped formats need whole groups of 32.
    pub const fn can_pack(format: PackedFormat, n_columns: usize) -> bool {
        !format.is_grouped() || n_columns.is_multiple_of(BLOCK_LEN)
    }

    /// Packs a matrix, one panel per job of the pool.
    ///
    /// `source(n)` returns the stored row of output `n`; a row without bytes means zeros (padding). Plain types convert
    /// to both plain formats, rounding to nearest even for bf16, and block types are dequantized to them. A grouped
    /// format accepts the block types for which it is [`PackedFormat::of`]. Formats with a [`PackedFormat::grid`], and
    /// Q8_0, also accept plain types with finite values.
    ///
    /// Errors: [`DeviceError::Allocation`]. Panics if [`Self::can_pack`] is false, if a row has another length, or if a
    /// grouped format does not accept its type: the loader has chosen the format by the tensor's type.
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

    /// A matrix of zeros, to be packed with [`Self::fill`]. Errors and panics: as [`Self::pack`].
    pub fn zeroed(format: PackedFormat, n_rows: usize, n_columns: usize) -> Result<Self, DeviceError> {
        assert!(Self::can_pack(format, n_columns), "{format:?} cannot store rows of {n_columns}");
        let panels = AlignedBuf::zeroed("packed weights", format.matrix_bytes(n_rows, n_columns))?;
        Ok(Self { format, n_rows, n_columns, panels })
    }

    /// Packs `rows` as [`Self::pack`] does. Each row is packed once, and the last row of the matrix in the last call.
    ///
    /// Panics as [`Self::pack`] does, and if `rows` are not whole panels. The last panel of the matrix may be shorter.
    pub fn fill<'s>(
        &mut self,
        pool: &Pool,
        rows: Range<usize>,
        source: &(dyn Fn(usize) -> RowView<'s> + Sync),
    ) {
        if self.panels.is_empty() {
            return;
        }
        let is_last = rows.end == self.n_rows;
        assert!(
            rows.start.is_multiple_of(PANEL) && (is_last || rows.end.is_multiple_of(PANEL)),
            "rows {rows:?} of {} are not whole panels",
            self.n_rows
        );
        let n_bytes = self.panel_bytes();
        let bytes = rows.start / PANEL * n_bytes..rows.end.div_ceil(PANEL) * n_bytes;
        let bytes = &mut self.panels.as_mut_slice()[bytes];
        Panels { format: self.format, n_columns: self.n_columns, rows, bytes }.fill(pool, source);
        if is_last {
            pages::use_huge_pages(&self.panels);
        }
    }

    /// Packs the matrix in pieces of `n_rows` rows, which the threads of `pool` take in order: `job(i, panels)` fills the
    /// panels of piece `i` on its thread. Returns the error of the first piece that has one; later pieces may then be
    /// missing.
    ///
    /// Panics if a piece is not whole panels.
    pub fn fill_in_pieces<E: Send>(
        &mut self,
        pool: &Pool,
        n_rows: usize,
        job: &(dyn Fn(usize, Panels<'_>) -> Result<(), E> + Sync),
    ) -> Result<(), E> {
        if self.panels.is_empty() {
            return Ok(());
        }
        assert!(n_rows.is_multiple_of(PANEL), "pieces of {n_rows} rows are not whole panels");
        let (format, n_columns, all_rows) = (self.format, self.n_columns, self.n_rows);
        let n_bytes = n_rows / PANEL * self.panel_bytes();
        let first_error = Mutex::new(None);
        pool.run_chunks_dynamic(self.panels.as_mut_slice(), n_bytes, &|i, bytes| {
            let rows = i * n_rows..all_rows.min((i + 1) * n_rows);
            if let Err(error) = job(i, Panels { format, n_columns, rows, bytes }) {
                let mut first = first_error.lock().unwrap_or_else(PoisonError::into_inner);
                if first.as_ref().is_none_or(|&(known, _)| i < known) {
                    *first = Some((i, error));
                }
            }
        });
        if let Some((_, error)) = first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        pages::use_huge_pages(&self.panels);
        Ok(())
    }

    /// Outputs.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Inputs.
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// The format of the elements.
    pub fn format(&self) -> PackedFormat {
        self.format
    }

    /// Bytes of memory, padding included.
    pub fn n_bytes(&self) -> usize {
        self.panels.len()
    }

    /// Number of panels of 32 outputs.
    pub(crate) fn n_panels(&self) -> usize {
        self.n_rows.div_ceil(PANEL)
    }

    /// The bytes from panel `p` to the end of the matrix, on a 64-byte boundary.
    pub(crate) fn panels_from(&self, p: usize) -> &[u8] {
        &self.panels.as_slice()[p * self.panel_bytes()..]
    }

    /// Bytes of one panel.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.format.panel_bytes(self.n_columns)
    }
}
