//! Reads tensors into the page cache ahead of the threads that pack them, so that the disk does not wait for packing.
//!
//! The bytes go to a small buffer and are dropped. Advice (`POSIX_FADV_WILLNEED`) copies nothing, yet a file of 3.3 GB
//! loaded more slowly with it: the kernel took one to two seconds more of CPU time.

use super::file::{ModelFile, PIECE_BYTES};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// How far the thread may be ahead: about a layer, because a layer's tensors are not packed in the order of the file.
/// Far less than a machine's memory, or the system would drop pages before they are packed.
const LEAD_BYTES: usize = 256 << 20;

/// The distance between a thread that reads ahead and the threads that load.
#[derive(Debug)]
pub struct ReadAhead {
    lead_bytes: usize,
    loaded: Mutex<Loaded>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Loaded {
    n_bytes: usize,
    has_ended: bool,
}

/// Ends reading ahead when dropped, also if loading panics.
struct End<'a>(&'a ReadAhead);

impl Default for ReadAhead {
    fn default() -> Self {
        Self::new(LEAD_BYTES)
    }
}

impl ReadAhead {
    /// Reads at most `lead_bytes` ahead.
    pub fn new(lead_bytes: usize) -> Self {
        Self { lead_bytes, loaded: Mutex::default(), changed: Condvar::new() }
    }

    /// Runs `load` while a thread reads `ranges`, in the order in which `load` needs them. If the system has no thread
    /// left, only runs `load`.
    pub fn during<'a, T>(
        &self,
        ranges: impl Iterator<Item = (&'a ModelFile, Range<usize>)> + Send,
        load: impl FnOnce() -> T,
    ) -> T {
        *self.state() = Loaded::default();
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("llaisys-ahead".into());
            _ = thread.spawn_scoped(scope, move || self.read(ranges));
            let _end = End(self);
            load()
        })
    }

    /// Counts bytes that were loaded: the thread may read as many more.
    pub fn add_loaded(&self, n_bytes: usize) {
        let mut state = self.state();
        state.n_bytes = state.n_bytes.saturating_add(n_bytes);
        self.changed.notify_one();
    }

    /// Reads `ranges` until loading ends, and skips what is in the page cache, or may be. Returns the number of bytes
    /// read. Errors of the system end it; whoever loads the same bytes reports them.
    pub fn read<'a>(&self, ranges: impl Iterator<Item = (&'a ModelFile, Range<usize>)>) -> usize {
        let mut buffer = vec![0; PIECE_BYTES];
        let (mut n_passed, mut n_read) = (0_usize, 0_usize);
        for (file, range) in ranges {
            let mut reads = false;
            for start in range.clone().step_by(PIECE_BYTES) {
                let piece = &mut buffer[..PIECE_BYTES.min(range.end.saturating_sub(start))];
                n_passed = n_passed.saturating_add(piece.len());
                if !self.wait(n_passed) {
                    return n_read;
                }
                // After a piece that is not cached, all are read: the system reads ahead of whoever reads in order.
                let last = start.saturating_add(piece.len()).saturating_sub(1);
                reads = reads || file.is_cached(last) == Some(false);
                if !reads {
                    continue;
                }
                if file.read_at(start, piece).is_err() {
                    return n_read;
                }
                n_read = n_read.saturating_add(piece.len());
            }
        }
        n_read
    }

    /// Waits until the first `n_bytes` bytes may be read. Returns false if loading has ended.
    fn wait(&self, n_bytes: usize) -> bool {
        let is_far =
            |state: &mut Loaded| !state.has_ended && n_bytes > state.n_bytes.saturating_add(self.lead_bytes);
        let state = self.changed.wait_while(self.state(), is_far);
        !state.unwrap_or_else(PoisonError::into_inner).has_ended
    }

    fn state(&self) -> MutexGuard<'_, Loaded> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.state().has_ended = true;
        self.0.changed.notify_one();
    }
}
