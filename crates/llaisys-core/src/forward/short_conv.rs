//! The recurrent layers of the forward pass: gated short convolutions (LFM2, arXiv:2511.23404).

use super::decoder::{Branch, Decoder, Pass};
use crate::error::DeviceError;
use crate::forward::weights::ShortConvWeights;
use crate::ops::{self, Convolution, LinearPart, OpContext, RecurrentRows, StatesMut};

impl Decoder {
    /// Adds the output of a recurrent layer to the residual stream. Its input is in `pass.w.normed`, and `index` is its
    /// number among the recurrent layers.
    pub(super) fn short_conv(
        &self,
        cx: &mut OpContext,
        index: usize,
        weights: &ShortConvWeights,
        pass: &mut Pass<'_>,
    ) -> Result<(), DeviceError> {
        let rows = pass.rows.recurrent.expect("a model with recurrent layers has the rows of each sequence");
        let w = &mut pass.w.short_conv;
        let parts = [&weights.input_gate, &weights.output_gate, &weights.input]
            .map(|weight| LinearPart { weight, bias: None });
        let mut outputs = [&mut *w.input_gate, &mut *w.output_gate, &mut *w.input];
        ops::linear(cx, &*pass.w.normed, &parts, &mut outputs);
        ops::multiply(cx, w.input, w.input_gate);
        if let Some(journal) = pass.kv.journal() {
            journal.record(index, pass.rows.tokens.len(), &[&*w.input]);
        }
        let convolution = self.short_convolution(weights, rows, pass.kv.states_mut(index));
        // The gate of the input is no longer needed.
        let out = &mut *w.input_gate;
        ops::causal_conv(cx, w.input, convolution, out);
        ops::multiply(cx, out, w.output_gate);
        let branch = Branch { input: out, projection: &weights.out, norm: None, lora: None };
        self.add_projection(cx, branch, pass.w.x, pass.w.normed)
    }

    /// The convolution of a layer, which writes the new states.
    pub(super) fn short_convolution<'a>(
        &self,
        weights: &'a ShortConvWeights,
        rows: RecurrentRows<'a>,
        states: &'a mut [f32],
    ) -> Convolution<'a> {
        let config = self.config().short_conv().expect("recurrent layers are packed by the configuration");
        let len = config.state_len();
        let windows = StatesMut { data: states, stride: len, offset: 0, len };
        Convolution { taps: &weights.taps, silu: false, rows, windows }
    }
}
