//! Segments: cells of consecutive positions, held beside whatever sequences see them (the prefix cache's lease).

use super::KvError;
use super::cells::{Cells, Copies, refused};
use super::runs::{Run, Runs};
use crate::error::Result;

/// One segment: at least one cell, positions without a gap, all in one arena.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Segment {
    pub(super) stream: u32,
    pub(super) runs: Runs,
}

impl Segment {
    /// First position, and the one after the last.
    fn ends(&self) -> (i32, i32) {
        (self.runs.start().unwrap_or(0), self.runs.end().unwrap_or(0))
    }
}

/// Segment ids are the caller's, never used again once gone. Every refused operation has changed nothing.
impl Cells {
    /// Holds the cells of a sequence at positions `p0..p1` as a new segment.
    ///
    /// Errors: [`KvError::SegmentExists`], [`KvError::Slot`], [`KvError::Range`] unless `0 <= p0 < p1`,
    /// [`KvError::SequenceLacks`] if a position is missing, [`KvError::Retained`] if another segment holds one.
    pub fn retain(&mut self, segment: u64, slot: u32, p0: i32, p1: i32) -> Result<()> {
        self.check_new(segment)?;
        self.checked(slot, -1, -1)?;
        check_span(p0, p1)?;
        let lacks = |position| refused(KvError::SequenceLacks { slot, position });
        let pieces = self.index[slot as usize].whole(p0, p1).map_err(lacks)?;
        let cells = || pieces.iter().copied().flat_map(Run::cells);
        if let Some(cell) = cells().find(|&cell| self.table.is_retained(cell)) {
            return Err(refused(KvError::Retained { slot, position: self.table.position(cell) }));
        }
        cells().for_each(|cell| self.table.retain(cell));
        let stream = self.streams[slot as usize];
        self.segments.insert(segment, Segment { stream, runs: Runs::of(&pieces) });
        Ok(())
    }

    /// Lets a sequence that ends at `p0` (0 for an empty one) see the segment's positions `p0..p1`: the same cells
    /// in the same arena, else fresh cells of its own, whose contents are the caller's to copy.
    ///
    /// Errors: [`KvError::NoSegment`], [`KvError::Slot`], [`KvError::Range`] unless `0 <= p0 < p1`,
    /// [`KvError::NotAtEnd`], [`KvError::SegmentLacks`] if a position is missing,
    /// [`crate::error::Exhausted::Cells`] if the sequence's arena has too few free cells for a copy.
    pub fn attach(&mut self, segment: u64, slot: u32, p0: i32, p1: i32) -> Result<Copies> {
        let (stream, pieces) = {
            let held = self.segment(segment)?;
            self.checked(slot, -1, -1)?;
            check_span(p0, p1)?;
            let expected = self.index[slot as usize].end().unwrap_or(0);
            if p0 != expected {
                return Err(refused(KvError::NotAtEnd { slot, position: p0, expected }));
            }
            (held.stream, segment_pieces(held, segment, p0, p1)?)
        };
        self.share(&pieces, stream, slot)
    }

    /// Leaves positions below `at` to the segment and gives the others to the new segment `tail`.
    ///
    /// Errors: [`KvError::NoSegment`], [`KvError::SegmentExists`], [`KvError::SegmentBounds`] unless both parts
    /// have a position.
    pub fn segment_split(&mut self, segment: u64, at: i32, tail: u64) -> Result<()> {
        let (start, end) = self.segment(segment)?.ends();
        self.check_new(tail)?;
        if at <= start || at >= end {
            return Err(refused(KvError::SegmentBounds { segment, at, start, end }));
        }
        let held = self.segments.get_mut(&segment).expect("found above");
        let pieces: Vec<Run> = held.runs.pieces(at, end).collect();
        held.runs.remove(at, end);
        let stream = held.stream;
        self.segments.insert(tail, Segment { stream, runs: Runs::of(&pieces) });
        Ok(())
    }

    /// Forgets the segment's positions from `at`; from its first one on, the segment is gone. Cells that no
    /// sequence sees are free again.
    ///
    /// Errors: [`KvError::NoSegment`], [`KvError::SegmentBounds`] unless `at` is from its start to its end.
    pub fn segment_trim(&mut self, segment: u64, at: i32) -> Result<()> {
        let (start, end) = self.segment(segment)?.ends();
        if at < start || at > end {
            return Err(refused(KvError::SegmentBounds { segment, at, start, end }));
        }
        let held = self.segments.get_mut(&segment).expect("found above");
        for cell in held.runs.pieces(at, end).flat_map(Run::cells) {
            self.table.let_go(cell);
        }
        held.runs.remove(at, end);
        if at == start {
            self.segments.remove(&segment);
        }
        Ok(())
    }

    /// A new segment of `n` fresh cells of an arena at positions from `p0`, whose contents are the caller's to
    /// write; returns them in position order.
    ///
    /// Errors: [`KvError::SegmentExists`], [`KvError::Stream`], [`KvError::Range`] unless `p0 >= 0`, `n > 0` and
    /// the positions stay below `i32::MAX`, [`crate::error::Exhausted::Cells`].
    pub fn segment_create(&mut self, segment: u64, stream: u32, p0: i32, n: usize) -> Result<Vec<u32>> {
        self.check_new(segment)?;
        self.check_stream(stream)?;
        let p1 = i32::try_from(n).ok().and_then(|n| p0.checked_add(n)).unwrap_or(i32::MIN);
        check_span(p0, p1)?;
        self.check_room(stream, n)?;
        let mut runs = Runs::default();
        for position in p0..p1 {
            let cell = self.table.take(stream, runs.last_cell(), position);
            self.table.retain(cell);
            runs.push(position, cell);
        }
        let cells = runs.as_slice().iter().copied().flat_map(Run::cells).collect();
        self.segments.insert(segment, Segment { stream, runs });
        Ok(cells)
    }

    /// The cells of a segment's positions `p0..p1`, in position order.
    ///
    /// Errors: [`KvError::NoSegment`], [`KvError::Range`] unless `0 <= p0 < p1`, [`KvError::SegmentLacks`].
    pub fn segment_cells(&self, segment: u64, p0: i32, p1: i32) -> Result<Vec<u32>> {
        let held = self.segment(segment)?;
        check_span(p0, p1)?;
        Ok(segment_pieces(held, segment, p0, p1)?.into_iter().flat_map(Run::cells).collect())
    }

    /// Every segment by id: its arena and its runs in rising position order.
    pub fn segments(&self) -> impl Iterator<Item = (u64, u32, &[Run])> {
        self.segments.iter().map(|(&id, held)| (id, held.stream, held.runs.as_slice()))
    }

    fn segment(&self, segment: u64) -> Result<&Segment> {
        self.segments.get(&segment).ok_or_else(|| refused(KvError::NoSegment { segment }))
    }

    fn check_new(&self, segment: u64) -> Result<()> {
        let known = self.segments.contains_key(&segment);
        if known { Err(refused(KvError::SegmentExists { segment })) } else { Ok(()) }
    }
}

fn segment_pieces(held: &Segment, segment: u64, p0: i32, p1: i32) -> Result<Vec<Run>> {
    held.runs.whole(p0, p1).map_err(|position| refused(KvError::SegmentLacks { segment, position }))
}

/// Positions of a segment are named exactly: no open ends, not empty.
fn check_span(p0: i32, p1: i32) -> Result<()> {
    if 0 <= p0 && p0 < p1 { Ok(()) } else { Err(refused(KvError::Range { p0, p1 })) }
}
