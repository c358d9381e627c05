//! The matrices of LoRA adapters as [`lora`](super::lora) reads them, and the rows of a pass that use adapters.

use crate::error::DeviceError;
use crate::tensor::AlignedBuf;
use half::bf16;

/// Ranks of a block of [`LoraProduct::a`].
pub const RANK_BLOCK: usize = 16;
/// Outputs of a block of [`LoraPart::b`].
pub const OUT_BLOCK: usize = 64;

/// A matrix `[n_columns, n_inner]` in blocks of columns: block i is `[n_inner, width]` and has the columns from
/// `i * width` on. The columns after the last one are zero.
#[derive(Debug)]
pub struct LoraPanels {
    buffer: AlignedBuf,
    is_bf16: bool,
    width: usize,
    n_inner: usize,
    n_columns: usize,
}

/// The sizes of [`LoraPanels`].
#[derive(Debug, Clone, Copy)]
pub struct PanelSizes {
    /// Columns of a block.
    pub width: usize,
    /// Elements of a column.
    pub n_inner: usize,
    /// Columns without those that fill the last block.
    pub n_columns: usize,
}

/// One block of [`LoraPanels`].
#[derive(Debug, Clone, Copy)]
pub(super) enum PanelBlock<'a> {
    F32(&'a [f32]),
    /// Bits of bf16.
    Bf16(&'a [u16]),
}

impl LoraPanels {
    /// Allocates zeros in bf16 or f32. Errors: no memory.
    pub fn zeroed(sizes: PanelSizes, is_bf16: bool) -> Result<Self, DeviceError> {
        let PanelSizes { width, n_inner, n_columns } = sizes;
        let size = if is_bf16 { size_of::<bf16>() } else { size_of::<f32>() };
        let bytes = n_columns.div_ceil(width) * width * n_inner * size;
        let buffer = AlignedBuf::zeroed("a LoRA adapter", bytes)?;
        Ok(Self { buffer, is_bf16, width, n_inner, n_columns })
    }

    /// Sets column `column` to `values`, `[n_inner]`. Panics if there is no such column.
    pub fn set_column(&mut self, column: usize, values: &[f32]) {
        assert!(column < self.n_columns && values.len() == self.n_inner, "column {column}");
        let (width, first) = (self.width, column / self.width * self.width * self.n_inner);
        let at = |k: usize| first + k * width + column % width;
        if self.is_bf16 {
            let all = self.buffer.as_mut_slice::<u16>();
            values.iter().enumerate().for_each(|(k, &x)| all[at(k)] = bf16::from_f32(x).to_bits());
        } else {
            let all = self.buffer.as_mut_slice::<f32>();
            values.iter().enumerate().for_each(|(k, &x)| all[at(k)] = x);
        }
    }

    /// Columns without those that fill the last block.
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// Elements of a column.
    pub fn n_inner(&self) -> usize {
        self.n_inner
    }

    /// Bytes of all blocks.
    pub fn n_bytes(&self) -> usize {
        self.buffer.len()
    }

    pub(super) fn n_blocks(&self) -> usize {
        self.n_columns.div_ceil(self.width)
    }

    pub(super) fn block(&self, i: usize) -> PanelBlock<'_> {
        let len = self.width * self.n_inner;
        if self.is_bf16 {
            PanelBlock::Bf16(&self.buffer.as_slice()[i * len..][..len])
        } else {
            PanelBlock::F32(&self.buffer.as_slice()[i * len..][..len])
        }
    }
}

/// What one adapter adds to the projections of one input. The ranks of all projections are stacked, so that the input is
/// read once.
#[derive(Debug)]
pub struct LoraProduct {
    /// A, with blocks of [`RANK_BLOCK`]: a column of `n_in` for each rank.
    pub a: LoraPanels,
    /// The scale of each rank, as many as the blocks of `a` have columns.
    pub scales: Vec<f32>,
    /// At most one for each projection.
    pub parts: Vec<LoraPart>,
}

/// What one adapter adds to one projection.
#[derive(Debug)]
pub struct LoraPart {
    /// The number of the projection among those of the input.
    pub target: usize,
    /// Its first rank in [`LoraProduct::a`].
    pub first_rank: usize,
    /// B, with blocks of [`OUT_BLOCK`]: a column of `rank` for each output.
    pub b: LoraPanels,
}

impl LoraProduct {
    /// Ranks, with those that fill the last block.
    pub fn width(&self) -> usize {
        self.a.n_blocks() * RANK_BLOCK
    }

    /// Bytes of the matrices.
    pub fn n_bytes(&self) -> usize {
        self.a.n_bytes() + self.parts.iter().map(|part| part.b.n_bytes()).sum::<usize>()
    }
}

/// The rows of a pass that use one adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoraGroup {
    /// The slot of the adapter.
    pub slot: u32,
    /// The group's first row in [`LoraRows::rows`].
    pub start: usize,
    /// Its rows.
    pub n: usize,
}

/// The rows of a pass that use adapters. Each occurs once.
#[derive(Debug, Clone, Copy)]
pub struct LoraRows<'a> {
    /// One for each adapter.
    pub groups: &'a [LoraGroup],
    /// The rows of the first group, then of the second, and so on.
    pub rows: &'a [u32],
}

impl<'a> LoraRows<'a> {
    /// The rows of a group.
    pub fn of(self, group: &LoraGroup) -> &'a [u32] {
        &self.rows[group.start..group.start + group.n]
    }
}
