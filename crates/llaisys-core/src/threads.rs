//! The worker pool: one job at a time on all threads. The caller is worker 0.
//!
//! A decode step has some hundreds of parallel regions of a few microseconds each, so starting a job must cost less
//! than one microsecond. Workers wait by spinning, then by yielding, and park only after about 300 us without a job,
//! because waking one costs 25 us. The core reads no clock, so waits are counted in spins.
//!
//! The rules of access to `Shared`:
//! 1. Only the caller writes `job`, and only while no worker reads it: before `seq` is incremented, and after every
//!    worker has either finished the previous job or ended.
//! 2. A worker reads `job` once for each new value of `seq`, after it has seen that value (acquire).
//! 3. The caller of [`Pool::run`] neither returns nor unwinds before every worker has finished the job or ended, so the
//!    borrow behind `job` outlives every use. Nothing between `publish` and the end of `finish` can panic: the caller's
//!    part of the job runs in `catch_unwind`, and [`Pool::on`] has checked the CPU ids.
//! 4. A caller holds the lock of the pool ([`Pool::lock`]) and waits while another thread holds it. A job that runs a
//!    job is a bug and panics. `busy` is checked before `job` and `queues` change, so only one caller at a time uses
//!    them.

#![allow(unsafe_code, reason = "shares borrowed jobs with worker threads")]

mod affinity;
mod disjoint;
#[cfg(test)]
#[deny(unsafe_code)]
mod tests;
#[deny(unsafe_code)]
mod ticket_lock;
#[deny(unsafe_code)]
mod turns;

use crate::error::{DeviceError, Rejected, Result};
use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle, Thread};
use ticket_lock::TicketLock;

pub(crate) use disjoint::{Disjoint, DisjointWriter};
pub use ticket_lock::PoolGuard;
pub use turns::{Turn, Turns};

/// Pause instructions before a waiting thread starts to yield: about 20 us at 23 ns each.
const N_SPINS: u32 = 900;
/// Yields before a waiting worker parks: about 300 us at 530 ns each, if no other thread uses the CPU.
const N_YIELDS: u32 = 550;

/// The most threads of a pool. No machine has as many CPUs, so a larger number is a typing error.
pub const THREADS_MAX: usize = 1024;

/// Pools that contexts share ([`Pool::shared`]).
static SHARED: Mutex<Vec<SharedPool>> = Mutex::new(Vec::new());

struct SharedPool {
    n_threads: usize,
    cpus: Vec<usize>,
    pool: Weak<Pool>,
}

thread_local! {
    /// Address of the `Shared` of the pool whose worker this thread is; 0 for other threads.
    static WORKS_FOR: Cell<usize> = const { Cell::new(0) };
}

/// A job as the workers see it. Its lifetime is erased; rule 3 keeps it alive.
type Job = *const (dyn Fn(usize) + Sync);

/// A value in its own pair of cache lines, so that a spinning reader does not slow down the writer of a neighbor.
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// Number of jobs published so far, wrapping.
    seq: Line<AtomicU32>,
    /// The progress of each worker; worker `i` has index `i - 1`.
    finished: Box<[Line<Finished>]>,
    /// Workers that are parked, or about to park.
    parked: Line<AtomicUsize>,
    /// The current job; `None` tells the workers to end.
    job: Line<UnsafeCell<Option<Job>>>,
    /// The payload of the first panic of a worker in the current job.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// The progress of one worker. Only that worker writes it.
#[derive(Default)]
struct Finished {
    /// Number of the last job that the worker finished.
    seq: AtomicU32,
    /// The worker's thread has ended, or is about to end and accesses no job any more.
    has_ended: AtomicBool,
}

