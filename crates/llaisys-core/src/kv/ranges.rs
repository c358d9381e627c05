//! The cells of one sequence or node in position order, as contiguous ranges.

use std::ops::Range;

/// A contiguous range: `len` consecutive positions from `position` in `len` consecutive cells from `cell`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CellRange {
    /// First position, from 0.
    pub position: i32,
    /// Cell of the first position.
    pub cell: u32,
    /// Positions and cells, at least 1.
    pub len: u32,
}

impl CellRange {
    /// The position after the last. It does not overflow: positions are below `i32::MAX`.
    pub fn end(self) -> i32 {
        self.position + self.len.cast_signed()
    }

    /// The cells, in position order.
    pub fn cells(self) -> Range<u32> {
        self.cell..self.cell + self.len
    }

    /// Each position with its cell, in order.
    pub(super) fn positions_and_cells(self) -> impl Iterator<Item = (i32, u32)> {
        (self.position..self.end()).zip(self.cells())
    }

    /// The part of the range at positions `lo..hi`.
    fn cut(self, lo: i32, hi: i32) -> Option<CellRange> {
        let (start, end) = (self.position.max(lo), self.end().min(hi));
        if start >= end {
            return None;
        }
        let skipped = (start - self.position).cast_unsigned();
        Some(CellRange { position: start, cell: self.cell + skipped, len: (end - start).cast_unsigned() })
    }

    /// True if `next` starts where this range ends, in positions and in cells.
    pub(super) fn joins(self, next: CellRange) -> bool {
        self.end() == next.position && self.cells().end == next.cell
    }
}

/// Ranges in ascending order of positions, not empty, not overlapping, and merged where they are contiguous. So equal
/// contents have equal ranges.
#[derive(Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct CellRanges {
    ranges: Vec<CellRange>,
}

impl CellRanges {
    pub(super) fn as_slice(&self) -> &[CellRange] {
        &self.ranges
    }

    /// The first position.
    pub(super) fn start(&self) -> Option<i32> {
        self.ranges.first().map(|range| range.position)
    }

    /// The position after the last.
    pub(super) fn end(&self) -> Option<i32> {
        self.ranges.last().map(|range| range.end())
    }

    /// The cell of the last position.
    pub(super) fn last_cell(&self) -> Option<u32> {
        self.ranges.last().map(|range| range.cells().end - 1)
    }

    /// Appends one position, which is larger than all others.
    pub(super) fn push(&mut self, position: i32, cell: u32) {
        append(&mut self.ranges, CellRange { position, cell, len: 1 });
    }

    /// Collects pieces, which are in order, and merges contiguous ones.
    pub(super) fn of(pieces: &[CellRange]) -> Self {
        let mut ranges = Vec::with_capacity(pieces.len());
        pieces.iter().for_each(|piece| append(&mut ranges, *piece));
        Self { ranges }
    }

    /// Returns the pieces at positions `lo..hi` if none is missing. `Err` is the first missing position.
    pub(super) fn whole(&self, lo: i32, hi: i32) -> Result<Vec<CellRange>, i32> {
        let mut next = lo;
        let mut pieces = Vec::new();
        for piece in self.pieces(lo, hi) {
            if piece.position != next {
                break;
            }
            next = piece.end();
            pieces.push(piece);
        }
        if next == hi { Ok(pieces) } else { Err(next) }
    }

    /// Removes the last position: the inverse of [`CellRanges::push`].
    pub(super) fn pop(&mut self) {
        let last = self.ranges.last_mut().expect("pop undoes a push");
        last.len -= 1;
        if last.len == 0 {
            self.ranges.pop();
        }
    }

    /// Indices of the ranges that have a position in `lo..hi`.
    fn touching(&self, lo: i32, hi: i32) -> Range<usize> {
        let first = self.ranges.partition_point(|range| range.end() <= lo);
        // An empty `lo..hi` touches no range, even inside one.
        let end = if lo < hi { self.ranges.partition_point(|range| range.position < hi) } else { first };
        first..end.max(first)
    }

    /// The parts of the ranges at positions `lo..hi`, in order.
    pub(super) fn pieces(&self, lo: i32, hi: i32) -> impl Iterator<Item = CellRange> {
        self.ranges[self.touching(lo, hi)].iter().filter_map(move |range| range.cut(lo, hi))
    }

    /// Removes the positions `lo..hi`.
    pub(super) fn remove(&mut self, lo: i32, hi: i32) {
        let touched = self.touching(lo, hi);
        if touched.is_empty() {
            return;
        }
        let left = self.ranges[touched.start].cut(0, lo);
        let right = self.ranges[touched.end - 1].cut(hi, i32::MAX);
        self.ranges.splice(touched, left.into_iter().chain(right));
    }

    /// Inserts `pieces`, which are in order. The sequence has no position between the start of the first one and the
    /// end of the last one.
    pub(super) fn insert(&mut self, pieces: impl Iterator<Item = CellRange>) {
        let mut pieces = pieces.peekable();
        let Some(first) = pieces.peek() else { return };
        let at = self.ranges.partition_point(|range| range.end() <= first.position);
        let n_before = self.ranges.len();
        self.ranges.splice(at..at, pieces);
        let after = at + self.ranges.len() - n_before;
        self.join(after);
        self.join(at);
    }

    /// Merges ranges `i - 1` and `i` if both exist and are contiguous.
    fn join(&mut self, i: usize) {
        if i > 0 && i < self.ranges.len() && self.ranges[i - 1].joins(self.ranges[i]) {
            self.ranges[i - 1].len += self.ranges[i].len;
            self.ranges.remove(i);
        }
    }

    /// Returns these ranges with the positions `lo..hi` shifted by `delta`. The caller has checked that every shifted
    /// position is valid. `Err` is a position that would occur twice.
    pub(super) fn shifted(&self, lo: i32, hi: i32, delta: i32) -> Result<CellRanges, i32> {
        let moved = self.pieces(lo, hi).map(|range| CellRange { position: range.position + delta, ..range });
        let mut moved = moved.peekable();
        let mut kept = self.pieces(0, lo).chain(self.pieces(hi, i32::MAX)).peekable();
        let mut ranges = Vec::with_capacity(self.ranges.len() + 2);
        loop {
            let next = match (moved.peek(), kept.peek()) {
                (Some(m), Some(s)) if m.position < s.position => moved.next(),
                (_, Some(_)) => kept.next(),
                (_, None) => moved.next(),
            };
            let Some(next) = next else { return Ok(CellRanges { ranges }) };
            if let Some(last) = ranges.last()
                && CellRange::end(*last) > next.position
            {
                return Err(next.position);
            }
            append(&mut ranges, next);
        }
    }

    /// Removes everything.
    pub(super) fn clear(&mut self) {
        self.ranges.clear();
    }
}

/// Appends `range`, merged with the last one if they are contiguous.
fn append(ranges: &mut Vec<CellRange>, range: CellRange) {
    match ranges.last_mut() {
        Some(last) if last.joins(range) => last.len += range.len,
        _ => ranges.push(range),
    }
}
