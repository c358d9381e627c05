//! The size of the packed weights of a checkpoint, computed before packing.

use crate::arch::config::ModelConfig;
use crate::arch::recurrent::RecurrentLayer;
use crate::arch::weight_id::{
    DeltaWeight, ExpertPart, Gemma4Weight, LayerInputWeight, LayerWeight, ShortConvWeight, WeightId,
};
use crate::dtype::{ComputeMode, DType};
use crate::load::weight_format::packed_format;
use crate::ops::argmax_bounds::ArgmaxBounds;
use crate::ops::gate_up_rows;
use crate::ops::packed::PackedFormat;
use serde::Serialize;

/// Bytes of the packed weights in each mode, padding included. Predicts [`Weights::n_bytes`].
///
/// [`Weights::n_bytes`]: crate::forward::weights::Weights::n_bytes
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PackedBytes {
    /// [`ComputeMode::Auto`].
    pub auto: usize,
    /// [`ComputeMode::Float32`].
    pub float32: usize,
    /// [`ComputeMode::Bfloat16`].
    pub bfloat16: usize,
    /// [`ComputeMode::Int8`], of a checkpoint that can be quantized.
    pub int8: usize,
    /// [`ComputeMode::Int4`], of a checkpoint that can be quantized.
    pub int4: usize,
}

impl PackedBytes {
    /// Returns the bytes in `mode`.
    pub fn of(&self, mode: ComputeMode) -> usize {
        match mode {
            ComputeMode::Auto => self.auto,
            ComputeMode::Float32 => self.float32,
            ComputeMode::Bfloat16 => self.bfloat16,
            ComputeMode::Int8 => self.int8,
            ComputeMode::Int4 => self.int4,
        }
    }

    /// Computes the sizes. `stored` returns the type in which the packer reads the rows of a stored weight.
    pub(super) fn new(config: &ModelConfig, stored: &dyn Fn(WeightId) -> DType) -> Self {
        Self::each(|mode| Sizes { config, stored, mode }.total())
    }

    /// As [`PackedBytes::new`] for the argmax bounds of the head; 0 where it cannot have any.
    pub(super) fn of_argmax_bounds(config: &ModelConfig, stored: &dyn Fn(WeightId) -> DType) -> Self {
        Self::each(|mode| Sizes { config, stored, mode }.argmax_bounds())
    }

    pub(super) fn each(bytes: impl Fn(ComputeMode) -> usize) -> Self {
        Self {
            auto: bytes(ComputeMode::Auto),
            float32: bytes(ComputeMode::Float32),
            bfloat16: bytes(ComputeMode::Bfloat16),
            int8: bytes(ComputeMode::Int8),
            int4: bytes(ComputeMode::Int4),
        }
    }
}

/// Mirrors `crate::forward::weights::pack`. The bounds of the configuration keep every sum below 2^62.
struct Sizes<'a> {
    config: &'a ModelConfig,
    stored: &'a dyn Fn(WeightId) -> DType,
    mode: ComputeMode,
}

