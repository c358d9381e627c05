//! Reservations: cells that are allocated for one step, then committed to the sequences or freed.

use super::states::States;
use super::{KvCache, KvError, rejected};
use crate::error::Result;
use crate::seq::SeqId;

/// One row of a batch: a position in each of the sequences `seqs`.
#[derive(Debug, Clone, Copy)]
pub struct KvRow<'a> {
    /// From 0.
    pub position: i32,
    /// At least one, distinct.
    pub seqs: &'a [SeqId],
}

/// The effect on one sequence of the batch rows checked so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Mark {
    /// Number (from 1) of the last row in the sequence; 0 if there is none.
    last_row: u32,
    /// The position that the next row must have; `None`: any.
    next: Option<i32>,
}

/// Cells allocated for one step, one per row. They are already linked to the rows' sequences so that attention can see
/// them. Dropping the reservation frees them and restores the cache, digest included; [`commit`] keeps them.
///
/// [`commit`]: Reservation::commit
#[must_use = "dropping a reservation frees its cells"]
#[derive(Debug)]
pub struct Reservation<'c> {
    kv: &'c mut KvCache,
}

impl Reservation<'_> {
    /// The cache, the reserved rows included.
    pub fn kv(&self) -> &KvCache {
        self.kv
    }

    /// The cell of each row, `[n_rows]`: where its key and value are to be written.
    pub fn row_cells(&self) -> &[u32] {
        &self.kv.reserved
    }

    /// Predicts the cells that `prepare_rows(rows)` would allocate directly after this reservation is committed. `rows`
    /// must be the next ones of their sequences. Returns `None` if too few cells are free. Changes nothing.
    pub fn peek_next(&mut self, rows: &[KvRow<'_>]) -> Option<Vec<u32>> {
        let kv = &mut *self.kv;
        let (n_reserved, n_freed) = (kv.reserved.len(), kv.cells.n_freed());
        kv.check_capacity(rows).ok()?;
        rows.iter().for_each(|row| kv.allocate_row(row));
        let next = kv.reserved[n_reserved..].to_vec();
        for cell in kv.reserved.split_off(n_reserved).into_iter().rev() {
            kv.free_row(cell);
        }
        kv.cells.truncate_freed(n_freed);
        Some(next)
    }

    /// Keeps the rows.
    pub fn commit(self) {
        self.keep(|_| true);
    }

    /// Keeps the rows, and the written states of the slots for which `keeps_state` is true.
    fn keep(self, keeps_state: impl Fn(usize) -> bool) {
        self.kv.reserved.clear();
        self.kv.states.iter_mut().for_each(|states| states.commit(&keeps_state));
    }

    /// Keeps the rows except those of `removed` and the later rows that depend on them: those that share a sequence
    /// with a removed row. In a model with recurrent layers, the earlier rows of these sequences are removed too, because
    /// there is no state between them, except in the sequences `replayed`: the caller has written their states after
    /// the rows that are kept. Returns for each row the row of `removed` that caused its removal, or `None` if it was
    /// kept.
    pub fn commit_without(self, removed: &[usize], replayed: &[SeqId]) -> Vec<Option<usize>> {
        let is_replayed = |slot: usize| replayed.iter().any(|id| id.slot() as usize == slot);
        let mut culprit_of_slot = vec![None; self.kv.index.len()];
        let mut removed_with = vec![None; self.kv.reserved.len()];
        if self.kv.states.is_some() {
            for &row in removed.iter().rev() {
                let slots = self.kv.cells.seqs(self.kv.reserved[row]);
                slots.filter(|&slot| !is_replayed(slot)).for_each(|slot| culprit_of_slot[slot] = Some(row));
            }
        }
        for (row, &cell) in self.kv.reserved.iter().enumerate() {
            let culprit = if removed.contains(&row) {
                Some(row)
            } else {
                self.kv.cells.seqs(cell).find_map(|slot| culprit_of_slot[slot])
            };
            if culprit.is_some() {
                self.kv.cells.seqs(cell).for_each(|slot| culprit_of_slot[slot] = culprit);
            }
            removed_with[row] = culprit;
        }
        // From the last row, so that each removed cell is the last one of its sequences.
        for row in (0..removed_with.len()).rev().filter(|&row| removed_with[row].is_some()) {
            self.kv.free_row(self.kv.reserved[row]);
        }
        self.keep(|slot| culprit_of_slot[slot].is_none() || is_replayed(slot));
        removed_with
    }
}

impl Drop for Reservation<'_> {
    /// Frees the rows that were not committed, from the last one.
    fn drop(&mut self) {
        while let Some(cell) = self.kv.reserved.pop() {
            self.kv.free_row(cell);
        }
        self.kv.states.iter_mut().for_each(States::cancel);
    }
}

