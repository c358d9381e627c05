//! What the ranks of a tensor-parallel model say to each other: sums, gathers and broadcasts of f32.
//!
//! Every rank calls the same operations in the same order with slices of the same length. Results are the same bits on
//! every rank and in every run: sums are taken in the order of the ranks.

use crate::error::DeviceError;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, RwLockReadGuard};

/// One rank's end of its group. Errors of all three operations: [`DeviceError::RankLost`] if another rank has ended in
/// the middle; the slices then hold nothing of use, and the group is not used again.
pub trait Collective: Send + Debug {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Ranks in all.
    fn world(&self) -> usize;

    /// Puts the sum over all ranks in place of each element of `buf`.
    fn all_reduce_sum(&mut self, buf: &mut [f32]) -> Result<(), DeviceError>;

    /// Puts the ranks' `src`, `[n]` each, one after the other into `dst`, `[world, n]`.
    fn all_gather(&mut self, src: &[f32], dst: &mut [f32]) -> Result<(), DeviceError>;

    /// Puts rank `root`'s `buf` into every other's.
    fn broadcast(&mut self, buf: &mut [f32], root: usize) -> Result<(), DeviceError>;

    /// Ends the group: whoever waits for this rank, or comes to, gets an error.
    fn abort(&self);
}

/// The only rank of a world of one: nothing to do.
#[derive(Debug, Clone, Copy, Default)]
pub struct Solo;

impl Collective for Solo {
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
        assert_eq!(root, 0, "the root is a rank");
        Ok(())
    }

    fn abort(&self) {}
}

/// A rank that is a thread of this process. Dropping it ends its group, so a thread that panics keeps nobody waiting.
#[derive(Debug)]
pub struct Local {
    rank: usize,
    shared: Arc<Shared>,
    /// Which of the two sets of slots the next exchange uses.
    turn: usize,
}

#[derive(Debug)]
struct Shared {
    /// What each rank says, `[2][world]`. The sets take turns: who writes into one has passed the barrier of the
    /// exchange with the other, which nobody reaches before having read the first.
    slots: [Vec<RwLock<Vec<f32>>>; 2],
    barrier: Barrier,
}

impl Local {
    /// The `world >= 1` ends of a new group, in the order of the ranks.
    pub fn group(world: usize) -> Vec<Self> {
        let set = || (0..world).map(|_| RwLock::default()).collect();
        let shared = Arc::new(Shared { slots: [set(), set()], barrier: Barrier::new(world) });
        (0..world).map(|rank| Self { rank, shared: Arc::clone(&shared), turn: 0 }).collect()
    }

    /// True once a rank has ended.
    pub fn is_aborted(&self) -> bool {
        self.shared.barrier.aborted.load(Ordering::Acquire)
    }

    /// The error of this rank when another has ended.
    pub fn lost(&self) -> DeviceError {
        DeviceError::RankLost { rank: self.rank, world: self.world() }
    }

    /// Says `own`, if this rank has something to say, and waits until every rank has come.
    fn exchange(&mut self, own: Option<&[f32]>) -> Result<Said<'_>, DeviceError> {
        let slots = &self.shared.slots[self.turn];
        self.turn ^= 1;
        if let Some(own) = own {
            let mut slot = slots[self.rank].write().unwrap_or_else(PoisonError::into_inner);
            slot.clear();
            slot.extend_from_slice(own);
        }
        let lost = self.lost();
        self.shared.barrier.wait().map_err(|Aborted| lost)?;
        Ok(Said(slots))
    }
}

/// What the ranks said in an exchange.
struct Said<'a>(&'a [RwLock<Vec<f32>>]);

impl Said<'_> {
    /// The `n` words of one rank. Panics if it gave another number: ranks that disagree are a bug.
    fn of(&self, rank: usize, n: usize) -> RwLockReadGuard<'_, Vec<f32>> {
        let words = self.0[rank].read().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(words.len(), n, "rank {rank} gave another number of elements");
        words
    }
}

impl Collective for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.shared.barrier.world
    }

    fn all_reduce_sum(&mut self, buf: &mut [f32]) -> Result<(), DeviceError> {
        let world = self.world();
        let said = self.exchange(Some(buf))?;
        buf.copy_from_slice(&said.of(0, buf.len()));
        for rank in 1..world {
            let words = said.of(rank, buf.len());
            buf.iter_mut().zip(&*words).for_each(|(sum, x)| *sum += x);
        }
        Ok(())
    }

    fn all_gather(&mut self, src: &[f32], dst: &mut [f32]) -> Result<(), DeviceError> {
        let world = self.world();
        assert_eq!(dst.len(), world * src.len(), "room for every rank's part");
        let said = self.exchange(Some(src))?;
        for rank in 0..world {
            dst[rank * src.len()..(rank + 1) * src.len()].copy_from_slice(&said.of(rank, src.len()));
        }
        Ok(())
    }

    fn broadcast(&mut self, buf: &mut [f32], root: usize) -> Result<(), DeviceError> {
        let own = (self.rank == root).then_some(&*buf);
        let said = self.exchange(own)?;
        buf.copy_from_slice(&said.of(root, buf.len()));
        Ok(())
    }

    fn abort(&self) {
        self.shared.barrier.abort();
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Where ranks wait for each other, again and again: two times in each layer, mostly for microseconds. So they spin for
/// a while before they sleep.
#[derive(Debug)]
struct Barrier {
    world: usize,
    /// Ranks that wait for the current round to end.
    n_arrived: AtomicUsize,
    /// Rounds that ended. Written under `change`.
    round: AtomicUsize,
    /// Written under `change`.
    aborted: AtomicBool,
    /// Who sleeps has seen both as they were under this lock.
    change: Mutex<()>,
    changed: Condvar,
}

/// A rank will not come.
#[derive(Debug)]
struct Aborted;

/// Pause instructions before a waiting rank sleeps: about 100 us at 23 ns each. Waking it costs a quarter of that.
const N_SPINS: u32 = 4000;

impl Barrier {
    fn new(world: usize) -> Self {
        let (n_arrived, round) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let (change, changed) = (Mutex::new(()), Condvar::new());
        Self { world, n_arrived, round, aborted: AtomicBool::new(false), change, changed }
    }

    /// Returns when all have come. What a rank wrote before is seen by every rank after.
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
        // The last of a round may leave its group at once: that round has ended all the same.
        if self.round.load(Ordering::Acquire) == round { Err(Aborted) } else { Ok(()) }
    }

    fn abort(&self) {
        self.set(|| self.aborted.store(true, Ordering::Release));
    }

    /// Makes a change and wakes who sleeps.
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