// SAFETY: `job` is the only field that is not Send and Sync by itself. The pointee is Sync, so any thread may
// call it; rules 1 and 2 above keep the reads and writes of the cell apart.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Threads that run one job at a time. Dropping it ends and joins them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    lock: TicketLock,
    busy: AtomicBool,
    /// The CPU for the caller, if every worker is pinned to one of the others.
    caller_cpu: Option<usize>,
    /// Number of items taken from each queue of [`Pool::run_queues`].
    queues: Box<[Line<AtomicUsize>]>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("n_threads", &self.n_threads()).finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool of `n_threads >= 1` threads. The caller of [`Pool::run`] is the first; `n_threads - 1` are started.
    ///
    /// If the pool has as many threads as this thread may use CPUs, each worker is pinned to one of the CPUs. The
    /// caller is moved (not pinned) to the remaining one whenever it runs on a worker's. Otherwise the system places
    /// all threads. Two threads on one CPU make a region a hundred times as long.
    ///
    /// Errors: [`Rejected::OutOfRange`] unless `n_threads` is 1 to [`THREADS_MAX`]; [`DeviceError::Threads`] if the
    /// system cannot start a thread. Threads that were already started are then ended.
    pub fn new(n_threads: usize) -> Result<Self> {
        Self::on(n_threads, &one_each(n_threads))
    }

    /// A pool of `n_threads` threads with a CPU for each; with no CPUs, the system places all threads.
    ///
    /// Errors: as [`Pool::new`], and if `cpus` is neither empty nor one for each thread, or has a CPU id that no
    /// affinity mask can represent. All are checked before a thread starts.
    pub fn on(n_threads: usize, cpus: &[usize]) -> Result<Self> {
        check(n_threads, cpus)?;
        Self::start(n_threads, cpus, work)
    }

    /// Starts the workers, each of which runs `work` until it returns. The caller has checked `n_threads` and `cpus`.
    fn start(n_threads: usize, cpus: &[usize], work: fn(&Shared, usize)) -> Result<Self> {
        let shared = Arc::new(Shared {
            seq: Line(AtomicU32::new(0)),
            finished: (1..n_threads).map(|_| Line(Finished::default())).collect(),
            parked: Line(AtomicUsize::new(0)),
            job: Line(UnsafeCell::new(None)),
            panic: Mutex::new(None),
        });
        let caller_cpu = cpus.first().copied().filter(|_| n_threads > 1);
        let queues = (0..n_threads).map(|_| Line(AtomicUsize::new(0))).collect();
        let mut pool = Self {
            shared,
            workers: Vec::new(),
            lock: TicketLock::default(),
            busy: AtomicBool::new(false),
            caller_cpu,
            queues,
        };
        for worker in 1..n_threads {
            let shared = Arc::clone(&pool.shared);
            let cpu = cpus.get(worker).copied();
            let handle = thread::Builder::new()
                .name(format!("llaisys-{worker}"))
                .spawn(move || {
                    let _end = EndOfWorker { shared: &shared, worker };
                    if let Some(cpu) = cpu {
                        affinity::pin_to(cpu);
                    }
                    WORKS_FOR.set(Arc::as_ptr(&shared).addr());
                    work(&shared, worker);
                })
                .map_err(|source| DeviceError::Threads { n_threads, source })?;
            pool.workers.push(handle);
        }
        Ok(pool)
    }

    /// Returns the pool with `n_threads` threads that contexts of this process share, or creates it: as [`Pool::new`],
    /// or without pinning if `pins` is false. Contexts that share a pool lock it in turn and do not compete for the
    /// CPUs. The pool ends when its last owner drops it.
    ///
    /// Errors: as [`Pool::new`].
    pub fn shared(n_threads: usize, pins: bool) -> Result<Arc<Self>> {
        let cpus = if pins { one_each(n_threads) } else { Vec::new() };
        let mut pools = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|known| known.pool.strong_count() > 0);
        let known = pools.iter().find(|known| known.n_threads == n_threads && known.cpus == cpus);
        if let Some(pool) = known.and_then(|known| known.pool.upgrade()) {
            return Ok(pool);
        }
        let pool = Arc::new(Self::on(n_threads, &cpus)?);
        pools.push(SharedPool { n_threads, cpus, pool: Arc::downgrade(&pool) });
        Ok(pool)
    }

    /// Locks the pool for this thread until the guard is dropped. A step holds the lock, so that jobs of another model
    /// do not run between its parts. Other threads wait and get the lock in the order in which they came. Returns at
    /// once if this thread already holds the lock.
    ///
    /// Panics on a worker thread of this pool.
    pub fn lock(&self) -> PoolGuard<'_> {
        let works_here = WORKS_FOR.get() == Arc::as_ptr(&self.shared).addr();
        assert!(!works_here, "a job of a pool runs a job on the same pool");
        self.lock.lock()
    }

    /// Number of threads that a job runs on, the caller's included.
    pub fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job(worker)` once for each worker in `0..n_threads`, in parallel, 0 on the calling thread. Returns when
    /// all calls have returned.
    ///
    /// If a call panics, this waits for the others and then raises the panic; the pool stays usable. Waits while
    /// another thread holds the pool. Panics if a job runs a job, or if a worker's thread has ended.
    pub fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        let busy = self.begin();
        self.run_on_all(&busy, job);
    }

    /// Locks the pool and marks it as busy with one job. Panics if it already runs one.
    fn begin(&self) -> Busy<'_> {
        let guard = self.lock();
        assert!(!self.busy.swap(true, Ordering::Acquire), "the pool already runs a job");
        Busy { flag: &self.busy, _guard: guard }
    }

    /// See [`Pool::run`].
    fn run_on_all(&self, _busy: &Busy<'_>, job: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime changes; `finish` below does not return before the last use (rule 3).
        let erased: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(job) };
        self.publish(Some(erased));
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        let ended = self.finish();
        let theirs = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
        if let Some(worker) = ended {
            panic!("worker thread {worker} of the pool has ended");
        }
    }

    /// Calls `job(i, chunk)` once for each chunk of `chunk_len` elements of `data` (the last may be shorter); `i`
    /// counts chunks. Each worker gets consecutive chunks.
    pub fn run_chunks<T: Send>(
        &self,
        data: &mut [T],
        chunk_len: usize,
        job: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        let n_chunks = data.len().div_ceil(chunk_len);
        let n_threads = self.n_threads();
        let out = Disjoint::new(data);
        self.run(&|worker| {
            for i in share(n_chunks, n_threads, worker) {
                let range = i * chunk_len..((i + 1) * chunk_len).min(out.len());
                // SAFETY: `share` gives each chunk to exactly one worker, and chunks do not overlap.
                job(i, unsafe { out.range(range) });
            }
        });
    }

    /// As [`Pool::run_chunks`], but a worker takes the next chunk whenever it has finished one: for chunks that take
    /// unequal time.
    pub fn run_chunks_dynamic<T: Send>(
        &self,
        data: &mut [T],
        chunk_len: usize,
        job: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        let chunks = Chunks::new(data.len(), chunk_len);
        let out = Disjoint::new(data);
        self.run(&|_| {
            while let Some(range) = chunks.take() {
                let i = range.start / chunk_len;
                // SAFETY: `Chunks` hands out each range once, and ranges do not overlap.
                job(i, unsafe { out.range(range) });
            }
        });
    }

    /// Distributes one queue of `n` items for each thread in chunks of `chunk >= 1`: calls `job(queue, items)` once for
    /// each chunk. A thread takes the chunks of its own queue first, then those left in other queues. Each thread thus
    /// works on its own data, and none waits for one that another process slows down.
    pub fn run_queues(&self, n: usize, chunk: usize, job: &(dyn Fn(usize, Range<usize>) + Sync)) {
        assert!(chunk >= 1, "a chunk has at least one item");
        // A larger chunk has the same effect as `n`, and could make the counters overflow.
        let chunk = chunk.min(n.max(1));
        let busy = self.begin();
        self.queues.iter().for_each(|queue| queue.0.store(0, Ordering::Relaxed));
        self.run_on_all(&busy, &|worker| {
            for i in 0..self.queues.len() {
                let queue = (worker + i) % self.queues.len();
                loop {
                    let start = self.queues[queue].0.fetch_add(chunk, Ordering::Relaxed);
                    if start >= n {
                        break;
                    }
                    job(queue, start..(start + chunk).min(n));
                }
            }
        });
    }

    /// Makes `job` the current one and wakes parked workers.
    fn publish(&self, job: Option<Job>) {
        let shared = &*self.shared;
        // SAFETY: rule 1: `start` or the last `finish` left every worker waiting for the next `seq`.
        unsafe { *shared.job.0.get() = job };
        // SeqCst here and in `next_seq`: either the worker sees the new `seq`, or we see it as parked.
        shared.seq.0.fetch_add(1, Ordering::SeqCst);
        if shared.parked.0.load(Ordering::SeqCst) > 0 {
            self.workers.iter().map(JoinHandle::thread).for_each(Thread::unpark);
        }
    }

    /// Waits until every worker has finished the current job or ended. Returns a worker that has ended.
    fn finish(&self) -> Option<usize> {
        let seq = self.shared.seq.0.load(Ordering::Relaxed);
        let (mut waited, mut ended) = (0, None);
        for (i, worker) in self.shared.finished.iter().enumerate() {
            while worker.0.seq.load(Ordering::Acquire) != seq {
                if worker.0.has_ended.load(Ordering::Acquire) {
                    ended = Some(i + 1);
                    break;
                }
                pause(&mut waited);
                if waited == N_SPINS
                    && let Some(caller_cpu) = self.caller_cpu
                {
                    affinity::move_to(caller_cpu);
                }
            }
        }
        ended
    }
}

/// A locked pool, marked as `busy`, while it runs one job.
struct Busy<'a> {
    flag: &'a AtomicBool,
    _guard: PoolGuard<'a>,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.flag.store(false, Ordering::Release);
    }
}

/// Records that a worker's thread has ended, however it ends.
struct EndOfWorker<'a> {
    shared: &'a Shared,
    worker: usize,
}

impl Drop for EndOfWorker<'_> {
    fn drop(&mut self) {
        self.shared.finished[self.worker - 1].0.has_ended.store(true, Ordering::Release);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.publish(None);
        for worker in self.workers.drain(..) {
            // `run` has raised the worker's panic if a job came after it.
            let _ = worker.join();
        }
    }
}

/// One round of waiting: spins first, then yields.
fn pause(waited: &mut u32) {
    *waited = waited.saturating_add(1);
    if *waited < N_SPINS { std::hint::spin_loop() } else { thread::yield_now() }
}

fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        seen = next_seq(shared, seen);
        // SAFETY: rule 2: a new `seq` was seen, and the caller does not write before this worker has finished.
        let Some(job) = (unsafe { *shared.job.0.get() }) else { return };
        // SAFETY: rule 3: the caller keeps the job alive until every worker has finished.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*job)(worker) }));
        if let Err(payload) = result {
            let mut first = shared.panic.lock().unwrap_or_else(PoisonError::into_inner);
            match &*first {
                None => *first = Some(payload),
                // Dropping it could panic again, outside of `catch_unwind`, and end this thread.
                Some(_) => std::mem::forget(payload),
            }
        }
        shared.finished[worker - 1].0.seq.store(seen, Ordering::Release);
    }
}

/// Waits for a job after number `seen`: spins, yields, then parks.
fn next_seq(shared: &Shared, seen: u32) -> u32 {
    let mut waited = 0;
    while waited < N_SPINS + N_YIELDS {
        let seq = shared.seq.0.load(Ordering::Acquire);
        if seq != seen {
            return seq;
        }
        pause(&mut waited);
    }
    shared.parked.0.fetch_add(1, Ordering::SeqCst);
    let seq = loop {
        let seq = shared.seq.0.load(Ordering::SeqCst);
        if seq != seen {
            break seq;
        }
        thread::park();
    };
    shared.parked.0.fetch_sub(1, Ordering::SeqCst);
    seq
}

/// The items of part `part` when `n` items are cut into `n_parts` ranges whose lengths differ by at most one.
pub fn share(n: usize, n_parts: usize, part: usize) -> Range<usize> {
    n * part / n_parts..n * (part + 1) / n_parts
}

/// Distributes items in chunks to threads as they become free: for work whose parts take unequal time, or when another
/// process uses part of a CPU.
#[derive(Debug)]
pub struct Chunks {
    next: AtomicUsize,
    n: usize,
    chunk: usize,
}

impl Chunks {
    /// `n` items in chunks of `chunk >= 1`.
    pub fn new(n: usize, chunk: usize) -> Self {
        assert!(chunk >= 1, "a chunk has at least one item");
        // A larger chunk has the same effect as `n`, and could make the counter overflow.
        Self { next: AtomicUsize::new(0), n, chunk: chunk.min(n.max(1)) }
    }

    /// Takes the next chunk; `None` when all are taken.
    pub fn take(&self) -> Option<Range<usize>> {
        let start = self.next.fetch_add(self.chunk, Ordering::Relaxed);
        (start < self.n).then(|| start..(start + self.chunk).min(self.n))
    }
}

/// Rejects a number of threads or CPU ids that no pool can have.
fn check(n_threads: usize, cpus: &[usize]) -> Result<()> {
    let out_of_range = |what, got: usize, min, max: usize| Rejected::OutOfRange {
        what,
        got: i64::try_from(got).unwrap_or(i64::MAX),
        min,
        max: max as i64,
    };
    if !(1..=THREADS_MAX).contains(&n_threads) {
        return Err(out_of_range("n_threads", n_threads, 1, THREADS_MAX).into());
    }
    if !cpus.is_empty() && cpus.len() != n_threads {
        let (what, got) = ("the list of CPU ids, one for each thread,", cpus.len());
        return Err(Rejected::Length { what, got, want: n_threads }.into());
    }
    match cpus.iter().find(|&&cpu| cpu > affinity::CPU_ID_MAX) {
        Some(&cpu) => Err(out_of_range("a CPU id", cpu, 0, affinity::CPU_ID_MAX).into()),
        None => Ok(()),
    }
}

/// A CPU for each of `n_threads` threads; none if this thread may use more or fewer CPUs.
fn one_each(n_threads: usize) -> Vec<usize> {
    let cpus = usable_cpus();
    if cpus.len() == n_threads { cpus } else { Vec::new() }
}

/// The CPUs in the calling thread's affinity mask, ascending; empty if the system has no such masks.
pub fn usable_cpus() -> Vec<usize> {
    affinity::usable_cpus()
}
