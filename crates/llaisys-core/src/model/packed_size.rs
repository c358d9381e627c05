//! What the packed weights of a checkpoint will take, known before a byte is packed.

use crate::dtype::{ComputeMode, DType};
use crate::model::config::ModelConfig;
use crate::model::held::packed_format;
use crate::model::slot::{ExpertPart, LayerSlot, Slot};
use crate::ops::gate_up_rows;
use crate::ops::packed::PackedFormat;
use crate::ops::screen::Screen;
use serde::Serialize;

/// Bytes of the packed weights in each mode, padding included: [`Weights::n_bytes`] of what would be packed.
///
/// [`Weights::n_bytes`]: crate::model::weights::Weights::n_bytes
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PackedBytes {
    /// [`ComputeMode::Auto`].
    pub auto: usize,
    /// [`ComputeMode::Float32`].
    pub float32: usize,
    /// [`ComputeMode::Bfloat16`].
    pub bfloat16: usize,
    /// [`ComputeMode::Int8`], of a checkpoint that can be quantised.
    pub int8: usize,
    /// [`ComputeMode::Int4`], of a checkpoint that can be quantised.
    pub int4: usize,
}

impl PackedBytes {
    /// In `mode`.
    pub fn of(&self, mode: ComputeMode) -> usize {
        match mode {
            ComputeMode::Auto => self.auto,
            ComputeMode::Float32 => self.float32,
            ComputeMode::Bfloat16 => self.bfloat16,
            ComputeMode::Int8 => self.int8,
            ComputeMode::Int4 => self.int4,
        }
    }

    /// `stored` is the type in which the rows of a stored slot arrive at the packer.
    pub(super) fn new(config: &ModelConfig, stored: &dyn Fn(Slot) -> DType) -> Self {
        Self::each(|mode| Sizes { config, stored, mode }.total())
    }

    /// As [`PackedBytes::new`], of the head's screen alone; 0 where it cannot have one.
    pub(super) fn of_screen(config: &ModelConfig, stored: &dyn Fn(Slot) -> DType) -> Self {
        Self::each(|mode| Sizes { config, stored, mode }.screen())
    }

    fn each(bytes: impl Fn(ComputeMode) -> usize) -> Self {
        Self {
            auto: bytes(ComputeMode::Auto),
            float32: bytes(ComputeMode::Float32),
            bfloat16: bytes(ComputeMode::Bfloat16),
            int8: bytes(ComputeMode::Int8),
            int4: bytes(ComputeMode::Int4),
        }
    }
}

/// Goes the way of the packer. The configuration's bounds keep every sum below 2^62.
struct Sizes<'a> {
    config: &'a ModelConfig,
    stored: &'a dyn Fn(Slot) -> DType,
    mode: ComputeMode,
}

impl Sizes<'_> {
    fn total(&self) -> usize {
        let config = self.config;
        let shapes = config.slots().map(|slot| config.shape(slot));
        let vectors: usize = shapes.filter(|shape| shape.len() == 1).map(|shape| shape[0]).sum();
        let head = if config.tied_head { 0 } else { self.matrix(Slot::LmHead) };
        let layers: usize = (0..config.n_layers).map(|index| self.layer(index)).sum();
        vectors * size_of::<f32>() + self.matrix(Slot::Embed) + head + layers
    }

    fn screen(&self) -> usize {
        let slot = if self.config.tied_head { Slot::Embed } else { Slot::LmHead };
        let [n_rows, n_columns] = self.shape(slot);
        let can_have = self.config.has_plain_logits() && Screen::can_have(self.format(slot), n_columns);
        if can_have { Screen::bytes_for(n_rows, n_columns) } else { 0 }
    }

    fn layer(&self, index: usize) -> usize {
        let attention = [LayerSlot::Q, LayerSlot::K, LayerSlot::V, LayerSlot::O];
        let attention: usize = attention.map(|part| self.matrix(Slot::Layer(index, part))).iter().sum();
        let Some(experts) = self.config.experts else {
            return attention + self.mlp(index, [LayerSlot::Gate, LayerSlot::Up, LayerSlot::Down]);
        };
        let [n_rows, n_columns] = self.shape(Slot::Layer(index, LayerSlot::Router));
        let parts = [ExpertPart::Gate, ExpertPart::Up, ExpertPart::Down];
        let expert = |e| self.mlp(index, parts.map(|part| LayerSlot::Expert(e, part)));
        attention
            + PackedFormat::F32.matrix_bytes(n_rows, n_columns)
            + (0..experts.n).map(expert).sum::<usize>()
    }

    fn mlp(&self, index: usize, parts: [LayerSlot; 3]) -> usize {
        let [gate, up, down] = parts.map(|part| Slot::Layer(index, part));
        let [n_inner, n_columns] = self.shape(gate);
        let (format, other) = (self.format(gate), self.format(up));
        let format = if format == other { format } else { PackedFormat::F32 };
        format.matrix_bytes(gate_up_rows(n_inner), n_columns) + self.matrix(down)
    }

    fn matrix(&self, slot: Slot) -> usize {
        let [n_rows, n_columns] = self.shape(slot);
        self.format(slot).matrix_bytes(n_rows, n_columns)
    }

    fn format(&self, slot: Slot) -> PackedFormat {
        let (stored, _) = self.config.stored_slot(slot);
        packed_format(self.mode, slot, (self.stored)(stored), self.shape(slot)[1])
    }

    fn shape(&self, slot: Slot) -> [usize; 2] {
        let shape = self.config.shape(slot);
        [shape[0], shape[1]]
    }
}
