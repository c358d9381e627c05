//! An allocator that counts, and aborts where a bound is passed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static BOUND: AtomicUsize = AtomicUsize::new(usize::MAX);

pub struct Counting;

fn take(n_bytes: usize) {
    let live = LIVE.fetch_add(n_bytes, Relaxed) + n_bytes;
    if live > BOUND.load(Relaxed) {
        std::process::abort();
    }
}

// SAFETY: every call goes on to the system's allocator unchanged; the counters are atomics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promise for `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: `pointer` came from `System` with this layout, as `alloc` hands out nothing else.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Runs `call`; aborts as soon as it holds more than `n_bytes` of its own.
pub fn bounded(n_bytes: usize, call: impl FnOnce()) {
    BOUND.store(LIVE.load(Relaxed).saturating_add(n_bytes), Relaxed);
    call();
    BOUND.store(usize::MAX, Relaxed);
}
