//! What layers differ in: their heads, whose keys and values they read, and the widths of their blocks. For a model whose
//! layers are all alike, these are the sizes of the model.

use super::ModelConfig;
use crate::arch::bounds::{bounded, check_id};
use crate::arch::gemma4::Gemma4;
use crate::arch::weight_id::{Gemma4Weight, LayerInputWeight, LayerWeight, WeightId};
use crate::error::FormatError;
use crate::ops::{HeadWidths, KvHeads};

/// Bounds of the width of the input of each layer.
const D_INPUT: (f64, f64) = (0.0, (1 << 12) as f64);
/// Upper bound of the inputs of all layers together.
const D_INPUTS_MAX: usize = 1 << 20;

impl ModelConfig {
    /// Checks the properties that only Gemma 4 has. Errors: a size out of bounds or not divisible, a token
    /// outside the vocabulary.
    pub(super) fn check_gemma4(&self, gemma4: &Gemma4) -> Result<(), FormatError> {
        let KvHeads { n_kv_heads, d_head } = gemma4.full_heads;
        bounded(
            "the number of key-value heads of full attention",
            n_kv_heads as f64,
            1.0,
            f64::from(1 << 10),
        )?;
        bounded("the head width of full attention", d_head as f64, 2.0, f64::from(1 << 10))?;
        bounded("the width of the per-layer input", gemma4.d_input as f64, D_INPUT.0, D_INPUT.1)?;
        let d_inputs = gemma4.d_input * self.n_layers;
        bounded("the width of the inputs of all layers", d_inputs as f64, 0.0, D_INPUTS_MAX as f64)?;
        bounded("num_kv_shared_layers", gemma4.n_shared as f64, 0.0, self.n_layers as f64 - 1.0)?;
        if !gemma4.placeholders.is_empty() {
            check_id("pad_token_id", gemma4.placeholders.embeds_as, self.vocab_size)?;
        }
        let uneven = |what, got, of, divisor| Err(FormatError::NotAMultiple { what, got, of, divisor });
        if !d_head.is_multiple_of(2) {
            return uneven("the head width of full attention", d_head, "a pair", 2);
        }
        if !self.n_heads.is_multiple_of(n_kv_heads) {
            let of = "the number of key-value heads of full attention";
            return uneven("the number of heads", self.n_heads, of, n_kv_heads);
        }
        Ok(())
    }

    /// The key and value heads of layer `index`.
    pub fn kv_heads(&self, index: usize) -> KvHeads {
        let full = self.gemma4.filter(|_| !self.windowed[index]).map(|gemma4| gemma4.full_heads);
        full.unwrap_or(KvHeads { n_kv_heads: self.n_kv_heads, d_head: self.d_head })
    }

    /// The width of heads of layer `index`, and of their rotated part.
    pub fn head_widths(&self, index: usize) -> HeadWidths {
        if self.gemma4.is_some() && !self.windowed[index] {
            return HeadWidths::whole(self.kv_heads(index).d_head);
        }
        HeadWidths { d_head: self.d_head, d_rope: self.d_rope }
    }

    /// The rotated width of heads in layers without a window.
    pub fn d_rope_full(&self) -> usize {
        self.gemma4.map_or(self.d_rope, |gemma4| gemma4.full_heads.d_head)
    }

    /// The layer whose keys and values layer `index` reads: itself, or an earlier one.
    pub fn kv_source(&self, index: usize) -> usize {
        let n_own = self.n_layers - self.gemma4.map_or(0, |gemma4| gemma4.n_shared);
        if index < n_own {
            return index;
        }
        let is_source = |&source: &usize| self.windowed[source] == self.windowed[index];
        (0..n_own).rev().find(is_source).expect("the layers were checked")
    }

    /// The weights of keys and values that a file may have in layers which read those of other layers.
    pub fn unused_kv(&self) -> impl Iterator<Item = WeightId> {
        let shared = (0..self.n_layers).filter(|&index| self.kv_source(index) != index);
        let parts = [LayerWeight::K, LayerWeight::V, LayerWeight::KNorm];
        shared.flat_map(move |index| parts.map(|part| WeightId::Layer(index, part)))
    }

    /// The layers that have keys and values of their own, in order.
    pub fn kv_layers(&self) -> impl Iterator<Item = usize> {
        (0..self.n_layers).filter(|&index| !self.is_recurrent(index) && self.kv_source(index) == index)
    }

    /// True if the values of layer `index` have their own projection.
    pub fn has_v(&self, index: usize) -> bool {
        let made_of_keys = self.gemma4.is_some_and(|gemma4| gemma4.values_are_keys && !self.windowed[index]);
        self.kv_source(index) == index && !made_of_keys
    }

    /// Inner width of the dense feed-forward block of layer `index`.
    pub fn d_dense_of(&self, index: usize) -> usize {
        let is_wide = self.gemma4.is_some_and(|g| g.widens_shared && index >= self.n_layers - g.n_shared);
        if is_wide { 2 * self.d_dense() } else { self.d_dense() }
    }

    /// The most elements of all query heads, or of all keys, in a layer.
    pub(crate) fn qk_widths(&self) -> (usize, usize) {
        let full = self.gemma4.map(|gemma4| gemma4.full_heads);
        let kinds = [Some(KvHeads { n_kv_heads: self.n_kv_heads, d_head: self.d_head }), full];
        let kinds = kinds.into_iter().flatten();
        let d_head = kinds.clone().map(|heads| heads.d_head).max().unwrap_or(0);
        let kv = kinds.map(|heads| heads.n_kv_heads * heads.d_head).max().unwrap_or(0);
        (self.n_heads * d_head, kv)
    }

    /// Elements of the widest head.
    pub fn d_head_max(&self) -> usize {
        self.d_head.max(self.gemma4.map_or(0, |gemma4| gemma4.full_heads.d_head))
    }

    /// The width of the input of each layer; 0 for models without them.
    pub fn d_input(&self) -> usize {
        self.gemma4.map_or(0, |gemma4| gemma4.d_input)
    }

    /// Activations of one row that only Gemma 4 needs: the inputs of all layers twice, the gate of a layer's input, and
    /// the output of a dense block next to experts.
    pub(crate) fn gemma4_width(&self) -> usize {
        2 * self.d_inputs() + self.d_input() + self.dense_output_width()
    }

    /// Width of the output of a dense block next to experts; 0 without them.
    pub(crate) fn dense_output_width(&self) -> usize {
        if self.gemma4.is_some() && self.experts.is_some() { self.d_model } else { 0 }
    }

    /// The shape of a weight of a layer that only Gemma 4 has.
    pub(super) fn gemma4_shape(&self, part: Gemma4Weight) -> Vec<usize> {
        match part {
            Gemma4Weight::Scalar => vec![1],
            Gemma4Weight::InputGate => vec![self.d_input(), self.d_model],
            Gemma4Weight::InputProjection => vec![self.d_model, self.d_input()],
            Gemma4Weight::ExpertScale => vec![self.experts.map_or(0, |experts| experts.n)],
            _ => vec![self.d_model],
        }
    }

    /// The shape of a weight of the inputs of all layers.
    pub(super) fn layer_inputs_shape(&self, part: LayerInputWeight) -> Vec<usize> {
        match part {
            LayerInputWeight::Embed => vec![self.vocab_size, self.d_inputs()],
            LayerInputWeight::Projection => vec![self.d_inputs(), self.d_model],
            LayerInputWeight::Norm => vec![self.d_input()],
        }
    }

    /// Width of the inputs of all layers together; 0 for models without them.
    pub fn d_inputs(&self) -> usize {
        self.n_layers * self.d_input()
    }
}
