//! Reservations: cells held for one step, made the sequences' own or given back without a trace.

use super::KvError;
use super::cells::{Cells, RowPlace, refused};
use crate::error::Error;

/// What the rows of a batch looked at so far do to one sequence.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Mark {
    /// Number of the last row (from 1) that is in the sequence, 0 if none is.
    last_row: u32,
    /// The position that the next row must have; `None`: any.
    next: Option<i32>,
}

/// Cells held for one step, one a row, already linked to the rows' sequences so that attention can see them.
/// Dropping it gives every one back and leaves the cells as they were, digest included; only [`commit`] makes
/// them the sequences' own.
///
/// [`commit`]: Reservation::commit
#[must_use = "dropping a reservation frees its cells"]
#[derive(Debug)]
pub struct Reservation<'c> {
    cells: &'c mut Cells,
}

impl Reservation<'_> {
    /// The cells, the reserved rows included.
    pub fn cells(&self) -> &Cells {
        self.cells
    }

    /// The cell of each row, `[n_rows]`: where its key and value are to be written.
    pub fn placed(&self) -> &[u32] {
        &self.cells.placed
    }

    /// The cells that the next reservation gives `rows`, the next ones of their sequences, if they are all of it and
    /// nothing happens in between; `None` if too few are free. Changes nothing.
    pub fn foresee(&mut self, rows: &[RowPlace<'_>]) -> Option<Vec<u32>> {
        let cells = &mut *self.cells;
        let (n_placed, n_freed) = (cells.placed.len(), cells.table.n_freed());
        for stream in (0_u32..).take(cells.n_streams()) {
            let n_home = rows.iter().filter(|row| cells.stream(row.seqs[0]) == stream).count();
            cells.check_room(stream, n_home).ok()?;
        }
        rows.iter().for_each(|row| place(cells, row));
        let foreseen = cells.placed[n_placed..].to_vec();
        for cell in cells.placed.split_off(n_placed).into_iter().rev() {
            unplace(cells, cell);
        }
        cells.table.forget_freed(n_freed);
        Some(foreseen)
    }

    /// Keeps the rows.
    pub fn commit(self) {
        self.cells.placed.clear();
    }

    /// Keeps the rows but the `faulty` ones and what cannot stand without them: the later rows of the same
    /// sequences (and, where those are rows of several sequences, the later rows of these). By row: the faulty row
    /// that it went with, or `None` if it was kept.
    pub fn commit_without(self, faulty: &[usize]) -> Vec<Option<usize>> {
        let mut lost_slots = vec![None; self.cells.index.len()];
        let mut lost_with = vec![None; self.cells.placed.len()];
        for (row, &cell) in self.cells.placed.iter().enumerate() {
            let culprit = if faulty.contains(&row) {
                Some(row)
            } else {
                self.cells.table.seqs(cell).find_map(|slot| lost_slots[slot as usize])
            };
            if culprit.is_some() {
                self.cells.table.seqs(cell).for_each(|slot| lost_slots[slot as usize] = culprit);
            }
            lost_with[row] = culprit;
        }
        // Last first: what is taken from a sequence is its last position then.
        for row in (0..lost_with.len()).rev().filter(|&row| lost_with[row].is_some()) {
            unplace(self.cells, self.cells.placed[row]);
        }
        self.commit();
        lost_with
    }
}

impl Drop for Reservation<'_> {
    /// Unlinks the rows that were not committed, last first.
    fn drop(&mut self) {
        while let Some(cell) = self.cells.placed.pop() {
            unplace(self.cells, cell);
        }
    }
}

/// Takes a reserved cell, the last one of each of its sequences, from them: the inverse of [`place`].
fn unplace(cells: &mut Cells, cell: u32) {
    let Cells { table, index, .. } = cells;
    while let Some(slot) = table.first_seq(cell) {
        index[slot as usize].pop();
        table.unlink(slot, cell);
    }
}

