//! A copy of a matrix in Q8_0.

use super::fill::LINE;
use super::pages::use_huge_pages;
use super::{PANEL, PackedFormat, PackedMatrix};
use crate::error::DeviceError;
use crate::quant::BLOCK_LEN;
use crate::quant::quantize::{nearest, to_byte};
use crate::threads::Pool;
use half::f16;

/// 32 inputs of the 32 columns of a panel, input by input: compilers make vectors of the columns.
pub(crate) type Group = [[f32; PANEL]; BLOCK_LEN];

impl PackedMatrix {
    /// Returns a copy in Q8_0, computed by panels in parallel: each group of 32 is rounded to nearest with the scale
    /// that covers its largest magnitude.
    ///
    /// Calls `on_group(of_panel, group, copied)` for the groups of each panel, in order, with the entry of the panel in
    /// `of_panels`; columns after the last output are zeros. Values that are not finite, or too large for the scale, have
    /// unspecified copies.
    ///
    /// Errors: [`DeviceError::Allocation`]. Panics if the matrix is grouped, [`Self::can_pack`] is false, or `of_panels`
    /// has another length than the number of panels.
    pub(crate) fn to_q8_0<T: Send>(
        &self,
        pool: &Pool,
        of_panels: &mut [T],
        on_group: &(dyn Fn(&mut T, &Group, &Group) + Sync),
    ) -> Result<Self, DeviceError> {
        let (format, n_columns) = (PackedFormat::Q8_0, self.n_columns);
        assert_eq!(of_panels.len(), self.n_panels(), "one entry for each panel");
        let mut copy = Self::zeroed(format, self.n_rows, n_columns)?;
        let bytes = copy.panels.as_mut_slice::<u8>().chunks_exact_mut(format.panel_bytes(n_columns));
        let mut jobs: Vec<(&mut [u8], &mut T)> = bytes.zip(of_panels).collect();
        pool.run_chunks_dynamic(&mut jobs, 1, &|p, job| {
            let (mut group, mut copied) = ([[0.0; PANEL]; BLOCK_LEN], [[0.0; PANEL]; BLOCK_LEN]);
            for (panel, of_panel) in job {
                let own = &self.panels_from(p)[..self.panel_bytes()];
                let lines = own.chunks_exact(self.format.panel_bytes(BLOCK_LEN));
                for (lines, out) in lines.zip(panel.chunks_exact_mut(format.group_bytes())) {
                    read_group(self.format, lines, &mut group);
                    round_group(&group, out, &mut copied);
                    on_group(of_panel, &group, &copied);
                }
            }
        });
        use_huge_pages(&copy.panels);
        Ok(copy)
    }
}

/// Reads a group from the lines of a plain format. Panics if the format is grouped.
fn read_group(format: PackedFormat, lines: &[u8], group: &mut Group) {
    let lines = lines.as_chunks::<LINE>().0.iter().map(|line| line.as_chunks().0);
    match format {
        PackedFormat::F32 => {
            for (values, line) in group.iter_mut().zip(lines) {
                values.iter_mut().zip(line).for_each(|(value, word)| *value = f32::from_le_bytes(*word));
            }
        }
        PackedFormat::BF16 => {
            for ([even, odd], line) in group.as_chunks_mut().0.iter_mut().zip(lines) {
                for ((even, odd), word) in even.iter_mut().zip(odd).zip(line) {
                    let pair = u32::from_le_bytes(*word);
                    (*even, *odd) = (f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000));
                }
            }
        }
        _ => panic!("{format:?} has no lines of plain elements"),
    }
}

/// Rounds a group to `out`, a group in Q8_0, and to `copied`, the values of that.
fn round_group(group: &Group, out: &mut [u8], copied: &mut Group) {
    const MAX: f32 = 127.0;
    let mut largest = [0.0_f32; PANEL];
    for values in group {
        for (largest, value) in largest.iter_mut().zip(values) {
            *largest = if value.abs() > *largest { value.abs() } else { *largest };
        }
    }
    let scales = largest.map(|largest| f16::from_f32(largest / MAX));
    let (header, integers) = out.split_at_mut(PackedFormat::Q8_0.header_bytes());
    header.as_chunks_mut().0.iter_mut().zip(scales).for_each(|(out, scale)| *out = scale.to_le_bytes());
    let scales = scales.map(f16::to_f32);
    let inverses = scales.map(|scale| if scale > 0.0 { 1.0 / scale } else { 0.0 });
    let quads = group.as_chunks::<4>().0.iter().zip(copied.as_chunks_mut::<4>().0);
    for (line, (quad, copied)) in integers.chunks_exact_mut(LINE).zip(quads) {
        let mut words = [0; PANEL];
        for (k, (values, copied)) in quad.iter().zip(copied).enumerate() {
            for c in 0..PANEL {
                let whole = nearest((values[c] * inverses[c]).clamp(-MAX, MAX));
                copied[c] = scales[c] * whole;
                words[c] |= u32::from(to_byte(whole + 128.0)) << (8 * k);
            }
        }
        line.as_chunks_mut().0.iter_mut().zip(words).for_each(|(out, word)| *out = word.to_le_bytes());
    }
}
