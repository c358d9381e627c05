//! The feed-forward block of a layer: one network, or a mixture of experts.

use super::{ABSENT, DenseBranch, Projection, Target, vector};
use crate::arch::spec::{ExpertPart, LayerWeight};
use crate::ops::packed::PackedMatrix;
use crate::ops::{Gate, GateBias, GatedPart};

/// The feed-forward block of a layer.
#[derive(Debug)]
pub enum FeedForward {
    /// The same network for all tokens.
    Dense(Mlp),
    /// A mixture of experts: the router chooses some for each token.
    Experts {
        /// `[n_experts, d_model]`, in f32: with a rounding error the router could choose other experts.
        router: Projection,
        /// Decides with the scores which experts are chosen, `[n_experts]`.
        bias: Option<Vec<f32>>,
        /// By expert number.
        experts: Vec<Mlp>,
        /// The expert that all tokens use.
        shared: Option<SharedExpert>,
        /// A dense block next to the experts.
        dense: Option<Box<DenseBranch>>,
    },
}

/// An expert that all tokens use, with its own weight in each.
#[derive(Debug)]
pub struct SharedExpert {
    /// The expert.
    pub mlp: Mlp,
    /// Its weight before the sigmoid, `[1, d_model]`, in f32 as the router.
    pub scale: PackedMatrix,
}

/// A gated feed-forward network.
#[derive(Debug)]
pub struct Mlp {
    /// Gate and up, interleaved in groups of 16 rows ([`gate_up_row`](crate::ops::gate_up_row)), `[gate_up_rows(d_ff), d_model]`.
    pub gate_up: PackedMatrix,
    /// Bias of the gate, `[d_ff]`.
    pub gate_bias: Option<Vec<f32>>,
    /// Bias of the up projection, `[d_ff]`.
    pub up_bias: Option<Vec<f32>>,
    /// `[d_model, d_ff]`.
    pub down: Projection,
}

impl FeedForward {
    /// As [`Weights::targets`](super::Weights::targets).
    pub(super) fn targets(&mut self, part: LayerWeight) -> Vec<(Target<'_>, usize)> {
        match (self, part) {
            (FeedForward::Dense(mlp), LayerWeight::GateUp) => {
                let (d_ff, matrix) = (mlp.down.matrix.n_columns(), &mut mlp.gate_up);
                vec![(Target::BothGateUp { matrix, d_ff }, 0)]
            }
            (FeedForward::Dense(mlp), LayerWeight::Gate) => vec![(mlp.target(ExpertPart::Gate), 0)],
            (FeedForward::Dense(mlp), LayerWeight::Up) => vec![(mlp.target(ExpertPart::Up), 0)],
            (FeedForward::Dense(mlp), LayerWeight::Down) => vec![(mlp.target(ExpertPart::Down), 0)],
            (FeedForward::Dense(mlp), LayerWeight::GateBias) => vec![(vector(&mut mlp.gate_bias), 0)],
            (FeedForward::Dense(mlp), LayerWeight::UpBias) => vec![(vector(&mut mlp.up_bias), 0)],
            (FeedForward::Dense(mlp), LayerWeight::DownBias) => vec![(vector(&mut mlp.down.bias), 0)],
            (FeedForward::Experts { router, .. }, LayerWeight::Router) => {
                vec![(Target::Matrix(&mut router.matrix), 0)]
            }
            (FeedForward::Experts { bias, .. }, LayerWeight::RouterBias) => vec![(vector(bias), 0)],
            (FeedForward::Experts { experts, .. }, LayerWeight::Expert(expert, matrix)) => {
                vec![(experts[expert].target(matrix), 0)]
            }
            (FeedForward::Experts { experts, .. }, LayerWeight::Experts(matrix)) => {
                let experts = experts.iter_mut().enumerate();
                experts
                    .map(|(e, mlp)| {
                        let n = mlp.n_rows(matrix);
                        (mlp.target(matrix), e * n)
                    })
                    .collect()
            }
            _ => panic!("{ABSENT}"),
        }
    }

    pub(super) fn n_bytes(&self) -> usize {
        match self {
            FeedForward::Dense(mlp) => mlp.n_bytes(),
            FeedForward::Experts { router, bias, experts, shared, dense } => {
                let shared = shared.iter().map(|shared| shared.mlp.n_bytes() + shared.scale.n_bytes());
                let n_biases = [bias, &router.bias].into_iter().flatten().map(Vec::len).sum::<usize>();
                router.matrix.n_bytes()
                    + dense.as_ref().map_or(0, |dense| dense.n_bytes())
                    + n_biases * size_of::<f32>()
                    + experts.iter().map(Mlp::n_bytes).chain(shared).sum::<usize>()
            }
        }
    }
}

impl Mlp {
    /// Returns gate and up as the part of a [`linear_gated`](crate::ops::linear_gated) call.
    pub fn gated_part(&self, gate: Gate) -> GatedPart<'_> {
        let bias = self.gate_bias.as_ref().zip(self.up_bias.as_ref());
        let bias = bias.map(|(gate, up)| GateBias { gate, up });
        GatedPart { gate_up: &self.gate_up, bias, gate }
    }

    fn n_rows(&self, matrix: ExpertPart) -> usize {
        match matrix {
            ExpertPart::Gate | ExpertPart::Up => self.down.matrix.n_columns(),
            ExpertPart::Down => self.down.matrix.n_rows(),
        }
    }

    fn target(&mut self, part: ExpertPart) -> Target<'_> {
        let d_ff = self.down.matrix.n_columns();
        match part {
            ExpertPart::Gate => Target::GateOrUp { matrix: &mut self.gate_up, is_up: false, d_ff },
            ExpertPart::Up => Target::GateOrUp { matrix: &mut self.gate_up, is_up: true, d_ff },
            ExpertPart::Down => Target::Matrix(&mut self.down.matrix),
        }
    }

    pub(super) fn n_bytes(&self) -> usize {
        let biases = [&self.gate_bias, &self.up_bias, &self.down.bias];
        let n_values: usize = biases.into_iter().flatten().map(Vec::len).sum();
        self.gate_up.n_bytes() + self.down.matrix.n_bytes() + n_values * size_of::<f32>()
    }
}
