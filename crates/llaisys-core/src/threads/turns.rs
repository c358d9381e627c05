//! Whose turn it is on a pool that several threads use: first come, first served.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

thread_local! {
    /// Its address tells this thread from every other one that lives.
    static ME: Cell<u8> = const { Cell::new(0) };
}

fn me() -> usize {
    ME.with(|me| std::ptr::from_ref(me).addr())
}

/// A line of threads, numbered as they come; the one whose number is called has the turn.
#[derive(Debug, Default)]
pub(super) struct Turns {
    line: Mutex<Line>,
    called: Condvar,
    /// The thread that has the turn, as [`me`] names it; 0 while nobody has.
    holder: AtomicUsize,
}

#[derive(Debug, Default)]
struct Line {
    /// Numbers given out.
    given: u64,
    /// The number that has the turn, or is next to have it.
    serving: u64,
}

/// A thread's turn, until it is dropped.
#[derive(Debug)]
#[must_use = "the turn ends when this is dropped"]
pub struct Turn<'a> {
    /// None where the thread had the turn before.
    turns: Option<&'a Turns>,
    /// The turn belongs to the thread that took it, so it must not move to another.
    not_send: PhantomData<*const ()>,
}

impl Turns {
    /// Waits until those who came before have had theirs; at once if this thread has the turn already.
    pub(super) fn take(&self) -> Turn<'_> {
        // Only this thread writes its own name, and takes it away before it goes on: relaxed is enough.
        if self.holder.load(Ordering::Relaxed) == me() {
            return Turn { turns: None, not_send: PhantomData };
        }
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        let number = line.given;
        line.given += 1;
        while line.serving != number {
            line = self.called.wait(line).unwrap_or_else(PoisonError::into_inner);
        }
        self.holder.store(me(), Ordering::Relaxed);
        Turn { turns: Some(self), not_send: PhantomData }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(turns) = self.turns else { return };
        turns.holder.store(0, Ordering::Relaxed);
        turns.line.lock().unwrap_or_else(PoisonError::into_inner).serving += 1;
        turns.called.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::thread::{scope, yield_now};

    /// Whoever comes later has the turn later, though the one before comes back at once.
    #[test]
    fn turns_are_had_in_the_order_of_coming() {
        let turns = Turns::default();
        let (said, heard) = channel();
        scope(|s| {
            let first = turns.take();
            for name in 0..3 {
                let (turns, said) = (&turns, said.clone());
                s.spawn(move || {
                    let _turn = turns.take();
                    said.send(name).unwrap();
                });
                while turns.line.lock().unwrap().given != name + 2 {
                    yield_now();
                }
            }
            drop(first);
            let _again = turns.take();
            said.send(99).unwrap();
        });
        drop(said);
        assert_eq!(heard.iter().collect::<Vec<_>>(), [0, 1, 2, 99]);
    }

    #[test]
    fn a_turn_within_a_turn_is_the_same() {
        let turns = Turns::default();
        let outer = turns.take();
        drop(turns.take());
        assert_eq!(turns.holder.load(Ordering::Relaxed), me(), "the inner one ended the outer");
        drop(outer);
        assert_eq!((turns.holder.load(Ordering::Relaxed), turns.line.lock().unwrap().serving), (0, 1));
    }

    #[test]
    fn a_turn_ends_with_a_panic() {
        let turns = Turns::default();
        let lost = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _turn = turns.take();
            panic!("in the middle");
        }));
        assert!(lost.is_err());
        drop(turns.take());
    }
}
