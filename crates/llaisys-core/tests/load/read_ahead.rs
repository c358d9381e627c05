//! A thread reads a file ahead of those that load it: never farther than its lead, not after the end of the load, and
//! only what is not in the page cache.

use crate::model_files::TempFolder;
use llaisys_core::load::file::ModelFile;
use llaisys_core::load::read_ahead::ReadAhead;
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

const PIECE: usize = 256 << 10;
const N_PIECES: usize = 16;
const N_LEAD: usize = 4;

/// A file of [`N_PIECES`] pieces.
fn written() -> (TempFolder, ModelFile) {
    let scratch = TempFolder::new();
    let path = scratch.write("x.bin", vec![7; N_PIECES * PIECE]);
    (scratch, ModelFile::open(&path).unwrap())
}

fn pieces() -> impl Iterator<Item = Range<usize>> {
    (0..N_PIECES).map(|i| i * PIECE..(i + 1) * PIECE)
}

/// A broken thread makes this wait forever.
fn wait_for(counter: &AtomicUsize, n: usize) {
    while counter.load(Ordering::SeqCst) < n {
        thread::yield_now();
    }
}

#[test]
fn thread_follows_the_load_at_its_lead_and_ends_with_it() {
    let (_scratch, file) = written();
    let ahead = ReadAhead::new(N_LEAD * PIECE);
    for n_to_load in [0, 3, N_PIECES - N_LEAD, N_PIECES] {
        let (n_requested, n_loaded) = (AtomicUsize::new(0), AtomicUsize::new(0));
        // The next range is requested when the one before it was read.
        let ranges = pieces().enumerate().map(|(n_read, range)| {
            assert!(n_read <= n_loaded.load(Ordering::SeqCst) + N_LEAD, "{n_read}");
            n_requested.fetch_add(1, Ordering::SeqCst);
            (&file, range)
        });
        let returned = ahead.during(ranges, || {
            for n in 0..n_to_load {
                wait_for(&n_requested, (n + N_LEAD + 1).min(N_PIECES));
                n_loaded.fetch_add(1, Ordering::SeqCst);
                ahead.add_loaded(PIECE);
            }
            "loaded"
        });
        assert_eq!(returned, "loaded");
        assert!(n_requested.into_inner() <= n_to_load + N_LEAD + 1);
    }
}

#[test]
fn thread_ends_when_the_load_panics() {
    let (_scratch, file) = written();
    let ahead = ReadAhead::new(0);
    let load = || ahead.during(pieces().map(|range| (&file, range)), || panic!("in the load"));
    let panic = catch_unwind(AssertUnwindSafe(load)).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"in the load"));
}

#[test]
fn only_what_is_not_cached_is_read() {
    let (scratch, file) = written();
    let ahead = ReadAhead::new(usize::MAX);
    let n_read = || ahead.read([(&file, 0..N_PIECES * PIECE)].into_iter());
    let is_told = file.is_cached(0).is_some();
    assert_eq!(n_read(), 0);

    let on_disk = File::open(scratch.file("x.bin")).unwrap();
    on_disk.sync_all().unwrap();
    // The system keeps pages that it is using itself at that moment.
    let reads_all = (0..100).any(|_| {
        fadvise(&on_disk, 0, None, Advice::DontNeed).unwrap();
        n_read() == if is_told { N_PIECES * PIECE } else { 0 }
    });
    assert!(reads_all);
    assert_eq!(n_read(), 0);
}

#[test]
fn truncated_file_ends_reading_ahead() {
    let (scratch, file) = written();
    File::options().write(true).open(scratch.file("x.bin")).unwrap().set_len(0).unwrap();
    assert_eq!(ReadAhead::new(usize::MAX).read(pieces().map(|range| (&file, range))), 0);
}
