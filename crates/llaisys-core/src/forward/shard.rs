//! How a model is split over ranks (arXiv:1909.08053): each rank has some of the heads and inner columns, so that a
//! layer needs two sums over the ranks, one after attention and one after the feed-forward block.
//!
//! Projections to queries, keys, values, gates and ups are split by their outputs, those back to the residual stream by
//! their inputs; each expert is split like a dense layer. Embeddings and head are split by tokens. Every rank has all
//! norms, routers, and biases of projections that are split by inputs; the first rank adds these.

use crate::arch::config::ModelConfig;
use crate::arch::spec::QkNorm;
use crate::arch::weight_id::{ExpertPart, LayerWeight, WeightId};
use crate::error::Unsupported;
use std::ops::Range;

/// One rank's part of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Number of this rank, from 0.
    pub rank: usize,
    /// Number of ranks, at least 1.
    pub world: usize,
}

/// The dimension along which a tensor is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Split {
    Whole,
    /// Outputs, or elements of their bias.
    Rows,
    /// Inputs.
    Columns,
}

impl Shard {
    /// Returns the configuration of this rank's part: fewer heads and a narrower feed-forward block, with the whole
    /// vocabulary.
    ///
    /// Errors: heads or inner columns are not divisible by the ranks; norms over all heads.
    pub fn config(self, whole: &ModelConfig) -> Result<ModelConfig, Unsupported> {
        let norms_all_heads = whole.qk_norm && whole.arch.qk_norm == QkNorm::Projection;
        let has_sinks = whole.arch.attn_sinks;
        let is_refused =
            norms_all_heads || has_sinks || whole.gemma4.is_some() || whole.recurrent_layer.is_some();
        if self.world > 1 && is_refused {
            return Err(Unsupported::Feature {
                what: "tensor parallelism of the architecture",
                value: whole.arch.architecture.to_owned(),
                supported: if norms_all_heads {
                    "architectures that normalize no queries, or each head by itself"
                } else if has_sinks {
                    "architectures without attention sinks"
                } else if whole.gemma4.is_some() {
                    "architectures with heads of one width"
                } else {
                    "architectures without recurrent layers"
                },
            });
        }
        let divided = |what: &'static str, got: usize| match got.is_multiple_of(self.world) {
            true => Ok(got / self.world),
            false => Err(self.not_divisible(what.to_owned(), got, 1)),
        };
        let n_kv_heads = divided("the number of key-value heads", whole.n_kv_heads)?;
        let d_ff = divided("the feed-forward width", whole.d_ff)?;
        Ok(ModelConfig { n_heads: whole.n_heads / self.world, n_kv_heads, d_ff, ..whole.clone() })
    }

    /// Returns this rank's rows of a matrix of `n_rows`, or its elements of a vector. Every rank has the same number of
    /// rows, so those of embeddings and head may go beyond the last one.
    pub(crate) fn rows(self, id: WeightId, n_rows: usize) -> Range<usize> {
        self.part(n_rows, split(id) == Split::Rows)
    }

    /// Returns this rank's columns of a matrix with blocks of `block` columns. `name` is used in the error.
    ///
    /// Errors: the boundary between two ranks is within a block.
    pub(crate) fn columns(
        self,
        id: WeightId,
        n_columns: usize,
        block: usize,
        name: &dyn Fn() -> String,
    ) -> Result<Range<usize>, Unsupported> {
        let columns = self.plain_columns(id, n_columns);
        if columns.len().is_multiple_of(block) {
            return Ok(columns);
        }
        Err(self.not_divisible(format!("the row length of {} (blocks of {block})", name()), n_columns, block))
    }

    /// As [`Shard::columns`], of a matrix without blocks.
    pub(crate) fn plain_columns(self, id: WeightId, n_columns: usize) -> Range<usize> {
        self.part(n_columns, split(id) == Split::Columns)
    }

    fn part(self, n: usize, is_split: bool) -> Range<usize> {
        let len = n.div_ceil(self.world);
        if is_split { self.rank * len..(self.rank + 1) * len } else { 0..n }
    }

    fn not_divisible(self, what: String, got: usize, block: usize) -> Unsupported {
        Unsupported::Split { n_ranks: self.world, what, got, multiple: self.world * block }
    }
}

fn split(id: WeightId) -> Split {
    let part = match id {
        WeightId::Embed | WeightId::LmHead => return Split::Rows,
        WeightId::OutputNorm | WeightId::LayerInputs(_) => return Split::Whole,
        WeightId::Layer(_, part) => part,
    };
    match part {
        LayerWeight::Q | LayerWeight::K | LayerWeight::V | LayerWeight::Gate | LayerWeight::Up => Split::Rows,
        LayerWeight::QBias | LayerWeight::KBias | LayerWeight::VBias => Split::Rows,
        LayerWeight::GateBias | LayerWeight::UpBias => Split::Rows,
        LayerWeight::Expert(_, ExpertPart::Gate | ExpertPart::Up) => Split::Rows,
        LayerWeight::O | LayerWeight::Down | LayerWeight::Expert(_, ExpertPart::Down) => Split::Columns,
        LayerWeight::AttnNorm
        | LayerWeight::AttnPostNorm
        | LayerWeight::FfnNorm
        | LayerWeight::FfnPostNorm => Split::Whole,
        LayerWeight::QNorm | LayerWeight::KNorm | LayerWeight::Router | LayerWeight::RouterBias => {
            Split::Whole
        }
        LayerWeight::OBias | LayerWeight::DownBias => Split::Whole,
        // Of models that are not split.
        LayerWeight::AttnGate | LayerWeight::Shared(_) | LayerWeight::SharedScale => Split::Whole,
        LayerWeight::Delta(_) | LayerWeight::ShortConv(_) | LayerWeight::Sinks => Split::Whole,
        LayerWeight::Gemma4(_) => Split::Whole,
        LayerWeight::RouterProjectionBias | LayerWeight::ExpertsBias(_) | LayerWeight::ExpertsGateUpBias => {
            Split::Whole
        }
        LayerWeight::Qkv
        | LayerWeight::QAndGate
        | LayerWeight::GateUp
        | LayerWeight::Experts(_)
        | LayerWeight::ExpertsGateUp => unreachable!("fused weights are packed by their parts"),
    }
}
