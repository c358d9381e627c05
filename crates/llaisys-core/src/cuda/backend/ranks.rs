//! A context whose model is split over several GPUs, one per rank. Each GPU is always used by the same thread; the
//! context's thread is that of rank 0. All ranks do the same work at the same time, and exchange data through their
//! devices.

use super::{CudaBackend, Gpu, Share, check_computed};
use crate::arch::weight_id::WeightId;
use crate::collective::{root_cause, run_or_abort};
use crate::context::backend::Backend;
use crate::context::{Context, ContextConfig};
use crate::error::Result;
use crate::forward::decoder::ForwardRows;
use crate::forward::weights::Replacement;
use crate::kv::Copies;
use crate::load::checkpoint::Checkpoint;
use crate::progress::Progress;
use crate::threads::Pool;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The ranks in order, and their threads.
#[derive(Debug)]
struct CudaRanks {
    ranks: Vec<Mutex<CudaBackend>>,
    threads: Pool,
    /// For work on the host.
    pool: Pool,
    name: String,
}

impl Context {
    /// As [`Context::on_gpu`], with one GPU for each of [`ContextConfig::n_ranks`] ranks, two or more. `open(rank)` is
    /// called on all ranks' threads at once, each of which will use its GPU. It returns a device that has joined the
    /// others.
    ///
    /// Errors: as [`Context::on_gpu`]; a model that cannot be split so; that of the first rank whose GPU cannot be
    /// opened.
    pub fn on_gpus(
        mut checkpoint: Checkpoint,
        mut config: ContextConfig,
        open: &(dyn Fn(usize) -> Result<Gpu> + Sync),
    ) -> Result<Self> {
        check_computed(&config, &checkpoint)?;
        checkpoint.choose_rope(config.max_model_len);
        let (n_ranks, threads) = (config.n_ranks, Pool::new(config.n_ranks)?);
        let n_threads = (config.n_threads / n_ranks).max(1);
        let loaded = on_all(&threads, &|rank| {
            let Gpu { device, memory_share, .. } = open(rank)?;
            CudaBackend::load(device, &checkpoint, &config, Share { memory: memory_share, n_threads })
        })?;
        let name = format!("{n_ranks} x {}", loaded[0].name());
        let pool = Pool::new(config.n_threads)?;
        config.n_cells = loaded[0].n_cells(config.n_streams);
        let fingerprint = loaded[0].fingerprint(&checkpoint, &config)?;
        let ranks = loaded.into_iter().map(Mutex::new).collect();
        let backend = Box::new(CudaRanks { ranks, threads, pool, name });
        Self::assemble(checkpoint, config, backend, fingerprint)
    }
}

/// Runs `job` for each rank on the rank's thread, and returns the results in the order of the ranks.
///
/// Errors: the first rank's that did not fail because another rank failed. A panic of any rank is raised here when all
/// have ended.
fn on_all<T: Send>(threads: &Pool, job: &(dyn Fn(usize) -> Result<T> + Sync)) -> Result<Vec<T>> {
    let results: Vec<Mutex<Option<Result<T>>>> = (0..threads.n_threads()).map(|_| Mutex::default()).collect();
    threads.run(&|rank| *lock(&results[rank]) = Some(job(rank)));
    let results =
        results.into_iter().map(|result| result.into_inner().unwrap_or_else(PoisonError::into_inner));
    let (given, errors): (Vec<_>, Vec<_>) =
        results.map(|result| result.expect("every thread has run")).partition(Result::is_ok);
    match root_cause(errors.into_iter().filter_map(Result::err)) {
        Some(error) => Err(error),
        None => Ok(given.into_iter().flatten().collect()),
    }
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CudaRanks {
    /// Runs `job` with each rank's backend, on the rank's thread ([`on_all`]). A rank whose job fails ends the
    /// exchanges, so that no other rank waits for it.
    fn on_all<T: Send>(&self, job: &(dyn Fn(usize, &mut CudaBackend) -> Result<T> + Sync)) -> Result<Vec<T>> {
        on_all(&self.threads, &|rank| {
            let mut backend = lock(&self.ranks[rank]);
            run_or_abort(&mut *backend, |backend| job(rank, backend), CudaBackend::abort)
        })
    }

    /// Returns the sum of `of` over the ranks; `of` does not use the device.
    fn sum(&self, of: impl Fn(&CudaBackend) -> usize) -> usize {
        self.ranks.iter().map(|rank| of(&lock(rank))).sum()
    }

    /// Returns the backend of rank 0, whose thread is the context's.
    fn first(&mut self) -> &mut CudaBackend {
        self.ranks[0].get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for CudaRanks {
    /// Counts the layers of rank 0 as progress.
    fn forward(&mut self, rows: &ForwardRows<'_>, progress: &Progress) -> Result<()> {
        let others = Progress::default();
        self.on_all(&|rank, backend| backend.forward(rows, if rank == 0 { progress } else { &others }))?;
        Ok(())
    }

    /// Computes all logits on every rank, and downloads those of rank 0.
    fn compute_outputs(&mut self, rows: &[usize], n_logits: usize, logits: &mut [f32]) -> Result<()> {
        let logits = Mutex::new(logits);
        self.on_all(&|rank, backend| match rank {
            0 => backend.compute_outputs(rows, n_logits, &mut lock(&logits)),
            _ => backend.compute_outputs(rows, n_logits, &mut []),
        })?;
        Ok(())
    }

    fn hidden_states(&mut self, n_rows: usize) -> Result<&[f32]> {
        self.first().hidden_states(n_rows)
    }

    fn copy_cells(&mut self, copies: &Copies) -> Result<()> {
        self.on_all(&|_, backend| backend.copy_cells(copies)).map(|_| ())
    }

    fn shift_cells(&mut self, cells: &[u32], delta: i32) -> Result<()> {
        self.on_all(&|_, backend| backend.shift_cells(cells, delta)).map(|_| ())
    }

    fn read_cells(&self, cells: &[u32]) -> Result<Vec<u8>> {
        Ok(self.on_all(&|_, backend| backend.read_cells(cells))?.concat())
    }

    fn write_cells(&mut self, cells: &[u32], data: &[u8]) -> Result<()> {
        let of_rank = data.len() / self.ranks.len();
        let data = |rank| &data[rank * of_rank..(rank + 1) * of_rank];
        self.on_all(&|rank, backend| backend.write_cells(cells, data(rank))).map(|_| ())
    }

    fn nan_fill(&mut self, cells: &[u32]) -> Result<()> {
        self.on_all(&|_, backend| backend.nan_fill(cells)).map(|_| ())
    }

    fn nan_fill_all(&mut self) -> Result<()> {
        self.on_all(&|_, backend| backend.nan_fill_all()).map(|_| ())
    }

    fn replace_weight(&mut self, _id: WeightId, _values: &Replacement<'_>) -> Result<()> {
        unreachable!("the context rejects this with several ranks")
    }

    fn weight_bytes(&self) -> usize {
        self.sum(CudaBackend::weight_bytes)
    }

    fn cell_bytes(&self) -> usize {
        self.sum(CudaBackend::cell_bytes)
    }

    fn host_pool(&self) -> &Pool {
        &self.pool
    }

    fn name(&self) -> &str {
        &self.name
    }
}
