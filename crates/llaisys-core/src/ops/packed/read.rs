//! Reading values back from panels.

use super::fill::{digit_place, digits};
use super::{PANEL, PackedFormat, PackedMatrix};
use crate::quant::{BLOCK_LEN, Block, mxfp4};
use half::{bf16, f16};

impl PackedMatrix {
    /// Reads row (output) `n` as f32: exactly the values that the products use.
    ///
    /// - `out`: `[n_columns]`
    ///
    /// Panics if the row does not exist or `out` has another length.
    pub fn read_row(&self, n: usize, out: &mut [f32]) {
        assert!(n < self.n_rows, "row {n} of {}", self.n_rows);
        assert_eq!(out.len(), self.n_columns, "row of another length");
        let (c, bytes) = (n % PANEL, &self.panels_from(n / PANEL)[..self.panel_bytes()]);
        match self.format {
            PackedFormat::F32 | PackedFormat::BF16 => read_plain(self.format, bytes, c, out),
            format => {
                let groups = bytes.chunks_exact(format.group_bytes());
                let unit = read_unit(format, bytes, self.n_columns, c);
                for (values, group) in out.chunks_exact_mut(BLOCK_LEN).zip(groups) {
                    let block = read_block(format, group, c);
                    for (i, value) in values.iter_mut().enumerate() {
                        *value = block.value(i) * unit;
                    }
                }
            }
        }
    }
}

/// Reads the first elements of column `c` from the lines of a plain format. Panics if the format is grouped.
fn read_plain(format: PackedFormat, lines: &[u8], c: usize, out: &mut [f32]) {
    let words = lines.as_chunks::<{ 4 * PANEL }>().0.iter().map(|line| line.as_chunks::<4>().0[c]);
    match format {
        PackedFormat::F32 => {
            out.iter_mut().zip(words).for_each(|(value, word)| *value = f32::from_le_bytes(word))
        }
        PackedFormat::BF16 => {
            for (pair, word) in out.chunks_mut(2).zip(words) {
                for (value, bits) in pair.iter_mut().zip(word.as_chunks().0) {
                    *value = bf16::from_le_bytes(*bits).to_f32();
                }
            }
        }
        _ => panic!("{format:?} has no lines of plain elements"),
    }
}

/// The factor of the values of column `c` of a panel; 1 in formats without units.
pub(crate) fn read_unit(format: PackedFormat, panel: &[u8], n_columns: usize, c: usize) -> f32 {
    if !format.has_units() {
        return 1.0;
    }
    let at = format.units_at(n_columns) + 4 * c;
    f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
}

/// Column `c` of a group as a block, without its unit.
pub(crate) fn read_block(format: PackedFormat, group: &[u8], c: usize) -> Block {
    let (header, integers) = group.split_at(format.header_bytes());
    let number = |line: usize| {
        if format.has_exponents() {
            return mxfp4::scale(header[c]);
        }
        if format.has_units() {
            let byte = |line: usize| f32::from(header[line * PANEL + c]);
            return if line == 0 { byte(0) } else { -byte(0) * byte(line) / 16.0 };
        }
        let at = 2 * (line * PANEL + c);
        f16::from_le_bytes([header[at], header[at + 1]]).to_f32()
    };
    let n_scales = format.n_scales();
    // The numbers of both halves; `first` is the line of the first half's number.
    let halves = |first: usize| [number(first), number(first + n_scales - 1)];
    let mut q = [0; BLOCK_LEN];
    for (low, bits) in digits(format) {
        for (i, q) in q.iter_mut().enumerate() {
            let (byte, shift) = digit_place(low, bits, c, i);
            *q |= (integers[byte] >> shift & (0xff >> (8 - bits))) << low;
        }
    }
    if let Some(integers) = format.table() {
        q = q.map(|nibble| integers[usize::from(nibble)]);
    }
    let min = if format.has_min() { halves(n_scales) } else { [0.0; 2] };
    Block { scale: halves(0), min, offset: format.offset(), q }
}
