//! Measurements of the whole process: the threads that contexts share, and resident memory. They are in a separate
//! binary, where no other test starts threads or allocates.

mod common;

use common::{Outputs, Tiny, feed, load, settings};
use llaisys_core::context::ContextConfig;
use llaisys_core::tensor::AlignedBuf;
use llaisys_core::threads::Pool;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Locked by each test, so that one runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// The number of threads of this process that pools have started.
fn n_workers() -> usize {
    let names = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        // A thread may end between listing and reading it.
        std::fs::read_to_string(task.unwrap().path().join("comm")).ok()
    });
    names.filter(|name| name.starts_with("llaisys-")).count()
}

/// Waits until pools have `expected` threads. The list in `/proc` lags: a new thread sets its name itself, and a thread
/// that was joined stays listed until the kernel has reaped it.
#[track_caller]
fn expect_workers(expected: usize) {
    let mut n = n_workers();
    for _ in 0..100_000 {
        if n == expected {
            return;
        }
        thread::yield_now();
        n = n_workers();
    }
    panic!("pools have {n} threads, expected {expected}");
}

#[test]
fn pool_is_shared_until_its_last_user_ends() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pool = Pool::shared(3, false).unwrap();
    assert!(Arc::ptr_eq(&pool, &Pool::shared(3, false).unwrap()));
    assert!(!Arc::ptr_eq(&pool, &Pool::shared(4, false).unwrap()));
    expect_workers(2); // The pool of four has ended.
    drop(pool);
    expect_workers(0);
    Pool::shared(3, false).unwrap().run(&|_| {});
}

/// Jobs of several threads never overlap, and no job of another thread runs while a guard exists.
#[test]
fn jobs_wait_for_each_other_and_guards_exclude_other_threads() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pool = Pool::shared(3, false).unwrap();
    let (at_work, jobs) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|s| {
        for name in 0..4 {
            let (pool, at_work, jobs) = (&pool, &at_work, &jobs);
            s.spawn(move || {
                for _ in 0..50 {
                    let _guard = pool.lock();
                    for _ in 0..3 {
                        pool.run(&|worker| {
                            assert!(at_work.fetch_add(1, Ordering::SeqCst) < 3, "two jobs at once");
                            if worker == 0 {
                                jobs.lock().unwrap().push(name);
                            }
                            at_work.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                }
                (0..50).for_each(|_| pool.run_queues(5, 2, &|_, _| {}));
            });
        }
    });
    let jobs = jobs.into_inner().unwrap();
    assert_eq!(jobs.len(), 4 * 50 * 3);
    assert!(jobs.chunks_exact(3).all(|turn| turn.iter().all(|name| name == &turn[0])), "{jobs:?}");
}

fn answer(model: &Tiny, seed: u64) -> Outputs {
    let config = ContextConfig { n_threads: 3, ..settings() };
    let mut loaded = load(model, config);
    let seq = loaded.context.seq_acquire(0).unwrap();
    feed(&mut loaded.context, seq, &model.tokens(seed, 60), 5)
}

/// Two models compute concurrently on shared threads.
#[test]
fn concurrent_contexts_have_the_outputs_of_single_ones() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let models = [Tiny::odd("Qwen2ForCausalLM", true), Tiny::odd("LlamaForCausalLM", false)];
    let alone: Vec<Outputs> = models.iter().map(|model| answer(model, 7)).collect();
    let kept = Pool::shared(3, settings().pins).unwrap();
    for _ in 0..5 {
        let together: Vec<Outputs> = thread::scope(|s| {
            let at_once: Vec<_> = models.iter().map(|model| s.spawn(|| answer(model, 7))).collect();
            at_once.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(together == alone, "another model in the process changed an output");
        expect_workers(2); // No context started threads of its own.
    }
    drop(kept);
}

/// Resident bytes of this process (Linux: the second field of `statm`, in pages of 4 KiB).
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages: usize = statm.split(' ').nth(1).expect("two fields").parse().expect("a number");
    pages * 4096
}

#[test]
fn large_buffer_is_not_resident_until_written() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = resident();
    let mut buf = AlignedBuf::zeroed("test", 512 << 20).expect("address space");
    // The system may have reclaimed other pages meanwhile.
    assert!(resident().saturating_sub(before) < 64 << 20);
    buf.as_mut_slice::<u8>()[..128 << 20].fill(1);
    assert!(resident().saturating_sub(before) > 100 << 20);
}

/// Pages of 2 MiB need one mapping. Linux joins neighbors only if none was touched before the others had the same advice.
#[test]
#[cfg(target_os = "linux")]
fn neighboring_buffers_share_a_mapping() {
    const N: usize = 64;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let touched = |_| {
        let mut buf = AlignedBuf::zeroed("test", 3 << 19).unwrap();
        buf.as_mut_slice::<u8>()[0] = 1;
        buf
    };
    let bufs: Vec<AlignedBuf> = (0..N).map(touched).collect();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let number = |hex: &str| usize::from_str_radix(hex, 16).unwrap();
    let n_mappings = maps
        .lines()
        .filter_map(|line| line.split(' ').next()?.split_once('-'))
        .map(|(start, end)| number(start)..number(end))
        .filter(|mapping| bufs.iter().any(|buf| mapping.contains(&buf.as_slice::<u8>().as_ptr().addr())))
        .count();
    assert!(n_mappings < N / 4, "{n_mappings} mappings for {N} buffers");
}
