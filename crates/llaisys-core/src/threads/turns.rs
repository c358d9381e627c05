//! Turns of the pieces of a parallel job: a part of each piece is done in order, the rest at any time.

use std::sync::{Condvar, Mutex, PoisonError};

/// The turns of a job's pieces, which are numbered from 0.
#[derive(Debug, Default)]
pub struct Turns {
    /// The piece whose turn it is.
    current: Mutex<usize>,
    changed: Condvar,
}

/// The turn of one piece. It ends when this is dropped, also by a panic or before it came.
#[derive(Debug)]
#[must_use = "the turn ends when this is dropped"]
pub struct Turn<'a> {
    turns: &'a Turns,
    piece: usize,
}

impl Turns {
    /// The turn of `piece`. Every piece gets one, and only one, and a thread takes the next piece only when it has
    /// dropped the turn of its last one: otherwise threads wait forever.
    pub fn of(&self, piece: usize) -> Turn<'_> {
        Turn { turns: self, piece }
    }
}

impl Turn<'_> {
    /// Waits until the turns of all pieces before this one have ended.
    pub fn wait(&self) {
        let current = self.turns.current.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.turns.changed.wait_while(current, |current| *current != self.piece);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.wait();
        *self.turns.current.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::{Chunks, Pool};

    /// Runs a job of `n` pieces on four threads, which write down two of three pieces in their turns and then call
    /// `after`.
    fn order(n: usize, after: impl Fn(usize) + Sync) -> Vec<usize> {
        let (turns, pieces, order) = (Turns::default(), Chunks::new(n, 1), Mutex::new(Vec::new()));
        Pool::new(4).unwrap().run(&|_| {
            while let Some(piece) = pieces.take() {
                let turn = turns.of(piece.start);
                if piece.start % 3 != 1 {
                    turn.wait();
                    order.lock().unwrap().push(piece.start);
                }
                after(piece.start);
            }
        });
        order.into_inner().unwrap()
    }

    /// A piece that does nothing in its turn, as after an error, does not hold up the others.
    #[test]
    fn turns_come_in_order() {
        let want: Vec<usize> = (0..1000).filter(|piece| piece % 3 != 1).collect();
        assert_eq!(order(1000, |_| ()), want);
    }

    #[test]
    fn a_panic_ends_a_turn() {
        let order = std::panic::catch_unwind(|| order(100, |piece| assert_ne!(piece, 50)));
        assert!(order.is_err(), "piece 50 panicked");
    }
}
