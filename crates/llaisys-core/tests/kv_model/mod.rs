//! The naive model of the cells: ordered maps from (sequence, position) and (segment, position) to cell, and a
//! count of readers.
#![allow(dead_code, reason = "each test binary uses its own part of this file")]

use llaisys_core::kv::{BLOCK_CELLS, Cells, CellsDump, Copies, KvError, KvShape, RowPlace};
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

/// Cells of one arena, in the order of production.
pub(crate) fn cells(n_cells: usize, n_seq_max: usize) -> Cells {
    Cells::new(one_arena(n_cells, n_seq_max))
}

/// The shape of those.
pub(crate) fn one_arena(n_cells: usize, n_seq_max: usize) -> KvShape {
    KvShape { n_cells, n_seq_max, n_streams: 1, lifo: false }
}

#[derive(Debug, Clone)]
pub(crate) struct Model {
    shape: KvShape,
    streams: Vec<u32>,
    links: BTreeMap<(u32, i32), u32>,
    held: BTreeMap<(u64, i32), u32>,
    /// Sequences and segments of each cell.
    n_readers: Vec<u32>,
    /// All free cells of all arenas, last freed last: what the order of tests looks at.
    freed: Vec<u32>,
}

impl Model {
    pub(crate) fn new(shape: KvShape) -> Self {
        Self {
            shape,
            streams: vec![0; shape.n_seq_max],
            links: BTreeMap::new(),
            held: BTreeMap::new(),
            n_readers: vec![0; shape.n_cells],
            freed: (0_u32..).take(shape.n_cells).collect::<Vec<_>>().into_iter().rev().collect(),
        }
    }

    pub(crate) fn dump(&self) -> CellsDump {
        let links = self.links.iter().map(|(&(slot, position), &cell)| (slot, position, cell)).collect();
        let held = self.held.iter().map(|(&(segment, position), &cell)| (segment, position, cell)).collect();
        let free = (0_u32..).zip(&self.n_readers).filter(|(_, n)| **n == 0).map(|(cell, _)| cell).collect();
        CellsDump { links, held, free }
    }

    pub(crate) fn n_free(&self) -> usize {
        self.n_readers.iter().filter(|n| **n == 0).count()
    }

    fn per_arena(&self) -> usize {
        self.shape.n_cells / self.shape.n_streams
    }

    /// Cells of an arena.
    fn arena(&self, stream: u32) -> Range<usize> {
        let start = stream as usize * self.per_arena();
        start..start + self.per_arena()
    }

    pub(crate) fn n_free_in(&self, stream: u32) -> Result<usize, Refusal> {
        self.check_stream(stream)?;
        Ok(self.arena(stream).filter(|&cell| self.n_readers[cell] == 0).count())
    }

    fn check_stream(&self, stream: u32) -> Result<(), Refusal> {
        let n_streams = self.shape.n_streams;
        if (stream as usize) < n_streams {
            return Ok(());
        }
        Err(Refusal::Kv(KvError::Stream { stream, n_streams }))
    }

    fn check_room(&self, stream: u32, needed: usize) -> Result<(), Refusal> {
        let free = self.n_free_in(stream)?;
        if needed <= free {
            return Ok(());
        }
        Err(Refusal::Cells(Exhausted::Cells { needed, free, capacity: self.per_arena() }))
    }

