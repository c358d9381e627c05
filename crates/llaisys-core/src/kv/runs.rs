//! The cells of one sequence in position order, as runs.

use std::ops::Range;

/// `len` consecutive positions from `position`, held by `len` consecutive cells from `cell`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// First position, from 0.
    pub position: i32,
    /// Cell of the first position.
    pub cell: u32,
    /// Positions and cells, at least 1.
    pub len: u32,
}

impl Run {
    /// The position after the last. Fits: positions are below `i32::MAX`.
    pub fn end(self) -> i32 {
        self.position + self.len.cast_signed()
    }

    /// The cells, in position order.
    pub fn cells(self) -> Range<u32> {
        self.cell..self.cell + self.len
    }

    /// Each position with its cell, in order.
    pub(super) fn places(self) -> impl Iterator<Item = (i32, u32)> {
        (self.position..self.end()).zip(self.cells())
    }

    /// The part of the run at positions `lo..hi`.
    fn cut(self, lo: i32, hi: i32) -> Option<Run> {
        let (start, end) = (self.position.max(lo), self.end().min(hi));
        if start >= end {
            return None;
        }
        let skipped = (start - self.position).cast_unsigned();
        Some(Run { position: start, cell: self.cell + skipped, len: (end - start).cast_unsigned() })
    }

    /// True if `next` goes on where this run ends, in positions and in cells.
    pub(super) fn joins(self, next: Run) -> bool {
        self.end() == next.position && self.cells().end == next.cell
    }
}

/// Runs in rising position order, none overlapping, none empty, none that joins its neighbour: equal contents
/// have equal runs.
#[derive(Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Runs {
    runs: Vec<Run>,
}

impl Runs {
    pub(super) fn as_slice(&self) -> &[Run] {
        &self.runs
    }

    /// The first position.
    pub(super) fn start(&self) -> Option<i32> {
        self.runs.first().map(|run| run.position)
    }

    /// The position after the last.
    pub(super) fn end(&self) -> Option<i32> {
        self.runs.last().map(|run| run.end())
    }

    /// The cell of the last position.
    pub(super) fn last_cell(&self) -> Option<u32> {
        self.runs.last().map(|run| run.cells().end - 1)
    }

    /// Appends one position; it lies behind all others.
    pub(super) fn push(&mut self, position: i32, cell: u32) {
        append(&mut self.runs, Run { position, cell, len: 1 });
    }

    /// These pieces, in order, joined where they go on in each other.
    pub(super) fn of(pieces: &[Run]) -> Self {
        let mut runs = Vec::with_capacity(pieces.len());
        pieces.iter().for_each(|piece| append(&mut runs, *piece));
        Self { runs }
    }

    /// The pieces at positions `lo..hi`, or the first position there that is missing.
    pub(super) fn whole(&self, lo: i32, hi: i32) -> Result<Vec<Run>, i32> {
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

    /// Takes the last position away: the inverse of [`Runs::push`].
    pub(super) fn pop(&mut self) {
        let last = self.runs.last_mut().expect("pop undoes a push");
        last.len -= 1;
        if last.len == 0 {
            self.runs.pop();
        }
    }

    /// Indices of the runs that have a position in `lo..hi`.
    fn touching(&self, lo: i32, hi: i32) -> Range<usize> {
        let first = self.runs.partition_point(|run| run.end() <= lo);
        // An empty range touches nothing, also where it lies inside a run.
        let end = if lo < hi { self.runs.partition_point(|run| run.position < hi) } else { first };
        first..end.max(first)
    }

    /// The parts of the runs at positions `lo..hi`, in order.
    pub(super) fn pieces(&self, lo: i32, hi: i32) -> impl Iterator<Item = Run> {
        self.runs[self.touching(lo, hi)].iter().filter_map(move |run| run.cut(lo, hi))
    }

    /// Forgets the positions `lo..hi`.
    pub(super) fn remove(&mut self, lo: i32, hi: i32) {
        let touched = self.touching(lo, hi);
        if touched.is_empty() {
            return;
        }
        let left = self.runs[touched.start].cut(0, lo);
        let right = self.runs[touched.end - 1].cut(hi, i32::MAX);
        self.runs.splice(touched, left.into_iter().chain(right));
    }

    /// Adds `pieces`, in order, all of them between two neighbours: there is no position of this sequence
    /// from the first piece's start to the last one's end.
    pub(super) fn insert(&mut self, pieces: impl Iterator<Item = Run>) {
        let mut pieces = pieces.peekable();
        let Some(first) = pieces.peek() else { return };
        let at = self.runs.partition_point(|run| run.end() <= first.position);
        let n_before = self.runs.len();
        self.runs.splice(at..at, pieces);
        let after = at + self.runs.len() - n_before;
        self.join(after);
        self.join(at);
    }

    /// Joins runs `i - 1` and `i` if they are there and go on in each other.
    fn join(&mut self, i: usize) {
        if i > 0 && i < self.runs.len() && self.runs[i - 1].joins(self.runs[i]) {
            self.runs[i - 1].len += self.runs[i].len;
            self.runs.remove(i);
        }
    }

    /// These runs with the positions `lo..hi` moved by `delta`; the caller has checked that no moved position
    /// leaves the range of positions. `Err` is a position that would be there twice.
    pub(super) fn shifted(&self, lo: i32, hi: i32, delta: i32) -> Result<Runs, i32> {
        let moved = self.pieces(lo, hi).map(|run| Run { position: run.position + delta, ..run });
        let mut moved = moved.peekable();
        let mut still = self.pieces(0, lo).chain(self.pieces(hi, i32::MAX)).peekable();
        let mut runs = Vec::with_capacity(self.runs.len() + 2);
        loop {
            let next = match (moved.peek(), still.peek()) {
                (Some(m), Some(s)) if m.position < s.position => moved.next(),
                (_, Some(_)) => still.next(),
                (_, None) => moved.next(),
            };
            let Some(next) = next else { return Ok(Runs { runs }) };
            if let Some(last) = runs.last()
                && Run::end(*last) > next.position
            {
                return Err(next.position);
            }
            append(&mut runs, next);
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.runs.clear();
    }
}

/// Puts `run` behind all others, as a part of the last one if it goes on in it.
fn append(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.joins(run) => last.len += run.len,
        _ => runs.push(run),
    }
}
