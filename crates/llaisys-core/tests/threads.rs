//! The worker pool: every worker once, disjoint chunks, panics, dropping.

use llaisys_core::threads::{Chunks, Pool, share, usable_cpus};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn every_worker_runs_each_job_once() {
    for n_threads in 1..=4 {
        let pool = Pool::new(n_threads).unwrap();
        let counts: Vec<AtomicUsize> = (0..n_threads).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..200 {
            pool.run(&|worker| {
                counts[worker].fetch_add(1, Ordering::Relaxed);
            });
        }
        assert!(counts.iter().all(|n| n.load(Ordering::Relaxed) == 200), "{n_threads} threads: {counts:?}");
    }
}

#[test]
fn worker_zero_is_the_caller() {
    let pool = Pool::new(3).unwrap();
    let caller = std::thread::current().id();
    pool.run(&|worker| assert_eq!(worker == 0, std::thread::current().id() == caller));
}

/// Each thread has a queue; whoever is through with its own helps with the others'.
#[test]
fn queues_are_emptied_once_by_whoever_comes() {
    for (n_threads, n, chunk) in [(1, 7, 2), (2, 0, 1), (3, 1, 5), (3, 100, 7), (4, 64, 1)] {
        let pool = Pool::new(n_threads).unwrap();
        for _ in 0..50 {
            let counts: Vec<AtomicUsize> = (0..n_threads * n).map(|_| AtomicUsize::new(0)).collect();
            pool.run_queues(n, chunk, &|queue, items| {
                assert!(items.len() <= chunk);
                for i in items {
                    counts[queue * n + i].fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(counts.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{n_threads} threads: {counts:?}");
        }
    }
}

#[test]
fn a_panic_of_any_worker_reaches_the_caller_and_the_pool_lives_on() {
    let pool = Pool::new(3).unwrap();
    for bad in 0..3 {
        let ran = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|worker| {
                ran.fetch_add(1, Ordering::Relaxed);
                assert_ne!(worker, bad, "worker {bad} fails");
            });
        }));
        let message = result.unwrap_err().downcast::<String>().unwrap();
        assert!(message.contains(&format!("worker {bad} fails")), "{message}");
        assert_eq!(ran.load(Ordering::Relaxed), 3);
    }
    let ran = AtomicUsize::new(0);
    pool.run(&|_| {
        ran.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(ran.load(Ordering::Relaxed), 3);
}

#[test]
fn a_job_that_runs_a_job_is_refused() {
    for n_threads in 1..=2 {
        let pool = Pool::new(n_threads).unwrap();
        let nested = catch_unwind(AssertUnwindSafe(|| pool.run(&|_| pool.run(&|_| {}))));
        assert!(nested.is_err());
        pool.run(&|_| {});
    }
}

#[test]
fn chunks_cover_the_data_once() {
    for (len, chunk_len, n_threads) in [(0, 5, 2), (1, 5, 3), (17, 5, 2), (20, 5, 3), (7, 1, 3)] {
        let pool = Pool::new(n_threads).unwrap();
        let mut data = vec![0_usize; len];
        pool.run_chunks(&mut data, chunk_len, &|i, chunk| {
            for (j, x) in chunk.iter_mut().enumerate() {
                *x += 1 + i * chunk_len + j;
            }
        });
        assert!(data.iter().enumerate().all(|(i, &x)| x == i + 1), "{data:?}");
    }
}

#[test]
fn shares_and_dynamic_chunks_cover_the_items_once() {
    for n in [0, 1, 2, 7, 64, 65] {
        for parts in 1..5 {
            let mut next = 0;
            for range in (0..parts).map(|part| share(n, parts, part)) {
                assert_eq!(range.start, next);
                assert!(range.len() <= n.div_ceil(parts));
                next = range.end;
            }
            assert_eq!(next, n);
        }
        let chunks = Chunks::new(n, 3);
        let taken: Vec<_> = std::iter::from_fn(|| chunks.take()).flatten().collect();
        assert!(taken.into_iter().eq(0..n));
    }
}

/// Threads stay where they are put, and without CPUs may go wherever the caller may.
#[test]
#[cfg(target_os = "linux")]
fn workers_are_kept_to_their_cpus() {
    let allowed = || {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).map(str::trim);
        line.unwrap().to_owned()
    };
    let masks = |pool: &Pool| {
        let masks = std::sync::Mutex::new(vec![String::new(); pool.n_threads()]);
        pool.run(&|worker| masks.lock().unwrap()[worker] = allowed());
        masks.into_inner().unwrap()
    };
    let (own, cpus) = (allowed(), usable_cpus());
    let (first, last) = (cpus[0], cpus[cpus.len() - 1]);
    let pinned = Pool::on(3, &[first, last, first]).unwrap();
    assert_eq!(masks(&pinned), [own.clone(), last.to_string(), first.to_string()]);
    let free = Pool::on(cpus.len(), &[]).unwrap();
    assert!(masks(&free).into_iter().all(|mask| mask == own));
}

thread_local! {
    /// Dropped when its thread ends.
    static HELD: std::cell::RefCell<Option<Arc<()>>> = const { std::cell::RefCell::new(None) };
}

#[test]
fn dropping_the_pool_joins_its_workers() {
    let held = Arc::new(());
    let pool = Pool::new(3).unwrap();
    pool.run(&|worker| {
        if worker > 0 {
            HELD.with(|slot| *slot.borrow_mut() = Some(Arc::clone(&held)));
        }
    });
    assert_eq!(Arc::strong_count(&held), 3);
    drop(pool);
    assert_eq!(Arc::strong_count(&held), 1, "a worker is still there");
}

/// Workers that have parked (they do after some hundred yields) still take the next job.
#[test]
fn parked_workers_wake_up() {
    let pool = Pool::new(2).unwrap();
    let ran = AtomicUsize::new(0);
    for _ in 0..20 {
        for _ in 0..20_000 {
            std::thread::yield_now();
        }
        pool.run(&|_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
    }
    assert_eq!(ran.load(Ordering::Relaxed), 40);
}
