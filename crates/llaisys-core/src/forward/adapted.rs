//! Projections with LoRA adapters.

use super::decoder::{Decoder, ForwardRows};
use super::lora::{GatedLayer, LoraAt, LoraProjections};
use crate::ops::{self, GatedSums, LoraInput, LoraOutputs, OpContext};

impl Decoder {
    /// Adds what the adapters of the pass contribute to the outputs of some projections.
    pub(super) fn add_lora(
        &self,
        cx: &OpContext,
        rows: &ForwardRows<'_>,
        projections: LoraProjections<'_>,
        outputs: LoraOutputs<'_, '_>,
    ) {
        let Some(pass) = rows.lora else { return };
        let LoraProjections { layer, at, input, scratch } = projections;
        let product = &|slot| pass.product(slot, layer, at);
        ops::lora(cx, LoraInput { x: input, rows: pass.rows, product }, scratch, outputs);
    }

    /// Writes the inner values of a dense feed-forward block of layer `layer`, with the adapters of the pass.
    ///
    /// Gate and up are written to memory only if an adapter adds to them. The bits of the other rows are the same in
    /// both forms.
    pub(super) fn gated(
        &self,
        cx: &mut OpContext,
        rows: &ForwardRows<'_>,
        gated: GatedLayer<'_>,
        inner: &mut [f32],
    ) {
        let GatedLayer { layer, mlp, input, scratch, gate_up } = gated;
        let at = LoraAt::FeedForward;
        let part = mlp.gated_part(self.gate());
        if !rows.lora.is_some_and(|pass| pass.changes(layer, at)) {
            return ops::linear_gated(cx, input, part, inner);
        }
        let (n, d_dense) = (input.len() / self.config().d_model, self.config().d_dense_of(layer));
        let gate_up = &mut gate_up[..n * ops::gate_up_rows(d_dense)];
        let weight = ops::LinearPart { weight: part.gate_up, bias: None };
        ops::linear(cx, input, &[weight], &mut [&mut *gate_up]);
        let projections = LoraProjections { layer, at, input, scratch };
        self.add_lora(cx, rows, projections, LoraOutputs::GateUp(&mut *gate_up));
        let sums = GatedSums { gate_up, bias: part.bias, gate: part.gate };
        ops::gate(cx, sums, d_dense, inner);
    }
}
