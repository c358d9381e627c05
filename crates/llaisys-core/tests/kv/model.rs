//! The reference model of the KV cache: ordered maps from (sequence, position) and (node, position) to cell, and a
//! count of users per cell.

use llaisys_core::kv::{BLOCK_CELLS, Copies, KvCache, KvDump, KvError, KvRow, KvShape};
use llaisys_core::seq::SeqId;
use llaisys_core::{Error, error::Exhausted, error::Rejected};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The reason of a rejection, in a form that can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rejection {
    Kv(KvError),
    Exhausted(Exhausted),
    /// A sequence id that is not acquired.
    Stale,
}

/// Converts an error of the cache. Panics on other kinds, which the cache must not return.
pub(crate) fn rejection(error: Error) -> Rejection {
    match error {
        Error::Rejected(Rejected::Kv(error)) => Rejection::Kv(error),
        Error::Exhausted(error) => Rejection::Exhausted(error),
        Error::Rejected(Rejected::StaleSequence { .. }) => Rejection::Stale,
        other => panic!("expected an error of the cache, got {other}"),
    }
}

/// One row of a batch, owned.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) position: i32,
    pub(crate) seqs: Vec<SeqId>,
}

/// The rows in the form of `prepare_rows`.
pub(crate) fn kv_rows(rows: &[Row]) -> Vec<KvRow<'_>> {
    rows.iter().map(|row| KvRow { position: row.position, seqs: &row.seqs }).collect()
}

/// The first id of a slot in a new cache.
pub(crate) fn id(slot: u32) -> SeqId {
    SeqId::from_raw(i64::from(slot))
}

/// A cache of this shape in which every id is acquired, in stream 0.
pub(crate) fn acquired(shape: KvShape) -> KvCache {
    let mut kv = KvCache::new(shape).expect("sizes in their bounds");
    for slot in (0..).take(shape.n_seq_max) {
        assert_eq!(kv.seq_acquire(0).expect("an id is free"), id(slot));
    }
    kv
}

/// The shape of a cache of one stream, without `lifo`.
pub(crate) fn one_stream(n_cells: usize, n_seq_max: usize) -> KvShape {
    KvShape { n_cells, n_seq_max, n_streams: 1, lifo: false }
}

#[derive(Debug, Clone)]
pub(crate) struct Model {
    shape: KvShape,
    streams: Vec<u32>,
    links: BTreeMap<(u32, i32), u32>,
    cached: BTreeMap<(u64, i32), u32>,
    /// Sequences and nodes of each cell.
    n_readers: Vec<u32>,
    /// The free cells of all streams, the last freed one last: the order of reuse with `lifo`.
    freed: Vec<u32>,
}

impl Model {
    pub(crate) fn new(shape: KvShape) -> Self {
        Self {
            shape,
            streams: vec![0; shape.n_seq_max],
            links: BTreeMap::new(),
            cached: BTreeMap::new(),
            n_readers: vec![0; shape.n_cells],
            freed: (0_u32..).take(shape.n_cells).collect::<Vec<_>>().into_iter().rev().collect(),
        }
    }

    pub(crate) fn dump(&self) -> KvDump {
        let links = self.links.iter().map(|(&(slot, position), &cell)| (slot, position, cell)).collect();
        let cached = self.cached.iter().map(|(&(node, position), &cell)| (node, position, cell)).collect();
        let free = (0_u32..).zip(&self.n_readers).filter(|(_, n)| **n == 0).map(|(cell, _)| cell).collect();
        KvDump { links, cached, free }
    }

    pub(crate) fn n_free(&self) -> usize {
        self.n_readers.iter().filter(|n| **n == 0).count()
    }

    fn stream_len(&self) -> usize {
        self.shape.n_cells / self.shape.n_streams
    }

    /// The cells of a stream.
    fn stream(&self, stream: u32) -> Range<usize> {
        let start = stream as usize * self.stream_len();
        start..start + self.stream_len()
    }

    pub(crate) fn n_free_in(&self, stream: u32) -> Result<usize, Rejection> {
        self.check_stream(stream)?;
        Ok(self.stream(stream).filter(|&cell| self.n_readers[cell] == 0).count())
    }

    fn check_stream(&self, stream: u32) -> Result<(), Rejection> {
        let n_streams = self.shape.n_streams;
        if (stream as usize) < n_streams {
            return Ok(());
        }
        Err(Rejection::Kv(KvError::Stream { stream, n_streams }))
    }

