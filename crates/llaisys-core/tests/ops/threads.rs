//! The worker pool: every worker runs once, chunks are disjoint, panics are propagated, dropping joins.

use llaisys_core::threads::{Chunks, Pool, PoolGuard, THREADS_MAX, share, usable_cpus};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

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

/// Each thread has a queue. A thread that has emptied its own takes items from the others.
#[test]
fn every_queued_item_runs_once_on_any_thread() {
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
fn panic_of_any_worker_reaches_the_caller_and_the_pool_remains_usable() {
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

/// Panics again when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("dropped");
    }
}

/// The pool keeps the first panic of its workers. Dropping the payloads of others must not end a worker.
#[test]
fn panic_payload_that_panics_on_drop_ends_no_worker() {
    let pool = Pool::new(3).unwrap();
    let result = catch_unwind(AssertUnwindSafe(|| {
        pool.run(&|worker| {
            if worker > 0 {
                panic_any(Bomb);
            }
        });
    }));
    std::mem::forget(result.unwrap_err());
    let ran = AtomicUsize::new(0);
    pool.run(&|_| {
        ran.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(ran.into_inner(), 3);
}

/// An invalid setting is an error before a thread starts, never a panic while threads run.
#[test]
fn invalid_settings_are_rejected() {
    let cases: [(usize, &[usize], &str); 7] = [
        (0, &[], "n_threads is 0, allowed are 1 to 1024"),
        (THREADS_MAX + 1, &[], "n_threads is 1025, allowed are 1 to 1024"),
        (usize::MAX, &[], "n_threads is 9223372036854775807, allowed are 1 to 1024"),
        (2, &[5000, 0], "a CPU id is 5000, allowed are 0 to "),
        (2, &[0, 5000], "a CPU id is 5000, allowed are 0 to "),
        (2, &[0], "has 1 elements, expected 2"),
        (1, &[0, 1], "has 2 elements, expected 1"),
    ];
    for (n_threads, cpus, says) in cases {
        let text = Pool::on(n_threads, cpus).unwrap_err().to_string();
        assert!(text.contains(says), "{text}");
    }
    assert!(Pool::new(0).is_err());
    assert!(Pool::shared(THREADS_MAX + 1, true).is_err());
}

/// Compiles only where `T` is not `Send`: otherwise both impls apply and `A` cannot be inferred.
trait IsNotSend<A> {
    const IS_NOT_SEND: () = ();
}
impl<T: ?Sized> IsNotSend<()> for T {}
impl<T: ?Sized + Send> IsNotSend<u8> for T {}
const _: () = <PoolGuard<'static> as IsNotSend<_>>::IS_NOT_SEND;

thread_local! {
    /// A guard that a job drops while it runs, which no scope can.
    static TURN: RefCell<Option<PoolGuard<'static>>> = const { RefCell::new(None) };
}

/// A second caller is rejected before it changes the queues, so no item runs twice.
#[test]
fn second_caller_does_not_change_the_queues_of_a_running_job() {
    static POOL: LazyLock<Pool> = LazyLock::new(|| Pool::new(2).unwrap());
    let counts: Vec<AtomicUsize> = (0..16).map(|_| AtomicUsize::new(0)).collect();
    let caller = std::thread::current().id();
    TURN.set(Some(POOL.lock()));
    POOL.run_queues(8, 1, &|queue, items| {
        for i in items {
            counts[queue * 8 + i].fetch_add(1, Ordering::Relaxed);
        }
        if std::thread::current().id() == caller && TURN.take().is_some() {
            let second = std::thread::spawn(|| POOL.run_queues(8, 1, &|_, _| {}));
            assert!(second.join().is_err(), "two jobs at once");
        }
    });
    assert!(counts.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{counts:?}");
    POOL.run(&|_| {});
}

#[test]
fn chunk_larger_than_the_items_runs_them_once() {
    let pool = Pool::new(3).unwrap();
    let n_items = AtomicUsize::new(0);
    pool.run_queues(5, usize::MAX / 2 + 1, &|_, items| {
        n_items.fetch_add(items.len(), Ordering::Relaxed);
    });
    assert_eq!(n_items.into_inner(), 15);
    let chunks = Chunks::new(5, usize::MAX / 2 + 1);
    assert_eq!((0..9).filter_map(|_| chunks.take()).flatten().count(), 5);
}

#[test]
fn nested_job_is_rejected() {
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
        for run in [Pool::run_chunks, Pool::run_chunks_dynamic] {
            let mut data = vec![0_usize; len];
            run(&pool, &mut data, chunk_len, &|i, chunk| {
                for (j, x) in chunk.iter_mut().enumerate() {
                    *x += 1 + i * chunk_len + j;
                }
            });
            assert!(data.iter().enumerate().all(|(i, &x)| x == i + 1), "{data:?}");
        }
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

/// Threads stay on their CPUs; without a list of CPUs they may run where the caller may.
#[test]
#[cfg(target_os = "linux")]
fn workers_are_pinned_to_their_cpus() {
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
    static HELD: RefCell<Option<Arc<()>>> = const { RefCell::new(None) };
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
    assert_eq!(Arc::strong_count(&held), 1, "a worker still runs");
}

/// Workers that have parked (after some hundred yields) still run the next job.
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
