//! The interface between a context and the device that computes for it: one trait, [`Backend`]. The CPU backend is
//! [`super::cpu_backend::CpuBackend`]; the CUDA backends are in `crate::cuda::backend`.

use crate::arch::weight_id::WeightId;
use crate::batch::Batch;
use crate::error::Result;
use crate::forward::decoder::ForwardRows;
use crate::forward::replay::Replay;
use crate::forward::weights::Replacement;
use crate::kv::{Copies, KvCache};
use crate::progress::Progress;
use crate::sample::{Outcome, SamplerSpec};
use crate::seq::SeqId;
use crate::threads::Pool;
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// Rows of a batch for a decode step.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only GPU backends run decode steps"))]
pub(crate) struct StepBatch<'a> {
    pub(crate) kv: &'a KvCache,
    pub(crate) batch: &'a Batch,
    /// The cell of each row of the batch.
    pub(crate) row_cells: &'a [u32],
    /// The batch rows to compute. Each has one sequence, which is in no other row.
    pub(crate) rows: &'a [usize],
    /// The allowed tokens of each row of the batch.
    pub(crate) masks: Option<&'a [Option<&'a [u32]>]>,
}

/// Owns the weights and the contents of the KV cells, and computes with them. Cells have the KV cache's numbers. After
/// a [`crate::error::DeviceError`] the contents that a call was to change are undefined.
///
/// A backend may also run decode steps: it computes and samples rows from state that it keeps for each sequence. It may
/// launch the next step before a decode requests it (async scheduling). The cells of a step in flight are free in the
/// KV cache. A decode calls [`Backend::launch_step`], runs the passes of its other rows, and calls
/// [`Backend::launch_next_step`] and [`Backend::collect_step`]. It may fail at any point: the next decode compares the
/// state with its rows. The default methods are those of a backend without decode steps.
pub(crate) trait Backend: Any + Debug + Send {
    /// Runs all layers for `rows`, at most `n_batch`; each layer ticks `progress`.
    fn forward(&mut self, rows: &ForwardRows<'_>, progress: &Progress) -> Result<()>;

    /// Computes the final hidden states of `rows` of the last [`Backend::forward`], at most
    /// [`super::sampling::LOGITS_ROWS`], and writes the logits `[n_logits, vocab_size]` of the first `n_logits` of them
    /// to `logits`.
    fn compute_outputs(&mut self, rows: &[usize], n_logits: usize, logits: &mut [f32]) -> Result<()>;

    /// As [`Backend::compute_outputs`] for rows that need only the argmax. Returns the id with the largest logit (the
    /// lowest on ties) for rows whose logits are all finite and for which pruning found it. Empty if this backend
    /// always computes all logits.
    fn pruned_argmax(&mut self, _rows: &[usize]) -> Result<&[Option<u32>]> {
        Ok(&[])
    }

    /// Returns the first `n_rows` hidden states of the last [`Backend::compute_outputs`], `[n_rows, d_model]`.
    fn hidden_states(&mut self, n_rows: usize) -> Result<&[f32]>;

    /// Copies keys and values of `copies.from` to `copies.to`, in all layers, bit for bit.
    fn copy_cells(&mut self, copies: &Copies) -> Result<()>;

    /// Rotates the keys of `cells`, which are distinct, by `delta` positions.
    fn shift_cells(&mut self, cells: &[u32], delta: i32) -> Result<()>;

    /// Returns the contents of `cells`: for each layer their keys `[n][n_kv_heads][d_head]`, then their values in the
    /// same order. With several ranks, the contents for the heads of rank 0 are followed by those of rank 1, and so on.
    fn read_cells(&self, cells: &[u32]) -> Result<Vec<u8>>;

    /// Writes what [`Backend::read_cells`] returned to as many cells.
    fn write_cells(&mut self, cells: &[u32], data: &[u8]) -> Result<()>;

    /// Fills `cells` with NaN in all layers.
    fn nan_fill(&mut self, cells: &[u32]) -> Result<()>;

    /// Forgets the recorded inputs of recurrent layers.
    fn clear_journal(&mut self) {}

    /// Records the inputs of recurrent layers at these rows of the next [`Backend::forward`].
    fn journal_rows(&mut self, _rows: &[u32]) {}

    /// Computes the recurrent states of some sequences again from the recorded inputs.
    fn replay(&mut self, _replays: &[Replay]) {}

    /// Returns the bytes of a recurrent state in all layers; 0 for a model or a device without.
    fn state_bytes(&self) -> usize {
        0
    }

    /// Returns the contents of a recurrent state: for each recurrent layer its numbers (f32).
    fn read_state(&self, _state: u32) -> Vec<u8> {
        Vec::new()
    }

    /// Writes what [`Backend::read_state`] returned to a state.
    fn write_state(&mut self, _state: u32, _data: &[u8]) {}

    /// Fills recurrent states with NaN in all layers.
    fn nan_fill_states(&mut self, _states: &[u32]) {}

    /// Fills every cell with NaN in all layers.
    fn nan_fill_all(&mut self) -> Result<()>;

    /// Replaces one tensor; called only with one rank. Errors, without side effects: a weight in quantized blocks.
    fn replace_weight(&mut self, id: WeightId, values: &Replacement<'_>) -> Result<()>;

    /// Returns the bytes of the packed weights.
    fn weight_bytes(&self) -> usize;

    /// Returns the bytes of one cell's keys and values in all layers.
    fn cell_bytes(&self) -> usize;

    /// Returns threads for work on the host while no pass runs on them.
    fn host_pool(&self) -> &Pool;

    /// Returns the threads that a step locks, because other contexts may use them too; None if it does not use shared
    /// threads.
    fn shared_pool(&self) -> Option<Arc<Pool>> {
        None
    }

    /// Returns the name of what computes: the instruction set or the GPU.
    fn name(&self) -> &str;

    /// Returns the most rows of a decode step; 0 without decode steps.
    fn max_step_rows(&self) -> usize {
        0
    }

    /// Returns whether a step can compute and sample the row of `id` at `position`. The row's cell is the last one of
    /// the sequence.
    fn can_step(&self, _kv: &KvCache, _id: SeqId, _position: i32) -> bool {
        false
    }

    /// Launches those rows of a step that are not in flight.
    fn launch_step(&mut self, _step: &StepBatch<'_>) -> Result<()> {
        Ok(())
    }

    /// Launches the next step of the launched rows: `next_cells` has the cell that the next decode would allocate for
    /// each.
    fn launch_next_step(&mut self, _next_cells: &[u32]) -> Result<()> {
        Ok(())
    }

    /// Waits for the launched rows and returns their outcomes.
    fn collect_step(&mut self) -> Result<Vec<Outcome>> {
        Ok(Vec::new())
    }

    /// Sets a sequence's sampling; `output` is the part of its completion that exists.
    fn set_sampling(&mut self, _id: SeqId, _spec: &SamplerSpec, _prompt: &[i32], _output: &[i32]) {}

    /// Appends `token` to the completion of a sequence.
    fn append_token(&mut self, _id: SeqId, _token: u32) {}

    /// Drops a sequence's row in flight, before something other than a step changes the sequence.
    fn invalidate_sequence(&mut self, _id: SeqId) {}

    /// Drops the step in flight, before any sequence may change.
    fn invalidate_all(&mut self) {}

    /// Drops rows in flight with a cell that was allocated again or lost its contents.
    fn invalidate_cells(&mut self, _is_invalid: &dyn Fn(u32) -> bool) {}

    /// Drops the row in flight and the sampling of a released sequence.
    fn release_sequence(&mut self, _id: SeqId) {}

    /// Returns, once, why steps run without a CUDA graph, if one could not be captured.
    fn take_graph_refusal(&mut self) -> Option<String> {
        None
    }
}
