//! The recurrent states of all sequences, addressed by number.

use crate::error::DeviceError;
use crate::tensor::AlignedBuf;

/// Recurrent states in f32: per layer one buffer `[n_states, state_len]`. [`super::KvCache`] records which states are in
/// use; the contents of the others are meaningless. Their memory is touched as they are used.
#[derive(Debug)]
pub struct StateStorage {
    layers: Vec<AlignedBuf>,
    state_len: usize,
}

impl StateStorage {
    /// States of `n_layers` recurrent layers with `state_len` numbers each. Errors: [`DeviceError::Allocation`].
    pub fn new(n_layers: usize, n_states: usize, state_len: usize) -> Result<Self, DeviceError> {
        const WHAT: &str = "recurrent states";
        let too_large = DeviceError::Allocation { what: WHAT, bytes: usize::MAX };
        let bytes =
            n_states.checked_mul(state_len).and_then(|n| n.checked_mul(size_of::<f32>())).ok_or(too_large)?;
        let layers = (0..n_layers).map(|_| AlignedBuf::zeroed(WHAT, bytes));
        Ok(Self { layers: layers.collect::<Result<_, _>>()?, state_len })
    }

    /// All states of one recurrent layer, `[n_states, state_len]`. Panics if there is no such layer.
    pub fn layer_mut(&mut self, layer: usize) -> &mut [f32] {
        self.layers[layer].as_mut_slice()
    }

    /// Bytes of one state in all layers.
    pub fn state_bytes(&self) -> usize {
        self.layers.len() * self.state_len * size_of::<f32>()
    }

    /// The contents of a state: the numbers of each layer in order.
    pub fn read(&self, state: u32) -> Vec<u8> {
        let n = self.state_len * size_of::<f32>();
        let of_layer = |layer: &AlignedBuf| layer.as_slice::<u8>()[state as usize * n..][..n].to_vec();
        self.layers.iter().flat_map(of_layer).collect()
    }

    /// Writes what [`StateStorage::read`] returned. Panics if `data` has another size.
    pub fn write(&mut self, state: u32, data: &[u8]) {
        assert_eq!(data.len(), self.state_bytes(), "the contents of a state");
        let n = self.state_len * size_of::<f32>();
        for (layer, part) in self.layers.iter_mut().zip(data.chunks_exact(n)) {
            let bytes: &mut [u8] = layer.as_mut_slice();
            bytes[state as usize * n..][..n].copy_from_slice(part);
        }
    }

    /// Fills `states` with NaN in all layers, so that a read before the first write shows in the logits.
    pub fn nan_fill(&mut self, states: &[u32]) {
        for layer in &mut self.layers {
            let numbers: &mut [f32] = layer.as_mut_slice();
            for &state in states {
                numbers[state as usize * self.state_len..][..self.state_len].fill(f32::NAN);
            }
        }
    }
}
