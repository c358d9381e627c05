//! A copy of a matrix in Q8_0.

use super::fill::put_block;
use super::pages::use_huge_pages;
use super::read::read_plain;
use super::{PANEL, PackedFormat, PackedMatrix};
use crate::error::DeviceError;
use crate::quant::BLOCK_LEN;
use crate::quant::quantize::round_q8_0;
use crate::threads::Pool;

/// See [`PackedMatrix::to_q8_0`].
type GroupCallback<'a, T> = dyn Fn(&mut T, usize, &[f32; BLOCK_LEN], &[f32; BLOCK_LEN]) + Sync + 'a;

impl PackedMatrix {
    /// Returns a copy in Q8_0, computed by panels in parallel: each group of 32 is rounded to nearest with the scale
    /// that covers its largest magnitude.
    ///
    /// Calls `on_group(of_panel, c, group, copied)` for each group of each row, in order, with the group, its copy, the
    /// entry of its panel in `of_panels`, and its column `c` in the panel. Values that are not finite, or too large for
    /// the scale, have unspecified copies.
    ///
    /// Errors: [`DeviceError::Allocation`]. Panics if the matrix is grouped, [`Self::can_pack`] is false, or `of_panels`
    /// has another length than the number of panels.
    pub(crate) fn to_q8_0<T: Send>(
        &self,
        pool: &Pool,
        of_panels: &mut [T],
        on_group: &GroupCallback<'_, T>,
    ) -> Result<Self, DeviceError> {
        let (format, n_rows, n_columns) = (PackedFormat::Q8_0, self.n_rows, self.n_columns);
        assert_eq!(of_panels.len(), self.n_panels(), "one entry for each panel");
        let mut copy = Self::zeroed(format, n_rows, n_columns)?;
        let bytes = copy.panels.as_mut_slice::<u8>().chunks_exact_mut(format.panel_bytes(n_columns));
        let mut jobs: Vec<(&mut [u8], &mut T)> = bytes.zip(of_panels).collect();
        pool.run_chunks_dynamic(&mut jobs, 1, &|p, job| {
            for (panel, of_panel) in job {
                let own = &self.panels_from(p)[..self.panel_bytes()];
                for (g, lines) in own.chunks_exact(self.format.panel_bytes(BLOCK_LEN)).enumerate() {
                    for c in 0..PANEL.min(n_rows - p * PANEL) {
                        let (mut group, mut copied) = ([0.0; BLOCK_LEN], [0.0; BLOCK_LEN]);
                        read_plain(self.format, lines, c, &mut group);
                        let block = round_q8_0(&group);
                        put_block(format, panel, g, c, &block);
                        copied.iter_mut().enumerate().for_each(|(i, value)| *value = block.value(i));
                        on_group(of_panel, c, &group, &copied);
                    }
                }
            }
        });
        use_huge_pages(&copy.panels);
        Ok(copy)
    }
}