    pub(crate) fn set_stream(&mut self, slot: u32, stream: u32) -> Result<(), Refusal> {
        self.range(slot, -1, -1)?;
        self.check_stream(stream)?;
        if let Some(&(position, _)) = self.all(slot).first() {
            return Err(Refusal::Kv(KvError::Occupied { slot, position }));
        }
        self.streams[slot as usize] = stream;
        Ok(())
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

    /// Everything that a segment has, ascending.
    pub(crate) fn segment(&self, segment: u64) -> Vec<(i32, u32)> {
        let range = (segment, 0)..=(segment, i32::MAX);
        self.held.range(range).map(|(&(_, position), &cell)| (position, cell)).collect()
    }

    fn gain(&mut self, cell: u32) {
        self.n_readers[cell as usize] += 1;
        self.freed.retain(|free| *free != cell);
    }

    fn lose(&mut self, cell: u32) {
        self.n_readers[cell as usize] -= 1;
        if self.n_readers[cell as usize] == 0 {
            self.freed.push(cell);
        }
    }

    fn link(&mut self, slot: u32, position: i32, cell: u32) {
        assert_eq!(self.links.insert((slot, position), cell), None, "a position twice");
        self.gain(cell);
    }

    fn unlink(&mut self, slot: u32, position: i32) {
        let cell = self.links.remove(&(slot, position)).expect("it was held");
        self.lose(cell);
    }

    /// Places the rows, or says why not and is as before. Answers the cells.
    pub(crate) fn prepare(&mut self, rows: &[Row]) -> Result<Vec<u32>, Refusal> {
        let before = self.clone();
        // Rows are judged as if there were always room: the extra cells exist during the call only.
        let n_cells = self.n_readers.len();
        self.n_readers.resize(n_cells + rows.len(), 0);
        let mut placed = Vec::new();
        let mut homes = Vec::new();
        for (row, place) in rows.iter().enumerate() {
            if let Err(error) = self.judge(row, place) {
                *self = before;
                return Err(Refusal::Kv(error));
            }
            let first = place.seqs[0];
            let last = self.all(first).last().map(|(_, cell)| *cell);
            let cell = self.choose(self.streams[first as usize], last);
            for &slot in &place.seqs {
                self.link(slot, place.position, cell);
            }
            placed.push(cell);
            homes.push(self.streams[first as usize]);
        }
        for stream in (0_u32..).take(self.shape.n_streams) {
            let needed = homes.iter().filter(|home| **home == stream).count();
            if let Err(error) = before.check_room(stream, needed) {
                *self = before;
                return Err(error);
            }
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
            if slot as usize >= self.shape.n_seq_max {
                return Err(KvError::Slot { slot, n_seq_max: self.shape.n_seq_max });
            }
            let last = self.all(slot).last().copied();
            if let Some((last, _)) = last.filter(|(last, _)| last + 1 != position) {
                return Err(KvError::NotNext { row, slot, position, expected: last + 1 });
            }
            let streams = [first, slot].map(|slot| self.streams[slot as usize]);
            if streams[0] != streams[1] || self.all(first) != self.all(slot) {
                return Err(KvError::CoupledDiffer { row, first, second: slot });
            }
        }
        let mut seen = BTreeSet::new();
        match place.seqs.iter().find(|slot| !seen.insert(**slot)) {
            Some(&slot) => Err(KvError::RepeatedSlot { row, slot }),
            None => Ok(()),
        }
    }

    /// The cell that the rule of the order gives to who has `last` as its last cell, found by looking at every
    /// cell; one of the extra cells if the arena is full.
    fn choose(&self, stream: u32, last: Option<u32>) -> u32 {
        let arena = self.arena(stream);
        let extra = || (self.shape.n_cells..self.n_readers.len()).find(|&cell| self.n_readers[cell] == 0);
        let cell = if self.shape.lifo {
            self.freed.iter().rev().map(|cell| *cell as usize).find(|cell| arena.contains(cell))
        } else {
            let within = last.filter(|last| arena.contains(&(*last as usize)));
            self.choose_by_blocks(arena, within)
        };
        u32::try_from(cell.or_else(extra).expect("there is an extra cell for each row"))
            .expect("a small pool")
    }

    fn choose_by_blocks(&self, arena: Range<usize>, last: Option<u32>) -> Option<usize> {
        let base = arena.start;
        let is_free = |cell: usize| self.n_readers[cell] == 0;
        let n_blocks = arena.len() / BLOCK_CELLS;
        let is_free_block = |block: usize| {
            block < n_blocks && (0..BLOCK_CELLS).all(|i| is_free(base + block * BLOCK_CELLS + i))
        };
        let next = last.map(|cell| cell as usize + 1);
        let next = next.filter(|&next| next < arena.end && is_free(next));
        let opens = |next: usize| (next - base).is_multiple_of(BLOCK_CELLS);
        let next = next.filter(|&next| !opens(next) || is_free_block((next - base) / BLOCK_CELLS));
        next.or_else(|| (0..n_blocks).find(|&b| is_free_block(b)).map(|b| base + b * BLOCK_CELLS))
            .or_else(|| arena.clone().find(|&cell| is_free(cell)))
    }

    fn range(&self, slot: u32, p0: i32, p1: i32) -> Result<Range<i32>, Refusal> {
        if slot as usize >= self.shape.n_seq_max {
            return Err(Refusal::Kv(KvError::Slot { slot, n_seq_max: self.shape.n_seq_max }));
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

    pub(crate) fn seq_cp(&mut self, src: u32, dst: u32, p0: i32, p1: i32) -> Result<Copies, Refusal> {
        let range = self.range(src, p0, p1)?;
        self.range(dst, p0, p1)?;
        if src == dst {
            return Ok(Copies::default());
        }
        if let Some(&(position, _)) = self.held(dst, range.clone()).first() {
            return Err(Refusal::Kv(KvError::Occupied { slot: dst, position }));
        }
        self.share(&self.held(src, range), self.streams[src as usize], dst)
    }

    fn share(&mut self, places: &[(i32, u32)], stream: u32, dst: u32) -> Result<Copies, Refusal> {
        let home = self.streams[dst as usize];
        let mut copies = Copies::default();
        if stream != home {
            self.check_room(home, places.len())?;
        }
        let mut last = self.all(dst).last().map(|(_, cell)| *cell);
        for &(position, cell) in places {
            let to = if stream == home { cell } else { self.choose(home, last) };
            if stream != home {
                copies.from.push(cell);
                copies.to.push(to);
            }
            self.link(dst, position, to);
            last = Some(to);
        }
        Ok(copies)
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
        let mut links = self.links.clone();
        links.retain(|(other, position), _| *other != slot || !moved.iter().any(|(p, _)| p == position));
        for (position, cell) in &moved {
            let position = position + delta;
            if links.insert((slot, position), *cell).is_some() {
                return Err(Refusal::Kv(KvError::Occupied { slot, position }));
            }
        }
        self.links = links;
        Ok(moved.into_iter().map(|(_, cell)| cell).collect())
    }

    fn check_new(&self, segment: u64) -> Result<(), Refusal> {
        let known = !self.segment(segment).is_empty();
        if known { Err(Refusal::Kv(KvError::SegmentExists { segment })) } else { Ok(()) }
    }

    /// First position of a segment, and the one after the last.
    fn ends(&self, segment: u64) -> Result<(i32, i32), Refusal> {
        let places = self.segment(segment);
        match (places.first(), places.last()) {
            (Some(first), Some(last)) => Ok((first.0, last.0 + 1)),
            _ => Err(Refusal::Kv(KvError::NoSegment { segment })),
        }
    }

    pub(crate) fn retain(&mut self, segment: u64, slot: u32, p0: i32, p1: i32) -> Result<(), Refusal> {
        self.check_new(segment)?;
        self.range(slot, -1, -1)?;
        check_span(p0, p1)?;
        for position in p0..p1 {
            if !self.links.contains_key(&(slot, position)) {
                return Err(Refusal::Kv(KvError::SequenceLacks { slot, position }));
            }
        }
        let places = self.held(slot, p0..p1);
        let is_held = |cell: u32| self.held.values().any(|other| *other == cell);
        if let Some(&(position, _)) = places.iter().find(|(_, cell)| is_held(*cell)) {
            return Err(Refusal::Kv(KvError::Retained { slot, position }));
        }
        for (position, cell) in places {
            self.held.insert((segment, position), cell);
            self.gain(cell);
        }
        Ok(())
    }

    pub(crate) fn attach(&mut self, segment: u64, slot: u32, p0: i32, p1: i32) -> Result<Copies, Refusal> {
        self.ends(segment)?;
        self.range(slot, -1, -1)?;
        check_span(p0, p1)?;
        let expected = self.all(slot).last().map_or(0, |(position, _)| position + 1);
        if p0 != expected {
            return Err(Refusal::Kv(KvError::NotAtEnd { slot, position: p0, expected }));
        }
        let mut places = Vec::new();
        for position in p0..p1 {
            match self.held.get(&(segment, position)) {
                Some(&cell) => places.push((position, cell)),
                None => return Err(Refusal::Kv(KvError::SegmentLacks { segment, position })),
            }
        }
        let stream = u32::try_from(places[0].1 as usize / self.per_arena()).expect("a small pool");
        self.share(&places, stream, slot)
    }

    pub(crate) fn split(&mut self, segment: u64, at: i32, tail: u64) -> Result<(), Refusal> {
        let (start, end) = self.ends(segment)?;
        self.check_new(tail)?;
        if !(start + 1..end).contains(&at) {
            return Err(Refusal::Kv(KvError::SegmentBounds { segment, at, start, end }));
        }
        for (position, cell) in self.segment(segment).into_iter().filter(|(position, _)| *position >= at) {
            self.held.remove(&(segment, position));
            self.held.insert((tail, position), cell);
        }
        Ok(())
    }

    pub(crate) fn trim(&mut self, segment: u64, at: i32) -> Result<(), Refusal> {
        let (start, end) = self.ends(segment)?;
        if !(start..=end).contains(&at) {
            return Err(Refusal::Kv(KvError::SegmentBounds { segment, at, start, end }));
        }
        for (position, cell) in self.segment(segment).into_iter().filter(|(position, _)| *position >= at) {
            self.held.remove(&(segment, position));
            self.lose(cell);
        }
        Ok(())
    }

    pub(crate) fn create(&mut self, segment: u64, stream: u32, p0: i32, n: i32) -> Result<Vec<u32>, Refusal> {
        self.check_new(segment)?;
        self.check_stream(stream)?;
        check_span(p0, p0 + n)?;
        self.check_room(stream, usize::try_from(n).expect("check_span saw a positive count"))?;
        let mut cells: Vec<u32> = Vec::new();
        for position in p0..p0 + n {
            let cell = self.choose(stream, cells.last().copied());
            self.held.insert((segment, position), cell);
            self.gain(cell);
            cells.push(cell);
        }
        Ok(cells)
    }
}

fn check_span(p0: i32, p1: i32) -> Result<(), Refusal> {
    if 0 <= p0 && p0 < p1 { Ok(()) } else { Err(Refusal::Kv(KvError::Range { p0, p1 })) }
}
