//! Stored rows into panels.

use super::{PANEL, PackedFormat, PackedMatrix};
use crate::quant::{BLOCK_LEN, Block, dequantize_row};
use crate::tensor::{AlignedBuf, RowView};
use crate::threads::Pool;
use half::bf16;

/// The stored row of an output; `None` past the last output.
type Source<'a> = &'a (dyn Fn(usize) -> Option<RowView<'a>> + Sync);

/// Fills all `panels` (which are zero) from `source`, spread over the threads of `pool`.
pub(super) fn fill(
    pool: &Pool,
    format: PackedFormat,
    n_columns: usize,
    panels: &mut AlignedBuf,
    source: Source<'_>,
) {
    let n_bytes = format.panel_bytes(n_columns);
    let rows = |p: usize| {
        (0..PANEL).filter_map(move |c| {
            source(p * PANEL + c).filter(|row| !row.bytes.is_empty()).map(|row| (c, row))
        })
    };
    match format {
        PackedFormat::F32 => pool.run_chunks(panels.as_mut_slice::<f32>(), n_bytes / 4, &|p, panel| {
            let mut values = vec![0.0; n_columns];
            for (c, row) in rows(p) {
                dequantize_row(row, &mut values);
                put_f32(panel, c, &values);
            }
        }),
        PackedFormat::BF16 => pool.run_chunks(panels.as_mut_slice::<u16>(), n_bytes / 2, &|p, panel| {
            let mut values = vec![0.0; n_columns];
            for (c, row) in rows(p) {
                dequantize_row(row, &mut values);
                put_bf16(panel, c, &values);
            }
        }),
        PackedFormat::Q8_0 | PackedFormat::Q4_0 | PackedFormat::Q4_1 => {
            pool.run_chunks(panels.as_mut_slice::<u8>(), n_bytes, &|p, panel| {
                for (c, row) in rows(p) {
                    put_blocks(format, panel, c, row);
                }
            });
        }
    }
}

/// Writes column `c` of an F32 panel.
fn put_f32(panel: &mut [f32], c: usize, values: &[f32]) {
    for (line, &value) in panel.chunks_exact_mut(PANEL).zip(values) {
        line[c] = value;
    }
}

/// Writes column `c` of a BF16 panel, rounding to nearest even.
fn put_bf16(panel: &mut [u16], c: usize, values: &[f32]) {
    for (line, pair) in panel.chunks_exact_mut(2 * PANEL).zip(values.chunks(2)) {
        for (slot, &value) in line[2 * c..].iter_mut().zip(pair) {
            *slot = bf16::from_f32(value).to_bits();
        }
    }
}

/// Writes column `c` of a grouped panel from a row of the same block type. The nibbles of the column are zero
/// before.
fn put_blocks(format: PackedFormat, panel: &mut [u8], c: usize, row: RowView<'_>) {
    assert_eq!(row.dtype, format.dtype(), "a grouped format takes its own block type only");
    let n_groups = panel.len() / format.group_bytes();
    assert_eq!(row.bytes.len(), n_groups * row.dtype.block_bytes(), "row of another length");
    let blocks = row.bytes.chunks_exact(row.dtype.block_bytes());
    for (group, bytes) in panel.chunks_exact_mut(format.group_bytes()).zip(blocks) {
        let block = Block::parse(row.dtype, bytes).expect("a grouped format's type is a block type");
        let (header, integers) = group.split_at_mut(format.header_bytes());
        header[2 * c..2 * c + 2].copy_from_slice(&block.scale.to_le_bytes());
        if format == PackedFormat::Q4_1 {
            let min = 2 * PANEL + 2 * c;
            header[min..min + 2].copy_from_slice(&block.min.to_le_bytes());
        }
        for i in 0..BLOCK_LEN {
            let (byte, shift) = integer_place(format, c, i);
            integers[byte] |= block.q[i] << shift;
        }
    }
}

/// Where element `i` of column `c` lies in a group's integers: its byte, and the bits below it there.
pub(super) const fn integer_place(format: PackedFormat, c: usize, i: usize) -> (usize, u32) {
    match format {
        PackedFormat::Q8_0 => ((i / 4) * 4 * PANEL + c * 4 + i % 4, 0),
        _ => ((i / 8) * 4 * PANEL + c * 4 + i % 4, if (i / 4).is_multiple_of(2) { 0 } else { 4 }),
    }
}

impl PackedMatrix {
    /// Writes new values into rows (outputs) `rows`, in order: `values` is `[rows.len(), n_columns]`, rounded to
    /// the matrix's format.
    ///
    /// Panics if the format is grouped, a row is not there or the lengths disagree: the context has refused
    /// such a replacement before.
    pub fn repack_rows(&mut self, rows: &[usize], values: &[f32]) {
        let (n_columns, n_bytes) = (self.n_columns, self.panel_bytes());
        assert_eq!(values.len(), rows.len() * n_columns, "values of another shape");
        if n_columns == 0 {
            return;
        }
        for (&n, values) in rows.iter().zip(values.chunks_exact(n_columns)) {
            assert!(n < self.n_rows, "row {n} of {}", self.n_rows);
            let (p, c) = (n / PANEL, n % PANEL);
            match self.format {
                PackedFormat::F32 => {
                    put_f32(
                        &mut self.panels.as_mut_slice()[p * n_bytes / 4..(p + 1) * n_bytes / 4],
                        c,
                        values,
                    );
                }
                PackedFormat::BF16 => {
                    put_bf16(
                        &mut self.panels.as_mut_slice()[p * n_bytes / 2..(p + 1) * n_bytes / 2],
                        c,
                        values,
                    );
                }
                format => panic!("rows of {format:?} cannot be replaced"),
            }
        }
    }
}
