//! The K and V tensors of all streams, addressed by cell.

use super::Copies;
use crate::dtype::KvDType;
use crate::error::DeviceError;
use crate::tensor::{AlignedBuf, KvLayer, KvLayerMut};

/// All bits set is a NaN in every float type, and as the scale of an int8 head.
pub(crate) const NAN_BYTE: u8 = 0xff;

/// Keys and values: per layer two buffers `[n_cells][n_kv_heads][d_head]`. [`super::KvCache`] records which cells are
/// in use; the contents of the others are meaningless.
#[derive(Debug)]
pub struct Storage {
    layers: Vec<KeysAndValues>,
    dtype: KvDType,
    n_kv_heads: usize,
    d_head: usize,
}

#[derive(Debug)]
struct KeysAndValues {
    k: AlignedBuf,
    v: AlignedBuf,
}

impl Storage {
    /// Zeroed tensors of `n_layers` layers. Errors: [`DeviceError::Allocation`] if the system refuses, or if
    /// the size of a tensor does not fit a `usize`.
    pub fn new(
        n_layers: usize,
        n_cells: usize,
        n_kv_heads: usize,
        d_head: usize,
        dtype: KvDType,
    ) -> Result<Self, DeviceError> {
        const WHAT: &str = "KV cells";
        let too_large = DeviceError::Allocation { what: WHAT, bytes: usize::MAX };
        let tensor_bytes = n_kv_heads
            .checked_mul(dtype.head_bytes(d_head))
            .and_then(|of_cell| of_cell.checked_mul(n_cells))
            .ok_or(too_large)?;
        let tensor = || AlignedBuf::zeroed(WHAT, tensor_bytes);
        let layers = (0..n_layers).map(|_| Ok(KeysAndValues { k: tensor()?, v: tensor()? }));
        Ok(Self { layers: layers.collect::<Result<_, DeviceError>>()?, dtype, n_kv_heads, d_head })
    }

    /// The tensors of layer `layer`, to read. Panics if there is no such layer.
    pub fn layer(&self, layer: usize) -> KvLayer<'_> {
        let KeysAndValues { k, v } = &self.layers[layer];
        KvLayer { dtype: self.dtype, n_kv_heads: self.n_kv_heads, d_head: self.d_head, k, v }
    }

    /// The tensors of layer `layer`, to write. Panics if there is no such layer.
    pub fn layer_mut(&mut self, layer: usize) -> KvLayerMut<'_> {
        let KeysAndValues { k, v } = &mut self.layers[layer];
        KvLayerMut { dtype: self.dtype, n_kv_heads: self.n_kv_heads, d_head: self.d_head, k, v }
    }

    /// Copies the keys and values of `copies.from` to `copies.to`, in all layers, bit for bit.
    pub fn copy(&mut self, copies: &Copies) {
        let n = self.cell_row_bytes();
        for (&from, &to) in copies.from.iter().zip(&copies.to) {
            let (from, to) = (from as usize * n, to as usize * n);
            for tensor in self.tensors() {
                tensor.copy_within(from..from + n, to);
            }
        }
    }

    /// The contents of `cells`: for each layer their keys, then their values, `[n][n_kv_heads][d_head]` each, an int8
    /// head with its scale.
    pub fn read_cells(&self, cells: &[u32]) -> Vec<u8> {
        let n = self.cell_row_bytes();
        let mut data = Vec::with_capacity(2 * self.layers.len() * cells.len() * n);
        for tensor in self.layers.iter().flat_map(|layer| [&layer.k, &layer.v]) {
            for &cell in cells {
                data.extend_from_slice(&tensor.as_slice()[cell as usize * n..][..n]);
            }
        }
        data
    }

    /// Writes what [`Storage::read_cells`] returned into as many `cells`. Panics if `data` has another size.
    pub fn write_cells(&mut self, cells: &[u32], data: &[u8]) {
        let n = self.cell_row_bytes();
        assert_eq!(
            data.len(),
            2 * self.layers.len() * cells.len() * n,
            "the contents of {} cells",
            cells.len()
        );
        let parts = data.chunks_exact(cells.len() * n);
        for (tensor, part) in self.tensors().zip(parts) {
            for (&cell, values) in cells.iter().zip(part.chunks_exact(n)) {
                tensor[cell as usize * n..][..n].copy_from_slice(values);
            }
        }
    }

    /// Fills `cells` with NaN in all layers, so that a read before the first write shows in the logits.
    pub fn nan_fill(&mut self, cells: &[u32]) {
        let n = self.cell_row_bytes();
        for tensor in self.tensors() {
            for &cell in cells {
                tensor[cell as usize * n..][..n].fill(NAN_BYTE);
            }
        }
    }

    /// As [`Storage::nan_fill`] for every cell. Touches all of the memory.
    pub fn nan_fill_all(&mut self) {
        self.tensors().for_each(|tensor| tensor.fill(NAN_BYTE));
    }

    /// The bytes of every layer's K, then V.
    fn tensors(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.layers.iter_mut().flat_map(|layer| [layer.k.as_mut_slice(), layer.v.as_mut_slice()])
    }

    /// Bytes of one cell's key (or value) in one layer.
    fn cell_row_bytes(&self) -> usize {
        self.n_kv_heads * self.dtype.head_bytes(self.d_head)
    }

    /// Bytes of one cell's keys and values in all layers.
    pub fn cell_bytes(&self) -> usize {
        2 * self.layers.len() * self.cell_row_bytes()
    }

    /// Layers.
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of all tensors.
    pub fn n_bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.k.len() + layer.v.len()).sum()
    }
}