impl Cells {
    /// Takes one cell a row and links it, tentatively (llama.cpp's `find_slot` and `apply_ubatch`).
    ///
    /// The rows of a sequence go on at its largest position + 1, + 2, ... in row order; an empty sequence may
    /// start anywhere. A row of several sequences needs them to see exactly the same cells below it. A
    /// sequence is given whole blocks of [`super::BLOCK_CELLS`] while there are free ones.
    ///
    /// Errors, nothing changed: [`KvError`] for a wrong row; if all rows are right,
    /// [`crate::error::Exhausted::Cells`] when an arena has fewer free cells than the rows of its sequences.
    pub fn prepare<'c>(&'c mut self, rows: &[RowPlace<'_>]) -> Result<Reservation<'c>, Error> {
        assert!(self.placed.is_empty(), "a reservation was neither committed nor dropped");
        self.check_rows(rows).map_err(refused)?;
        let home = |row: &RowPlace<'_>| self.streams[row.seqs[0] as usize];
        for stream in (0_u32..).take(self.n_streams()) {
            self.check_room(stream, rows.iter().filter(|row| home(row) == stream).count())?;
        }
        let reservation = Reservation { cells: self };
        for row in rows {
            place(reservation.cells, row);
        }
        Ok(reservation)
    }

    /// Checks the rows one after the other, each against the sequences as the rows before it leave them.
    fn check_rows(&mut self, rows: &[RowPlace<'_>]) -> Result<(), KvError> {
        self.marks.clear();
        self.marks.extend(self.index.iter().map(|runs| Mark { last_row: 0, next: runs.end() }));
        for (row, place) in rows.iter().enumerate() {
            self.check_row(row, place)?;
            let last_row = u32::try_from(row + 1).unwrap_or(u32::MAX);
            for &slot in place.seqs {
                let mark = &mut self.marks[slot as usize];
                if mark.last_row == last_row {
                    return Err(KvError::RepeatedSlot { row, slot });
                }
                *mark = Mark { last_row, next: Some(place.position + 1) };
            }
        }
        Ok(())
    }

    fn check_row(&self, row: usize, place: &RowPlace<'_>) -> Result<(), KvError> {
        let position = place.position;
        if !(0..i32::MAX).contains(&position) {
            return Err(KvError::Position { row, position, max: i32::MAX - 1 });
        }
        let Some(&first) = place.seqs.first() else { return Err(KvError::NoSequence { row }) };
        for &slot in place.seqs {
            let Some(mark) = self.marks.get(slot as usize) else {
                return Err(KvError::Slot { slot, n_seq_max: self.index.len() });
            };
            if let Some(expected) = mark.next.filter(|next| *next != position) {
                return Err(KvError::NotNext { row, slot, position, expected });
            }
            if !self.sees_the_same(first, slot) {
                return Err(KvError::CoupledDiffer { row, first, second: slot });
            }
        }
        Ok(())
    }

    /// True if both sequences, with the rows marked so far, see exactly the same cells. If their last row is
    /// the same one, that row's check has found them equal before it and no row since has touched either; if
    /// they have none, their runs tell (equal contents have equal runs); otherwise only one of them has the
    /// cell of the later row.
    fn sees_the_same(&self, first: u32, second: u32) -> bool {
        let (a, b) = (first as usize, second as usize);
        let last_row = self.marks[a].last_row;
        self.streams[a] == self.streams[b]
            && last_row == self.marks[b].last_row
            && (a == b || last_row > 0 || self.index[a] == self.index[b])
    }
}

/// Links one checked row to a cell; a cell is free.
fn place(cells: &mut Cells, row: &RowPlace<'_>) {
    let Cells { table, streams, index, placed, .. } = cells;
    let first = row.seqs[0] as usize;
    let cell = table.take(streams[first], index[first].last_cell(), row.position);
    for &slot in row.seqs {
        table.link(slot, cell);
        index[slot as usize].push(row.position, cell);
    }
    placed.push(cell);
}
