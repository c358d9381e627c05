//! The ops of the forward pass. An op has one name everywhere: `reference/<op>.rs` defines it,
//! `cpu/<op>.rs` computes it, and the decoder calls the function exported here.
//!
//! Each op takes the [`OpContext`] first. Arrays are row-major, one row per token. An op panics on arrays whose lengths
//! disagree: shapes follow from checked configuration, so a mismatch is a bug.

pub mod argmax_bounds;
pub mod cases;
mod cpu;
pub mod lora;
pub mod packed;
mod recurrent;
pub mod reference;

use crate::collective::{Collective, SingleRank};
use crate::error::DeviceError;
use crate::threads::Pool;
use cpu::activations::Activations;
use cpu::attention::Scratch as AttentionScratch;
use dispatch::Kernels;
use std::sync::Arc;

pub use crate::tensor::KvHeads;
pub use cpu::add::add;
pub use cpu::argmax::{argmax, argmax_finite, largest};
pub use cpu::attention::{AttentionRow, AttentionRows, MAX_D_HEAD, Queries, Scoring, attention, window_span};
pub use cpu::causal_conv::{Convolution, causal_conv};
pub use cpu::delta_gates::delta_gates;
pub use cpu::delta_rule::{DeltaInputs, Recurrence, delta_rule};
pub use cpu::dispatch;
pub use cpu::embed::embed;
pub use cpu::gate::{ClampedSilu, Gate, GateBias, gate_up_row, gate_up_rows};
pub use cpu::gated_norm::gated_norm;
pub use cpu::gather::gather;
pub use cpu::gelu::gelu;
pub use cpu::gelu_columns::{Columns, gelu_columns};
pub use cpu::kv_store::kv_store;
pub use cpu::layer_norm::{LayerNorm, layer_norm};
pub use cpu::linear::{
    ExpertPart, ExpertScratch, GatedPart, LinearPart, Mixture, PrunedArgmaxScratch, experts, linear,
    linear_add, linear_add_lora, linear_gated, linear_gated_lora, linear_lora, pruned_argmax,
};
pub use cpu::lora::{LoraHidden, LoraInput, lora};
pub use cpu::multiply::multiply;
pub use cpu::rms_norm::{rms_norm, rms_norm_in_place};
pub use cpu::rope::{HeadWidths, RopeTable, rope, rope_shift};
pub use cpu::route::{Routes, Routing, route};
pub use cpu::scale::scale;
pub use cpu::scale_rows::scale_rows;
pub use cpu::scatter_add::scatter_add;
pub use cpu::sigmoid_gate::sigmoid_gate;
pub use cpu::soft_cap::soft_cap;
pub use cpu::softmax_weights::{NEGLIGIBLE, SoftmaxWeights, WEIGHT_PART};
pub use recurrent::{DeltaHeads, RecurrentRows, SequenceRows, StatesMut, ValueOrder};

/// What every op needs: the chosen kernels, the threads, and scratch memory. The memory is sized at creation, so that
/// no op allocates.
#[derive(Debug)]
pub struct OpContext {
    /// The chosen instruction set.
    pub kernels: Kernels,
    /// The worker threads; contexts of other models may share them.
    pub pool: Arc<Pool>,
    /// Exchange with the other ranks of a model that is split.
    pub collective: Box<dyn Collective>,
    /// Inputs of the current product, packed for its kernel.
    activations: Activations,
    /// Scratch memory of attention.
    attention: AttentionScratch,
}

impl OpContext {
    /// A context of a single rank, with scratch for products of up to `max_rows` rows and `max_columns` inputs. Memory
    /// is touched only when it is used.
    ///
    /// Errors: [`DeviceError::Allocation`].
    pub fn new(
        kernels: Kernels,
        pool: impl Into<Arc<Pool>>,
        max_rows: usize,
        max_columns: usize,
    ) -> Result<Self, DeviceError> {
        let pool = pool.into();
        let activations = Activations::new(max_rows, max_columns)?;
        let attention = AttentionScratch::new(pool.n_threads(), max_rows, max_columns)?;
        Ok(Self { kernels, pool, collective: Box::new(SingleRank), activations, attention })
    }
}