impl KvCache {
    /// Allocates one cell per row and links it, tentatively (llama.cpp's `find_slot` and `apply_ubatch`).
    ///
    /// The rows of a sequence continue at its largest position + 1, + 2, ... in row order; an empty sequence may start
    /// at any position. The sequences of one row must see exactly the same cells below it. A sequence is allocated
    /// whole blocks of [`super::BLOCK_CELLS`] while there are free ones.
    ///
    /// Errors: an id that is not acquired, then [`KvError`] for a wrong row, then [`crate::error::Exhausted::Cells`]
    /// when a stream has fewer free cells than the rows of its sequences.
    pub fn prepare_rows<'c>(&'c mut self, rows: &[KvRow<'_>]) -> Result<Reservation<'c>> {
        for &id in rows.iter().flat_map(|row| row.seqs) {
            self.acquired(id)?;
        }
        self.reserve(rows)
    }

    /// As [`KvCache::prepare_rows`], for rows of acquired ids.
    pub(super) fn reserve<'c>(&'c mut self, rows: &[KvRow<'_>]) -> Result<Reservation<'c>> {
        assert!(self.reserved.is_empty(), "a reservation was neither committed nor dropped");
        self.check_rows(rows).map_err(rejected)?;
        self.check_capacity(rows)?;
        let reservation = Reservation { kv: self };
        for row in rows {
            reservation.kv.allocate_row(row);
            if let Some(states) = &mut reservation.kv.states {
                states.reserve(row.seqs[0].slot() as usize);
            }
        }
        Ok(reservation)
    }

    /// Checks that each stream has a free cell for each of its rows. Errors: [`crate::error::Exhausted::Cells`].
    fn check_capacity(&self, rows: &[KvRow<'_>]) -> Result<()> {
        let stream_of = |row: &KvRow<'_>| self.streams[row.seqs[0].slot() as usize];
        for stream in (0_u32..).take(self.n_streams()) {
            self.check_free(stream, rows.iter().filter(|row| stream_of(row) == stream).count())?;
        }
        Ok(())
    }

    /// Checks the rows in order, each against the state of the sequences after the rows before it.
    fn check_rows(&mut self, rows: &[KvRow<'_>]) -> Result<(), KvError> {
        self.marks.clear();
        self.marks.extend(self.index.iter().map(|ranges| Mark { last_row: 0, next: ranges.end() }));
        for (row, kv_row) in rows.iter().enumerate() {
            self.check_row(row, kv_row)?;
            let last_row = u32::try_from(row + 1).unwrap_or(u32::MAX);
            for slot in kv_row.seqs.iter().map(|id| id.slot()) {
                let mark = &mut self.marks[slot as usize];
                if mark.last_row == last_row {
                    return Err(KvError::RepeatedSlot { row, slot });
                }
                *mark = Mark { last_row, next: Some(kv_row.position + 1) };
            }
        }
        Ok(())
    }

    fn check_row(&self, row: usize, kv_row: &KvRow<'_>) -> Result<(), KvError> {
        let position = kv_row.position;
        if !(0..i32::MAX).contains(&position) {
            return Err(KvError::Position { row, position, max: i32::MAX - 1 });
        }
        let Some(first) = kv_row.seqs.first() else { return Err(KvError::NoSequence { row }) };
        if self.states.is_some() && kv_row.seqs.len() > 1 {
            return Err(KvError::RecurrentCoupled { row });
        }
        for id in kv_row.seqs {
            let (first, slot) = (first.slot(), id.slot());
            let next = self.marks[slot as usize].next;
            if let Some(expected) = next.filter(|next| *next != position) {
                return Err(KvError::NotNext { row, slot, position, expected });
            }
            self.check_has_state(*id)?;
            if !self.sees_the_same(first as usize, slot as usize) {
                return Err(KvError::CoupledDiffer { row, first, second: slot });
            }
        }
        Ok(())
    }

    /// True if both slots' sequences, with the rows marked so far, see exactly the same cells. There are three cases:
    /// - They have the same last row: its check found them equal before it, and no row since has changed either.
    /// - They have no rows: their ranges are compared (equal contents have equal ranges).
    /// - Their last rows differ: only one of them has the cell of the later row.
    fn sees_the_same(&self, a: usize, b: usize) -> bool {
        let last_row = self.marks[a].last_row;
        self.streams[a] == self.streams[b]
            && last_row == self.marks[b].last_row
            && (a == b || last_row > 0 || self.index[a] == self.index[b])
    }

    /// Allocates a cell for one checked row and links it. The caller has checked that a cell is free.
    fn allocate_row(&mut self, row: &KvRow<'_>) {
        let first = row.seqs[0].slot() as usize;
        let cell = self.cells.allocate(self.streams[first], self.index[first].last_cell(), row.position);
        for slot in row.seqs.iter().map(|id| id.slot() as usize) {
            self.cells.link(slot, cell);
            self.index[slot].push(row.position, cell);
        }
        self.reserved.push(cell);
    }

    /// Unlinks a reserved cell, which is the last one of each of its sequences. The inverse of
    /// [`KvCache::allocate_row`].
    fn free_row(&mut self, cell: u32) {
        while let Some(slot) = self.cells.first_seq(cell) {
            self.index[slot].pop();
            self.cells.unlink(slot, cell);
        }
    }
}
