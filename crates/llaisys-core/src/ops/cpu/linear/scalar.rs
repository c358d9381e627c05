//! Products in plain loops: for machines without vector kernels, and as the readable form of the others.

use super::{Panel, Tile};
use crate::ops::cpu::activations::{GroupInput, Inputs};
use crate::ops::packed::{PANEL, PackedFormat, read_block, read_unit};
use crate::quant::BLOCK_LEN;

/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 4;

/// The sums of `panel` for a block of `n_rows` rows.
pub(super) fn tile(panel: &Panel<'_>, n_rows: usize, inputs: Inputs<'_>, out: &mut Tile) {
    for sums in &mut out.0[..n_rows] {
        sums.fill(0.0);
    }
    match inputs {
        Inputs::Plain(x) => plain(panel, n_rows, x, out),
        Inputs::Groups(words, groups) => grouped(panel, n_rows, words, groups, out),
        Inputs::Sized(_) => unreachable!("`form` returns sizes only for AVX2 and AVX-512"),
        Inputs::Pairs(_) => unreachable!("`form` returns pairs only for AVX-512 with BF16"),
    }
}

/// F32 and BF16: `sum += x[k] * w[k]`, each step rounded.
fn plain(panel: &Panel<'_>, n_rows: usize, x: &[f32], out: &mut Tile) {
    let n_columns = match panel.format {
        PackedFormat::F32 => panel.bytes.len() / (4 * PANEL),
        _ => panel.bytes.len() / (2 * PANEL),
    };
    for k in 0..n_columns {
        let x = &x[k / BLOCK_LEN * n_rows * BLOCK_LEN + k % BLOCK_LEN..];
        for c in 0..PANEL {
            let weight = match panel.format {
                PackedFormat::F32 => {
                    let at = (k * PANEL + c) * 4;
                    f32::from_le_bytes(std::array::from_fn(|i| panel.bytes[at + i]))
                }
                _ => {
                    let at = ((k / 2 * PANEL + c) * 2 + k % 2) * 2;
                    f32::from_bits(u32::from(panel.bytes[at]) << 16 | u32::from(panel.bytes[at + 1]) << 24)
                }
            };
            for (sums, x) in out.0[..n_rows].iter_mut().zip(x.iter().step_by(BLOCK_LEN)) {
                sums[c] += x * weight;
            }
        }
    }
}

/// Groups of integers: an exact integer sum of each part of a group, scaled, added to the f32 sum.
fn grouped(panel: &Panel<'_>, n_rows: usize, words: &[u32], groups: &[GroupInput], out: &mut Tile) {
    let group_words = words.chunks_exact(BLOCK_LEN / 4 * n_rows);
    let group_bytes = panel.bytes.chunks_exact(panel.format.group_bytes());
    let n_parts = panel.format.n_scales();
    let offset = i32::from(panel.format.offset());
    let part_len = BLOCK_LEN / n_parts;
    for ((bytes, words), inputs) in group_bytes.zip(group_words).zip(groups.chunks_exact(n_rows)) {
        for c in 0..PANEL {
            let block = read_block(panel.format, bytes, c);
            for (r, (sums, input)) in out.0.iter_mut().zip(inputs).enumerate() {
                for part in 0..n_parts {
                    let elements = part * part_len..(part + 1) * part_len;
                    let which = if n_parts == 2 { 1 + part } else { 0 };
                    let mut dot = offset * input.minus_sums[which];
                    for i in elements {
                        let x = words[r * (BLOCK_LEN / 4) + i / 4].to_le_bytes()[i % 4] as i8;
                        dot += i32::from(block.q[i]) * i32::from(x);
                    }
                    sums[c] += dot as f32 * input.scale * block.scale[part];
                    if panel.format.has_min() {
                        sums[c] += block.min[part] * input.scaled_sums[which];
                    }
                }
            }
        }
    }
    if panel.format.has_units() {
        let n_columns = groups.len() / n_rows * BLOCK_LEN;
        for sums in &mut out.0[..n_rows] {
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum *= read_unit(panel.format, panel.bytes, n_columns, c);
            }
        }
    }
}