    fn check_free(&self, stream: u32, needed: usize) -> Result<(), Rejection> {
        let free = self.n_free_in(stream)?;
        if needed <= free {
            return Ok(());
        }
        Err(Rejection::Exhausted(Exhausted::Cells { needed, free, capacity: self.stream_len() }))
    }

    /// Replaces a slot's sequence by an empty one in stream `stream`.
    pub(crate) fn acquire_again(&mut self, slot: u32, stream: u32) -> Result<(), Rejection> {
        self.check_slot(slot)?;
        self.check_stream(stream)?;
        self.seq_rm(slot, -1, -1)?;
        self.streams[slot as usize] = stream;
        Ok(())
    }

    /// Positions and cells of a sequence in a range, ascending.
    fn in_range(&self, slot: u32, range: Range<i32>) -> Vec<(i32, u32)> {
        if range.is_empty() {
            return Vec::new();
        }
        let range = (slot, range.start)..(slot, range.end);
        self.links.range(range).map(|(&(_, position), &cell)| (position, cell)).collect()
    }

    /// All positions and cells of a sequence, ascending.
    pub(crate) fn all(&self, slot: u32) -> Vec<(i32, u32)> {
        self.in_range(slot, 0..i32::MAX)
    }

    /// All positions and cells of a node, ascending.
    pub(crate) fn node(&self, node: u64) -> Vec<(i32, u32)> {
        let range = (node, 0)..=(node, i32::MAX);
        self.cached.range(range).map(|(&(_, position), &cell)| (position, cell)).collect()
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
        assert_eq!(self.links.insert((slot, position), cell), None, "a repeated position");
        self.gain(cell);
    }

    fn unlink(&mut self, slot: u32, position: i32) {
        let cell = self.links.remove(&(slot, position)).expect("it was linked");
        self.lose(cell);
    }

    /// Allocates and links cells for the rows and returns them. A rejection has no side effects.
    pub(crate) fn prepare(&mut self, rows: &[Row]) -> Result<Vec<u32>, Rejection> {
        rows.iter().flat_map(|row| &row.seqs).try_for_each(|id| self.check_slot(id.slot()))?;
        let before = self.clone();
        // Rows are checked as if there were always free cells: the extra cells exist only during the call.
        let n_cells = self.n_readers.len();
        self.n_readers.resize(n_cells + rows.len(), 0);
        let mut cells = Vec::new();
        let mut streams = Vec::new();
        for (row, kv_row) in rows.iter().enumerate() {
            if let Err(error) = self.check_row(row, kv_row) {
                *self = before;
                return Err(Rejection::Kv(error));
            }
            let first = kv_row.seqs[0].slot();
            let last = self.all(first).last().map(|(_, cell)| *cell);
            let cell = self.choose(self.streams[first as usize], last);
            for id in &kv_row.seqs {
                self.link(id.slot(), kv_row.position, cell);
            }
            cells.push(cell);
            streams.push(self.streams[first as usize]);
        }
        for stream in (0_u32..).take(self.shape.n_streams) {
            let needed = streams.iter().filter(|other| **other == stream).count();
            if let Err(error) = before.check_free(stream, needed) {
                *self = before;
                return Err(error);
            }
        }
        self.n_readers.truncate(n_cells);
        Ok(cells)
    }

