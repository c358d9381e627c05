//! An allocator that counts bytes and aborts above a bound.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static BOUND: AtomicUsize = AtomicUsize::new(usize::MAX);

pub struct Counting;

fn count(n_bytes: usize) {
    let live = LIVE.fetch_add(n_bytes, Relaxed) + n_bytes;
    if live > BOUND.load(Relaxed) {
        std::process::abort();
    }
}

// SAFETY: every call is forwarded unchanged to the system's allocator; the counters are atomics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller guarantees a valid `layout`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: `alloc` returned `pointer` for this layout, from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Runs `call`. Aborts as soon as it has allocated more than `n_bytes`.
pub fn bounded(n_bytes: usize, call: impl FnOnce()) {
    BOUND.store(LIVE.load(Relaxed).saturating_add(n_bytes), Relaxed);
    call();
    BOUND.store(usize::MAX, Relaxed);
}
