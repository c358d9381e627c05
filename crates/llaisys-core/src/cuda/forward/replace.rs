//! Replaces the values of a loaded tensor.

use super::decoder::DeviceDecoder;
use super::load::{DeviceLayer, bytes_of};
use crate::arch::weight_id::{LayerWeight, WeightId};
use crate::cuda::device::{Device, DevicePtr};
use crate::error::{Result, Unsupported};
use crate::forward::weights::Replacement;

/// The place of a tensor on the device.
enum Place {
    /// f32
    Norm(DevicePtr),
    /// Rows of the weights' type: also the elements of a bias.
    Rows(DevicePtr),
}

impl DeviceDecoder {
    /// As [`Weights::replace`](crate::forward::weights::Weights::replace): rounds to the weights' type, in the order of
    /// the device's work. Errors: the tensor is not stored separately on the device; the device's.
    pub fn replace(&self, device: &dyn Device, id: WeightId, values: &Replacement<'_>) -> Result<()> {
        let n_rows = self.config.shape(id)[0];
        match self.place(id) {
            Some(Place::Norm(at)) => {
                let value = |n| values.row(n)[0] + values.offset;
                device.upload_words(at, (0..n_rows).map(|n| value(n).to_bits()))?;
            }
            Some(Place::Rows(at)) => {
                let values = (0..n_rows).flat_map(|n| values.row(n));
                let bytes: Vec<u8> = values.flat_map(|&value| bytes_of(self.element, value)).collect();
                device.upload(at, &bytes)?;
            }
            None => {
                let (name, stored) = (values.name.to_owned(), "parts of other matrices");
                return Err(Unsupported::ReplaceWeight { name, stored, given: "a whole tensor" }.into());
            }
        }
        Ok(())
    }

    fn place(&self, id: WeightId) -> Option<Place> {
        let weights = &self.weights;
        Some(match id {
            WeightId::Embed => Place::Rows(weights.embed),
            WeightId::LmHead => Place::Rows(weights.head),
            WeightId::OutputNorm => Place::Norm(weights.output_norm),
            WeightId::LayerInputs(_) => return None,
            WeightId::Layer(index, part) => self.place_in_layer(&weights.layers[index], part)?,
        })
    }

    fn place_in_layer(&self, layer: &DeviceLayer, part: LayerWeight) -> Option<Place> {
        let config = &self.config;
        let (q, kv) = (config.n_heads * config.d_head, config.n_kv_heads * config.d_head);
        let row = |base: DevicePtr, n: usize| Place::Rows(base.at(n * config.d_model * 2));
        let element = |base: DevicePtr, n: usize| Place::Rows(base.at(n * 2));
        Some(match part {
            LayerWeight::AttnNorm => Place::Norm(layer.attn_norm),
            LayerWeight::FfnNorm => Place::Norm(layer.ffn_norm),
            LayerWeight::QNorm => Place::Norm(layer.q_norm),
            LayerWeight::KNorm => Place::Norm(layer.k_norm),
            LayerWeight::Qkv | LayerWeight::Q => row(layer.qkv, 0),
            LayerWeight::K => row(layer.qkv, q),
            LayerWeight::V => row(layer.qkv, q + kv),
            LayerWeight::QBias => element(layer.qkv_bias, 0),
            LayerWeight::KBias => element(layer.qkv_bias, q),
            LayerWeight::VBias => element(layer.qkv_bias, q + kv),
            LayerWeight::O => Place::Rows(layer.o),
            LayerWeight::GateUp | LayerWeight::Gate => row(layer.gate_up, 0),
            LayerWeight::Up => row(layer.gate_up, config.d_ff),
            LayerWeight::Down => Place::Rows(layer.down),
            _ => return None,
        })
    }
}
