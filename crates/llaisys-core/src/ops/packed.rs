//! Weights packed once for the CPU, the same bytes for one row and for many.
//!
//! The `n_rows` outputs of a matrix lie in panels of 32; a panel is one sequential stream of bytes and panels
//! follow each other. Missing outputs of the last panel are zero weights with zero scales. With panel
//! `p = n / 32`, column `c = n % 32`, and everything on 64-byte lines:
//!
//! ```text
//! F32   element (n, k) at (p*K + k)*32 + c                    one k = 128 bytes
//! BF16  element (n, k) at ((p*(K'/2) + k/2)*32 + c)*2 + k%2   K' = K rounded up to even, the odd one zero
//! Q*    per 32 k a group: f16 scale[32] (Q4_1: then f16 min[32]), then the integers; i = k % 32:
//!   Q8_0        byte (i/4)*128 + c*4 + i%4, unsigned: q + 128             16 + 1 lines a group
//!   Q4_0, Q4_1  byte (i/8)*128 + c*4 + i%4, low nibble for even i/4, high for odd; 8 + 1 and 8 + 2 lines
//! ```

mod fill;
mod pages;
mod read;

pub(crate) use read::read_block;

use crate::dtype::DType;
use crate::error::DeviceError;
use crate::quant::BLOCK_LEN;
use crate::tensor::{AlignedBuf, RowView};
use crate::threads::Pool;

/// Outputs of a panel.
pub(crate) const PANEL: usize = 32;

/// How a packed matrix holds its elements.
#[allow(non_camel_case_types, reason = "the block types keep the names of DType, which are GGUF's")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PackedFormat {
    /// IEEE binary32.
    F32,
    /// Pairs of bf16; activations are rounded to bf16, sums are f32.
    BF16,
    /// 8-bit integers in groups of 32; activations are rounded to 8 bits in groups of 32.
    Q8_0,
    /// 4-bit integers around 8, otherwise as `Q8_0`.
    Q4_0,
    /// 4-bit integers above a minimum, otherwise as `Q8_0`.
    Q4_1,
}

impl PackedFormat {
    /// Every format.
    pub const ALL: [PackedFormat; 5] =
        [PackedFormat::F32, PackedFormat::BF16, PackedFormat::Q8_0, PackedFormat::Q4_0, PackedFormat::Q4_1];

    /// The element type that this format stores without loss.
    pub const fn dtype(self) -> DType {
        match self {
            PackedFormat::F32 => DType::F32,
            PackedFormat::BF16 => DType::BF16,
            PackedFormat::Q8_0 => DType::Q8_0,
            PackedFormat::Q4_0 => DType::Q4_0,
            PackedFormat::Q4_1 => DType::Q4_1,
        }
    }

    /// True for the formats of integers in groups.
    pub const fn is_grouped(self) -> bool {
        self.dtype().is_quantized()
    }

    /// Bytes of scales (and minima) in front of a group's integers; 0 for plain formats.
    pub(crate) const fn header_bytes(self) -> usize {
        match self {
            PackedFormat::F32 | PackedFormat::BF16 => 0,
            PackedFormat::Q8_0 | PackedFormat::Q4_0 => PANEL * 2,
            PackedFormat::Q4_1 => PANEL * 4,
        }
    }

    /// Bytes of a group with its header; 0 for plain formats.
    pub(crate) const fn group_bytes(self) -> usize {
        match self {
            PackedFormat::F32 | PackedFormat::BF16 => 0,
            PackedFormat::Q8_0 => self.header_bytes() + PANEL * BLOCK_LEN,
            PackedFormat::Q4_0 | PackedFormat::Q4_1 => self.header_bytes() + PANEL * BLOCK_LEN / 2,
        }
    }

    /// Bytes of a panel of `n_columns` inputs, a multiple of 64.
    const fn panel_bytes(self, n_columns: usize) -> usize {
        match self {
            PackedFormat::F32 => n_columns.saturating_mul(PANEL * 4),
            PackedFormat::BF16 => n_columns.div_ceil(2).saturating_mul(PANEL * 4),
            _ => (n_columns / BLOCK_LEN).saturating_mul(self.group_bytes()),
        }
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
    /// even), block types dequantise to them, and a grouped format takes its own block type only, unchanged.
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
        assert!(Self::can_pack(format, n_columns), "{format:?} cannot hold rows of {n_columns}");
        let panel_bytes = format.panel_bytes(n_columns);
        let mut panels =
            AlignedBuf::zeroed("packed weights", n_rows.div_ceil(PANEL).saturating_mul(panel_bytes))?;
        if !panels.is_empty() {
            fill::fill(pool, format, n_columns, &mut panels, &|n| (n < n_rows).then(|| source(n)));
            pages::use_huge_pages(&panels);
        }
        Ok(Self { format, n_rows, n_columns, panels })
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
