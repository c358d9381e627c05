//! How a model is split over ranks (arXiv:1909.08053): heads and inner columns go to one rank each, so that a layer needs
//! two sums over the ranks, one behind attention and one behind the feed-forward part.
//!
//! Projections to queries, keys, values, gates and ups are split by their outputs, those back to the residual stream by
//! their inputs; every expert as a dense layer is. Embeddings and head are split by tokens. Norms and routers are
//! whole on every rank.

use crate::error::Unsupported;
use crate::model::config::ModelConfig;
use crate::model::family::QkNorm;
use crate::model::slot::{ExpertPart, LayerSlot, Slot};
use std::ops::Range;

/// One rank's part of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// From 0.
    pub rank: usize,
    /// Ranks in all, at least 1.
    pub world: usize,
}

/// Along which size of a tensor the ranks' parts lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Split {
    Whole,
    /// Outputs, or elements of their bias.
    Rows,
    /// Inputs.
    Columns,
}

impl Shard {
    /// The configuration of this rank's part: that of a model with fewer heads and a narrower feed-forward part. The
    /// vocabulary stays whole.
    ///
    /// Errors: heads or inner columns that do not divide; norms over all heads.
    pub fn config(self, whole: &ModelConfig) -> Result<ModelConfig, Unsupported> {
        let divided = |what: &'static str, got: usize| match got.is_multiple_of(self.world) {
            true => Ok(got / self.world),
            false => Err(self.refused(what.to_owned(), got, 1)),
        };
        let n_kv_heads = divided("the number of key-value heads", whole.n_kv_heads)?;
        let d_ff = divided("the feed-forward width", whole.d_ff)?;
        if self.world > 1 && whole.qk_norm && whole.family.qk_norm == QkNorm::Projection {
            return Err(Unsupported::Feature {
                what: "tensor parallelism in the family",
                value: whole.family.architecture.to_owned(),
                supported: "families that norm no queries, or each head by itself",
            });
        }
        Ok(ModelConfig { n_heads: whole.n_heads / self.world, n_kv_heads, d_ff, ..whole.clone() })
    }

    /// This rank's rows of a matrix of `n_rows`, or elements of a vector. Those of embeddings and head may reach
    /// beyond the last: every rank has as many.
    pub(super) fn rows(self, slot: Slot, n_rows: usize) -> Range<usize> {
        self.part(n_rows, split(slot) == Split::Rows)
    }

    /// This rank's columns of a matrix whose rows are held in blocks of `block`. `name` is for the error.
    ///
    /// Errors: a border within a block.
    pub(super) fn columns(
        self,
        slot: Slot,
        n_columns: usize,
        (block, name): (usize, &dyn Fn() -> String),
    ) -> Result<Range<usize>, Unsupported> {
        let columns = self.plain_columns(slot, n_columns);
        if columns.len().is_multiple_of(block) {
            return Ok(columns);
        }
        Err(self.refused(format!("the row length of {} (blocks of {block})", name()), n_columns, block))
    }

    /// As [`Shard::columns`], of a matrix whose rows are held in single numbers.
    pub(super) fn plain_columns(self, slot: Slot, n_columns: usize) -> Range<usize> {
        self.part(n_columns, split(slot) == Split::Columns)
    }

    fn part(self, n: usize, is_split: bool) -> Range<usize> {
        let len = n.div_ceil(self.world);
        if is_split { self.rank * len..(self.rank + 1) * len } else { 0..n }
    }

    fn refused(self, what: String, got: usize, unit: usize) -> Unsupported {
        Unsupported::Split { n_ranks: self.world, what, got, multiple: self.world * unit }
    }
}

fn split(slot: Slot) -> Split {
    let part = match slot {
        Slot::Embed | Slot::LmHead => return Split::Rows,
        Slot::OutputNorm => return Split::Whole,
        Slot::Layer(_, part) => part,
    };
    match part {
        LayerSlot::Q | LayerSlot::K | LayerSlot::V | LayerSlot::Gate | LayerSlot::Up => Split::Rows,
        LayerSlot::QBias | LayerSlot::KBias | LayerSlot::VBias => Split::Rows,
        LayerSlot::Expert(_, ExpertPart::Gate | ExpertPart::Up) => Split::Rows,
        LayerSlot::O | LayerSlot::Down | LayerSlot::Expert(_, ExpertPart::Down) => Split::Columns,
        LayerSlot::AttnNorm | LayerSlot::AttnPostNorm | LayerSlot::FfnNorm | LayerSlot::FfnPostNorm => {
            Split::Whole
        }
        LayerSlot::QNorm | LayerSlot::KNorm | LayerSlot::Router => Split::Whole,
        LayerSlot::Qkv | LayerSlot::GateUp | LayerSlot::Experts(_) => {
            unreachable!("what is stored together is packed by its parts")
        }
    }
}
