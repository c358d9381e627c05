//! The ranks of a context: each has its part of the weights and of the cells' tensors, and threads to compute with.
//!
//! All belong to the context's thread, which is rank 0's; the other ranks' threads work only within [`Ranks::run`]. So
//! whatever does not compute (copies, exports, poison) goes over all ranks in a plain loop.

use super::ContextConfig;
use super::backend::Compute;
use crate::collective::Local;
use crate::dtype::KvDType;
use crate::error::{DeviceError, Error, Result, Unsupported};
use crate::faults::fault_point;
use crate::kv::cells::Copies;
use crate::kv::storage::Storage;
use crate::model::checkpoint::Checkpoint;
use crate::model::decoder::{Decoder, ForwardRows, HeadRoom, KvLayers, Workspace};
use crate::model::shard::Shard;
use crate::model::slot::Slot;
use crate::model::weights::{PackSettings, Replacement, Weights};
use crate::ops::dispatch::Kernels;
use crate::ops::{GreedyRoom, OpContext, rope_shift};
use crate::progress::Progress;
use crate::tensor::{KvLayer, KvLayerMut};
use crate::threads::{Pool, usable_cpus};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

/// One rank. Of a model that is not split, all of it.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) decoder: Decoder,
    pub(super) ops: OpContext,
    pub(super) work: Workspace,
    pub(super) storage: Storage,
    head: HeadRoom,
    greedy: GreedyRoom,
    /// What [`Rank::greedy`] found.
    ids: Vec<Option<u32>>,
}

/// The ranks in order, and their threads.
#[derive(Debug)]
pub(super) struct Ranks {
    pub(super) ranks: Vec<Rank>,
    /// A thread for each rank, the caller's for the first; None of a model that is not split.
    threads: Option<Pool>,
    /// The ranks have a group that works: not before the first run, nor after one that did not end well.
    in_group: bool,
}

/// A rank's layers as the forward pass sees them. Reaching one counts as progress, on rank 0.
struct Layers<'a> {
    storage: &'a mut Storage,
    progress: Option<&'a Progress>,
}

impl KvLayers for Layers<'_> {
    fn layer(&self, index: usize) -> KvLayer<'_> {
        self.storage.layer(index)
    }

    fn layer_mut(&mut self, index: usize) -> KvLayerMut<'_> {
        if let Some(progress) = self.progress {
            progress.layer();
            fault_point!(panic "decode.layer");
        }
        self.storage.layer_mut(index)
    }
}

impl Rank {
    fn new(
        decoder: Decoder,
        config: &ContextConfig,
        kernels: (Kernels, KvDType),
        pool: Arc<Pool>,
    ) -> Result<Self> {
        let (model, (kernels, kv_dtype)) = (decoder.config(), kernels);
        let ops = OpContext::new(kernels, pool, config.n_batch, Workspace::max_columns(model))?;
        let work = Workspace::new(model, config.n_batch)?;
        let storage = Storage::new(model.n_layers, config.n_cells, model.n_kv_heads, model.d_head, kv_dtype)?;
        let (head, greedy) = (HeadRoom::default(), GreedyRoom::default());
        Ok(Self { decoder, ops, work, storage, head, greedy, ids: Vec::new() })
    }

    /// As [`Decoder::forward`].
    pub(super) fn forward(&mut self, rows: &ForwardRows<'_>, progress: &Progress) -> Result<()> {
        let is_first = self.ops.collective.rank() == 0;
        if !is_first {
            fault_point!("decode.rank");
        }
        let mut layers = Layers { storage: &mut self.storage, progress: is_first.then_some(progress) };
        Ok(self.decoder.forward(&mut self.ops, rows, &mut layers, &mut self.work)?)
    }

    /// Leaves the final hidden states of `rows` of the last forward pass in the workspace. Of the first `n_logits` of
    /// them the logits go to `logits`, if it has room.
    pub(super) fn outputs(&mut self, rows: &[usize], n_logits: usize, logits: &mut [f32]) -> Result<()> {
        let hidden = self.decoder.final_hidden(&mut self.ops, rows, &mut self.work);
        if n_logits > 0 {
            let hidden = &hidden[..n_logits * self.decoder.config().d_model];
            self.decoder.logits(&mut self.ops, hidden, &mut self.head, logits)?;
        }
        Ok(())
    }

