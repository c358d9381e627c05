//! The mixture of experts of a layer (arXiv:2401.04088).

use super::decoder::Decoder;
use super::workspace::ExpertRows;
use crate::arch::experts::Experts;
use crate::forward::weights::{FeedForward, LayerWeights, Mlp, SharedExpert};
use crate::ops::{self, ExpertPart, ExpertScratch, LinearPart, Mixture, OpContext, Routing};

impl Decoder {
    /// Chooses the experts of each row of `input`, `[n, d_model]`, and their weights.
    pub(super) fn route(
        &self,
        cx: &mut OpContext,
        layer: &LayerWeights,
        input: &[f32],
        w: &mut ExpertRows<'_>,
    ) {
        let (FeedForward::Experts { router, bias, dense, .. }, Some(config)) =
            (&layer.feed_forward, self.config().experts)
        else {
            unreachable!("experts are packed by the configuration")
        };
        ops::linear(cx, input, &[router.part()], &mut [&mut *w.logits]);
        let Experts { n: n_experts, n_used, normalize, sigmoid, scale, .. } = config;
        let expert_scale = dense.as_ref().map(|dense| &*dense.expert_scale);
        let bias = bias.as_deref();
        let routing = Routing { n_experts, n_used, sigmoid, bias, normalize, scale, expert_scale };
        ops::route(w.logits, routing, w.routes);
    }

    /// Computes the weighted sum of the outputs of each row's experts. They are added in ascending order of the
    /// experts, then the shared one, so that the sum does not depend on which rows are computed together.
    pub(super) fn experts(
        &self,
        cx: &mut OpContext,
        layer: &LayerWeights,
        input: &[f32],
        w: &mut ExpertRows<'_>,
    ) {
        let FeedForward::Experts { experts, shared, .. } = &layer.feed_forward else {
            unreachable!("the layer has experts")
        };
        let d_model = self.config().d_model;
        let part = |number: usize| {
            let mlp: &Mlp = &experts[number];
            ExpertPart { gated: mlp.gated_part(self.gate()), down: mlp.down.part() }
        };
        w.sum.fill(0.0);
        let scratch = ExpertScratch { gathered: &mut *w.gathered, inner: &mut *w.inner };
        ops::experts(cx, input, Mixture { routes: w.routes, part: &part }, scratch, w.sum);
        if let Some(SharedExpert { mlp, scale }) = shared {
            let n = input.len() / d_model;
            w.rows.clear();
            w.rows.extend(0..n as u32);
            w.weights.clear();
            w.weights.resize(n, 0.0);
            ops::linear(cx, input, &[LinearPart { weight: scale, bias: None }], &mut [&mut *w.weights]);
            w.weights.iter_mut().for_each(|weight| *weight = 1.0 / (1.0 + (-*weight).exp()));
            ops::linear_gated(cx, input, mlp.gated_part(self.gate()), w.shared_inner);
            ops::linear(cx, w.shared_inner, &[mlp.down.part()], &mut [&mut *w.out]);
            ops::scatter_add(w.sum, d_model, w.rows, w.weights, w.out);
        }
    }
}
