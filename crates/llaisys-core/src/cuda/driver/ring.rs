//! Which bytes of a pinned buffer are free while copies from or to others are under way.

use std::collections::VecDeque;

/// A buffer that is given out in order and taken back in the same order.
#[derive(Debug)]
pub(super) struct Ring<T> {
    capacity: usize,
    /// Given out, the oldest first: from, to, and what tells when it is free again.
    lent: VecDeque<(usize, usize, T)>,
}

impl<T> Ring<T> {
    /// Over `capacity` bytes, all free.
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, lent: VecDeque::new() }
    }

    /// All bytes.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Where `n_bytes` (1 to the capacity) in one piece are free; None until the oldest is taken back.
    pub(super) fn place(&self, n_bytes: usize) -> Option<usize> {
        debug_assert!((1..=self.capacity).contains(&n_bytes));
        let (Some(&(oldest, ..)), Some(&(.., end, _))) = (self.lent.front(), self.lent.back()) else {
            return Some(0);
        };
        // Equal means full: nothing of no bytes is lent.
        if end <= oldest {
            (oldest - end >= n_bytes).then_some(end)
        } else if self.capacity - end >= n_bytes {
            Some(end)
        } else {
            (oldest >= n_bytes).then_some(0)
        }
    }

    /// Gives out `n_bytes` at what [`Ring::place`] said.
    pub(super) fn lend(&mut self, start: usize, n_bytes: usize, until: T) {
        debug_assert_eq!(self.place(n_bytes), Some(start));
        self.lent.push_back((start, start + n_bytes, until));
    }

    /// The oldest that is lent: where it begins, and its sign.
    pub(super) fn oldest(&self) -> Option<(usize, &T)> {
        self.lent.front().map(|(start, _, until)| (*start, until))
    }

    /// Takes the oldest back.
    pub(super) fn take_back(&mut self) -> Option<T> {
        self.lent.pop_front().map(|(.., until)| until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// What is lent is in the buffer and apart from all else that is, and a piece that fits into an empty
        /// buffer is found a place by taking back the oldest often enough.
        #[test]
        fn pieces_that_are_lent_are_apart(capacity in 1_usize..40, sizes in prop::collection::vec(1_usize..40, 1..60)) {
            let mut ring = Ring::new(capacity);
            let mut lent: VecDeque<(usize, usize)> = VecDeque::new();
            for (i, n) in sizes.into_iter().map(|n| n.min(capacity)).enumerate() {
                let start = loop {
                    if let Some(start) = ring.place(n) { break start; }
                    prop_assert_eq!(ring.oldest(), lent.front().map(|piece| (piece.0, &piece.1)));
                    prop_assert!(ring.take_back().is_some());
                    lent.pop_front();
                };
                prop_assert!(start + n <= capacity);
                ring.lend(start, n, start + n);
                for &(from, to) in &lent {
                    prop_assert!(start >= to || start + n <= from, "piece {i}: {start}+{n} on {from}..{to}");
                }
                lent.push_back((start, start + n));
            }
        }
    }
}
