//! The progress of a context as counters that any thread may read. A context is alive if its counters advance, not if
//! its thread exists.

mod stall;

pub use stall::{LivenessSample, StallDetector, StallReason, StallWindows};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counters that only grow, and the progress of a load. The thread that owns the context writes them, others read them
/// without a lock. Each number is exact; two of them may be from slightly different moments.
#[derive(Debug, Default)]
pub struct Progress {
    waiting_for_pool: AtomicBool,
    n_steps_begun: AtomicU64,
    n_steps_ended: AtomicU64,
    n_layers_begun: AtomicU64,
    n_rows_committed: AtomicU64,
    n_sequences_acquired: AtomicU64,
    n_sequences_released: AtomicU64,
    n_weight_bytes: AtomicU64,
    n_weight_bytes_packed: AtomicU64,
    n_argmax_rows: AtomicU64,
    n_argmax_rows_pruned: AtomicU64,
}

/// The counters at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProgressSample {
    /// The context waits for the threads that it shares with another one, which computes. A detector watches that one.
    pub waiting_for_pool: bool,
    /// Decodes that were called.
    pub n_steps_begun: u64,
    /// Decodes that returned, with a result or an error. If equal to `n_steps_begun`, no step is running.
    pub n_steps_ended: u64,
    /// Layers that forward passes have begun: progress within a step.
    pub n_layers_begun: u64,
    /// Rows whose cells were committed.
    pub n_rows_committed: u64,
    /// Sequence ids acquired.
    pub n_sequences_acquired: u64,
    /// Sequence ids released.
    pub n_sequences_released: u64,
}

impl Progress {
    /// The counters now.
    pub fn sample(&self) -> ProgressSample {
        let read = |counter: &AtomicU64| counter.load(Ordering::Acquire);
        // Read the end before the beginning: a step that begins in between counts as begun, never only as ended.
        let n_steps_ended = read(&self.n_steps_ended);
        ProgressSample {
            waiting_for_pool: self.waiting_for_pool.load(Ordering::Acquire),
            n_steps_begun: read(&self.n_steps_begun),
            n_steps_ended,
            n_layers_begun: read(&self.n_layers_begun),
            n_rows_committed: read(&self.n_rows_committed),
            n_sequences_acquired: read(&self.n_sequences_acquired),
            n_sequences_released: read(&self.n_sequences_released),
        }
    }

    /// While a context is loaded: bytes of weights packed so far, and the total. They are equal once all are packed.
    pub fn loading(&self) -> (u64, u64) {
        // Read the part before the total, which only decreases towards it.
        let packed = self.n_weight_bytes_packed.load(Ordering::Acquire);
        (packed, self.n_weight_bytes.load(Ordering::Acquire))
    }

    /// Output rows for which the pruned argmax ran, and those whose token it found without computing all logits.
    pub fn argmax_pruning(&self) -> (u64, u64) {
        // Read the part before the total, so that it is never larger.
        let pruned = self.n_argmax_rows_pruned.load(Ordering::Acquire);
        (self.n_argmax_rows.load(Ordering::Acquire), pruned)
    }

    /// Sets the total bytes of weights to pack: an upper bound that is slightly too large.
    pub(crate) fn start_packing(&self, n_bytes: usize) {
        self.n_weight_bytes.store(n_bytes as u64, Ordering::Release);
    }

    pub(crate) fn bytes_packed(&self, n_bytes: usize) {
        add(&self.n_weight_bytes_packed, n_bytes as u64);
    }

    /// Sets the total to the packed bytes, when all weights are packed.
    pub(crate) fn finish_packing(&self) {
        self.n_weight_bytes.store(self.n_weight_bytes_packed.load(Ordering::Acquire), Ordering::Release);
    }

    /// Returns the result of `wait`; during the call the context counts as waiting for its pool.
    pub(crate) fn waiting_for_pool<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.waiting_for_pool.store(true, Ordering::Release);
        let waited = wait();
        self.waiting_for_pool.store(false, Ordering::Release);
        waited
    }

    /// Begins a step, which ends when the guard is dropped: on return, on error and on panic.
    pub(crate) fn begin_step(&self) -> StepGuard<'_> {
        add(&self.n_steps_begun, 1);
        StepGuard(self)
    }

    pub(crate) fn begin_layer(&self) {
        add(&self.n_layers_begun, 1);
    }

    pub(crate) fn rows_committed(&self, n_rows: usize) {
        add(&self.n_rows_committed, n_rows as u64);
    }

    pub(crate) fn argmax_rows(&self, n_rows: usize, n_pruned: usize) {
        add(&self.n_argmax_rows, n_rows as u64);
        add(&self.n_argmax_rows_pruned, n_pruned as u64);
    }

    pub(crate) fn sequence_acquired(&self) {
        add(&self.n_sequences_acquired, 1);
    }

    pub(crate) fn sequence_released(&self) {
        add(&self.n_sequences_released, 1);
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Release);
}

/// See [`Progress::begin_step`].
pub(crate) struct StepGuard<'a>(&'a Progress);

impl Drop for StepGuard<'_> {
    fn drop(&mut self) {
        add(&self.0.n_steps_ended, 1);
    }
}
