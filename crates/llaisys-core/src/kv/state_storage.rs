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
