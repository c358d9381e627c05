//! The tensors of a model, packed once for this machine.

mod head;
mod pack;

pub use pack::PackSettings;

use crate::error::{Result, Unsupported};
use crate::model::family::{ExpertPart, LayerSlot, Slot};
use crate::ops::packed::{PackedFormat, PackedMatrix};
use crate::ops::screen::Screen;
use crate::ops::{LinearPart, gate_up_row};
use crate::threads::Pool;

/// A product with an optional bias.
#[derive(Debug)]
pub struct Projection {
    /// `[n_out, n_in]`.
    pub matrix: PackedMatrix,
    /// `[n_out]`.
    pub bias: Option<Vec<f32>>,
}

impl Projection {
    /// As a part of a [`linear`](crate::ops::linear) call.
    pub fn part(&self) -> LinearPart<'_> {
        LinearPart { weight: &self.matrix, bias: self.bias.as_deref() }
    }
}

/// One decoder layer.
#[derive(Debug)]
pub struct LayerWeights {
    /// Norm before attention, `[d_model]`.
    pub attn_norm: Option<Vec<f32>>,
    /// Norm of what attention adds, `[d_model]`.
    pub attn_post_norm: Option<Vec<f32>>,
    /// `[n_heads * d_head, d_model]`.
    pub q: Projection,
    /// `[n_kv_heads * d_head, d_model]`.
    pub k: Projection,
    /// `[n_kv_heads * d_head, d_model]`.
    pub v: Projection,
    /// Norm of each query head, `[d_head]`, or of all together, `[n_heads * d_head]`.
    pub q_norm: Option<Vec<f32>>,
    /// Norm of each key head, `[d_head]`, or of all together, `[n_kv_heads * d_head]`.
    pub k_norm: Option<Vec<f32>>,
    /// `[d_model, n_heads * d_head]`.
    pub o: PackedMatrix,
    /// Norm before the feed-forward part, `[d_model]`.
    pub ffn_norm: Option<Vec<f32>>,
    /// Norm of what the feed-forward part adds, `[d_model]`.
    pub ffn_post_norm: Option<Vec<f32>>,
    /// The feed-forward part.
    pub feed_forward: FeedForward,
}

/// The feed-forward part of a layer.
#[derive(Debug)]
pub enum FeedForward {
    /// One for all tokens.
    Dense(Mlp),
    /// Each token chooses some.
    Experts {
        /// What they choose by, `[n_experts, d_model]`, in f32: a small error would choose others.
        router: PackedMatrix,
        /// By number.
        experts: Vec<Mlp>,
    },
}

/// A gated feed-forward network.
#[derive(Debug)]
pub struct Mlp {
    /// Gate and up, interleaved 16 by 16 as [`gate_up_row`] says, `[gate_up_rows(d_ff), d_model]`.
    pub gate_up: PackedMatrix,
    /// `[d_model, d_ff]`.
    pub down: PackedMatrix,
}

/// All tensors of a model, or a rank's part of them: shapes are those of
/// [`Shard::config`](crate::model::shard::Shard::config).
#[derive(Debug)]
pub struct Weights {
    /// `[vocab_size, d_model]`; also the head of a model with a tied head. Of one rank of several: as many rows as every
    /// other has, those beyond the vocabulary zero.
    pub embed: PackedMatrix,
    /// As `embed`, of a model with its own head.
    lm_head: Option<PackedMatrix>,
    /// The head's, once [`Weights::screen_head`] was called, if it can have one.
    screen: Option<Screen>,
    is_screened: bool,
    /// Norm after the last layer, `[d_model]`.
    pub output_norm: Vec<f32>,
    /// In order of depth.
    pub layers: Vec<LayerWeights>,
}

impl Weights {
    /// Bytes held by matrices and vectors.
    pub fn n_bytes(&self) -> usize {
        let layers: usize = self.layers.iter().map(LayerWeights::n_bytes).sum();
        let head = self.lm_head.as_ref().map_or(0, PackedMatrix::n_bytes);
        let screen = self.screen.as_ref().map_or(0, Screen::n_bytes);
        self.embed.n_bytes() + head + screen + self.output_norm.len() * size_of::<f32>() + layers
    }

