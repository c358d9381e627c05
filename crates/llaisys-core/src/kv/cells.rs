//! Which sequence holds which position in which cell. Knows slots, positions and cells; knows no tensor.

use super::KvError;
use super::runs::{Run, Runs};
use super::table::Table;
use crate::error::{Error, Rejected, Result};

/// Where one row of a batch goes: a position, in every one of `seqs`.
#[derive(Debug, Clone, Copy)]
pub struct RowPlace<'a> {
    /// From 0.
    pub position: i32,
    /// Sequence slots, at least one, distinct.
    pub seqs: &'a [u32],
}

/// The unified cells of one stream (arena). A cell holds one position and the set of sequences that see it;
/// each sequence has its own index of cells in position order, so what is done to one sequence costs its own
/// length, not the pool's. Sharing, forking and trimming are index edits; no key or value is copied.
///
/// Positions are `0..i32::MAX`. In ranges `p0..p1` a negative `p0` means from the start, a negative `p1` to
/// the end. Every refused operation has changed nothing.
///
/// Invariants, checked by [`Cells::check`]:
/// 1. A cell is in use exactly if some sequence sees it; a free cell has position 0.
/// 2. The free count, the use bits and their summaries agree.
/// 3. The runs of a sequence rise in position, do not overlap, are not empty and are as long as can be.
/// 4. A sequence has a cell at a position in its runs exactly if the cell has that position and the sequence
///    in its set: a position exists at most once per sequence.
#[derive(Debug)]
pub struct Cells {
    pub(super) stream: u32,
    pub(super) table: Table,
    /// By slot.
    pub(super) index: Vec<Runs>,
    /// Cells of the live reservation, in row order; empty when there is none.
    pub(super) placed: Vec<u32>,
    /// By slot: working memory of `prepare`, meaningless outside it.
    pub(super) marks: Vec<super::reserve::Mark>,
}

impl Cells {
    /// `n_cells` free cells of arena `stream` for the slots `0..n_seq_max`. Memory is about 12 bytes a cell
    /// (to 64 sequences; 8 more for each further 64), touched as cells are used.
    pub fn new(n_cells: usize, n_seq_max: usize, stream: u32) -> Self {
        assert!(u32::try_from(n_cells).is_ok(), "{n_cells} cells: cells are numbered in 32 bits");
        Self {
            stream,
            table: Table::new(n_cells, n_seq_max),
            index: (0..n_seq_max).map(|_| Runs::default()).collect(),
            placed: Vec::new(),
            marks: Vec::new(),
        }
    }

    /// Forgets positions `p0..p1` of a sequence. Cells that no other sequence sees are free again.
    /// Errors: [`KvError::Slot`], [`KvError::Range`].
    pub fn seq_rm(&mut self, slot: u32, p0: i32, p1: i32) -> Result<()> {
        let (lo, hi) = self.checked(slot, p0, p1)?;
        let runs = &mut self.index[slot as usize];
        for cell in runs.pieces(lo, hi).flat_map(Run::cells) {
            self.table.unlink(slot, cell);
        }
        runs.remove(lo, hi);
        Ok(())
    }

    /// Lets `dst` see the cells of `src` at positions `p0..p1`; copying a sequence to itself does nothing.
    /// Errors: [`KvError::Slot`], [`KvError::Range`], [`KvError::Occupied`] if `dst` has a position in the
    /// range.
    pub fn seq_cp(&mut self, src: u32, dst: u32, p0: i32, p1: i32) -> Result<()> {
        let (lo, hi) = self.checked(src, p0, p1)?;
        self.checked(dst, p0, p1)?;
        if src == dst {
            return Ok(());
        }
        if let Some(run) = self.index[dst as usize].pieces(lo, hi).next() {
            return Err(refused(KvError::Occupied { slot: dst, position: run.position }));
        }
        let mut runs = std::mem::take(&mut self.index[dst as usize]);
        let shared = &self.index[src as usize];
        for cell in shared.pieces(lo, hi).flat_map(Run::cells) {
            self.table.link(dst, cell);
        }
        runs.insert(shared.pieces(lo, hi));
        self.index[dst as usize] = runs;
        Ok(())
    }