    /// As [`Decoder::greedy`], of `rows` of the last forward pass.
    fn greedy(&mut self, rows: &[usize]) -> &[Option<u32>] {
        self.ids.clear();
        if self.decoder.weights.screen().is_some() {
            let hidden = self.decoder.final_hidden(&mut self.ops, rows, &mut self.work);
            self.decoder.greedy(&mut self.ops, hidden, &mut self.greedy, &mut self.ids);
        }
        &self.ids
    }

    /// Does a job of [`Ranks::run`]. If it does not end well, the other ranks do not wait for this one.
    fn attempt(&mut self, logits: &mut [f32], job: &Job<'_>) -> Result<()> {
        let result = catch_unwind(AssertUnwindSafe(|| job(self, logits)));
        if !matches!(result, Ok(Ok(()))) {
            self.ops.collective.abort();
        }
        result.unwrap_or_else(|payload| resume_unwind(payload))
    }
}

/// A job for each rank, with room for logits or none.
type Job<'a> = dyn Fn(&mut Rank, &mut [f32]) -> Result<()> + Sync + 'a;

/// Each rank's part of the weights, packed with all threads of `pool`. `progress` tells how far it has come.
///
/// Errors: a model that cannot be split so; no memory.
pub(super) fn pack(
    checkpoint: &Checkpoint,
    config: &ContextConfig,
    pool: &Pool,
    progress: &Progress,
) -> Result<Vec<Decoder>> {
    progress.packing(checkpoint.info().packed_bytes.of(config.mode));
    let decoder = |rank| {
        let shard = Shard { rank, world: config.n_ranks };
        let model = shard.config(checkpoint.config())?;
        let mut weights = Weights::pack(checkpoint, PackSettings::new(config.mode, shard), pool, progress)?;
        if config.screens_head && config.n_ranks == 1 && model.has_plain_logits() {
            weights.screen_head(pool)?;
        }
        Ok(Decoder::new(model, weights))
    };
    let decoders = (0..config.n_ranks).map(decoder).collect::<Result<_>>()?;
    progress.all_packed();
    Ok(decoders)
}

impl Ranks {
    /// A rank for each decoder. The only one computes with `pool`; of several each has its share of as many threads.
    ///
    /// Errors: no memory, no threads.
    pub(super) fn new(
        decoders: Vec<Decoder>,
        config: &ContextConfig,
        kernels: (Kernels, KvDType),
        pool: Arc<Pool>,
    ) -> Result<Self> {
        let n_ranks = decoders.len();
        let n_threads = (config.n_threads / n_ranks).max(1);
        // Of several, each has a run of the CPUs, and its own thread the first of them.
        let cpus = if config.pins { usable_cpus() } else { Vec::new() };
        let cpus = if cpus.len() == n_ranks * n_threads { cpus } else { Vec::new() };
        let firsts: Vec<usize> = cpus.iter().copied().step_by(n_threads).collect();
        let mut runs = cpus.chunks(n_threads);
        let (mut whole, threads) =
            if n_ranks == 1 { (Some(pool), None) } else { (None, Some(Pool::on(n_ranks, &firsts)?)) };
        let rank = |decoder| {
            let cpus = runs.next().unwrap_or_default();
            let pool = whole.take().map_or_else(|| Pool::on(n_threads, cpus).map(Arc::new), Ok)?;
            Rank::new(decoder, config, kernels, pool)
        };
        let ranks = decoders.into_iter().map(rank).collect::<Result<_>>()?;
        Ok(Self { ranks, threads, in_group: false })
    }

