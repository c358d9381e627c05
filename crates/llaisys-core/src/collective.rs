//! Collective operations between the ranks of a tensor-parallel model: sums, gathers and broadcasts of f32.
//!
//! Every rank calls the same operations in the same order with slices of the same length. Results have the same bits on
//! every rank and in every run, because sums add the ranks in order.

use crate::error::{DeviceError, Error, Result};
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, RwLockReadGuard};

/// One rank of a group. All three operations return [`DeviceError::RankLost`] if another rank has ended in the middle.
/// The contents of the slices are then undefined, and the group must not be used again.
pub trait Collective: Send + Debug {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// Replaces each element of `buf` by its sum over all ranks.
    fn all_reduce_sum(&mut self, buf: &mut [f32]) -> Result<(), DeviceError>;

    /// Concatenates the `src` of all ranks, `[n]` each, into `dst`, `[world, n]`.
    fn all_gather(&mut self, src: &[f32], dst: &mut [f32]) -> Result<(), DeviceError>;

    /// Copies the `buf` of rank `root` to every other rank.
    fn broadcast(&mut self, buf: &mut [f32], root: usize) -> Result<(), DeviceError>;

    /// Ends the group: ranks that wait for this one, now or later, get an error.
    fn abort(&self);
}

/// Runs `job` on one rank. If it fails or panics, calls `abort`, so that the other ranks stop waiting for this one. The
/// panic is then propagated.
pub(crate) fn run_or_abort<R, T>(
    rank: &mut R,
    job: impl FnOnce(&mut R) -> Result<T>,
    abort: impl FnOnce(&R),
) -> Result<T> {
    let result = catch_unwind(AssertUnwindSafe(|| job(rank)));
    if !matches!(result, Ok(Ok(_))) {
        abort(rank);
    }
    result.unwrap_or_else(|payload| resume_unwind(payload))
}

/// Returns, of the errors of the ranks in their order, the first one that another rank's failure did not cause.
pub(crate) fn root_cause(errors: impl IntoIterator<Item = Error>) -> Option<Error> {
    let is_consequence = |error: &Error| matches!(error, Error::Device(DeviceError::RankLost { .. }));
    errors.into_iter().min_by_key(is_consequence)
}

/// The only rank of a group of one.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleRank;

impl Collective for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn all_reduce_sum(&mut self, _buf: &mut [f32]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn all_gather(&mut self, src: &[f32], dst: &mut [f32]) -> Result<(), DeviceError> {
        dst.copy_from_slice(src);
        Ok(())
    }

    fn broadcast(&mut self, _buf: &mut [f32], root: usize) -> Result<(), DeviceError> {
        assert_eq!(root, 0, "the root must be a rank");
        Ok(())
    }

    fn abort(&self) {}
}

/// A rank that is a thread of this process. Dropping it ends its group, so no rank waits for a thread that panicked.
#[derive(Debug)]
pub struct LocalRank {
    rank: usize,
    shared: Arc<Shared>,
    /// Index of the set of messages that the next exchange uses.
    set: usize,
}

#[derive(Debug)]
struct Shared {
    /// The message of each rank, `[2][world]`. Exchanges alternate between the two sets: a rank that writes to one set
    /// has passed the barrier of the exchange with the other set, which every rank reaches only after reading the
    /// first.
    messages: [Vec<RwLock<Vec<f32>>>; 2],
    barrier: Barrier,
}

impl LocalRank {
    /// The `world >= 1` ranks of a new group, in order.
    pub fn group(world: usize) -> Vec<Self> {
        let set = || (0..world).map(|_| RwLock::default()).collect();
        let shared = Arc::new(Shared { messages: [set(), set()], barrier: Barrier::new(world) });
        (0..world).map(|rank| Self { rank, shared: Arc::clone(&shared), set: 0 }).collect()
    }

    /// True after a rank has ended.
    pub fn is_aborted(&self) -> bool {
        self.shared.barrier.aborted.load(Ordering::Acquire)
    }

    /// The error of this rank after another rank has ended.
    pub fn lost(&self) -> DeviceError {
        DeviceError::RankLost { rank: self.rank, world: self.world() }
    }

    /// Publishes the message of this rank, if there is one, and waits until every rank has called this.
    fn exchange(&mut self, own: Option<&[f32]>) -> Result<Messages<'_>, DeviceError> {
        let messages = &self.shared.messages[self.set];
        self.set ^= 1;
        if let Some(own) = own {
            let mut message = messages[self.rank].write().unwrap_or_else(PoisonError::into_inner);
            message.clear();
            message.extend_from_slice(own);
        }
        let lost = self.lost();
        self.shared.barrier.wait().map_err(|Aborted| lost)?;
        Ok(Messages(messages))
    }
}

