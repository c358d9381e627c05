//! The CPU ranks of a context. Each has compute threads and its part of the weights and of the cells' tensors.
//!
//! The context's thread owns all ranks and runs rank 0; the threads of the other ranks work only within
//! [`CpuBackend::run`]. Work other than compute (copies, exports, NaN fill) is a plain loop over all ranks.

use super::ContextConfig;
use super::backend::Backend;
use crate::arch::weight_id::WeightId;
use crate::collective::{LocalRank, root_cause, run_or_abort};
use crate::dtype::KvDType;
use crate::error::Result;
use crate::faults::fault_point;
use crate::forward::decoder::{Decoder, ForwardRows, HeadScratch, KvLayers, Workspace};
use crate::forward::journal::Journal;
use crate::forward::replay::{Replay, ReplayMemory};
use crate::forward::shard::Shard;
use crate::forward::weights::{PackSettings, Replacement, Weights};
use crate::kv::{Copies, StateStorage, Storage, n_states};
use crate::load::checkpoint::Checkpoint;
use crate::ops::dispatch::Kernels;
use crate::ops::{KvHeads, OpContext, PrunedArgmaxScratch, rope_shift};
use crate::progress::Progress;
use crate::tensor::{KvLayer, KvLayerMut};
use crate::threads::{Pool, usable_cpus};
use std::sync::Arc;

/// One rank: a part of the model, or the whole model with one rank.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) decoder: Decoder,
    pub(super) ops: OpContext,
    pub(super) work: Workspace,
    pub(super) storage: Storage,
    states: StateStorage,
    journal: Journal,
    /// Rows of a pass.
    n_batch: usize,
    head: HeadScratch,
    pruned_argmax: PrunedArgmaxScratch,
    /// The result of the last [`Rank::pruned_argmax`].
    ids: Vec<Option<u32>>,
}

/// The ranks in order, and their threads.
#[derive(Debug)]
pub(crate) struct CpuBackend {
    pub(super) ranks: Vec<Rank>,
    /// A thread for each rank, the caller's for the first; None with one rank.
    threads: Option<Pool>,
    /// The ranks share a working collective: false before the first run and after a failed one.
    in_group: bool,
}

/// A rank's layers as the forward pass uses them. On rank 0 each layer counts as progress.
struct Layers<'a> {
    storage: &'a mut Storage,
    states: &'a mut StateStorage,
    journal: &'a mut Journal,
    progress: Option<&'a Progress>,
}

impl KvLayers for Layers<'_> {
    fn begin_layer(&mut self) {
        if let Some(progress) = self.progress {
            progress.begin_layer();
            fault_point!(panic "decode.layer");
        }
    }

    fn states_mut(&mut self, index: usize) -> &mut [f32] {
        self.states.layer_mut(index)
    }

    fn journal(&mut self) -> Option<&mut Journal> {
        Some(self.journal)
    }

    fn layer(&self, index: usize) -> KvLayer<'_> {
        self.storage.layer(index)
    }

    fn layer_mut(&mut self, index: usize) -> KvLayerMut<'_> {
        self.storage.layer_mut(index)
    }
}

impl Rank {
    fn new(
        decoder: Decoder,
        config: &ContextConfig,
        kernels: Kernels,
        kv_dtype: KvDType,
        pool: Arc<Pool>,
    ) -> Result<Self> {
        let model = decoder.config();
        let ops = OpContext::new(kernels, pool, config.n_batch, Workspace::max_columns(model))?;
        let mut work = Workspace::new(model, config.n_batch)?;
        if config.max_loras > 0 {
            work = work.with_lora(config.n_batch, config.max_lora_rank)?;
        }
        let heads: Vec<KvHeads> = model.kv_layers().map(|index| model.kv_heads(index)).collect();
        let storage = Storage::new(&heads, config.n_cells, kv_dtype)?;
        let state_len = model.recurrent_layer.map_or(0, |layer| layer.state_len());
        let n_states = n_states(config.n_seq_max, config.n_states_kept);
        let states = StateStorage::new(model.n_recurrent(), n_states, state_len)?;
        let (head, pruned_argmax) = (HeadScratch::default(), PrunedArgmaxScratch::default());
        let (journal, n_batch) = (Journal::new(model.n_recurrent()), config.n_batch);
        let ids = Vec::new();
        Ok(Self { decoder, ops, work, storage, states, journal, n_batch, head, pruned_argmax, ids })
    }

    /// Runs [`Decoder::forward`] on this rank.
    pub(super) fn forward(&mut self, rows: &ForwardRows<'_>, progress: &Progress) -> Result<()> {
        let is_first = self.ops.collective.rank() == 0;
        if !is_first {
            fault_point!("decode.rank");
        }
        let (storage, states, journal) = (&mut self.storage, &mut self.states, &mut self.journal);
        let mut layers = Layers { storage, states, journal, progress: is_first.then_some(progress) };
        Ok(self.decoder.forward(&mut self.ops, rows, &mut layers, &mut self.work)?)
    }