    /// Forgets every sequence but one. Errors: [`KvError::Slot`].
    pub fn seq_keep(&mut self, slot: u32) -> Result<()> {
        self.checked(slot, -1, -1)?;
        for (other, runs) in (0_u32..).zip(&mut self.index).filter(|(other, _)| *other != slot) {
            for cell in runs.as_slice().iter().copied().flat_map(Run::cells) {
                self.table.unlink(other, cell);
            }
            runs.clear();
        }
        Ok(())
    }

    /// Moves positions `p0..p1` of a sequence by `delta` and returns the cells that moved, in position order:
    /// the keys stored there must be rotated by `delta`.
    ///
    /// Errors: [`KvError::Slot`], [`KvError::Range`]; [`KvError::SharedCells`] if another sequence sees a cell
    /// of the range, [`KvError::ShiftRange`] if a position would leave `0..i32::MAX`, [`KvError::Occupied`] if
    /// the sequence has a position where one would move.
    pub fn seq_add(&mut self, slot: u32, p0: i32, p1: i32, delta: i32) -> Result<Vec<u32>> {
        let (lo, hi) = self.checked(slot, p0, p1)?;
        if delta == 0 {
            return Ok(Vec::new());
        }
        let runs = &self.index[slot as usize];
        let moved: Vec<u32> = runs.pieces(lo, hi).flat_map(Run::cells).collect();
        if let Some(&cell) = moved.iter().find(|&&cell| self.table.n_seqs(cell) > 1) {
            return Err(refused(KvError::SharedCells { slot, position: self.table.position(cell) }));
        }
        for &cell in moved.first().into_iter().chain(moved.last()) {
            let position = self.table.position(cell);
            if position.checked_add(delta).is_none_or(|p| !(0..i32::MAX).contains(&p)) {
                return Err(refused(KvError::ShiftRange { slot, position, delta }));
            }
        }
        let shifted = runs.shifted(lo, hi, delta);
        self.index[slot as usize] =
            shifted.map_err(|position| refused(KvError::Occupied { slot, position }))?;
        for &cell in &moved {
            self.table.set_position(cell, self.table.position(cell) + delta);
        }
        Ok(moved)
    }

    /// The smallest position of a sequence; `None` if it has none or there is no such slot.
    pub fn pos_min(&self, slot: u32) -> Option<i32> {
        self.index.get(slot as usize)?.start()
    }

    /// The largest position of a sequence; `None` if it has none or there is no such slot.
    pub fn pos_max(&self, slot: u32) -> Option<i32> {
        self.index.get(slot as usize)?.end().map(|end| end - 1)
    }

    /// The runs of a sequence in rising position order; none if there is no such slot.
    pub fn runs(&self, slot: u32) -> &[Run] {
        self.index.get(slot as usize).map_or(&[], Runs::as_slice)
    }

    /// Appends the cells of positions `0..=up_to` of a sequence to `out`, in position order.
    pub fn visible_cells(&self, slot: u32, up_to: i32, out: &mut Vec<u32>) {
        if let Some(runs) = self.index.get(slot as usize) {
            runs.pieces(0, up_to.saturating_add(1)).for_each(|run| out.extend(run.cells()));
        }
    }

    /// Cells that no sequence sees.
    pub fn n_free(&self) -> usize {
        self.table.free.n_free()
    }

    /// Cells in all.
    pub fn n_cells(&self) -> usize {
        self.table.free.n_cells()
    }

    /// Sequence slots.
    pub fn n_seq_max(&self) -> usize {
        self.index.len()
    }

    /// The arena's number.
    pub fn stream(&self) -> u32 {
        self.stream
    }

    /// The slot exists and `p0..p1` is a range; returns it with the negative ends resolved.
    fn checked(&self, slot: u32, p0: i32, p1: i32) -> Result<(i32, i32)> {
        if slot as usize >= self.index.len() {
            return Err(refused(KvError::Slot { slot, n_seq_max: self.index.len() }));
        }
        let (lo, hi) = (p0.max(0), if p1 < 0 { i32::MAX } else { p1 });
        if lo > hi { Err(refused(KvError::Range { p0, p1 })) } else { Ok((lo, hi)) }
    }
}

/// Places a refusal of this room in the tree.
pub(super) fn refused(error: KvError) -> Error {
    Rejected::Kv(error).into()
}