/// The messages of an exchange, by rank.
struct Messages<'a>(&'a [RwLock<Vec<f32>>]);

impl Messages<'_> {
    /// The `n` elements that one rank sent. Panics if it sent another number, which is a bug.
    fn message_of_rank(&self, rank: usize, n: usize) -> RwLockReadGuard<'_, Vec<f32>> {
        let message = self.0[rank].read().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(message.len(), n, "rank {rank} sent another number of elements");
        message
    }
}

impl Collective for LocalRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.shared.barrier.world
    }

    fn all_reduce_sum(&mut self, buf: &mut [f32]) -> Result<(), DeviceError> {
        let world = self.world();
        let messages = self.exchange(Some(buf))?;
        buf.copy_from_slice(&messages.message_of_rank(0, buf.len()));
        for rank in 1..world {
            let message = messages.message_of_rank(rank, buf.len());
            buf.iter_mut().zip(&*message).for_each(|(sum, x)| *sum += x);
        }
        Ok(())
    }

    fn all_gather(&mut self, src: &[f32], dst: &mut [f32]) -> Result<(), DeviceError> {
        let world = self.world();
        assert_eq!(dst.len(), world * src.len(), "the destination must have a part for every rank");
        let messages = self.exchange(Some(src))?;
        for rank in 0..world {
            dst[rank * src.len()..(rank + 1) * src.len()]
                .copy_from_slice(&messages.message_of_rank(rank, src.len()));
        }
        Ok(())
    }

    fn broadcast(&mut self, buf: &mut [f32], root: usize) -> Result<(), DeviceError> {
        let own = (self.rank == root).then_some(&*buf);
        let messages = self.exchange(own)?;
        buf.copy_from_slice(&messages.message_of_rank(root, buf.len()));
        Ok(())
    }

    fn abort(&self) {
        self.shared.barrier.abort();
    }
}

impl Drop for LocalRank {
    fn drop(&mut self) {
        self.abort();
    }
}

/// A reusable barrier. Ranks wait twice in each layer, mostly for microseconds, so they spin for a while before they
/// sleep.
#[derive(Debug)]
struct Barrier {
    world: usize,
    /// Ranks that wait for the current round to end.
    n_arrived: AtomicUsize,
    /// Number of rounds that have ended. Written under `change`.
    round: AtomicUsize,
    /// Written under `change`.
    aborted: AtomicBool,
    /// A sleeping rank has read both under this lock.
    change: Mutex<()>,
    changed: Condvar,
}

/// A rank has ended.
#[derive(Debug)]
struct Aborted;

/// Pause instructions before a waiting rank sleeps: about 100 us at 23 ns each. A wake-up costs a quarter of that.
const N_SPINS: u32 = 4000;

impl Barrier {
    fn new(world: usize) -> Self {
        let (n_arrived, round) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let (change, changed) = (Mutex::new(()), Condvar::new());
        Self { world, n_arrived, round, aborted: AtomicBool::new(false), change, changed }
    }

    /// Waits until all ranks have called this. Writes of a rank before the call are visible to every rank after it.
    fn wait(&self) -> Result<(), Aborted> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(Aborted);
        }
        let round = self.round.load(Ordering::Acquire);
        if self.n_arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.world {
            self.n_arrived.store(0, Ordering::Relaxed);
            self.set(|| self.round.store(round.wrapping_add(1), Ordering::Release));
            return Ok(());
        }
        self.sleep_while(|| {
            self.round.load(Ordering::Acquire) == round && !self.aborted.load(Ordering::Acquire)
        });
        // The last rank of a round may abort right after it: the round has still ended.
        if self.round.load(Ordering::Acquire) == round { Err(Aborted) } else { Ok(()) }
    }

    fn abort(&self) {
        self.set(|| self.aborted.store(true, Ordering::Release));
    }

    /// Makes a change and wakes sleeping ranks.
    fn set(&self, change: impl FnOnce()) {
        let lock = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        change();
        drop(lock);
        self.changed.notify_all();
    }

    fn sleep_while(&self, waits: impl Fn() -> bool) {
        for _ in 0..N_SPINS {
            if !waits() {
                return;
            }
            std::hint::spin_loop();
        }
        let mut lock = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        while waits() {
            lock = self.changed.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