    /// Computes the final hidden states of `rows` of the last forward pass into the workspace, and the logits of the
    /// first `n_logits` of them into `logits`. Only rank 0 has a buffer for logits.
    pub(super) fn outputs(&mut self, rows: &[usize], n_logits: usize, logits: &mut [f32]) -> Result<()> {
        let hidden = self.decoder.final_hidden(&mut self.ops, rows, &mut self.work);
        if n_logits > 0 {
            let hidden = &hidden[..n_logits * self.decoder.config().d_model];
            self.decoder.logits(&mut self.ops, hidden, &mut self.head, logits)?;
        }
        Ok(())
    }

    /// Runs [`Decoder::pruned_argmax`] on `rows` of the last forward pass.
    fn pruned_argmax(&mut self, rows: &[usize]) -> &[Option<u32>] {
        self.ids.clear();
        if self.decoder.weights.argmax_bounds().is_some() {
            let hidden = self.decoder.final_hidden(&mut self.ops, rows, &mut self.work);
            self.decoder.pruned_argmax(&mut self.ops, hidden, &mut self.pruned_argmax, &mut self.ids);
        }
        &self.ids
    }
}

/// A job for each rank, with its buffer for logits (empty except on rank 0).
type Job<'a> = dyn Fn(&mut Rank, &mut [f32]) -> Result<()> + Sync + 'a;

/// Packs each rank's part of the weights with all threads of `pool`. `progress` counts the packed bytes.
///
/// Errors: a model that cannot be split over these ranks; no memory.
pub(super) fn pack(
    checkpoint: &Checkpoint,
    config: &ContextConfig,
    pool: &Pool,
    progress: &Progress,
) -> Result<Vec<Decoder>> {
    progress.start_packing(checkpoint.info().packed_bytes.of(config.mode));
    let decoder = |rank| {
        let shard = Shard { rank, world: config.n_ranks };
        let model = shard.config(checkpoint.config())?;
        let mut weights = Weights::pack(checkpoint, PackSettings::new(config.mode, shard), pool, progress)?;
        if config.prune_argmax && config.n_ranks == 1 && model.has_plain_logits() {
            weights.bound_argmax(pool)?;
        }
        Ok(Decoder::new(model, weights))
    };
    let decoders = (0..config.n_ranks).map(decoder).collect::<Result<_>>()?;
    progress.finish_packing();
    Ok(decoders)
}

impl CpuBackend {
    /// Creates a rank for each decoder. A single rank computes with `pool`; several ranks divide the same number of
    /// threads.
    ///
    /// Errors: no memory, no threads.
    pub(super) fn new(
        decoders: Vec<Decoder>,
        config: &ContextConfig,
        kernels: Kernels,
        kv_dtype: KvDType,
        pool: Arc<Pool>,
    ) -> Result<Self> {
        let n_ranks = decoders.len();
        let n_threads = (config.n_threads / n_ranks).max(1);
        // With several ranks, each has a contiguous range of CPUs; its calling thread runs on the first of them.
        let cpus = if config.pins { usable_cpus() } else { Vec::new() };
        let cpus = if cpus.len() == n_ranks * n_threads { cpus } else { Vec::new() };
        let firsts: Vec<usize> = cpus.iter().copied().step_by(n_threads).collect();
        let mut cpu_ranges = cpus.chunks(n_threads);
        let (mut whole, threads) =
            if n_ranks == 1 { (Some(pool), None) } else { (None, Some(Pool::on(n_ranks, &firsts)?)) };
        let rank = |decoder| {
            let cpus = cpu_ranges.next().unwrap_or_default();
            let pool = whole.take().map_or_else(|| Pool::on(n_threads, cpus).map(Arc::new), Ok)?;
            Rank::new(decoder, config, kernels, kv_dtype, pool)
        };
        let ranks = decoders.into_iter().map(rank).collect::<Result<_>>()?;
        Ok(Self { ranks, threads, in_group: false })
    }

    /// Runs `job` on all ranks at once, each on its own thread. `logits` is the buffer of rank 0; the others have none.
    ///
    /// Errors: the error of the first rank that did not fail because of another rank. A panic of any rank is propagated
    /// once all ranks have ended.
    pub(super) fn run(&mut self, logits: &mut [f32], job: &Job<'_>) -> Result<()> {
        let Some(threads) = &self.threads else { return job(&mut self.ranks[0], logits) };
        if !std::mem::take(&mut self.in_group) {
            for (rank, collective) in self.ranks.iter_mut().zip(LocalRank::group(threads.n_threads())) {
                rank.ops.collective = Box::new(collective);
            }
        }
        let mut jobs: Vec<(&mut Rank, &mut [f32], Result<()>)> =
            self.ranks.iter_mut().map(|rank| (rank, &mut [][..], Ok(()))).collect();
        jobs[0].1 = logits;
        threads.run_chunks(&mut jobs, 1, &|_, jobs| {
            for (rank, logits, result) in jobs {
                *result = run_or_abort(*rank, |rank| job(rank, logits), |rank| rank.ops.collective.abort());
            }
        });
        let error = root_cause(jobs.into_iter().filter_map(|(.., result)| result.err()));
        self.in_group = error.is_none();
        error.map_or(Ok(()), Err)
    }

