//! The weights of a model, packed once for this machine.

mod feed_forward;
mod gemma4;
mod head;
mod mixer;
mod pack;

pub use feed_forward::{FeedForward, Mlp, SharedExpert};
pub use gemma4::{DenseBranch, InputBranch, LayerInputs};
pub use mixer::{Attention, DeltaNetWeights, Mixer, ShortConvWeights};
pub use pack::PackSettings;
pub(crate) use pack::{PIECE_BYTES, rows_at_once};

use crate::arch::spec::{LayerWeight, WeightId};
use crate::error::{Result, Unsupported};
use crate::ops::argmax_bounds::ArgmaxBounds;
use crate::ops::packed::{PackedFormat, PackedMatrix};
use crate::ops::{LinearPart, gate_up_row};
use crate::threads::Pool;

/// A projection with an optional bias.
#[derive(Debug)]
pub struct Projection {
    /// `[n_out, n_in]`.
    pub matrix: PackedMatrix,
    /// `[n_out]`.
    pub bias: Option<Vec<f32>>,
}

impl Projection {
    fn n_bytes(&self) -> usize {
        self.matrix.n_bytes() + self.bias.as_ref().map_or(0, Vec::len) * size_of::<f32>()
    }

    /// Returns the projection as a part of a [`linear`](crate::ops::linear) call.
    pub fn part(&self) -> LinearPart<'_> {
        LinearPart { weight: &self.matrix, bias: self.bias.as_deref() }
    }
}

/// One decoder layer.
#[derive(Debug)]
pub struct LayerWeights {
    /// Norm before attention or the recurrent part, `[d_model]`.
    pub attn_norm: Option<Vec<f32>>,
    /// Norm of its output, `[d_model]`.
    pub attn_post_norm: Option<Vec<f32>>,
    /// Attention, or the recurrent part.
    pub mixer: Mixer,
    /// Norm before the feed-forward block, `[d_model]`.
    pub ffn_norm: Option<Vec<f32>>,
    /// Norm of the output of the feed-forward block, `[d_model]`.
    pub ffn_post_norm: Option<Vec<f32>>,
    /// The feed-forward block.
    pub feed_forward: FeedForward,
    /// What adds the layer's input that depends on the token.
    pub input: Option<InputBranch>,
    /// Factor of the output, `[1]`.
    pub scalar: Option<Vec<f32>>,
}

/// All weights of a model, or a rank's part of them. Shapes are those of
/// [`Shard::config`](crate::forward::shard::Shard::config).
#[derive(Debug)]
pub struct Weights {
    /// `[vocab_size, d_model]`; also the head if it is tied. With several ranks, all have the same number of rows, and
    /// rows beyond the vocabulary are zero.
    pub embed: PackedMatrix,
    /// As `embed`; None if the head is tied.
    lm_head: Option<PackedMatrix>,
    /// Bounds of the head, after [`Weights::bound_argmax`], if its format has them.
    argmax_bounds: Option<ArgmaxBounds>,
    prunes_argmax: bool,
    /// The inputs of layers that depend on the token.
    pub layer_inputs: Option<LayerInputs>,
    /// Norm after the last layer, `[d_model]`.
    pub output_norm: Vec<f32>,
    /// In order of depth.
    pub layers: Vec<LayerWeights>,
}

impl Weights {
    /// Bytes of all matrices and vectors.
    pub fn n_bytes(&self) -> usize {
        let layers: usize = self.layers.iter().map(LayerWeights::n_bytes).sum();
        let head = self.lm_head.as_ref().map_or(0, PackedMatrix::n_bytes);
        let bounds = self.argmax_bounds.as_ref().map_or(0, ArgmaxBounds::n_bytes);
        let inputs = self.layer_inputs.as_ref().map_or(0, LayerInputs::n_bytes);
        self.embed.n_bytes() + head + bounds + self.output_norm.len() * size_of::<f32>() + inputs + layers
    }

    /// Replaces one tensor. The caller has checked the number of values. Errors, without side effects: the weight is
    /// quantized.
    pub fn replace(&mut self, pool: &Pool, id: WeightId, values: &Replacement<'_>) -> Result<()> {
        for (target, _) in &self.targets(id) {
            target.matrix().map_or(Ok(()), |matrix| values.check_format(matrix))?;
        }
        self.drop_argmax_bounds(id);
        for (target, first) in &mut self.targets(id) {
            let rows_of_tensor = target.rows();
            match target {
                Target::Vector(vector) => {
                    for (n, value) in vector.iter_mut().enumerate() {
                        *value = values.row(n)[0] + values.offset;
                    }
                }
                Target::Matrix(matrix)
                | Target::GateOrUp { matrix, .. }
                | Target::BothGateUp { matrix, .. } => {
                    let rows: Vec<usize> = rows_of_tensor.iter().map(|&(row, _)| row).collect();
                    let gathered: Vec<f32> =
                        rows_of_tensor.iter().flat_map(|&(_, n)| values.row(*first + n)).copied().collect();
                    matrix.repack_rows(&rows, &gathered);
                }
            }
        }
        self.restore_argmax_bounds(pool);
        Ok(())
    }