    /// Does `job` on all ranks at once, each on its own thread. `logits` is rank 0's room, the others have none.
    ///
    /// Errors: the first rank's that did not fail because another had. A panic of any rank is raised here once all
    /// have ended.
    pub(super) fn run(&mut self, logits: &mut [f32], job: &Job<'_>) -> Result<()> {
        let Some(threads) = &self.threads else { return job(&mut self.ranks[0], logits) };
        if !std::mem::take(&mut self.in_group) {
            for (rank, end) in self.ranks.iter_mut().zip(Local::group(threads.n_threads())) {
                rank.ops.collective = Box::new(end);
            }
        }
        let mut jobs: Vec<(&mut Rank, &mut [f32], Result<()>)> =
            self.ranks.iter_mut().map(|rank| (rank, &mut [][..], Ok(()))).collect();
        jobs[0].1 = logits;
        threads.run_chunks(&mut jobs, 1, &|_, jobs| {
            for (rank, logits, result) in jobs {
                *result = rank.attempt(logits, job);
            }
        });
        let errors = jobs.into_iter().filter_map(|(.., result)| result.err());
        let first = errors.min_by_key(|e| matches!(e, Error::Device(DeviceError::RankLost { .. })));
        self.in_group = first.is_none();
        first.map_or(Ok(()), Err)
    }

    /// The threads that a step is computed with, unless each rank has its own.
    pub(super) fn shared_pool(&self) -> Option<Arc<Pool>> {
        self.threads.is_none().then(|| Arc::clone(&self.ranks[0].ops.pool))
    }

    fn storages(&mut self) -> impl Iterator<Item = &mut Storage> {
        self.ranks.iter_mut().map(|rank| &mut rank.storage)
    }
}

impl Compute for Ranks {
    fn forward(&mut self, rows: &ForwardRows<'_>, progress: &Progress) -> Result<()> {
        self.run(&mut [], &|rank, _| rank.forward(rows, progress))
    }

    fn outputs(&mut self, rows: &[usize], n_logits: usize, logits: &mut [f32]) -> Result<()> {
        self.run(logits, &|rank, logits| rank.outputs(rows, n_logits, logits))
    }

    fn greedy(&mut self, rows: &[usize]) -> Result<&[Option<u32>]> {
        match &mut self.ranks[..] {
            [rank] => Ok(rank.greedy(rows)),
            _ => Ok(&[]),
        }
    }

    fn hidden(&mut self, n_rows: usize) -> Result<&[f32]> {
        Ok(self.ranks[0].work.hidden(n_rows))
    }

    fn copy(&mut self, copies: &Copies) -> Result<()> {
        self.storages().for_each(|storage| storage.copy(copies));
        Ok(())
    }

    fn shift(&mut self, cells: &[u32], delta: i32) -> Result<()> {
        for Rank { decoder, ops, storage, .. } in &mut self.ranks {
            for layer in 0..decoder.config().n_layers {
                rope_shift(ops, storage.layer_mut(layer), cells, delta, decoder.rope(layer));
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

    fn poison(&mut self, cells: &[u32]) -> Result<()> {
        self.storages().for_each(|storage| storage.poison(cells));
        Ok(())
    }

    fn poison_all(&mut self) -> Result<()> {
        self.storages().for_each(Storage::poison_all);
        Ok(())
    }

    fn replace(&mut self, slot: Slot, values: &Replacement<'_>) -> Result<()> {
        match &mut self.ranks[..] {
            [rank] => rank.decoder.weights.replace(&rank.ops.pool, slot, values),
            _ => {
                let (name, stored) = (values.name.to_owned(), "parts on several ranks");
                Err(Unsupported::ReplaceWeight { name, stored, given: "a whole tensor" }.into())
            }
        }
    }

    fn weight_bytes(&self) -> usize {
        self.ranks.iter().map(|rank| rank.decoder.weights.n_bytes()).sum()
    }

    fn cell_bytes(&self) -> usize {
        self.ranks.iter().map(|rank| rank.storage.cell_bytes()).sum()
    }

    fn pool(&self) -> &Pool {
        &self.ranks[0].ops.pool
    }

    fn name(&self) -> &str {
        self.ranks[0].ops.kernels.isa().name()
    }
}