impl Sizes<'_> {
    fn total(&self) -> usize {
        let config = self.config;
        let is_vector = |id: &WeightId| match id {
            WeightId::Layer(_, part) if part.is_stacked_bias() => true,
            &id => config.shape(id).len() == 1,
        };
        let shapes = config.weight_ids().filter(is_vector).map(|id| config.shape(id));
        let vectors: usize = shapes.map(|shape| shape.iter().product::<usize>()).sum();
        let taps = config.recurrent_layer.map_or(0, |layer| layer.taps_len());
        let vectors = vectors + config.n_recurrent() * taps;
        let head = if config.tied_head { 0 } else { self.matrix(WeightId::LmHead) };
        let layers: usize = (0..config.n_layers).map(|index| self.layer(index)).sum();
        vectors * size_of::<f32>() + self.matrix(WeightId::Embed) + head + self.layer_inputs() + layers
    }

    fn argmax_bounds(&self) -> usize {
        let id = if self.config.tied_head { WeightId::Embed } else { WeightId::LmHead };
        let [n_rows, n_columns] = self.shape(id);
        let can_have = self.config.has_plain_logits() && ArgmaxBounds::can_have(self.format(id), n_columns);
        if can_have { ArgmaxBounds::bytes_for(n_rows, n_columns) } else { 0 }
    }

    /// The matrices of the inputs of all layers.
    fn layer_inputs(&self) -> usize {
        if self.config.d_inputs() == 0 {
            return 0;
        }
        let shared = [LayerInputWeight::Embed, LayerInputWeight::Projection].map(WeightId::LayerInputs);
        let parts = [Gemma4Weight::InputGate, Gemma4Weight::InputProjection].map(LayerWeight::Gemma4);
        let of_layer = |index| parts.map(|part| self.matrix(WeightId::Layer(index, part)));
        let layers = (0..self.config.n_layers).flat_map(of_layer);
        shared.into_iter().map(|id| self.matrix(id)).chain(layers).sum()
    }

    fn layer(&self, index: usize) -> usize {
        let mixer = self.mixer(index);
        let dense = if self.config.has_dense(index) {
            self.mlp(index, [LayerWeight::Gate, LayerWeight::Up, LayerWeight::Down])
        } else {
            0
        };
        let Some(experts) = self.config.experts_of(index) else { return mixer + dense };
        let parts = [ExpertPart::Gate, ExpertPart::Up, ExpertPart::Down];
        let expert = |e| self.mlp(index, parts.map(|part| LayerWeight::Expert(e, part)));
        let shared = |_| {
            self.mlp(index, parts.map(LayerWeight::Shared)) + self.f32_matrix(index, LayerWeight::SharedScale)
        };
        mixer
            + dense
            + self.f32_matrix(index, LayerWeight::Router)
            + (0..experts.n).map(expert).sum::<usize>()
            + self.config.d_shared.map_or(0, shared)
    }

    /// Attention, or the recurrent part.
    fn mixer(&self, index: usize) -> usize {
        use DeltaWeight::{A, B, K, Out, Q, V, Z};
        let matrices =
            |parts: &[LayerWeight]| parts.iter().map(|&part| self.matrix(WeightId::Layer(index, part))).sum();
        match self.config.recurrent_layer.filter(|_| self.config.is_recurrent(index)) {
            Some(RecurrentLayer::DeltaNet(_)) => {
                let delta: usize = matrices(&[Q, K, V, Z, Out].map(LayerWeight::Delta));
                let f32_matrices = [B, A].map(|part| self.f32_matrix(index, LayerWeight::Delta(part)));
                return delta + f32_matrices.iter().sum::<usize>();
            }
            Some(RecurrentLayer::ShortConv(_)) => {
                use ShortConvWeight::{Input, InputGate, Out, OutputGate};
                return matrices(&[InputGate, OutputGate, Input, Out].map(LayerWeight::ShortConv));
            }
            None => {}
        }
        let gate: usize = if self.config.has_attn_gate() { matrices(&[LayerWeight::AttnGate]) } else { 0 };
        let has_k = self.config.kv_source(index) == index;
        let k = if has_k { matrices(&[LayerWeight::K]) } else { 0 };
        let v = if self.config.has_v(index) { matrices(&[LayerWeight::V]) } else { 0 };
        let attention: usize = matrices(&[LayerWeight::Q, LayerWeight::O]);
        attention + k + v + gate
    }

    /// A matrix that is in f32 in every mode.
    fn f32_matrix(&self, index: usize, part: LayerWeight) -> usize {
        let [n_rows, n_columns] = self.shape(WeightId::Layer(index, part));
        PackedFormat::F32.matrix_bytes(n_rows, n_columns)
    }

    fn mlp(&self, index: usize, parts: [LayerWeight; 3]) -> usize {
        let [gate, up, down] = parts.map(|part| WeightId::Layer(index, part));
        let [n_inner, n_columns] = self.shape(gate);
        let (format, other) = (self.format(gate), self.format(up));
        let format = if format == other { format } else { PackedFormat::F32 };
        format.matrix_bytes(gate_up_rows(n_inner), n_columns) + self.matrix(down)
    }

    fn matrix(&self, id: WeightId) -> usize {
        let [n_rows, n_columns] = self.shape(id);
        self.format(id).matrix_bytes(n_rows, n_columns)
    }

    fn format(&self, id: WeightId) -> PackedFormat {
        let (stored, _) = self.config.stored_weight(id);
        packed_format(self.mode, id, (self.stored)(stored), self.shape(id)[1])
    }

    fn shape(&self, id: WeightId) -> [usize; 2] {
        let shape = self.config.shape(id);
        [shape[0], shape[1]]
    }
}
