//! The contents of cells: copied, shifted and filled on the device, read and written by the host. Callers use the KV
//! cache's cell numbers, which are one below the device's.

use super::decoder::{DeviceDecoder, MOVES_MAX};
use crate::cuda::device::{Device, DevicePtr};
use crate::cuda::ops::rope_kv_store::RopeShift;
use crate::cuda::ops::step::CopyCells;
use crate::error::DeviceError;
use crate::kv::NAN_BYTE;

impl DeviceDecoder {
    /// Copies the keys and values of each cell of `from` to the cell of `to` at the same index, in all layers. No cell
    /// is both read and written.
    ///
    /// Panics on a cell that the decoder does not have. Errors: the device's.
    pub fn copy_cells(&self, device: &dyn Device, from: &[u32], to: &[u32]) -> Result<(), DeviceError> {
        self.check_cells(from);
        self.check_cells(to);
        let moves: Vec<[u32; 2]> = from.iter().zip(to).map(|(&from, &to)| [from, to]).collect();
        for moves in moves.chunks(MOVES_MAX) {
            device.upload_words(self.moves, device_numbers(moves.as_flattened()))?;
            let copy = CopyCells {
                arrays: self.kv,
                n_arrays: 2 * self.config.n_layers,
                stride: self.array_bytes(),
                moves: self.moves,
                n_moves: moves.len(),
                cell_bytes: self.bytes_of_cell(),
            };
            // SAFETY: `check_cells` accepted both cells of each move; `new` allocated the arrays of all layers.
            unsafe { copy.launch(device) }?;
        }
        Ok(())
    }

    /// Rotates the keys of `cells`, which are distinct, by `delta` positions.
    ///
    /// Panics on a cell that the decoder does not have. Errors: the device's.
    pub fn shift_cells(&self, device: &dyn Device, cells: &[u32], delta: i32) -> Result<(), DeviceError> {
        self.check_cells(cells);
        let half = self.config.d_head / 2;
        let mut angles = vec![0.0; 2 * half];
        let (cos, sin) = angles.split_at_mut(half);
        // The stored keys have the amplitude.
        self.config.rope.table(self.config.d_rope).turns(&[delta], cos, sin);
        let cos = self.moves.at(MOVES_MAX * 2 * size_of::<u32>());
        device.upload_words(cos, angles.into_iter().map(f32::to_bits))?;
        for cells in cells.chunks(MOVES_MAX) {
            device.upload_words(self.moves, device_numbers(cells))?;
            for layer in 0..self.config.n_layers {
                let shift = RopeShift {
                    element: self.element,
                    shape: self.shape(),
                    keys: self.cells(layer).0,
                    cells: self.moves,
                    cos,
                    sin: cos.at(half * size_of::<f32>()),
                    n_cells: cells.len(),
                };
                // SAFETY: `check_cells` accepted each cell; `new` allocated the layer's keys.
                unsafe { shift.launch(device) }?;
            }
        }
        Ok(())
    }

    /// Returns the contents of `cells`: for each layer their keys `[n][n_kv_heads][d_head]`, then their values
    /// likewise. Errors: the device's.
    pub fn read_cells(&self, device: &dyn Device, cells: &[u32]) -> Result<Vec<u8>, DeviceError> {
        let mut data = vec![0; self.cell_bytes() * cells.len()];
        let mut rest = &mut data[..];
        for (at, n_bytes) in self.pieces(cells) {
            let (piece, others) = rest.split_at_mut(n_bytes);
            device.download(at, piece)?;
            rest = others;
        }
        Ok(data)
    }

    /// Writes the result of [`DeviceDecoder::read_cells`] to as many cells. Panics if `data` has another size. Errors:
    /// the device's.
    pub fn write_cells(&self, device: &dyn Device, cells: &[u32], data: &[u8]) -> Result<(), DeviceError> {
        assert_eq!(data.len(), self.cell_bytes() * cells.len(), "the contents of {} cells", cells.len());
        let mut rest = data;
        for (at, n_bytes) in self.pieces(cells) {
            let (piece, others) = rest.split_at(n_bytes);
            device.upload(at, piece)?;
            rest = others;
        }
        Ok(())
    }

    /// Fills `cells` with NaN in all layers. Errors: the device's.
    pub fn nan_fill(&self, device: &dyn Device, cells: &[u32]) -> Result<(), DeviceError> {
        self.pieces(cells).try_for_each(|(at, n_bytes)| device.fill(at, NAN_BYTE, n_bytes))
    }

    /// Fills every cell with NaN in all layers, the device's cell 0 included. Errors: the device's.
    pub fn nan_fill_all(&self, device: &dyn Device) -> Result<(), DeviceError> {
        device.fill(self.kv, NAN_BYTE, 2 * self.config.n_layers * self.array_bytes())
    }

    /// Returns the address and bytes of each piece of the cells' contents: layer by layer keys, then values.
    /// Consecutive cells are one piece.
    fn pieces<'a>(&'a self, cells: &'a [u32]) -> impl Iterator<Item = (DevicePtr, usize)> + 'a {
        let n = self.bytes_of_cell();
        (0..2 * self.config.n_layers).flat_map(move |array| {
            let base = self.kv.at(array * self.array_bytes());
            cells
                .chunk_by(|a, b| a + 1 == *b)
                .map(move |range| (base.at((range[0] as usize + 1) * n), range.len() * n))
        })
    }
}

/// Returns the device's numbers of cells.
fn device_numbers(cells: &[u32]) -> impl Iterator<Item = u32> {
    cells.iter().map(|cell| cell + 1)
}
