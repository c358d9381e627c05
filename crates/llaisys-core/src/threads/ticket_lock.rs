//! The lock of a pool that several threads use: a reentrant ticket lock, first come, first served.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

thread_local! {
    /// Its address is unique among the running threads.
    static THREAD_MARK: Cell<u8> = const { Cell::new(0) };
}

fn thread_id() -> usize {
    THREAD_MARK.with(|mark| std::ptr::from_ref(mark).addr())
}

/// A lock that threads get in the order of their requests, by ticket.
#[derive(Debug, Default)]
pub(super) struct TicketLock {
    tickets: Mutex<Tickets>,
    released: Condvar,
    /// The [`thread_id`] of the thread that holds the lock; 0 if none does.
    holder: AtomicUsize,
}

#[derive(Debug, Default)]
struct Tickets {
    /// The next ticket.
    next: u64,
    /// The ticket that holds the lock, or gets it next.
    serving: u64,
}

/// A pool locked by this thread, until the guard is dropped.
#[derive(Debug)]
#[must_use = "the lock is released when this is dropped"]
pub struct PoolGuard<'a> {
    /// `None` if the thread already held the lock.
    lock: Option<&'a TicketLock>,
    /// The guard belongs to the thread that locked, so it must not move to another.
    not_send: PhantomData<*const ()>,
}

impl TicketLock {
    /// Waits for the threads that requested the lock before; returns at once if this thread already holds it.
    pub(super) fn lock(&self) -> PoolGuard<'_> {
        // Only this thread stores its own id, and clears it before it continues: relaxed is enough.
        if self.holder.load(Ordering::Relaxed) == thread_id() {
            return PoolGuard { lock: None, not_send: PhantomData };
        }
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = tickets.next;
        tickets.next += 1;
        while tickets.serving != ticket {
            tickets = self.released.wait(tickets).unwrap_or_else(PoisonError::into_inner);
        }
        self.holder.store(thread_id(), Ordering::Relaxed);
        PoolGuard { lock: Some(self), not_send: PhantomData }
    }
}

impl Drop for PoolGuard<'_> {
    fn drop(&mut self) {
        let Some(lock) = self.lock else { return };
        lock.holder.store(0, Ordering::Relaxed);
        lock.tickets.lock().unwrap_or_else(PoisonError::into_inner).serving += 1;
        lock.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::thread::{scope, yield_now};

    /// The lock is fair: a thread gets it before the holder gets it again.
    #[test]
    fn threads_get_the_lock_in_request_order() {
        let lock = TicketLock::default();
        let (sender, receiver) = channel();
        scope(|s| {
            let first = lock.lock();
            for name in 0..3 {
                let (lock, sender) = (&lock, sender.clone());
                s.spawn(move || {
                    let _guard = lock.lock();
                    sender.send(name).unwrap();
                });
                while lock.tickets.lock().unwrap().next != name + 2 {
                    yield_now();
                }
            }
            drop(first);
            let _again = lock.lock();
            sender.send(99).unwrap();
        });
        drop(sender);
        assert_eq!(receiver.iter().collect::<Vec<_>>(), [0, 1, 2, 99]);
    }

    #[test]
    fn a_nested_lock_keeps_the_outer_one() {
        let lock = TicketLock::default();
        let outer = lock.lock();
        drop(lock.lock());
        assert_eq!(
            lock.holder.load(Ordering::Relaxed),
            thread_id(),
            "the inner guard released the outer one"
        );
        drop(outer);
        assert_eq!((lock.holder.load(Ordering::Relaxed), lock.tickets.lock().unwrap().serving), (0, 1));
    }

    #[test]
    fn a_panic_releases_the_lock() {
        let lock = TicketLock::default();
        let lost = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _guard = lock.lock();
            panic!("in the middle");
        }));
        assert!(lost.is_err());
        drop(lock.lock());
    }
}
