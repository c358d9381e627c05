//! Packing of stored rows into panels.

use super::{PANEL, PackedFormat, PackedMatrix};
use crate::dtype::DType;
use crate::quant::quantize::{QuantizedRow, Quantizer, quantize_q8_0};
use crate::quant::{BLOCK_LEN, Block, LOW_NIBBLES, dequantize_row, mxfp4, q2_k, q3_k, q4_k, q5_k, q6_k};
use crate::tensor::RowView;
use crate::threads::Pool;
use half::{bf16, f16};
use std::ops::Range;

/// Bytes of a column in a line: a number in f32, a pair of numbers in bf16, or four integers or parts of integers.
const WORD: usize = 4;
/// Bytes of a line, which has a word of each column.
pub(super) const LINE: usize = WORD * PANEL;

/// Consecutive panels of a matrix, to be packed; they are zero before.
pub struct Panels<'a> {
    pub(super) format: PackedFormat,
    pub(super) n_columns: usize,
    /// The outputs of the panels.
    pub(super) rows: Range<usize>,
    pub(super) bytes: &'a mut [u8],
}

impl Panels<'_> {
    /// The outputs of the panels.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Packs the panels, one per job of `pool`. `source` and panics: as in [`PackedMatrix::pack`].
    pub fn fill<'s>(self, pool: &Pool, source: &(dyn Fn(usize) -> RowView<'s> + Sync)) {
        let Self { format, n_columns, rows, bytes } = self;
        pool.run_chunks_dynamic(bytes, format.panel_bytes(n_columns), &|p, panel| {
            let first = rows.start + p * PANEL;
            let outputs = (first..rows.end.min(first + PANEL)).map(source).enumerate();
            fill_panel(format, n_columns, panel, outputs.filter(|(_, row)| !row.bytes.is_empty()));
        });
    }
}

/// Writes a panel from the rows of its columns; those without a row stay zero.
fn fill_panel<'s>(
    format: PackedFormat,
    n_columns: usize,
    panel: &mut [u8],
    rows: impl Iterator<Item = (usize, RowView<'s>)>,
) {
    if let Some(grid) = format.grid() {
        let mut quantizer = Quantizer::new(grid, n_columns);
        return rows.for_each(|(c, row)| put_quantized(format, panel, c, quantizer.quantize(row)));
    }
    let is_stored = |row: &RowView<'_>| match format {
        PackedFormat::F32 => false,
        PackedFormat::BF16 => row.dtype == DType::BF16,
        _ => row.dtype.is_quantized(),
    };
    let (stored, others): (Vec<_>, Vec<_>) = rows.partition(|(_, row)| is_stored(row));
    match format {
        PackedFormat::F32 => {}
        PackedFormat::BF16 => put_stored_bf16(panel, &stored),
        _ => put_stored_blocks(format, n_columns, panel, &stored),
    }
    if others.is_empty() {
        return;
    }
    let mut values = vec![0.0; n_columns];
    for (c, row) in others {
        dequantize_row(row, &mut values);
        match format {
            PackedFormat::F32 => put_f32(panel, c, &values),
            PackedFormat::BF16 => put_bf16(panel, c, &values),
            PackedFormat::Q8_0 => put_q8_0(panel, c, &values),
            _ => panic!("{format:?} accepts its own block types only"),
        }
    }
}

/// Writes column `c` of an F32 panel.
fn put_f32(panel: &mut [u8], c: usize, values: &[f32]) {
    for (line, value) in panel.chunks_exact_mut(LINE).zip(values) {
        line[WORD * c..][..WORD].copy_from_slice(&value.to_le_bytes());
    }
}

/// Writes column `c` of a Q8_0 panel.
fn put_q8_0(panel: &mut [u8], c: usize, values: &[f32]) {
    for (g, values) in values.as_chunks().0.iter().enumerate() {
        put_block(PackedFormat::Q8_0, panel, g, c, &quantize_q8_0(values));
    }
}