    fn check_row(&self, row: usize, kv_row: &Row) -> Result<(), KvError> {
        let position = kv_row.position;
        if !(0..i32::MAX).contains(&position) {
            return Err(KvError::Position { row, position, max: i32::MAX - 1 });
        }
        let Some(first) = kv_row.seqs.first() else { return Err(KvError::NoSequence { row }) };
        let first = first.slot();
        for slot in kv_row.seqs.iter().map(|id| id.slot()) {
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
        match kv_row.seqs.iter().find(|id| !seen.insert(**id)) {
            Some(id) => Err(KvError::RepeatedSlot { row, slot: id.slot() }),
            None => Ok(()),
        }
    }

    /// Finds the next cell of a sequence whose last cell is `last` by a search of all cells. Returns one of the extra
    /// cells if the stream is full.
    fn choose(&self, stream: u32, last: Option<u32>) -> u32 {
        let stream = self.stream(stream);
        let extra = || (self.shape.n_cells..self.n_readers.len()).find(|&cell| self.n_readers[cell] == 0);
        let cell = if self.shape.lifo {
            self.freed.iter().rev().map(|cell| *cell as usize).find(|cell| stream.contains(cell))
        } else {
            let within = last.filter(|last| stream.contains(&(*last as usize)));
            self.choose_by_blocks(stream, within)
        };
        u32::try_from(cell.or_else(extra).expect("there is an extra cell for each row"))
            .expect("a small cache")
    }

    fn choose_by_blocks(&self, stream: Range<usize>, last: Option<u32>) -> Option<usize> {
        let base = stream.start;
        let is_free = |cell: usize| self.n_readers[cell] == 0;
        let n_blocks = stream.len() / BLOCK_CELLS;
        let is_free_block = |block: usize| {
            block < n_blocks && (0..BLOCK_CELLS).all(|i| is_free(base + block * BLOCK_CELLS + i))
        };
        let next = last.map(|cell| cell as usize + 1);
        let next = next.filter(|&next| next < stream.end && is_free(next));
        let opens = |next: usize| (next - base).is_multiple_of(BLOCK_CELLS);
        let next = next.filter(|&next| !opens(next) || is_free_block((next - base) / BLOCK_CELLS));
        next.or_else(|| (0..n_blocks).find(|&b| is_free_block(b)).map(|b| base + b * BLOCK_CELLS))
            .or_else(|| stream.clone().find(|&cell| is_free(cell)))
    }

    fn check_slot(&self, slot: u32) -> Result<(), Rejection> {
        if (slot as usize) < self.shape.n_seq_max { Ok(()) } else { Err(Rejection::Stale) }
    }

    fn range(&self, slot: u32, p0: i32, p1: i32) -> Result<Range<i32>, Rejection> {
        self.check_slot(slot)?;
        let (lo, hi) = (p0.max(0), if p1 < 0 { i32::MAX } else { p1 });
        if lo > hi { Err(Rejection::Kv(KvError::Range { p0, p1 })) } else { Ok(lo..hi) }
    }

    pub(crate) fn seq_rm(&mut self, slot: u32, p0: i32, p1: i32) -> Result<(), Rejection> {
        for (position, _) in self.in_range(slot, self.range(slot, p0, p1)?) {
            self.unlink(slot, position);
        }
        Ok(())
    }

    pub(crate) fn seq_cp(&mut self, src: u32, dst: u32, p0: i32, p1: i32) -> Result<Copies, Rejection> {
        self.check_slot(dst)?;
        let range = self.range(src, p0, p1)?;
        if src == dst {
            return Ok(Copies::default());
        }
        if let Some(&(position, _)) = self.in_range(dst, range.clone()).first() {
            return Err(Rejection::Kv(KvError::Occupied { slot: dst, position }));
        }
        self.share(&self.in_range(src, range), self.streams[src as usize], dst)
    }

    fn share(&mut self, cells: &[(i32, u32)], stream: u32, dst: u32) -> Result<Copies, Rejection> {
        let own_stream = self.streams[dst as usize];
        let mut copies = Copies::default();
        if stream != own_stream {
            self.check_free(own_stream, cells.len())?;
        }
        let mut last = self.all(dst).last().map(|(_, cell)| *cell);
        for &(position, cell) in cells {
            let to = if stream == own_stream { cell } else { self.choose(own_stream, last) };
            if stream != own_stream {
                copies.from.push(cell);
                copies.to.push(to);
            }
            self.link(dst, position, to);
            last = Some(to);
        }
        Ok(copies)
    }

    pub(crate) fn seq_keep(&mut self, slot: u32) -> Result<(), Rejection> {
        self.check_slot(slot)?;
        let others: Vec<_> = self.links.keys().copied().filter(|(other, _)| *other != slot).collect();
        others.into_iter().for_each(|(other, position)| self.unlink(other, position));
        Ok(())
    }

    pub(crate) fn seq_add(&mut self, slot: u32, p0: i32, p1: i32, delta: i32) -> Result<Vec<u32>, Rejection> {
        let moved = self.in_range(slot, self.range(slot, p0, p1)?);
        if delta == 0 {
            return Ok(Vec::new());
        }
        if let Some(&(position, _)) = moved.iter().find(|(_, cell)| self.n_readers[*cell as usize] > 1) {
            return Err(Rejection::Kv(KvError::SharedCells { slot, position }));
        }
        let leaves =
            |position: i32| !(0..i64::from(i32::MAX)).contains(&(i64::from(position) + i64::from(delta)));
        // The ends of the range are checked first, because the cache names one of them.
        let ends = moved.first().into_iter().chain(moved.last());
        if let Some(&(position, _)) = ends.into_iter().find(|(position, _)| leaves(*position)) {
            return Err(Rejection::Kv(KvError::ShiftRange { slot, position, delta }));
        }
        let mut links = self.links.clone();
        links.retain(|(other, position), _| *other != slot || !moved.iter().any(|(p, _)| p == position));
        for (position, cell) in &moved {
            let position = position + delta;
            if links.insert((slot, position), *cell).is_some() {
                return Err(Rejection::Kv(KvError::Occupied { slot, position }));
            }
        }
        self.links = links;
        Ok(moved.into_iter().map(|(_, cell)| cell).collect())
    }

    fn check_new(&self, node: u64) -> Result<(), Rejection> {
        let exists = !self.node(node).is_empty();
        if exists { Err(Rejection::Kv(KvError::NodeExists { node })) } else { Ok(()) }
    }

    /// The first position of a node and the end of its positions.
    fn ends(&self, node: u64) -> Result<(i32, i32), Rejection> {
        let cells = self.node(node);
        match (cells.first(), cells.last()) {
            (Some(first), Some(last)) => Ok((first.0, last.0 + 1)),
            _ => Err(Rejection::Kv(KvError::NoNode { node })),
        }
    }

    pub(crate) fn node_cache(&mut self, node: u64, slot: u32, p0: i32, p1: i32) -> Result<(), Rejection> {
        self.check_slot(slot)?;
        self.check_new(node)?;
        check_span(p0, p1)?;
        for position in p0..p1 {
            if !self.links.contains_key(&(slot, position)) {
                return Err(Rejection::Kv(KvError::SequenceLacks { slot, position }));
            }
        }
        let cells = self.in_range(slot, p0..p1);
        let is_cached = |cell: u32| self.cached.values().any(|other| *other == cell);
        if let Some(&(position, _)) = cells.iter().find(|(_, cell)| is_cached(*cell)) {
            return Err(Rejection::Kv(KvError::AlreadyCached { slot, position }));
        }
        for (position, cell) in cells {
            self.cached.insert((node, position), cell);
            self.gain(cell);
        }
        Ok(())
    }

    pub(crate) fn node_attach(
        &mut self,
        node: u64,
        slot: u32,
        p0: i32,
        p1: i32,
    ) -> Result<Copies, Rejection> {
        self.check_slot(slot)?;
        self.ends(node)?;
        check_span(p0, p1)?;
        let expected = self.all(slot).last().map_or(0, |(position, _)| position + 1);
        if p0 != expected {
            return Err(Rejection::Kv(KvError::NotAtEnd { slot, position: p0, expected }));
        }
        let mut cells = Vec::new();
        for position in p0..p1 {
            match self.cached.get(&(node, position)) {
                Some(&cell) => cells.push((position, cell)),
                None => return Err(Rejection::Kv(KvError::NodeLacks { node, position })),
            }
        }
        let stream = u32::try_from(cells[0].1 as usize / self.stream_len()).expect("a small cache");
        self.share(&cells, stream, slot)
    }

    pub(crate) fn node_split(&mut self, node: u64, at: i32, tail: u64) -> Result<(), Rejection> {
        let (start, end) = self.ends(node)?;
        self.check_new(tail)?;
        if !(start + 1..end).contains(&at) {
            return Err(Rejection::Kv(KvError::NodeBounds { node, at, start, end }));
        }
        for (position, cell) in self.node(node).into_iter().filter(|(position, _)| *position >= at) {
            self.cached.remove(&(node, position));
            self.cached.insert((tail, position), cell);
        }
        Ok(())
    }

    pub(crate) fn node_trim(&mut self, node: u64, at: i32) -> Result<(), Rejection> {
        let (start, end) = self.ends(node)?;
        if !(start..=end).contains(&at) {
            return Err(Rejection::Kv(KvError::NodeBounds { node, at, start, end }));
        }
        for (position, cell) in self.node(node).into_iter().filter(|(position, _)| *position >= at) {
            self.cached.remove(&(node, position));
            self.lose(cell);
        }
        Ok(())
    }

    pub(crate) fn node_create(
        &mut self,
        node: u64,
        stream: u32,
        p0: i32,
        n: i32,
    ) -> Result<Vec<u32>, Rejection> {
        self.check_new(node)?;
        self.check_stream(stream)?;
        check_span(p0, p0 + n)?;
        self.check_free(stream, usize::try_from(n).expect("check_span saw a positive count"))?;
        let mut cells: Vec<u32> = Vec::new();
        for position in p0..p0 + n {
            let cell = self.choose(stream, cells.last().copied());
            self.cached.insert((node, position), cell);
            self.gain(cell);
            cells.push(cell);
        }
        Ok(cells)
    }
}

fn check_span(p0: i32, p1: i32) -> Result<(), Rejection> {
    if 0 <= p0 && p0 < p1 { Ok(()) } else { Err(Rejection::Kv(KvError::Range { p0, p1 })) }
}
