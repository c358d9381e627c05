//! The recurrent layers of the forward pass: Gated DeltaNet (arXiv:2412.06464).

use super::decoder::{Decoder, Pass};
use super::journal::{Journal, Replay, ReplayMemory};
use super::workspace::DeltaRows;
use crate::arch::delta_net::DeltaNet;
use crate::error::DeviceError;
use crate::forward::decoder::Branch;
use crate::forward::weights::{DeltaNetWeights, Mixer};
use crate::ops::{
    self, Convolution, DeltaInputs, LinearPart, OpContext, Recurrence, RecurrentRows, SequenceRows, StatesMut,
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
        let config = self.config().delta_net.expect("recurrent layers are packed by the configuration");
        let (input, w) = (&*pass.w.normed, &mut pass.w.delta);
        let part = |weight| LinearPart { weight, bias: None };
        let parts = [&weights.q, &weights.k, &weights.v, &weights.z].map(part);
        ops::linear(cx, input, &parts, &mut [&mut *w.q_in, &mut *w.k_in, &mut *w.v_in, &mut *w.z]);
        ops::linear(cx, input, &[&weights.b, &weights.a].map(part), &mut [&mut *w.b, &mut *w.a]);
        if let Some(journal) = pass.kv.journal() {
            journal.record(index, pass.rows.tokens.len(), w);
        }
        let rows = pass.rows.recurrent.expect("a model with recurrent layers has the rows of each sequence");
        Recurrent { config: &config, weights, rows }.run(cx, pass.kv.states_mut(index), w);
        ops::gated_norm(cx, w.out, w.z, &weights.norm, self.config().rms_eps);
        let branch = Branch { input: w.out, projection: &weights.out, norm: None };
        self.add_projection(cx, branch, pass.w.x, pass.w.normed)
    }

    /// Computes the states of sequences again, from recorded inputs and with the same bits as a pass over these rows.
    pub fn replay(
        &self,
        cx: &mut OpContext,
        replays: &[Replay],
        journal: &Journal,
        memory: ReplayMemory<'_>,
    ) {
        let ReplayMemory { kv, work, n_rows } = memory;
        let config = self.config().delta_net.expect("only models with recurrent layers have replays");
        for group in Group::all(replays, n_rows) {
            let rows = RecurrentRows { sequences: &group.sequences, order: &group.order };
            let mut index = 0;
            for layer in &self.weights.layers {
                if let Mixer::DeltaNet(weights) = &layer.mixer {
                    let w = &mut work.rows(group.rows.len()).delta;
                    journal.load(index, &group.rows, w);
                    Recurrent { config: &config, weights, rows }.run(cx, kv.states_mut(index), w);
                    index += 1;
                }
            }
        }
    }
}

/// Sequences that are replayed together.
#[derive(Debug, Default)]
struct Group {
    sequences: Vec<SequenceRows>,
    order: Vec<u32>,
    /// Rows of the journal, `[n]`.
    rows: Vec<u32>,
}

impl Group {
    /// Divides the sequences into groups of up to `n_max` rows. A sequence with more rows is in several groups, in order.
    fn all(replays: &[Replay], n_max: usize) -> Vec<Self> {
        let mut groups = vec![Self::default()];
        for replay in replays {
            let mut before = replay.before;
            for rows in replay.rows.chunks(n_max) {
                if groups.last().is_none_or(|group| group.rows.len() + rows.len() > n_max) {
                    groups.push(Self::default());
                }
                let group = groups.last_mut().expect("pushed above");
                let start = group.rows.len();
                group.rows.extend_from_slice(rows);
                group.order.extend(start as u32..group.rows.len() as u32);
                group.sequences.push(SequenceRows { before, after: replay.after, start, n_rows: rows.len() });
                before = Some(replay.after);
            }
        }
        groups.retain(|group| !group.rows.is_empty());
        groups
    }
}

/// The part of a recurrent layer between its projections.
#[derive(Clone, Copy)]
struct Recurrent<'a> {
    config: &'a DeltaNet,
    weights: &'a DeltaNetWeights,
    rows: RecurrentRows<'a>,
}

impl Recurrent<'_> {
    /// Computes the outputs and the new states from the projected inputs in `w`.
    fn run(self, cx: &OpContext, states: &mut [f32], w: &mut DeltaRows<'_>) {
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
            ops::causal_conv(cx, x, Convolution { taps, rows, windows }, out);
            offset += len;
        }
    }
}
