//! The progress of a context as counters that any thread may read: liveness is progress, not a running thread.

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
    /// The context waits while another one computes with the threads that they share. The other one is watched itself.
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
        // The end before the beginning: a step that begins in between is seen as begun, never as ended only.
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

    /// Of a context that is being loaded, bytes of weights packed so far, and of all; equal once all are.
    pub fn loading(&self) -> (u64, u64) {
        // The part before the whole, which only shrinks to it.
        let packed = self.n_weight_bytes_packed.load(Ordering::Acquire);
        (packed, self.n_weight_bytes.load(Ordering::Acquire))
    }

    /// Output rows for which the pruned argmax ran, and those of them whose token it found without computing all logits.
    pub fn argmax_pruning(&self) -> (u64, u64) {
        // The part before the whole: never more than it.
        let settled = self.n_argmax_rows_pruned.load(Ordering::Acquire);
        (self.n_argmax_rows.load(Ordering::Acquire), settled)
    }

    /// Set the bytes of weights to be packed: an upper bound that is a little larger.
    pub(crate) fn start_packing(&self, n_bytes: usize) {
        self.n_weight_bytes.store(n_bytes as u64, Ordering::Release);
    }

    pub(crate) fn bytes_packed(&self, n_bytes: usize) {
        add(&self.n_weight_bytes_packed, n_bytes as u64);
    }

    /// All weights are packed.
    pub(crate) fn finish_packing(&self) {
        self.n_weight_bytes.store(self.n_weight_bytes_packed.load(Ordering::Acquire), Ordering::Release);
    }

    /// Return the result of `wait`; until then the context counts as waiting for its pool.
    pub(crate) fn waiting_for_pool<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.waiting_for_pool.store(true, Ordering::Release);
        let waited = wait();
        self.waiting_for_pool.store(false, Ordering::Release);
        waited
    }

    /// A step that ends when the guard is dropped: on return, on error and on panic.
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

    pub(crate) fn argmax_rows(&self, n_rows: usize, n_settled: usize) {
        add(&self.n_argmax_rows, n_rows as u64);
        add(&self.n_argmax_rows_pruned, n_settled as u64);
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
