//! What only Gemma 4 has: an input of each layer that depends on the token, a dense block next to the experts, and a
//! factor of each layer's output.

use super::decoder::{Branch, Decoder, Pass};
use super::lora::{LoraAt, LoraSite, lora_hidden};
use super::workspace::Gemma4Rows;
use crate::error::DeviceError;
use crate::forward::weights::{DenseBranch, LayerWeights};
use crate::ops::{self, Columns, LinearPart, OpContext};
use std::borrow::Cow;
use std::f32::consts::FRAC_1_SQRT_2;

impl Decoder {
    /// The tokens whose embeddings `tokens` have: those that stand for images, sound or video have another one's.
    pub(super) fn embedded<'a>(&self, tokens: &'a [i32]) -> Cow<'a, [i32]> {
        match self.config().gemma4.map(|gemma4| gemma4.placeholders).filter(|p| !p.is_empty()) {
            None => Cow::Borrowed(tokens),
            Some(placeholders) => tokens.iter().map(|&token| placeholders.embedded(token)).collect(),
        }
    }

    /// Computes the inputs of all layers for `tokens`, of which `x`, `[n, d_model]`, has the scaled embeddings: the mean
    /// of a projection of them, normalized for each layer, and of embeddings of their own, times the root of 2.
    pub(super) fn layer_inputs(&self, cx: &mut OpContext, tokens: &[i32], x: &[f32], w: &mut Gemma4Rows<'_>) {
        let Some(weights) = &self.weights.layer_inputs else { return };
        let (d_model, d_input) = (self.config().d_model as f64, self.config().d_input() as f64);
        let part = LinearPart { weight: &weights.projection, bias: None };
        ops::linear(cx, x, &[part], &mut [&mut *w.inputs]);
        ops::scale(cx, w.inputs, (1.0 / d_model.sqrt()) as f32);
        ops::rms_norm_in_place(cx, w.inputs, &weights.norm, self.config().rms_eps);
        ops::embed(cx, &weights.embed, tokens, w.embedded);
        ops::scale(cx, w.embedded, d_input.sqrt() as f32);
        ops::add(cx, w.inputs, w.embedded);
        ops::scale(cx, w.inputs, FRAC_1_SQRT_2);
    }

    /// Adds the input of a layer to the residual stream, and multiplies that by the layer's factor.
    pub(super) fn add_input(
        &self,
        cx: &mut OpContext,
        index: usize,
        layer: &LayerWeights,
        pass: &mut Pass<'_>,
    ) -> Result<(), DeviceError> {
        let w = &mut pass.w;
        if let Some(input) = &layer.input {
            let (gate, d_input) = (&mut *w.gemma4.gate, self.config().d_input());
            let part = LinearPart { weight: &input.gate, bias: None };
            ops::linear(cx, w.x, &[part], &mut [&mut *gate]);
            let row_len = self.config().d_inputs();
            let columns = Columns { x: w.gemma4.inputs, row_len, first: index * d_input };
            ops::gelu_columns(cx, gate, d_input, columns);
            let (projection, norm) = (&input.projection, Some(&input.norm));
            self.add_projection(cx, Branch { input: gate, projection, norm, lora: None }, w.x, w.normed)?;
        }
        if let Some(scalar) = &layer.scalar {
            ops::scale(cx, w.x, scalar[0]);
        }
        Ok(())
    }

    /// Writes the sum of a layer's dense block, whose input is in `pass.w.normed`, and of its experts to
    /// `pass.w.experts.sum`.
    pub(super) fn dense_and_experts(
        &self,
        cx: &mut OpContext,
        index: usize,
        dense: &DenseBranch,
        pass: &mut Pass<'_>,
    ) {
        let (rows, w, eps) = (pass.rows, &mut pass.w, self.config().rms_eps);
        let layer = &self.weights.layers[index];
        let inner = &mut w.inner[..rows.tokens.len() * self.config().d_dense_of(index)];
        let (mlp, out) = (&dense.mlp, &mut *w.gemma4.dense);
        let site = LoraSite { layer: index, at: LoraAt::FeedForward };
        let lora = lora_hidden(cx, rows.lora, site, w.normed, w.lora_hidden);
        ops::linear_gated_lora(cx, w.normed, mlp.gated_part(self.gate()), lora, inner);
        let site = LoraSite { layer: index, at: LoraAt::Inner };
        let lora = lora_hidden(cx, rows.lora, site, inner, w.lora_hidden);
        ops::linear_lora(cx, inner, &[mlp.down.part()], lora, &mut [&mut *out]);
        ops::rms_norm_in_place(cx, out, &dense.post_norm, eps);
        ops::rms_norm(cx, w.x, &dense.router_norm, eps, w.normed);
        self.route(cx, layer, w.normed, &mut w.experts);
        ops::rms_norm(cx, w.x, &dense.experts_norm, eps, w.normed);
        self.experts(cx, layer, w.normed, &mut w.experts);
        ops::rms_norm_in_place(cx, w.experts.sum, &dense.experts_post_norm, eps);
        ops::add(cx, w.experts.sum, out);
    }
}
