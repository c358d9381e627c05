//! The K and V tensors of one arena, addressed by cell.

use crate::dtype::KvDType;
use crate::error::DeviceError;
use crate::tensor::{AlignedBuf, KvLayer, KvLayerMut};

/// Keys and values: per layer two buffers `[n_cells][n_kv_heads][d_head]`. Which cell means what is the
/// business of [`super::Cells`]; a cell's contents count only while a sequence sees it.
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
        let sizes = [n_kv_heads, d_head, dtype.bytes()];
        let tensor_bytes =
            sizes.iter().try_fold(n_cells, |bytes, n| bytes.checked_mul(*n)).ok_or(too_large)?;
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

    /// Layers.
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of all tensors.
    pub fn n_bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.k.len() + layer.v.len()).sum()
    }
}
