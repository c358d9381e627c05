//! What a context computes with: the one place where CPU and GPU part.

#[cfg(feature = "cuda")]
use super::cuda_ranks::CudaRanks;
#[cfg(feature = "cuda")]
use super::cuda_steps::SteppedGpu;
use super::ranks::Ranks;
use crate::batch::Batch;
use crate::error::Result;
use crate::kv::cells::{Cells, Copies};
use crate::model::decoder::ForwardRows;
use crate::model::slot::Slot;
use crate::model::weights::Replacement;
use crate::progress::Progress;
use crate::sample::{Outcome, SamplerSpec};
use crate::seq::SeqId;
use crate::threads::Pool;
use std::fmt::Debug;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Weights and the cells' contents, wherever they are.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a context has one, and moves it once")]
pub(super) enum Backend {
    Cpu(Ranks),
    #[cfg(feature = "cuda")]
    Cuda(SteppedGpu),
    #[cfg(feature = "cuda")]
    CudaRanks(CudaRanks),
}

/// What a context asks of a backend. Cells have the books' numbers. After a [`crate::error::DeviceError`] what the
/// call was to change is not known.
pub(super) trait Compute: Debug {
    /// Runs all layers for `rows`, at most `n_batch`; each layer ticks `progress`.
    fn forward(&mut self, rows: &ForwardRows<'_>, progress: &Progress) -> Result<()>;

    /// Takes the final hidden states of `rows` of the last [`Compute::forward`], at most
    /// [`super::sampling::LOGITS_ROWS`]. The logits `[n, vocab_size]` of as many of them as fit `logits`, from the
    /// first on, go there.
    fn outputs(&mut self, rows: &[usize], n_logits: usize, logits: &mut [f32]) -> Result<()>;

    /// As [`Compute::outputs`], where of `rows` the largest logit alone is wanted: its id, the lowest on ties, if every
    /// logit is finite and it was found without computing all. Empty if this backend always computes all.
    fn greedy(&mut self, _rows: &[usize]) -> Result<&[Option<u32>]> {
        Ok(&[])
    }

    /// What the last [`Compute::outputs`] took: `[rows.len(), d_model]`, the first `n_rows`.
    fn hidden(&mut self, n_rows: usize) -> Result<&[f32]>;

    /// Copies keys and values of `copies.from` to `copies.to`, in all layers, bit for bit.
    fn copy(&mut self, copies: &Copies) -> Result<()>;

    /// Rotates the keys of `cells`, none twice, by `delta` positions.
    fn shift(&mut self, cells: &[u32], delta: i32) -> Result<()>;

    /// The contents of `cells`: for each layer their keys `[n][n_kv_heads][d_head]`, then their values likewise. Of
    /// several ranks: all this for the heads of each in turn.
    fn read_cells(&self, cells: &[u32]) -> Result<Vec<u8>>;

    /// Puts what [`Compute::read_cells`] gave into as many cells.
    fn write_cells(&mut self, cells: &[u32], data: &[u8]) -> Result<()>;

    /// Fills `cells` with NaN in all layers.
    fn poison(&mut self, cells: &[u32]) -> Result<()>;

    /// As [`Compute::poison`] for every cell.
    fn poison_all(&mut self) -> Result<()>;

    /// Replaces one tensor. Errors: a slot that is held in blocks or in parts; nothing has changed then.
    fn replace(&mut self, slot: Slot, values: &Replacement<'_>) -> Result<()>;

    /// Bytes of the packed weights.
    fn weight_bytes(&self) -> usize;

    /// Bytes of one cell's keys and values in all layers.
    fn cell_bytes(&self) -> usize;

    /// Threads for work of the host, while nothing is computed on them.
    fn pool(&self) -> &Pool;

    /// What computes, in words: the instruction set, or the GPU's name.
    fn name(&self) -> &str;
}

/// Decode steps whose sequences' state stays where they are computed and sampled, and which may be under way before a
/// decode asks for them. To the books the cells of rows under way are free.
///
/// A decode is [`DecodeSteps::launch`], its other rows' passes, [`DecodeSteps::launch_ahead`],
/// [`DecodeSteps::collect`]. It may fail in between: the next one finds what is not as its rows want it.
pub(super) trait DecodeSteps {
    /// The most rows that a step has.
    fn n_rows(&self) -> usize;

    /// Whether a step can compute and sample the row of `id` at `position`, whose cell is its last one.
    fn takes(&self, cells: &Cells, id: SeqId, position: i32) -> bool;

    /// Starts what of some rows of `batch` is not under way, each of one sequence that is in no other row: `rows` has
    /// the cell of each row of the batch, then the indices of the rows to start. `masks` are by batch row.
    fn launch(
        &mut self,
        cells: &Cells,
        batch: &Batch,
        rows: (&[u32], &[usize]),
        masks: Option<&[Option<&[u32]>]>,
    ) -> Result<()>;

    /// Starts one more step of the launched rows: `next_cells` has what the next decode would give each.
    fn launch_ahead(&mut self, next_cells: &[u32]) -> Result<()>;

    /// Waits for the launched rows' outcomes.
    fn collect(&mut self) -> Result<Vec<Outcome>>;

    /// What a sequence asks of sampling, with its prompt and what of its answer there is.
    fn set_sampling(&mut self, id: SeqId, spec: &SamplerSpec, tokens: (&[i32], &[i32]));

    /// `token` now belongs to the answer of a sequence.
    fn accept(&mut self, id: SeqId, token: u32);

    /// A sequence is about to change but by a step: its row under way is lost.
    fn forget(&mut self, id: SeqId);

    /// A sequence is released, and its sampling with it.
    fn release(&mut self, id: SeqId);

    /// All sequences may change.
    fn forget_all(&mut self);

    /// Rows under way whose cells are others' now, or lost their contents, are lost.
    fn forget_taken(&mut self, is_taken: &dyn Fn(u32) -> bool);

    /// Why steps are launched kernel by kernel where they should be one launch, if they are; told once.
    fn take_graph_refusal(&mut self) -> Option<String>;
}

impl Backend {
    /// Threads that a step keeps to itself while it lasts, as other contexts may have them too; None where it does not
    /// compute on them.
    pub(super) fn shared_pool(&self) -> Option<Arc<Pool>> {
        match self {
            Backend::Cpu(ranks) => ranks.shared_pool(),
            #[cfg(feature = "cuda")]
            _ => None,
        }
    }

    /// Its decode steps; None if every row is a pass's and the host's to sample.
    pub(super) fn steps(&mut self) -> Option<&mut dyn DecodeSteps> {
        match self {
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => Some(cuda),
            _ => None,
        }
    }
}

impl Deref for Backend {
    type Target = dyn Compute;

    fn deref(&self) -> &Self::Target {
        match self {
            Backend::Cpu(ranks) => ranks,
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => &cuda.gpu,
            #[cfg(feature = "cuda")]
            Backend::CudaRanks(ranks) => ranks,
        }
    }
}

impl DerefMut for Backend {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Backend::Cpu(ranks) => ranks,
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => &mut cuda.gpu,
            #[cfg(feature = "cuda")]
            Backend::CudaRanks(ranks) => ranks,
        }
    }
}
