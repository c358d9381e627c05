//! The cells' contents: copied, rotated and filled on the device, read and written by the host. Cells have the books'
//! numbers, one below the device's.

use super::{DeviceDecoder, arena};
use crate::arch::config::ModelConfig;
use crate::cuda::device::{Device, DevicePtr};
use crate::cuda::ops::rope_kv_store::RopeShift;
use crate::cuda::ops::step::CopyCells;
use crate::error::DeviceError;

/// Cells that one launch moves; more take several.
const MOVES_MAX: usize = 4096;
/// All bits set is a NaN in bf16 and in f16.
const NAN_BYTE: u8 = 0xff;

/// Bytes of a list of moves, and of the angles of a shift behind it.
pub(super) fn moves_bytes(config: &ModelConfig) -> usize {
    MOVES_MAX * 2 * size_of::<u32>() + config.d_head * size_of::<f32>()
}

impl DeviceDecoder {
    /// Copies keys and values of each cell of `from` to that of `to`, which no copy reads, in all layers. Errors: the
    /// device's.
    pub fn copy_cells(&self, device: &dyn Device, from: &[u32], to: &[u32]) -> Result<(), DeviceError> {
        let moves: Vec<[u32; 2]> = from.iter().zip(to).map(|(&from, &to)| [from, to]).collect();
        for moves in moves.chunks(MOVES_MAX) {
            device.upload_words(self.moves, device_numbers(moves.as_flattened()))?;
            CopyCells {
                arrays: self.kv,
                n_arrays: 2 * self.config.n_layers,
                stride: self.array_bytes(),
                moves: self.moves,
                n_moves: moves.len(),
                cell_bytes: self.bytes_of_cell(),
            }
            .launch(device)?;
        }
        Ok(())
    }

    /// Rotates the keys of `cells`, none twice, by `delta` positions. Errors: the device's.
    pub fn shift_cells(&self, device: &dyn Device, cells: &[u32], delta: i32) -> Result<(), DeviceError> {
        let half = self.config.d_head / 2;
        let mut angles = vec![0.0; 2 * half];
        let (cos, sin) = angles.split_at_mut(half);
        // The stored keys have the amplitude.
        self.config.rope.table(self.config.d_head).turns(&[delta], cos, sin);
        let cos = self.moves.at(MOVES_MAX * 2 * size_of::<u32>());
        device.upload_words(cos, angles.into_iter().map(f32::to_bits))?;
        for cells in cells.chunks(MOVES_MAX) {
            device.upload_words(self.moves, device_numbers(cells))?;
            for layer in 0..self.config.n_layers {
                RopeShift {
                    element: self.element,
                    shape: self.shape(),
                    keys: self.cells(layer).0,
                    cells: self.moves,
                    cos,
                    sin: cos.at(half * size_of::<f32>()),
                    n_cells: cells.len(),
                }
                .launch(device)?;
            }
        }
        Ok(())
    }

    /// The contents of `cells`: for each layer their keys `[n][n_kv_heads][d_head]`, then their values likewise.
    /// Errors: the device's.
    pub fn read_cells(&self, device: &dyn Device, cells: &[u32]) -> Result<Vec<u8>, DeviceError> {
        let mut data = vec![0; self.cell_bytes() * cells.len()];
        let mut rest = &mut data[..];
        for (at, n_bytes) in self.places(cells) {
            let (piece, others) = rest.split_at_mut(n_bytes);
            device.download(at, piece)?;
            rest = others;
        }
        Ok(data)
    }

    /// Puts what [`DeviceDecoder::read_cells`] gave into as many cells. Panics if `data` has another size. Errors: the
    /// device's.
    pub fn write_cells(&self, device: &dyn Device, cells: &[u32], data: &[u8]) -> Result<(), DeviceError> {
        assert_eq!(data.len(), self.cell_bytes() * cells.len(), "the contents of {} cells", cells.len());
        let mut rest = data;
        for (at, n_bytes) in self.places(cells) {
            let (piece, others) = rest.split_at(n_bytes);
            device.upload(at, piece)?;
            rest = others;
        }
        Ok(())
    }

    /// Fills `cells` with NaN in all layers. Errors: the device's.
    pub fn poison_cells(&self, device: &dyn Device, cells: &[u32]) -> Result<(), DeviceError> {
        self.places(cells).try_for_each(|(at, n_bytes)| device.fill(at, NAN_BYTE, n_bytes))
    }

    /// As [`DeviceDecoder::poison_cells`] for every cell, the device's cell 0 included.
    pub fn nan_fill_all(&self, device: &dyn Device) -> Result<(), DeviceError> {
        device.fill(self.kv, NAN_BYTE, 2 * self.config.n_layers * self.array_bytes())
    }

    /// Bytes of one cell's keys and values in all layers.
    pub fn cell_bytes(&self) -> usize {
        arena::cell_bytes(&self.config)
    }

    /// Bytes of one cell's key (or value) in one layer.
    fn bytes_of_cell(&self) -> usize {
        self.config.n_kv_heads * self.config.d_head * 2
    }

    /// Bytes of the keys (or values) of a layer.
    pub(super) fn array_bytes(&self) -> usize {
        (self.n_cells + 1) * self.bytes_of_cell()
    }

    /// Address and bytes of each piece of the cells' contents: layer by layer keys, then values, where cells that lie
    /// one behind the other are one piece.
    fn places<'a>(&'a self, cells: &'a [u32]) -> impl Iterator<Item = (DevicePtr, usize)> + 'a {
        let n = self.bytes_of_cell();
        (0..2 * self.config.n_layers).flat_map(move |array| {
            let base = self.kv.at(array * self.array_bytes());
            cells
                .chunk_by(|a, b| a + 1 == *b)
                .map(move |run| (base.at((run[0] as usize + 1) * n), run.len() * n))
        })
    }
}

/// The device's numbers of cells.
fn device_numbers(cells: &[u32]) -> impl Iterator<Item = u32> {
    cells.iter().map(|cell| cell + 1)
}
