//! A ring allocator for pinned buffers: finds bytes that no running copy uses.

use std::collections::VecDeque;

/// A buffer whose pieces are allocated in order and freed in the same order.
#[derive(Debug)]
pub(super) struct Ring<T> {
    capacity: usize,
    /// The allocated pieces, the oldest first: start, end, and the sign that the piece can be freed.
    pieces: VecDeque<(usize, usize, T)>,
}

impl<T> Ring<T> {
    /// Returns a ring of `capacity` bytes, all free.
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, pieces: VecDeque::new() }
    }

    /// Returns the number of bytes.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the start of `n_bytes` contiguous free bytes, 1 to the capacity; `None`: free the oldest piece and try
    /// again.
    pub(super) fn find_free(&self, n_bytes: usize) -> Option<usize> {
        debug_assert!((1..=self.capacity).contains(&n_bytes));
        let (Some(&(oldest, ..)), Some(&(.., end, _))) = (self.pieces.front(), self.pieces.back()) else {
            return Some(0);
        };
        // Equal means full, because no piece is empty.
        if end <= oldest {
            (oldest - end >= n_bytes).then_some(end)
        } else if self.capacity - end >= n_bytes {
            Some(end)
        } else {
            (oldest >= n_bytes).then_some(0)
        }
    }

    /// Allocates `n_bytes` at the place that [`Ring::find_free`] returned.
    pub(super) fn allocate(&mut self, start: usize, n_bytes: usize, until: T) {
        debug_assert_eq!(self.find_free(n_bytes), Some(start));
        self.pieces.push_back((start, start + n_bytes, until));
    }

    /// Returns the start of the oldest piece, and its sign.
    pub(super) fn oldest(&self) -> Option<(usize, &T)> {
        self.pieces.front().map(|(start, _, until)| (*start, until))
    }

    /// Frees the oldest piece and returns its sign.
    pub(super) fn free_oldest(&mut self) -> Option<T> {
        self.pieces.pop_front().map(|(.., until)| until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Allocated pieces are inside the buffer and do not overlap. A piece that fits into an empty buffer fits after
        /// enough of the oldest pieces are freed.
        #[test]
        fn allocated_pieces_do_not_overlap(
            capacity in 1_usize..40,
            sizes in prop::collection::vec(1_usize..40, 1..60),
        ) {
            let mut ring = Ring::new(capacity);
            let mut pieces: VecDeque<(usize, usize)> = VecDeque::new();
            for (i, n) in sizes.into_iter().map(|n| n.min(capacity)).enumerate() {
                let start = loop {
                    if let Some(start) = ring.find_free(n) { break start; }
                    prop_assert_eq!(ring.oldest(), pieces.front().map(|piece| (piece.0, &piece.1)));
                    prop_assert!(ring.free_oldest().is_some());
                    pieces.pop_front();
                };
                prop_assert!(start + n <= capacity);
                ring.allocate(start, n, start + n);
                for &(from, to) in &pieces {
                    prop_assert!(start >= to || start + n <= from, "piece {i}: {start}+{n} on {from}..{to}");
                }
                pieces.push_back((start, start + n));
            }
        }
    }
}
