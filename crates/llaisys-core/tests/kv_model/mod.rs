//! The naive model of the cells: one ordered map from (sequence, position) to cell, and a count of readers.

use llaisys_core::kv::{BLOCK_CELLS, CellsDump, KvError, RowPlace};
use llaisys_core::{Error, error::Exhausted, error::Rejected};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Why an operation was refused, comparable. Payloads are the real thing's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    Kv(KvError),
    Cells(Exhausted),
}

/// The real thing's error in those words. Any other kind is a bug in the cells.
pub(crate) fn refusal(error: Error) -> Refusal {
    match error {
        Error::Rejected(Rejected::Kv(error)) => Refusal::Kv(error),
        Error::Exhausted(error) => Refusal::Cells(error),
        other => panic!("the cells cannot answer {other}"),
    }
}

/// One row to be placed, owned.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) position: i32,
    pub(crate) seqs: Vec<u32>,
}

/// The rows as the cells take them.
pub(crate) fn places(rows: &[Row]) -> Vec<RowPlace<'_>> {
    rows.iter().map(|row| RowPlace { position: row.position, seqs: &row.seqs }).collect()
}

#[derive(Debug, Clone)]
pub(crate) struct Model {
    n_seq_max: usize,
    links: BTreeMap<(u32, i32), u32>,
    n_readers: Vec<u32>,
}

impl Model {
    pub(crate) fn new(n_cells: usize, n_seq_max: usize) -> Self {
        Self { n_seq_max, links: BTreeMap::new(), n_readers: vec![0; n_cells] }
    }

    pub(crate) fn dump(&self) -> CellsDump {
        let links = self.links.iter().map(|(&(slot, position), &cell)| (slot, position, cell)).collect();
        let free = (0_u32..).zip(&self.n_readers).filter(|(_, n)| **n == 0).map(|(cell, _)| cell).collect();
        CellsDump { links, free }
    }

    pub(crate) fn n_free(&self) -> usize {
        self.n_readers.iter().filter(|n| **n == 0).count()
    }

    /// Positions and cells of a sequence in a range, ascending.
    fn held(&self, slot: u32, range: Range<i32>) -> Vec<(i32, u32)> {
        if range.is_empty() {
            return Vec::new();
        }
        let range = (slot, range.start)..(slot, range.end);
        self.links.range(range).map(|(&(_, position), &cell)| (position, cell)).collect()
    }

    /// Everything that a sequence has, ascending.
    pub(crate) fn all(&self, slot: u32) -> Vec<(i32, u32)> {
        self.held(slot, 0..i32::MAX)
    }

    fn link(&mut self, slot: u32, position: i32, cell: u32) {
        assert_eq!(self.links.insert((slot, position), cell), None, "a position twice");
        self.n_readers[cell as usize] += 1;
    }

    fn unlink(&mut self, slot: u32, position: i32) {
        let cell = self.links.remove(&(slot, position)).expect("it was held");
        self.n_readers[cell as usize] -= 1;
    }

    /// Places the rows, or says why not and is as before. Answers the cells.
    pub(crate) fn prepare(&mut self, rows: &[Row]) -> Result<Vec<u32>, Refusal> {
        let before = self.clone();
        // Rows are judged as if there were always room: the extra cells exist during the call only.
        let n_cells = self.n_readers.len();
        let n_free = self.n_free();
        self.n_readers.resize(n_cells + rows.len(), 0);
        let mut placed = Vec::new();
        for (row, place) in rows.iter().enumerate() {
            if let Err(error) = self.judge(row, place) {
                *self = before;
                return Err(Refusal::Kv(error));
            }
            let cell = self.choose(place.seqs[0], n_cells);
            for &slot in &place.seqs {
                self.link(slot, place.position, cell);
            }
            placed.push(cell);
        }
        if rows.len() > n_free {
            *self = before;
            let error = Exhausted::Cells { needed: rows.len(), free: n_free, capacity: n_cells };
            return Err(Refusal::Cells(error));
        }
        self.n_readers.truncate(n_cells);
        Ok(placed)
    }

    fn judge(&self, row: usize, place: &Row) -> Result<(), KvError> {
        let position = place.position;
        if !(0..i32::MAX).contains(&position) {
            return Err(KvError::Position { row, position, max: i32::MAX - 1 });
        }
        let Some(&first) = place.seqs.first() else { return Err(KvError::NoSequence { row }) };
        for &slot in &place.seqs {
            if slot as usize >= self.n_seq_max {
                return Err(KvError::Slot { slot, n_seq_max: self.n_seq_max });
            }
            let last = self.all(slot).last().copied();
            if let Some((last, _)) = last.filter(|(last, _)| last + 1 != position) {
                return Err(KvError::NotNext { row, slot, position, expected: last + 1 });
            }
            if self.all(first) != self.all(slot) {
                return Err(KvError::CoupledDiffer { row, first, second: slot });
            }
        }
        let mut seen = BTreeSet::new();
        match place.seqs.iter().find(|slot| !seen.insert(**slot)) {
            Some(&slot) => Err(KvError::RepeatedSlot { row, slot }),
            None => Ok(()),
        }
    }