    fn storages(&mut self) -> impl Iterator<Item = &mut Storage> {
        self.ranks.iter_mut().map(|rank| &mut rank.storage)
    }
}

impl Backend for CpuBackend {
    fn forward(&mut self, rows: &ForwardRows<'_>, progress: &Progress) -> Result<()> {
        self.run(&mut [], &|rank, _| rank.forward(rows, progress))
    }

    fn compute_outputs(&mut self, rows: &[usize], n_logits: usize, logits: &mut [f32]) -> Result<()> {
        self.run(logits, &|rank, logits| rank.outputs(rows, n_logits, logits))
    }

    fn pruned_argmax(&mut self, rows: &[usize]) -> Result<&[Option<u32>]> {
        match &mut self.ranks[..] {
            [rank] => Ok(rank.pruned_argmax(rows)),
            _ => Ok(&[]),
        }
    }

    fn hidden_states(&mut self, n_rows: usize) -> Result<&[f32]> {
        Ok(self.ranks[0].work.hidden(n_rows))
    }

    fn copy_cells(&mut self, copies: &Copies) -> Result<()> {
        self.storages().for_each(|storage| storage.copy(copies));
        Ok(())
    }

    fn shift_cells(&mut self, cells: &[u32], delta: i32) -> Result<()> {
        for Rank { decoder, ops, storage, .. } in &mut self.ranks {
            for (number, layer) in decoder.config().kv_layers().enumerate() {
                if let Some(rope) = decoder.rope(layer) {
                    rope_shift(ops, storage.layer_mut(number), cells, delta, rope);
                }
            }
        }
        Ok(())
    }

    fn read_cells(&self, cells: &[u32]) -> Result<Vec<u8>> {
        Ok(self.ranks.iter().flat_map(|rank| rank.storage.read_cells(cells)).collect())
    }

    fn write_cells(&mut self, cells: &[u32], data: &[u8]) -> Result<()> {
        let of_rank = data.len() / self.ranks.len();
        for (storage, data) in self.storages().zip(data.chunks_exact(of_rank)) {
            storage.write_cells(cells, data);
        }
        Ok(())
    }

    fn nan_fill(&mut self, cells: &[u32]) -> Result<()> {
        self.storages().for_each(|storage| storage.nan_fill(cells));
        Ok(())
    }

    // A model with recurrent layers has one rank.
    fn clear_journal(&mut self) {
        self.ranks[0].journal.clear();
    }

    fn journal_rows(&mut self, rows: &[u32]) {
        self.ranks[0].journal.choose(rows);
    }

    fn replay(&mut self, replays: &[Replay]) {
        let Rank { decoder, ops, work, storage, states, journal, n_batch, .. } = &mut self.ranks[0];
        let mut unused = Journal::default();
        let mut layers = Layers { storage, states, journal: &mut unused, progress: None };
        let memory = ReplayMemory { kv: &mut layers, work, n_rows: *n_batch };
        decoder.replay(ops, replays, journal, memory);
    }

    fn state_bytes(&self) -> usize {
        self.ranks[0].states.state_bytes()
    }

    fn read_state(&self, state: u32) -> Vec<u8> {
        self.ranks[0].states.read(state)
    }

    fn write_state(&mut self, state: u32, data: &[u8]) {
        self.ranks[0].states.write(state, data);
    }

    fn nan_fill_states(&mut self, states: &[u32]) {
        self.ranks.iter_mut().for_each(|rank| rank.states.nan_fill(states));
    }

    fn nan_fill_all(&mut self) -> Result<()> {
        self.storages().for_each(Storage::nan_fill_all);
        Ok(())
    }

    fn replace_weight(&mut self, id: WeightId, values: &Replacement<'_>) -> Result<()> {
        let [rank] = &mut self.ranks[..] else { unreachable!("the context rejects this with several ranks") };
        rank.decoder.weights.replace(&rank.ops.pool, id, values)
    }

    fn weight_bytes(&self) -> usize {
        self.ranks.iter().map(|rank| rank.decoder.weights.n_bytes()).sum()
    }

    fn cell_bytes(&self) -> usize {
        self.ranks.iter().map(|rank| rank.storage.cell_bytes()).sum()
    }

    /// Each rank of a split model has its own threads.
    fn shared_pool(&self) -> Option<Arc<Pool>> {
        self.threads.is_none().then(|| Arc::clone(&self.ranks[0].ops.pool))
    }

    fn host_pool(&self) -> &Pool {
        &self.ranks[0].ops.pool
    }

    fn name(&self) -> &str {
        self.ranks[0].ops.kernels.isa().name()
    }
}