    /// Replaces one tensor. `values` is row-major in the checkpoint's shape; `stored_row(n)` is the row of it
    /// that holds logical row `n`. `n_columns` is the length of a row (1 for a vector). The caller has checked
    /// the number of values. Errors: the slot is held in blocks; nothing has changed then.
    pub fn replace(&mut self, pool: &Pool, slot: Slot, values: &Replacement<'_>) -> Result<()> {
        for (place, _) in &self.places(slot) {
            place.matrix().map_or(Ok(()), |matrix| values.check_format(matrix))?;
        }
        self.drop_screen(slot);
        for (place, first) in &mut self.places(slot) {
            let held = place.held();
            match place {
                Place::Vector(vector) => {
                    for (n, value) in vector.iter_mut().enumerate() {
                        *value = values.row(n)[0] + values.offset;
                    }
                }
                Place::Matrix(matrix) | Place::GateOrUp { matrix, .. } | Place::BothGateUp { matrix, .. } => {
                    let rows: Vec<usize> = held.iter().map(|&(row, _)| row).collect();
                    let gathered: Vec<f32> =
                        held.iter().flat_map(|&(_, n)| values.row(*first + n)).copied().collect();
                    matrix.repack_rows(&rows, &gathered);
                }
            }
        }
        self.screen_again(pool);
        Ok(())
    }

    /// Where a slot's values are held, and from which stored row on. Panics on a slot that the model does not
    /// have: names were checked.
    fn places(&mut self, slot: Slot) -> Vec<(Place<'_>, usize)> {
        let (index, part) = match slot {
            Slot::Embed => return vec![(Place::Matrix(&mut self.embed), 0)],
            Slot::LmHead => return vec![(Place::Matrix(self.lm_head.as_mut().expect(ABSENT)), 0)],
            Slot::OutputNorm => return vec![(Place::Vector(&mut self.output_norm), 0)],
            Slot::Layer(index, part) => (index, part),
        };
        let layer = &mut self.layers[index];
        let place = match part {
            LayerSlot::AttnNorm => vector(&mut layer.attn_norm),
            LayerSlot::AttnPostNorm => vector(&mut layer.attn_post_norm),
            LayerSlot::FfnNorm => vector(&mut layer.ffn_norm),
            LayerSlot::FfnPostNorm => vector(&mut layer.ffn_post_norm),
            LayerSlot::Qkv => {
                let (q, k) = (layer.q.matrix.n_rows(), layer.k.matrix.n_rows());
                return vec![
                    (Place::Matrix(&mut layer.q.matrix), 0),
                    (Place::Matrix(&mut layer.k.matrix), q),
                    (Place::Matrix(&mut layer.v.matrix), q + k),
                ];
            }
            LayerSlot::Q => Place::Matrix(&mut layer.q.matrix),
            LayerSlot::K => Place::Matrix(&mut layer.k.matrix),
            LayerSlot::V => Place::Matrix(&mut layer.v.matrix),
            LayerSlot::QBias => vector(&mut layer.q.bias),
            LayerSlot::KBias => vector(&mut layer.k.bias),
            LayerSlot::VBias => vector(&mut layer.v.bias),
            LayerSlot::O => Place::Matrix(&mut layer.o),
            LayerSlot::QNorm => vector(&mut layer.q_norm),
            LayerSlot::KNorm => vector(&mut layer.k_norm),
            other => return layer.feed_forward.places(other),
        };
        vec![(place, 0)]
    }
}

const ABSENT: &str = "the slot was found by its name in this model's checkpoint";

fn vector(vector: &mut Option<Vec<f32>>) -> Place<'_> {
    Place::Vector(vector.as_mut().expect(ABSENT))
}