    /// The cell that the rule of blocks gives to a sequence, found by looking at every cell.
    fn choose(&self, slot: u32, n_cells: usize) -> u32 {
        let is_free = |cell: usize| self.n_readers[cell] == 0;
        let is_free_block = |block: usize| {
            (block + 1) * BLOCK_CELLS <= n_cells && (0..BLOCK_CELLS).all(|i| is_free(block * BLOCK_CELLS + i))
        };
        let next = self.all(slot).last().map(|(_, cell)| *cell as usize + 1);
        let next = next.filter(|&next| next < n_cells && is_free(next));
        let next = next.filter(|next| next % BLOCK_CELLS != 0 || is_free_block(next / BLOCK_CELLS));
        let cell = next
            .or_else(|| (0..n_cells / BLOCK_CELLS).find(|&b| is_free_block(b)).map(|b| b * BLOCK_CELLS))
            .or_else(|| (0..self.n_readers.len()).find(|&cell| is_free(cell)));
        u32::try_from(cell.expect("prepare made room")).expect("a small pool")
    }

    fn range(&self, slot: u32, p0: i32, p1: i32) -> Result<Range<i32>, Refusal> {
        if slot as usize >= self.n_seq_max {
            return Err(Refusal::Kv(KvError::Slot { slot, n_seq_max: self.n_seq_max }));
        }
        let (lo, hi) = (p0.max(0), if p1 < 0 { i32::MAX } else { p1 });
        if lo > hi { Err(Refusal::Kv(KvError::Range { p0, p1 })) } else { Ok(lo..hi) }
    }

    pub(crate) fn seq_rm(&mut self, slot: u32, p0: i32, p1: i32) -> Result<(), Refusal> {
        for (position, _) in self.held(slot, self.range(slot, p0, p1)?) {
            self.unlink(slot, position);
        }
        Ok(())
    }

    pub(crate) fn seq_cp(&mut self, src: u32, dst: u32, p0: i32, p1: i32) -> Result<(), Refusal> {
        let range = self.range(src, p0, p1)?;
        self.range(dst, p0, p1)?;
        if src == dst {
            return Ok(());
        }
        if let Some(&(position, _)) = self.held(dst, range.clone()).first() {
            return Err(Refusal::Kv(KvError::Occupied { slot: dst, position }));
        }
        for (position, cell) in self.held(src, range) {
            self.link(dst, position, cell);
        }
        Ok(())
    }

    pub(crate) fn seq_keep(&mut self, slot: u32) -> Result<(), Refusal> {
        self.range(slot, -1, -1)?;
        let others: Vec<_> = self.links.keys().copied().filter(|(other, _)| *other != slot).collect();
        others.into_iter().for_each(|(other, position)| self.unlink(other, position));
        Ok(())
    }

    pub(crate) fn seq_add(&mut self, slot: u32, p0: i32, p1: i32, delta: i32) -> Result<Vec<u32>, Refusal> {
        let moved = self.held(slot, self.range(slot, p0, p1)?);
        if delta == 0 {
            return Ok(Vec::new());
        }
        if let Some(&(position, _)) = moved.iter().find(|(_, cell)| self.n_readers[*cell as usize] > 1) {
            return Err(Refusal::Kv(KvError::SharedCells { slot, position }));
        }
        let leaves =
            |position: i32| !(0..i64::from(i32::MAX)).contains(&(i64::from(position) + i64::from(delta)));
        // The ends of the range leave first, so the real thing names one of them.
        let ends = moved.first().into_iter().chain(moved.last());
        if let Some(&(position, _)) = ends.into_iter().find(|(position, _)| leaves(*position)) {
            return Err(Refusal::Kv(KvError::ShiftRange { slot, position, delta }));
        }
        let before = self.clone();
        moved.iter().for_each(|(position, _)| self.unlink(slot, *position));
        if let Some((position, _)) = moved.iter().find(|(p, _)| self.links.contains_key(&(slot, p + delta))) {
            *self = before;
            return Err(Refusal::Kv(KvError::Occupied { slot, position: position + delta }));
        }
        moved.iter().for_each(|(position, cell)| self.link(slot, position + delta, *cell));
        Ok(moved.into_iter().map(|(_, cell)| cell).collect())
    }
}
