//! Which sequence holds which position in which cell. Knows slots, positions and cells; knows no tensor.

use super::KvError;
use super::free::FreeCells;
use super::runs::{Run, Runs};
use super::segments::Segment;
use super::table::Table;
use crate::error::{Error, Exhausted, Rejected, Result};
use std::collections::BTreeMap;

/// Where one row of a batch goes: a position, in every one of `seqs`.
#[derive(Debug, Clone, Copy)]
pub struct RowPlace<'a> {
    /// From 0.
    pub position: i32,
    /// Sequence slots, at least one, distinct.
    pub seqs: &'a [u32],
}

/// Sizes of the books.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Cells in all; a multiple of `n_streams`.
    pub n_cells: usize,
    /// Sequence slots.
    pub n_seq_max: usize,
    /// Arenas (streams) of equal size: arena `s` has the cells `s * n .. (s + 1) * n` with
    /// `n = n_cells / n_streams`.
    pub n_streams: usize,
    /// What was freed last is taken next: the order for tests, in which a stale use shows at once.
    pub lifo: bool,
}

/// Cells whose keys and values must be copied, one to one, before anybody looks: sharing across arenas.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use = "the new cells hold nothing until the tensors are copied"]
pub struct Copies {
    /// Where they lie.
    pub from: Vec<u32>,
    /// Where they go, fresh cells of another arena.
    pub to: Vec<u32>,
}

/// The unified cells of all arenas. A cell holds one position, the set of sequences that see it, and at most one
/// segment (see [`super::segments`]); each sequence has its own index of cells in position order, so what is done
/// to one sequence costs its own length, not the pool's. A sequence lives in one arena. Sharing, forking and
/// trimming within an arena are index edits; across arenas keys and values are copied.
///
/// Positions are `0..i32::MAX`. In ranges `p0..p1` a negative `p0` means from the start, a negative `p1` to
/// the end. Every refused operation has changed nothing.
///
/// Invariants, checked by [`Cells::check`]:
/// 1. A cell is in use exactly if some sequence sees it or a segment holds it; a free cell has position 0.
/// 2. The free counts, the use bits, their summaries and, in the order of tests, the stacks agree.
/// 3. The runs of a sequence rise in position, do not overlap, are not empty and are as long as can be.
/// 4. A sequence has a cell at a position in its runs exactly if the cell has that position and the sequence
///    in its set: a position exists at most once per sequence.
/// 5. A segment holds at least one cell, its positions have no gap, and its cells have those positions. A cell is
///    marked as retained exactly if one segment, and only one, has it.
/// 6. The cells of a sequence or segment lie in its arena.
#[derive(Debug)]
pub struct Cells {
    pub(super) table: Table,
    /// By slot: its arena.
    pub(super) streams: Vec<u32>,
    /// By slot.
    pub(super) index: Vec<Runs>,
    /// By the caller's id.
    pub(super) segments: BTreeMap<u64, Segment>,
    /// Cells of the live reservation, in row order; empty when there is none.
    pub(super) placed: Vec<u32>,
    /// By slot: working memory of `prepare`, meaningless outside it.
    pub(super) marks: Vec<super::reserve::Mark>,
}

impl Cells {
    /// Free cells, every slot in arena 0. Memory is about 12 bytes a cell (to 64 sequences; 8 more for each
    /// further 64), touched as cells are used. Panics if `n_streams` does not divide `n_cells`, or a count is 0:
    /// [`crate::books::Books`] has checked them.
    pub fn new(shape: KvShape) -> Self {
        let KvShape { n_cells, n_seq_max, n_streams, .. } = shape;
        assert!(u32::try_from(n_cells).is_ok(), "{n_cells} cells: cells are numbered in 32 bits");
        assert!(
            n_streams > 0 && n_cells > 0 && n_cells.is_multiple_of(n_streams),
            "{shape:?}: uneven arenas"
        );
        Self {
            table: Table::new(shape),
            streams: vec![0; n_seq_max],
            index: (0..n_seq_max).map(|_| Runs::default()).collect(),
            segments: BTreeMap::new(),
            placed: Vec::new(),
            marks: Vec::new(),
        }
    }