impl FeedForward {
    /// As [`Weights::places`].
    fn places(&mut self, part: LayerSlot) -> Vec<(Place<'_>, usize)> {
        match (self, part) {
            (FeedForward::Dense(mlp), LayerSlot::GateUp) => {
                let (d_ff, matrix) = (mlp.down.n_columns(), &mut mlp.gate_up);
                vec![(Place::BothGateUp { matrix, d_ff }, 0)]
            }
            (FeedForward::Dense(mlp), LayerSlot::Gate) => vec![(mlp.place(ExpertPart::Gate), 0)],
            (FeedForward::Dense(mlp), LayerSlot::Up) => vec![(mlp.place(ExpertPart::Up), 0)],
            (FeedForward::Dense(mlp), LayerSlot::Down) => vec![(mlp.place(ExpertPart::Down), 0)],
            (FeedForward::Experts { router, .. }, LayerSlot::Router) => vec![(Place::Matrix(router), 0)],
            (FeedForward::Experts { experts, .. }, LayerSlot::Expert(expert, matrix)) => {
                vec![(experts[expert].place(matrix), 0)]
            }
            (FeedForward::Experts { experts, .. }, LayerSlot::Experts(matrix)) => {
                let places = experts.iter_mut().enumerate();
                places
                    .map(|(e, mlp)| {
                        let n = mlp.n_rows(matrix);
                        (mlp.place(matrix), e * n)
                    })
                    .collect()
            }
            _ => panic!("{ABSENT}"),
        }
    }

    fn n_bytes(&self) -> usize {
        match self {
            FeedForward::Dense(mlp) => mlp.n_bytes(),
            FeedForward::Experts { router, experts } => {
                router.n_bytes() + experts.iter().map(Mlp::n_bytes).sum::<usize>()
            }
        }
    }
}

impl Mlp {
    fn n_rows(&self, matrix: ExpertPart) -> usize {
        match matrix {
            ExpertPart::Gate | ExpertPart::Up => self.down.n_columns(),
            ExpertPart::Down => self.down.n_rows(),
        }
    }

    fn place(&mut self, part: ExpertPart) -> Place<'_> {
        let d_ff = self.down.n_columns();
        match part {
            ExpertPart::Gate => Place::GateOrUp { matrix: &mut self.gate_up, is_up: false, d_ff },
            ExpertPart::Up => Place::GateOrUp { matrix: &mut self.gate_up, is_up: true, d_ff },
            ExpertPart::Down => Place::Matrix(&mut self.down),
        }
    }

    fn n_bytes(&self) -> usize {
        self.gate_up.n_bytes() + self.down.n_bytes()
    }
}

enum Place<'a> {
    Vector(&'a mut Vec<f32>),
    Matrix(&'a mut PackedMatrix),
    /// The gate's rows of a matrix of both, or up's.
    GateOrUp {
        matrix: &'a mut PackedMatrix,
        is_up: bool,
        d_ff: usize,
    },
    /// The rows of both, the gate's first.
    BothGateUp {
        matrix: &'a mut PackedMatrix,
        d_ff: usize,
    },
}

impl Place<'_> {
    fn matrix(&self) -> Option<&PackedMatrix> {
        match self {
            Place::Vector(_) => None,
            Place::Matrix(matrix) | Place::GateOrUp { matrix, .. } | Place::BothGateUp { matrix, .. } => {
                Some(matrix)
            }
        }
    }

    /// The packed rows that a tensor's rows lie in, with the numbers of those.
    fn held(&self) -> Vec<(usize, usize)> {
        let n_rows = self.matrix().map_or(0, PackedMatrix::n_rows);
        let rows = 0..n_rows;
        match *self {
            Place::Vector(_) | Place::Matrix(_) => rows.map(|n| (n, n)).collect(),
            Place::GateOrUp { is_up, d_ff, .. } => {
                let ours = |n| gate_up_row(d_ff, n).filter(|&(up, _)| up == is_up).map(|(_, row)| (n, row));
                rows.filter_map(ours).collect()
            }
            Place::BothGateUp { d_ff, .. } => {
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
    /// The row that holds a logical row.
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
        let matrices = [&self.q.matrix, &self.k.matrix, &self.v.matrix, &self.o];
        let norms = [&self.attn_norm, &self.attn_post_norm, &self.ffn_norm, &self.ffn_post_norm];
        let vectors = [&self.q.bias, &self.k.bias, &self.v.bias, &self.q_norm, &self.k_norm];
        let n_values = norms.into_iter().chain(vectors).flatten().map(Vec::len).sum::<usize>();
        let n_bytes = matrices.into_iter().map(PackedMatrix::n_bytes).sum::<usize>();
        n_bytes + n_values * size_of::<f32>() + self.feed_forward.n_bytes()
    }
}
