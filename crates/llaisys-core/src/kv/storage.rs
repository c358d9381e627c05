//! The K and V tensors of all streams, addressed by cell.

use super::Copies;
use crate::dtype::KvDType;
use crate::error::DeviceError;
use crate::tensor::{AlignedBuf, KvHeads, KvLayer, KvLayerMut};

/// All bits set is a NaN in every float type, and as the scale of an int8 head.
pub(crate) const NAN_BYTE: u8 = 0xff;

/// Keys and values: per layer two buffers `[n_cells][n_kv_heads][d_head]`. [`super::KvCache`] records which cells are
/// in use; the contents of the others are meaningless.
#[derive(Debug)]
pub struct Storage {
    layers: Vec<KeysAndValues>,
    dtype: KvDType,
}

#[derive(Debug)]
struct KeysAndValues {
    heads: KvHeads,
    k: AlignedBuf,
    v: AlignedBuf,
}

impl KeysAndValues {
    /// Bytes of one cell's key (or value).
    fn row_bytes(&self, dtype: KvDType) -> usize {
        self.heads.n_kv_heads * dtype.head_bytes(self.heads.d_head)
    }
}

impl Storage {
    /// Zeroed tensors of layers with these heads. Errors: [`DeviceError::Allocation`] if the system refuses, or if
    /// the size of a tensor does not fit a `usize`.
    pub fn new(layers: &[KvHeads], n_cells: usize, dtype: KvDType) -> Result<Self, DeviceError> {
        const WHAT: &str = "KV cells";
        let tensors = |&heads: &KvHeads| -> Result<KeysAndValues, DeviceError> {
            let bytes = (heads.n_kv_heads)
                .checked_mul(dtype.head_bytes(heads.d_head))
                .and_then(|of_cell| of_cell.checked_mul(n_cells))
                .ok_or(DeviceError::Allocation { what: WHAT, bytes: usize::MAX })?;
            let tensor = || AlignedBuf::zeroed(WHAT, bytes);
            Ok(KeysAndValues { heads, k: tensor()?, v: tensor()? })
        };
        Ok(Self { layers: layers.iter().map(tensors).collect::<Result<_, _>>()?, dtype })
    }

    /// The tensors of layer `layer`, to read. Panics if there is no such layer.
    pub fn layer(&self, layer: usize) -> KvLayer<'_> {
        let KeysAndValues { heads: KvHeads { n_kv_heads, d_head }, k, v } = &self.layers[layer];
        KvLayer { dtype: self.dtype, n_kv_heads: *n_kv_heads, d_head: *d_head, k, v }
    }

    /// The tensors of layer `layer`, to write. Panics if there is no such layer.
    pub fn layer_mut(&mut self, layer: usize) -> KvLayerMut<'_> {
        let KeysAndValues { heads: KvHeads { n_kv_heads, d_head }, k, v } = &mut self.layers[layer];
        KvLayerMut { dtype: self.dtype, n_kv_heads: *n_kv_heads, d_head: *d_head, k, v }
    }

    /// Copies the keys and values of `copies.from` to `copies.to`, in all layers, bit for bit.
    pub fn copy(&mut self, copies: &Copies) {
        for (tensor, n) in self.tensors() {
            for (&from, &to) in copies.from.iter().zip(&copies.to) {
                let (from, to) = (from as usize * n, to as usize * n);
                tensor.copy_within(from..from + n, to);
            }
        }
    }

    /// The contents of `cells`: for each layer their keys, then their values, `[n][n_kv_heads][d_head]` each, an int8
    /// head with its scale.
    pub fn read_cells(&self, cells: &[u32]) -> Vec<u8> {
        let mut data = Vec::with_capacity(cells.len() * self.cell_bytes());
        for layer in &self.layers {
            let n = layer.row_bytes(self.dtype);
            for tensor in [&layer.k, &layer.v] {
                for &cell in cells {
                    data.extend_from_slice(&tensor.as_slice()[cell as usize * n..][..n]);
                }
            }
        }
        data
    }

    /// Writes what [`Storage::read_cells`] returned into as many `cells`. Panics if `data` has another size.
    pub fn write_cells(&mut self, cells: &[u32], data: &[u8]) {
        assert_eq!(data.len(), cells.len() * self.cell_bytes(), "the contents of {} cells", cells.len());
        let mut rest = data;
        for (tensor, n) in self.tensors() {
            let (part, others) = rest.split_at(cells.len() * n);
            for (&cell, values) in cells.iter().zip(part.chunks_exact(n)) {
                tensor[cell as usize * n..][..n].copy_from_slice(values);
            }
            rest = others;
        }
    }

    /// Fills `cells` with NaN in all layers, so that a read before the first write shows in the logits.
    pub fn nan_fill(&mut self, cells: &[u32]) {
        for (tensor, n) in self.tensors() {
            for &cell in cells {
                tensor[cell as usize * n..][..n].fill(NAN_BYTE);
            }
        }
    }

    /// As [`Storage::nan_fill`] for every cell. Touches all of the memory.
    pub fn nan_fill_all(&mut self) {
        self.tensors().for_each(|(tensor, _)| tensor.fill(NAN_BYTE));
    }

    /// The bytes of every layer's K, then V, each with those of one cell.
    fn tensors(&mut self) -> impl Iterator<Item = (&mut [u8], usize)> {
        let dtype = self.dtype;
        self.layers.iter_mut().flat_map(move |layer| {
            let n = layer.row_bytes(dtype);
            [(layer.k.as_mut_slice(), n), (layer.v.as_mut_slice(), n)]
        })
    }

    /// Bytes of one cell's keys and values in all layers.
    pub fn cell_bytes(&self) -> usize {
        2 * self.layers.iter().map(|layer| layer.row_bytes(self.dtype)).sum::<usize>()
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