    /// Puts an empty sequence into an arena. Errors: [`KvError::Slot`], [`KvError::Stream`],
    /// [`KvError::Occupied`] if it has cells.
    pub fn set_stream(&mut self, slot: u32, stream: u32) -> Result<()> {
        self.checked(slot, -1, -1)?;
        self.check_stream(stream)?;
        if let Some(position) = self.index[slot as usize].start() {
            return Err(refused(KvError::Occupied { slot, position }));
        }
        self.streams[slot as usize] = stream;
        Ok(())
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

    /// Lets `dst` see positions `p0..p1` of `src`: the same cells in the same arena, else fresh cells of its own,
    /// whose contents are the caller's to copy. Copying a sequence to itself does nothing.
    /// Errors: [`KvError::Slot`], [`KvError::Range`], [`KvError::Occupied`] if `dst` has a position in the
    /// range, [`Exhausted::Cells`] if its arena has too few free cells for a copy.
    pub fn seq_cp(&mut self, src: u32, dst: u32, p0: i32, p1: i32) -> Result<Copies> {
        let (lo, hi) = self.checked(src, p0, p1)?;
        self.checked(dst, p0, p1)?;
        if src == dst {
            return Ok(Copies::default());
        }
        if let Some(run) = self.index[dst as usize].pieces(lo, hi).next() {
            return Err(refused(KvError::Occupied { slot: dst, position: run.position }));
        }
        let pieces: Vec<Run> = self.index[src as usize].pieces(lo, hi).collect();
        self.share(&pieces, self.streams[src as usize], dst)
    }

    /// Lets `dst`, which has none of their positions, see the `pieces` of arena `stream`, or copies of them.
    pub(super) fn share(&mut self, pieces: &[Run], stream: u32, dst: u32) -> Result<Copies> {
        let home = self.streams[dst as usize];
        if stream == home {
            for cell in pieces.iter().copied().flat_map(Run::cells) {
                self.table.link(dst, cell);
            }
            self.index[dst as usize].insert(pieces.iter().copied());
            return Ok(Copies::default());
        }
        let from: Vec<u32> = pieces.iter().copied().flat_map(Run::cells).collect();
        self.check_room(home, from.len())?;
        let mut last = self.index[dst as usize].last_cell();
        let mut copied = Runs::default();
        for (position, _) in pieces.iter().flat_map(|piece| piece.places()) {
            let cell = self.table.take(home, last, position);
            self.table.link(dst, cell);
            copied.push(position, cell);
            last = Some(cell);
        }
        let to = copied.as_slice().iter().copied().flat_map(Run::cells).collect();
        self.index[dst as usize].insert(copied.as_slice().iter().copied());
        Ok(Copies { from, to })
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
    /// of the range or a segment holds it, [`KvError::ShiftRange`] if a position would leave `0..i32::MAX`, [`KvError::Occupied`] if
    /// the sequence has a position where one would move.
    pub fn seq_add(&mut self, slot: u32, p0: i32, p1: i32, delta: i32) -> Result<Vec<u32>> {
        let (lo, hi) = self.checked(slot, p0, p1)?;
        if delta == 0 {
            return Ok(Vec::new());
        }
        let runs = &self.index[slot as usize];
        let moved: Vec<u32> = runs.pieces(lo, hi).flat_map(Run::cells).collect();
        let is_shared = |cell: u32| self.table.n_seqs(cell) > 1 || self.table.is_retained(cell);
        if let Some(&cell) = moved.iter().find(|&&cell| is_shared(cell)) {
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

    /// Cells that no sequence sees and no segment holds.
    pub fn n_free(&self) -> usize {
        self.table.arenas.iter().map(FreeCells::n_free).sum()
    }

    /// True if no sequence sees the cell and no segment holds it.
    pub fn is_free(&self, cell: u32) -> bool {
        !self.table.arenas[self.table.stream_of(cell) as usize].is_used(cell)
    }

    /// Free cells of one arena. Errors: [`KvError::Stream`].
    pub fn n_free_in(&self, stream: u32) -> Result<usize> {
        self.check_stream(stream)?;
        Ok(self.table.arenas[stream as usize].n_free())
    }

    /// Free cells of each arena.
    pub fn n_free_by_stream(&self) -> Vec<usize> {
        self.table.arenas.iter().map(FreeCells::n_free).collect()
    }

    /// Cells in all.
    pub fn n_cells(&self) -> usize {
        self.table.n_cells()
    }

    /// Arenas.
    pub fn n_streams(&self) -> usize {
        self.table.arenas.len()
    }

    /// Sequence slots.
    pub fn n_seq_max(&self) -> usize {
        self.index.len()
    }

    /// The arena of a sequence; 0 if there is no such slot.
    pub fn stream(&self, slot: u32) -> u32 {
        self.streams.get(slot as usize).copied().unwrap_or(0)
    }

    /// The cells that became free since the last call, in the order of that; some may be in use again. Nothing is
    /// remembered before the first call.
    pub fn take_freed(&mut self) -> Vec<u32> {
        self.table.take_freed()
    }

    /// The arena has `needed` free cells, or [`Exhausted::Cells`].
    pub(super) fn check_room(&self, stream: u32, needed: usize) -> Result<()> {
        let arena = &self.table.arenas[stream as usize];
        let (free, capacity) = (arena.n_free(), arena.n_cells());
        if needed > free { Err(Exhausted::Cells { needed, free, capacity }.into()) } else { Ok(()) }
    }

    /// The arena exists.
    pub(super) fn check_stream(&self, stream: u32) -> Result<()> {
        let n_streams = self.n_streams();
        let exists = (stream as usize) < n_streams;
        if exists { Ok(()) } else { Err(refused(KvError::Stream { stream, n_streams })) }
    }

    /// The slot exists and `p0..p1` is a range; returns it with the negative ends resolved.
    pub(super) fn checked(&self, slot: u32, p0: i32, p1: i32) -> Result<(i32, i32)> {
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
