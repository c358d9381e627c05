//! The recurrent layers of the forward pass: Gated DeltaNet (arXiv:2412.06464).

use super::decoder::{Branch, Decoder, Pass};
use super::workspace::DeltaRows;
use crate::arch::delta_net::DeltaNet;
use crate::error::DeviceError;
use crate::forward::weights::DeltaNetWeights;
use crate::ops::{
    self, Convolution, DeltaInputs, LinearPart, OpContext, Recurrence, RecurrentRows, StatesMut,
};

/// Added to the sum of squares of a query or key before its root.
const L2_EPS: f32 = 1e-6;

impl Decoder {
    /// Adds the output of a recurrent layer to the residual stream. Its input is in `pass.w.normed`, and `index` is its
    /// number among the recurrent layers.
    pub(super) fn delta_net(
        &self,
        cx: &mut OpContext,
        index: usize,
        weights: &DeltaNetWeights,
        pass: &mut Pass<'_>,
    ) -> Result<(), DeviceError> {
        let config = self.config().delta_net().expect("recurrent layers are packed by the configuration");
        let (input, w) = (&*pass.w.normed, &mut pass.w.delta);
        let part = |weight| LinearPart { weight, bias: None };
        let parts = [&weights.q, &weights.k, &weights.v, &weights.z].map(part);
        ops::linear(cx, input, &parts, &mut [&mut *w.q_in, &mut *w.k_in, &mut *w.v_in, &mut *w.z]);
        ops::linear(cx, input, &[&weights.b, &weights.a].map(part), &mut [&mut *w.b, &mut *w.a]);
        if let Some(journal) = pass.kv.journal() {
            journal.record(index, pass.rows.tokens.len(), &w.inputs().map(|values| &*values));
        }
        let rows = pass.rows.recurrent.expect("a model with recurrent layers has the rows of each sequence");
        Recurrent { config: &config, weights, rows }.run(cx, pass.kv.states_mut(index), w);
        ops::gated_norm(cx, w.out, w.z, &weights.norm, self.config().rms_eps);
        let branch = Branch { input: w.out, projection: &weights.out, norm: None, lora: None };
        self.add_projection(cx, branch, pass.w.x, pass.w.normed)
    }
}

/// The part of a recurrent layer between its projections.
#[derive(Clone, Copy)]
pub(super) struct Recurrent<'a> {
    pub(super) config: &'a DeltaNet,
    pub(super) weights: &'a DeltaNetWeights,
    pub(super) rows: RecurrentRows<'a>,
}

impl DeltaRows<'_> {
    /// What a layer computes its states from. The steps of the layer overwrite it.
    pub(super) fn inputs(&mut self) -> [&mut [f32]; 5] {
        let Self { q_in, k_in, v_in, b, a, .. } = self;
        [&mut **q_in, &mut **k_in, &mut **v_in, &mut **b, &mut **a]
    }
}

impl Recurrent<'_> {
    /// Computes the outputs and the new states from the projected inputs in `w`.
    pub(super) fn run(self, cx: &OpContext, states: &mut [f32], w: &mut DeltaRows<'_>) {
        let Self { config, weights, rows } = self;
        self.convolve(cx, states, w);
        let eps = L2_EPS / config.heads.d_key as f32;
        ops::rms_norm_in_place(cx, w.q, &weights.unit[0], eps);
        ops::rms_norm_in_place(cx, w.k, &weights.unit[1], eps);
        ops::delta_gates(w.b, w.a, &weights.rate, &weights.dt_bias);
        let inputs = DeltaInputs { q: w.q, k: w.k, v: w.v, beta: w.b, decay: w.a };
        let states = StatesMut {
            data: states,
            stride: config.state_len(),
            offset: config.window_len(),
            len: config.heads.matrices_len(),
        };
        // The convolution has read its inputs.
        ops::delta_rule(cx, inputs, Recurrence { heads: config.heads, rows, states }, w.v_in, w.out);
    }

    /// Convolves queries, keys and values, each with its part of the windows.
    fn convolve(self, cx: &OpContext, states: &mut [f32], w: &mut DeltaRows<'_>) {
        let Self { config, weights, rows } = self;
        let mut offset = 0;
        let parts = [(&*w.q_in, &mut *w.q), (&*w.k_in, &mut *w.k), (&*w.v_in, &mut *w.v)];
        for ((x, out), taps) in parts.into_iter().zip(&weights.taps) {
            let len = taps.len() / config.n_taps * (config.n_taps - 1);
            let windows = StatesMut { data: &mut *states, stride: config.state_len(), offset, len };
            ops::causal_conv(cx, x, Convolution { taps, silu: true, rows, windows }, out);
            offset += len;
        }
    }
}
