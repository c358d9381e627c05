//! Values back out of panels.

use super::fill::integer_place;
use super::{PANEL, PackedFormat, PackedMatrix};
use crate::quant::{BLOCK_LEN, Block};
use half::{bf16, f16};

impl PackedMatrix {
    /// Row (output) `n` as f32 values: exactly those that the products use.
    ///
    /// - `out`: `[n_columns]`
    ///
    /// Panics if the row is not there or `out` has another length.
    pub fn read_row(&self, n: usize, out: &mut [f32]) {
        assert!(n < self.n_rows, "row {n} of {}", self.n_rows);
        assert_eq!(out.len(), self.n_columns, "row of another length");
        let (c, bytes) = (n % PANEL, &self.panels_from(n / PANEL)[..self.panel_bytes()]);
        match self.format {
            PackedFormat::F32 => {
                for (value, line) in out.iter_mut().zip(bytes.chunks_exact(4 * PANEL)) {
                    *value =
                        f32::from_le_bytes([line[4 * c], line[4 * c + 1], line[4 * c + 2], line[4 * c + 3]]);
                }
            }
            PackedFormat::BF16 => {
                for (pair, line) in out.chunks_mut(2).zip(bytes.chunks_exact(4 * PANEL)) {
                    for (value, bits) in pair.iter_mut().zip(line[4 * c..].chunks_exact(2)) {
                        *value = bf16::from_le_bytes([bits[0], bits[1]]).to_f32();
                    }
                }
            }
            format => {
                let groups = bytes.chunks_exact(format.group_bytes());
                for (values, group) in out.chunks_exact_mut(BLOCK_LEN).zip(groups) {
                    let block = read_block(format, group, c);
                    for (value, &q) in values.iter_mut().zip(&block.q) {
                        *value = block.value(q);
                    }
                }
            }
        }
    }
}

/// Column `c` of a group: the block that was packed there.
pub(crate) fn read_block(format: PackedFormat, group: &[u8], c: usize) -> Block {
    let f16_at = |at: usize| f16::from_le_bytes([group[at], group[at + 1]]);
    let (min, offset, mask) = match format {
        PackedFormat::Q8_0 => (f16::ZERO, 128, 0xff),
        PackedFormat::Q4_0 => (f16::ZERO, 8, 15),
        PackedFormat::Q4_1 => (f16_at(2 * PANEL + 2 * c), 0, 15),
        PackedFormat::F32 | PackedFormat::BF16 => unreachable!("plain formats have no groups"),
    };
    let mut q = [0; BLOCK_LEN];
    for (i, q) in q.iter_mut().enumerate() {
        let (byte, shift) = integer_place(format, c, i);
        *q = (group[format.header_bytes() + byte] >> shift) & mask;
    }
    Block { scale: f16_at(2 * c), min, offset, q }
}