    /// Returns the packed tensors that contain a weight, each with its first row in the weight. Panics if the model
    /// does not have the weight; the caller has found it by name.
    fn targets(&mut self, id: WeightId) -> Vec<(Target<'_>, usize)> {
        let (index, part) = match id {
            WeightId::Embed => return vec![(Target::Matrix(&mut self.embed), 0)],
            WeightId::LmHead => return vec![(Target::Matrix(self.lm_head.as_mut().expect(ABSENT)), 0)],
            WeightId::OutputNorm => return vec![(Target::Vector(&mut self.output_norm), 0)],
            WeightId::Layer(index, part) => (index, part),
            WeightId::LayerInputs(_) => panic!("{ABSENT}"),
        };
        let layer = &mut self.layers[index];
        let target = match part {
            LayerWeight::AttnNorm => vector(&mut layer.attn_norm),
            LayerWeight::AttnPostNorm => vector(&mut layer.attn_post_norm),
            LayerWeight::FfnNorm => vector(&mut layer.ffn_norm),
            LayerWeight::FfnPostNorm => vector(&mut layer.ffn_post_norm),
            LayerWeight::Gate
            | LayerWeight::Up
            | LayerWeight::Down
            | LayerWeight::GateUp
            | LayerWeight::GateBias
            | LayerWeight::UpBias
            | LayerWeight::DownBias
            | LayerWeight::Router
            | LayerWeight::RouterBias
            | LayerWeight::RouterProjectionBias
            | LayerWeight::ExpertsBias(_)
            | LayerWeight::ExpertsGateUpBias
            | LayerWeight::Expert(..)
            | LayerWeight::Experts(_)
            | LayerWeight::ExpertsGateUp
            | LayerWeight::Shared(_)
            | LayerWeight::SharedScale => return layer.feed_forward.targets(part),
            part => return layer.mixer.targets(part),
        };
        vec![(target, 0)]
    }
}

const ABSENT: &str = "the caller found the weight by name in this model's checkpoint";

fn vector(vector: &mut Option<Vec<f32>>) -> Target<'_> {
    Target::Vector(vector.as_mut().expect(ABSENT))
}

/// A packed tensor, or some of its rows, that replaced values are written to.
enum Target<'a> {
    Vector(&'a mut Vec<f32>),
    Matrix(&'a mut PackedMatrix),
    /// The rows of gate or of up in a matrix of both.
    GateOrUp {
        matrix: &'a mut PackedMatrix,
        is_up: bool,
        d_ff: usize,
    },
    /// The rows of both, those of gate first.
    BothGateUp {
        matrix: &'a mut PackedMatrix,
        d_ff: usize,
    },
}

impl Target<'_> {
    fn matrix(&self) -> Option<&PackedMatrix> {
        match self {
            Target::Vector(_) => None,
            Target::Matrix(matrix) | Target::GateOrUp { matrix, .. } | Target::BothGateUp { matrix, .. } => {
                Some(matrix)
            }
        }
    }

    /// Returns pairs of a packed row and the row of the tensor in it.
    fn rows(&self) -> Vec<(usize, usize)> {
        let n_rows = self.matrix().map_or(0, PackedMatrix::n_rows);
        let rows = 0..n_rows;
        match *self {
            Target::Vector(_) | Target::Matrix(_) => rows.map(|n| (n, n)).collect(),
            Target::GateOrUp { is_up, d_ff, .. } => {
                let ours = |n| gate_up_row(d_ff, n).filter(|&(up, _)| up == is_up).map(|(_, row)| (n, row));
                rows.filter_map(ours).collect()
            }
            Target::BothGateUp { d_ff, .. } => {
                let both = |n| gate_up_row(d_ff, n).map(|(up, row)| (n, if up { d_ff + row } else { row }));
                rows.filter_map(both).collect()
            }
        }
    }
}

/// New values of one tensor, in the checkpoint's own row order.
pub struct Replacement<'a> {
    /// Its name in the checkpoint.
    pub name: &'a str,
    /// `[n_rows, n_columns]` row-major.
    pub values: &'a [f32],
    /// Length of a row; 1 for a vector.
    pub n_columns: usize,
    /// Maps a logical row to its row of `values`.
    pub stored_row: &'a dyn Fn(usize) -> usize,
    /// Added to a vector's values.
    pub offset: f32,
}

impl Replacement<'_> {
    /// The new values of a logical row.
    pub fn row(&self, logical: usize) -> &[f32] {
        let start = (self.stored_row)(logical) * self.n_columns;
        &self.values[start..start + self.n_columns]
    }

    fn check_format(&self, matrix: &PackedMatrix) -> Result<()> {
        let stored = match matrix.format() {
            PackedFormat::F32 | PackedFormat::BF16 => return Ok(()),
            format => format.name(),
        };
        Err(Unsupported::ReplaceWeight { name: self.name.to_owned(), stored, given: "float32 values" }.into())
    }
}

impl LayerWeights {
    fn n_bytes(&self) -> usize {
        let norms = [&self.attn_norm, &self.attn_post_norm, &self.ffn_norm, &self.ffn_post_norm];
        let n_values = norms.into_iter().chain([&self.scalar]).flatten().map(Vec::len).sum::<usize>();
        let input = self.input.as_ref().map_or(0, InputBranch::n_bytes);
        n_values * size_of::<f32>() + self.mixer.n_bytes() + self.feed_forward.n_bytes() + input
    }
}
