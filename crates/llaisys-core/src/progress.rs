//! What a context has done so far, in numbers that any thread may read: liveness is progress, not a running thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counters that only grow, and how far a load has come. The thread that owns the context writes them, others read; no lock is involved. Each
/// number is exact by itself; two of them read one after the other may lie a moment apart.
#[derive(Debug, Default)]
pub struct Progress {
    in_line: AtomicBool,
    n_steps_begun: AtomicU64,
    n_steps_ended: AtomicU64,
    n_layers_begun: AtomicU64,
    n_rows_committed: AtomicU64,
    n_sequences_lent: AtomicU64,
    n_sequences_returned: AtomicU64,
    n_weight_bytes: AtomicU64,
    n_weight_bytes_packed: AtomicU64,
    n_rows_screened: AtomicU64,
    n_rows_settled: AtomicU64,
}

/// The counters at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProgressSample {
    /// Waits while another context computes with the threads that they share; that one is watched for itself.
    pub in_line: bool,
    /// Decodes that were called.
    pub n_steps_begun: u64,
    /// Decodes that returned, whatever with. Equal to the former: the context is outside a step.
    pub n_steps_ended: u64,
    /// Layers that a forward pass has reached, over all passes: ticks within a step.
    pub n_layers_begun: u64,
    /// Rows whose cells were committed: tokens computed for good.
    pub n_rows_committed: u64,
    /// Sequence ids lent.
    pub n_sequences_lent: u64,
    /// Sequence ids returned.
    pub n_sequences_returned: u64,
}

impl Progress {
    /// The counters now.
    pub fn sample(&self) -> ProgressSample {
        let read = |counter: &AtomicU64| counter.load(Ordering::Acquire);
        // The end before the beginning: a step that begins in between is seen as begun, never as ended only.
        let n_steps_ended = read(&self.n_steps_ended);
        ProgressSample {
            in_line: self.in_line.load(Ordering::Acquire),
            n_steps_begun: read(&self.n_steps_begun),
            n_steps_ended,
            n_layers_begun: read(&self.n_layers_begun),
            n_rows_committed: read(&self.n_rows_committed),
            n_sequences_lent: read(&self.n_sequences_lent),
            n_sequences_returned: read(&self.n_sequences_returned),
        }
    }

    /// Of a context that is being loaded, bytes of weights packed so far, and of all; equal once all are.
    pub fn loading(&self) -> (u64, u64) {
        // The part before the whole, which only shrinks to it.
        let packed = self.n_weight_bytes_packed.load(Ordering::Acquire);
        (packed, self.n_weight_bytes.load(Ordering::Acquire))
    }

    /// Output rows whose largest logit was looked for with the head's screen, and those of them where it was found
    /// without the others.
    pub fn screening(&self) -> (u64, u64) {
        // The part before the whole: never more than it.
        let settled = self.n_rows_settled.load(Ordering::Acquire);
        (self.n_rows_screened.load(Ordering::Acquire), settled)
    }

    /// As many bytes of weights are to be packed, or a few more.
    pub(crate) fn packing(&self, n_bytes: usize) {
        self.n_weight_bytes.store(n_bytes as u64, Ordering::Release);
    }

    pub(crate) fn packed(&self, n_bytes: usize) {
        add(&self.n_weight_bytes_packed, n_bytes as u64);
    }

    /// All weights are packed.
    pub(crate) fn all_packed(&self) {
        self.n_weight_bytes.store(self.n_weight_bytes_packed.load(Ordering::Acquire), Ordering::Release);
    }

    /// What `wait` gives; until then the context is in line for its threads.
    pub(crate) fn in_line<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.in_line.store(true, Ordering::Release);
        let waited = wait();
        self.in_line.store(false, Ordering::Release);
        waited
    }

    /// A step that ends when the guard is dropped: on return, on error and on panic.
    pub(crate) fn step(&self) -> StepGuard<'_> {
        add(&self.n_steps_begun, 1);
        StepGuard(self)
    }

    pub(crate) fn layer(&self) {
        add(&self.n_layers_begun, 1);
    }

    pub(crate) fn committed(&self, n_rows: usize) {
        add(&self.n_rows_committed, n_rows as u64);
    }

    pub(crate) fn screened(&self, n_rows: usize, n_settled: usize) {
        add(&self.n_rows_screened, n_rows as u64);
        add(&self.n_rows_settled, n_settled as u64);
    }

    pub(crate) fn lent(&self) {
        add(&self.n_sequences_lent, 1);
    }

    pub(crate) fn returned(&self) {
        add(&self.n_sequences_returned, 1);
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Release);
}

/// See [`Progress::step`].
pub(crate) struct StepGuard<'a>(&'a Progress);

impl Drop for StepGuard<'_> {
    fn drop(&mut self) {
        add(&self.0.n_steps_ended, 1);
    }
}
