//! A case that only the inside of the pool can cause: a worker thread that ends.

use super::*;

/// A worker that ends must not leave the caller waiting, nor let it return before the others have finished.
#[test]
fn the_caller_panics_if_a_worker_thread_has_ended() {
    let endings: [fn(&Shared, usize); 2] = [
        |_, worker| assert_ne!(worker, 1, "this worker panics outside of any job"),
        |shared, worker| {
            if worker == 2 {
                work(shared, worker)
            }
        },
    ];
    for ending in endings {
        let pool = Pool::start(3, &[], ending).unwrap();
        for _ in 0..2 {
            let ran = AtomicUsize::new(0);
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|_| {
                    ran.fetch_add(1, Ordering::Relaxed);
                });
            }));
            let message = result.unwrap_err().downcast::<String>().unwrap();
            assert!(message.contains("of the pool has ended"), "{message}");
            assert!(ran.into_inner() >= 1);
        }
    }
}