/// Writes column `c` of a BF16 panel, rounded to nearest even.
fn put_bf16(panel: &mut [u8], c: usize, values: &[f32]) {
    for (line, pair) in panel.chunks_exact_mut(LINE).zip(values.chunks(2)) {
        for (number, &value) in line[WORD * c..].as_chunks_mut().0.iter_mut().zip(pair) {
            *number = bf16::from_f32(value).to_le_bytes();
        }
    }
}

/// Writes columns of a BF16 panel from rows in the same type: pairs change their places only. A few pairs of all rows
/// are written at a time, because the lines of all pairs exceed the first-level cache.
fn put_stored_bf16(panel: &mut [u8], rows: &[(usize, RowView<'_>)]) {
    const PAIRS: usize = 64;
    for (i, lines) in panel.chunks_mut(LINE * PAIRS).enumerate() {
        for (c, row) in rows {
            let bytes = &row.bytes[WORD * PAIRS * i..row.bytes.len().min(WORD * PAIRS * (i + 1))];
            let (pairs, last) = bytes.as_chunks::<WORD>();
            let mut lines = lines.chunks_exact_mut(LINE).map(|line| &mut line[WORD * c..][..WORD]);
            for (pair, line) in pairs.iter().zip(lines.by_ref()) {
                line.copy_from_slice(pair);
            }
            if let Some(line) = lines.next() {
                line[..last.len()].copy_from_slice(last);
            }
        }
    }
}

/// Writes columns of a grouped panel from rows of types that the format stores. A few groups of all rows are written at
/// a time, because the lines of all groups exceed the first-level cache.
fn put_stored_blocks(
    format: PackedFormat,
    n_columns: usize,
    panel: &mut [u8],
    rows: &[(usize, RowView<'_>)],
) {
    /// A multiple of the eight groups that the K types store together.
    const GROUPS: usize = 32;
    for (_, row) in rows {
        assert_eq!(PackedFormat::of(row.dtype), format, "a grouped format accepts its own block types only");
        assert_eq!(row.dtype.bytes_of(n_columns), Some(row.bytes.len()), "row of another length");
    }
    let starts = (0..n_columns).step_by(GROUPS * BLOCK_LEN);
    for (start, groups) in starts.zip(panel.chunks_mut(GROUPS * format.group_bytes())) {
        for (c, row) in rows {
            let columns = start..n_columns.min(start + GROUPS * BLOCK_LEN);
            put_blocks(format, groups, *c, row.columns(columns));
        }
    }
}

/// Writes column `c` of groups from the blocks of a part of a row.
fn put_blocks(format: PackedFormat, groups: &mut [u8], c: usize, row: RowView<'_>) {
    // The types of most files have code of their own, which is several times as fast.
    match row.dtype {
        DType::Q4_0 => move_blocks::<18, 4>(PackedFormat::Q4_0, groups, c, row.bytes, nibble_lines),
        DType::Q4_1 => move_blocks::<20, 4>(PackedFormat::Q4_1, groups, c, row.bytes, nibble_lines),
        DType::Q8_0 => move_blocks::<34, 8>(PackedFormat::Q8_0, groups, c, row.bytes, byte_lines),
        DType::Q2_K => put_parts::<84>(PackedFormat::Q2_K, groups, c, row.bytes, q2_k::parse),
        DType::Q3_K => put_parts::<110>(PackedFormat::Q3_K, groups, c, row.bytes, q3_k::parse),
        DType::Q4_K => put_parts::<144>(PackedFormat::Q4_1, groups, c, row.bytes, q4_k::parse),
        DType::Q5_K => put_parts::<176>(PackedFormat::Q5_1, groups, c, row.bytes, q5_k::parse),
        DType::Q6_K => put_parts::<210>(PackedFormat::Q6_K, groups, c, row.bytes, q6_k::parse),
        _ => Block::for_each(row, |g, block| put_block(format, groups, g, c, block)),
    }
}

/// Writes column `c` of groups from blocks of `BYTES` bytes: numbers in f16, then `WORDS` words with integers, which
/// `lines` puts in the order of the format. It is compiled for each type.
#[inline(always)]
fn move_blocks<const BYTES: usize, const WORDS: usize>(
    format: PackedFormat,
    groups: &mut [u8],
    c: usize,
    blocks: &[u8],
    lines: impl Fn([u32; WORDS]) -> [u32; WORDS],
) {
    assert!(c < PANEL, "column {c} of a panel");
    let (blocks, _) = blocks.as_chunks::<BYTES>();
    for (group, block) in groups.chunks_exact_mut(format.group_bytes()).zip(blocks) {
        let (header, integers) = group.split_at_mut(format.header_bytes());
        let (numbers, words) = block.split_at(BYTES - 4 * WORDS);
        for (line, number) in header.chunks_exact_mut(2 * PANEL).zip(numbers.as_chunks::<2>().0) {
            line[2 * c..][..2].copy_from_slice(number);
        }
        let words: [[u8; 4]; WORDS] = std::array::from_fn(|k| words.as_chunks().0[k]);
        let words = lines(words.map(u32::from_le_bytes));
        for (line, word) in integers.chunks_exact_mut(LINE).zip(words) {
            line[4 * c..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// Writes column `c` of groups from super-blocks of `BYTES` bytes, eight groups each. It is compiled for each type.
#[inline(always)]
fn put_parts<const BYTES: usize>(
    format: PackedFormat,
    groups: &mut [u8],
    c: usize,
    blocks: &[u8],
    parse: impl Fn(&[u8], usize) -> Block,
) {
    const PARTS: usize = 8;
    let (blocks, _) = blocks.as_chunks::<BYTES>();
    for (groups, block) in groups.chunks_exact_mut(PARTS * format.group_bytes()).zip(blocks) {
        for i in 0..PARTS {
            put_block(format, groups, i, c, &parse(block, i));
        }
    }
}

/// The lines of 32 nibbles, from the words of a block: byte `j` has element `j` in its low half and element `j + 16` in
/// its high half.
#[inline(always)]
fn nibble_lines([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let low = |even, odd| (even & LOW_NIBBLES) | (odd & LOW_NIBBLES) << 4;
    let high = |even, odd| (even >> 4 & LOW_NIBBLES) | (odd & !LOW_NIBBLES);
    [low(a, b), low(c, d), high(a, b), high(c, d)]
}

/// The lines of 32 signed bytes, which become `byte + 128`.
#[inline(always)]
fn byte_lines(words: [u32; 8]) -> [u32; 8] {
    words.map(|word| word ^ 0x8080_8080)
}

/// Writes group `g` of column `c` of a panel.
#[inline(always)]
pub(super) fn put_block(format: PackedFormat, panel: &mut [u8], g: usize, c: usize, block: &Block) {
    let group = &mut panel[g * format.group_bytes()..][..format.group_bytes()];
    let (header, integers) = group.split_at_mut(format.header_bytes());
    if format.has_exponents() {
        header[c] = mxfp4::exponent(block.scale[0]);
        return put_integers(format, integers, c, &block.q.map(mxfp4::nibble));
    }
    let n_scales = format.n_scales();
    for half in 0..n_scales {
        put_f16(header, half, c, block.scale[half]);
        if format.has_min() {
            put_f16(header, n_scales + half, c, block.min[half]);
        }
    }
    put_integers(format, integers, c, &block.q);
}

/// Writes column `c` of a panel from a quantized row.
fn put_quantized(format: PackedFormat, panel: &mut [u8], c: usize, row: &QuantizedRow) {
    let groups = panel.chunks_exact_mut(format.group_bytes());
    for (group, quantized) in groups.zip(&row.groups) {
        let (header, integers) = group.split_at_mut(format.header_bytes());
        header[c] = quantized.scale;
        if format.has_min() {
            header[PANEL + c] = quantized.zero;
        }
        put_integers(format, integers, c, &quantized.q);
    }
    let unit = format.units_at(row.groups.len() * BLOCK_LEN) + 4 * c;
    panel[unit..unit + 4].copy_from_slice(&row.unit.to_le_bytes());
}

/// Writes the integers of column `c` of a group, or the nibbles in their place.
#[inline(always)]
fn put_integers(format: PackedFormat, integers: &mut [u8], c: usize, q: &[u8; BLOCK_LEN]) {
    let words =
        std::array::from_fn(|k| u32::from_le_bytes([q[4 * k], q[4 * k + 1], q[4 * k + 2], q[4 * k + 3]]));
    for (low, bits) in digits(format) {
        match bits {
            8 => put_digits::<8>(integers, c, low, &words),
            4 => put_digits::<4>(integers, c, low, &words),
            _ => put_digits::<1>(integers, c, low, &words),
        }
    }
}

/// Writes `BITS` bits from bit `low` on of each integer of column `c` of a group: four integers at a time, each a byte of
/// a word. [`digit_place`] has the layout.
#[inline(always)]
fn put_digits<const BITS: usize>(integers: &mut [u8], c: usize, low: usize, words: &[u32; BLOCK_LEN / 4]) {
    let mask = u32::from(0xff_u8 >> (8 - BITS)) * 0x0101_0101;
    for (line, words) in words.chunks_exact(8 / BITS).enumerate() {
        let parts = words.iter().enumerate().map(|(k, word)| (word >> low & mask) << (k * BITS));
        let bytes = parts.fold(0, |all, part| all | part).to_le_bytes();
        integers[(low + line) * LINE + 4 * c..][..4].copy_from_slice(&bytes);
    }
}

/// Writes number `line` of column `c` in a group's header, rounded to f16.
#[inline(always)]
fn put_f16(header: &mut [u8], line: usize, c: usize, value: f32) {
    let at = 2 * (line * PANEL + c);
    header[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// The parts in which an integer is stored: the lowest bit of each and its number of bits.
pub(super) fn digits(format: PackedFormat) -> impl Iterator<Item = (usize, usize)> {
    let whole = match format.bits() {
        8 => 8,
        4.. => 4,
        _ => 0,
    };
    let planes = (whole..format.bits()).map(|bit| (bit, 1));
    (whole > 0).then_some((0, whole)).into_iter().chain(planes)
}

/// The place of one part of an integer in a group's integers: its byte, and the number of bits below it in that byte.
/// The part has `bits` bits from bit `low` of element `i` of column `c` on.
pub(super) const fn digit_place(low: usize, bits: usize, c: usize, i: usize) -> (usize, usize) {
    let (k, per_byte) = (i / 4, 8 / bits);
    ((low + k / per_byte) * LINE + c * 4 + i % 4, k % per_byte * bits)
}

impl PackedMatrix {
    /// Overwrites rows (outputs) `rows`, in order. `values` is `[rows.len(), n_columns]`, rounded to the matrix's
    /// format.
    ///
    /// Panics if the format is grouped, a row does not exist or the lengths disagree: the context rejects such a
    /// replacement before.
    pub fn repack_rows(&mut self, rows: &[usize], values: &[f32]) {
        let (n_columns, n_bytes) = (self.n_columns, self.panel_bytes());
        assert_eq!(values.len(), rows.len() * n_columns, "values of another shape");
        if n_columns == 0 {
            return;
        }
        for (&n, values) in rows.iter().zip(values.chunks_exact(n_columns)) {
            assert!(n < self.n_rows, "row {n} of {}", self.n_rows);
            let (p, c) = (n / PANEL, n % PANEL);
            let panel = &mut self.panels.as_mut_slice()[p * n_bytes..][..n_bytes];
            match self.format {
                PackedFormat::F32 => put_f32(panel, c, values),
                PackedFormat::BF16 => put_bf16(panel, c, values),
                format => panic!("rows of {format:?} cannot be replaced"),
            }
        }
    }
}
