//! The unified KV cache: which sequence has which position in which cell.
//!
//! [`KvCache`] has only the metadata: cells (`cells`, `free`), the ranges of each sequence (`ranges`), cache nodes
//! (`nodes`), the pool of sequence ids (`seq_pool`), recurrent states (`states`) and reservations (`reserve`). The
//! tensors are separate (`storage`, `state_storage`) because a live reservation borrows the metadata while kernels write the tensors.

mod cells;
mod check;
mod free;
mod nodes;
mod ranges;
mod reserve;
mod seq_pool;
mod state_storage;
mod states;
mod storage;

pub use crate::error::KvError;
pub use check::KvDump;
pub use free::BLOCK_CELLS;
pub use ranges::CellRange;
pub use reserve::{KvRow, Reservation};
pub use state_storage::StateStorage;
pub use states::n_states;
#[cfg(feature = "cuda")]
pub(crate) use storage::NAN_BYTE;
pub use storage::Storage;

use crate::batch::{Batch, BatchArrays, BatchLimits};
use crate::error::{Error, Exhausted, Rejected, Result};
use crate::seq::{SEQ_LIMIT, SeqId};
use cells::Cells;
use nodes::Node;
use ranges::CellRanges;
use seq_pool::SeqPool;
use states::States;
use std::collections::BTreeMap;

/// The largest number of streams; more than any machine has NUMA nodes.
pub const STREAM_LIMIT: usize = 256;

/// Sizes of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Number of cells; a multiple of `n_streams`.
    pub n_cells: usize,
    /// Sequences that may exist at a time.
    pub n_seq_max: usize,
    /// KV streams of equal size: stream `s` has the cells `s * n .. (s + 1) * n` with `n = n_cells / n_streams`.
    pub n_streams: usize,
    /// Reuse the cell or sequence id that was freed last (for tests), so that a stale use shows immediately.
    pub lifo: bool,
}

/// Cells whose keys and values must be copied, one to one, before the next forward pass: sharing across streams.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use = "the new cells have no contents until the tensors are copied"]
pub struct Copies {
    /// Source cells.
    pub from: Vec<u32>,
    /// Destination cells, newly allocated in another stream.
    pub to: Vec<u32>,
}

/// The cells of a sequence or of a cache node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation<Id> {
    /// The sequence's or node's id.
    pub id: Id,
    /// Its stream.
    pub stream: u32,
    /// Its positions and cells, in ascending order of positions.
    pub ranges: Vec<CellRange>,
}

/// All allocated cells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The acquired sequences, by slot.
    pub sequences: Vec<Allocation<SeqId>>,
    /// The cache nodes, by id.
    pub nodes: Vec<Allocation<u64>>,
    /// Free cells of each stream.
    pub n_free: Vec<usize>,
}

/// The unified cells of all streams, with the sequence ids and the cache nodes that use them. A context owns one next
/// to its tensors; a simulation of the engine uses one alone.
///
/// A cell has one position, the set of sequences that see it, and at most one cache node. Each sequence has its own
/// index of cells in position order, so the time of an operation depends on the sequence's length, not the cache's. A
/// sequence is in one stream. Within a stream, sharing, forking and trimming only edit the index; across streams, keys
/// and values are copied.
///
/// Positions are `0..i32::MAX`. In ranges `p0..p1` a negative `p0` means from the start, a negative `p1` to the end.
/// Every method that takes a sequence id rejects one that is not acquired ([`Rejected::StaleSequence`]). Rejected calls
/// have no side effects.
///
/// Invariants, verified by [`KvCache::check`] (those of the id pool are in `seq_pool.rs`):
/// 1. A cell is in use exactly if a sequence sees it or a node caches it; a free cell has position 0.
/// 2. The free counts, the use bits, their summaries and, with `lifo`, the stacks agree.
/// 3. The ranges of a sequence are in ascending order, do not overlap, are not empty and are as long as possible.
/// 4. A sequence has a cell at a position in its ranges exactly if the cell has that position and lists the sequence.
///    A position exists at most once per sequence.
/// 5. A node has at least one cell, its positions have no gap, and its cells have those positions. A cell is
///    marked as cached exactly if one node has it; two nodes never have the same cell.
/// 6. The cells of a sequence or node are in its stream.
/// 7. A slot that is not acquired has no cells and is in stream 0.
#[derive(Debug)]
pub struct KvCache {
    cells: Cells,
    /// By slot: the stream of the sequence.
    streams: Vec<u32>,
    /// By slot: the cells of the sequence.
    index: Vec<CellRanges>,
    /// By the caller's id.
    nodes: BTreeMap<u64, Node>,
    seqs: SeqPool,
    /// Of a model with recurrent layers.
    states: Option<States>,
    /// Cells of the live reservation, in row order; empty when there is none.
    reserved: Vec<u32>,
    /// By slot: scratch of `prepare`.
    marks: Vec<reserve::Mark>,
}

impl KvCache {
    /// Creates a cache whose cells and sequence ids are all free. It takes about 12 bytes per cell for up to 64
    /// sequences and 8 more for each further 64. This memory is touched as cells are used.
    ///
    /// Errors: a size out of its bounds, a number of streams that does not divide the cells.
    pub fn new(shape: KvShape) -> Result<Self> {
        let counts = [
            ("n_cells", shape.n_cells, i32::MAX as usize),
            ("n_seq_max", shape.n_seq_max, SEQ_LIMIT),
            ("n_streams", shape.n_streams, STREAM_LIMIT),
        ];
        for (what, got, max) in counts {
            if got < 1 || got > max {
                return Err(Rejected::OutOfRange { what, got: got as i64, min: 1, max: max as i64 }.into());
            }
        }
        let KvShape { n_cells, n_seq_max, n_streams, lifo } = shape;
        if !n_cells.is_multiple_of(n_streams) {
            return Err(Rejected::UnevenStreams { n_cells, n_streams }.into());
        }
        Ok(Self {
            cells: Cells::new(shape),
            streams: vec![0; n_seq_max],
            index: (0..n_seq_max).map(|_| CellRanges::default()).collect(),
            nodes: BTreeMap::new(),
            seqs: SeqPool::new(n_seq_max, lifo),
            states: None,
            reserved: Vec::new(),
            marks: Vec::new(),
        })
    }

    /// Acquires a sequence id with no cells in stream `stream`. Errors: [`KvError::Stream`],
    /// [`Exhausted::SequenceIds`].
    pub fn seq_acquire(&mut self, stream: u32) -> Result<SeqId> {
        self.check_stream(stream)?;
        let id = self.seqs.acquire()?;
        self.streams[id.slot() as usize] = stream;
        Ok(id)
    }

    /// Releases the id and its cells. Cells that a node caches stay in use.
    pub fn seq_release(&mut self, id: SeqId) -> Result<()> {
        let slot = self.acquired(id)?;
        self.remove(slot, 0, i32::MAX);
        self.streams[slot] = 0;
        self.seqs.release(id);
        Ok(())
    }

    /// Removes positions `p0..p1` of a sequence. Cells that no other sequence sees and no node caches become free.
    /// Errors: [`KvError::Range`].
    pub fn seq_rm(&mut self, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        let slot = self.acquired(id)?;
        let (lo, hi) = resolve_range(p0, p1)?;
        self.check_whole(slot, lo, hi, "removes positions")?;
        self.remove(slot, lo, hi);
        Ok(())
    }

    fn remove(&mut self, slot: usize, lo: i32, hi: i32) {
        let ranges = &mut self.index[slot];
        if let Some(states) = &mut self.states
            && ranges.pieces(lo, hi).next().is_some()
        {
            states.clear(slot);
        }
        for cell in ranges.pieces(lo, hi).flat_map(CellRange::cells) {
            self.cells.unlink(slot, cell);
        }
        ranges.remove(lo, hi);
    }

    /// Lets `dst` see positions `p0..p1` of `src`: the same cells within a stream, else newly allocated cells whose
    /// contents the caller copies. Copying a sequence to itself does nothing.
    ///
    /// Errors: [`KvError::Range`], [`KvError::Occupied`] if `dst` has a position in the range, [`Exhausted::Cells`] if
    /// its stream has too few free cells for a copy.
    pub fn seq_cp(&mut self, src: SeqId, dst: SeqId, p0: i32, p1: i32) -> Result<Copies> {
        let (from, to) = (self.acquired(src)?, self.acquired(dst)?);
        let (lo, hi) = resolve_range(p0, p1)?;
        if src == dst {
            return Ok(Copies::default());
        }
        if let Some(range) = self.index[to].pieces(lo, hi).next() {
            return Err(rejected(KvError::Occupied { slot: dst.slot(), position: range.position }));
        }
        self.check_whole(from, lo, hi, "copies positions")?;
        let pieces: Vec<CellRange> = self.index[from].pieces(lo, hi).collect();
        if pieces.is_empty() {
            return Ok(Copies::default());
        }
        if self.index[to].start().is_some() {
            self.check_no_states("appends copies")?;
        }
        let copies = self.share(&pieces, self.streams[from], to)?;
        self.states.iter_mut().for_each(|states| states.copy(from, to));
        Ok(copies)
    }

    /// Lets `slot` see the `pieces` of stream `stream`, or copies of them in its own stream. The sequence has none of
    /// their positions yet.
    fn share(&mut self, pieces: &[CellRange], stream: u32, slot: usize) -> Result<Copies> {
        let own_stream = self.streams[slot];
        if stream == own_stream {
            for cell in pieces.iter().copied().flat_map(CellRange::cells) {
                self.cells.link(slot, cell);
            }
            self.index[slot].insert(pieces.iter().copied());
            return Ok(Copies::default());
        }
        let from: Vec<u32> = pieces.iter().copied().flat_map(CellRange::cells).collect();
        self.check_free(own_stream, from.len())?;
        let mut last = self.index[slot].last_cell();
        let mut copied = CellRanges::default();
        for (position, _) in pieces.iter().flat_map(|piece| piece.positions_and_cells()) {
            let cell = self.cells.allocate(own_stream, last, position);
            self.cells.link(slot, cell);
            copied.push(position, cell);
            last = Some(cell);
        }
        let to = copied.as_slice().iter().copied().flat_map(CellRange::cells).collect();
        self.index[slot].insert(copied.as_slice().iter().copied());
        Ok(Copies { from, to })
    }

    /// Removes the cells of every sequence except one. All ids stay acquired.
    pub fn seq_keep(&mut self, id: SeqId) -> Result<()> {
        let slot = self.acquired(id)?;
        for (other, ranges) in self.index.iter_mut().enumerate().filter(|(other, _)| *other != slot) {
            for cell in ranges.as_slice().iter().copied().flat_map(CellRange::cells) {
                self.cells.unlink(other, cell);
            }
            ranges.clear();
            self.states.iter_mut().for_each(|states| states.clear(other));
        }
        Ok(())
    }

    /// Shifts positions `p0..p1` of a sequence by `delta`. Returns the shifted cells in position order; the caller
    /// rotates their keys by `delta`.
    ///
    /// Errors: [`KvError::Range`]; [`KvError::SharedCells`] if another sequence sees a cell of the range or a node
    /// caches it, [`KvError::ShiftRange`] if a position would leave `0..i32::MAX`, [`KvError::Occupied`] if the
    /// sequence has a position where one would move.
    pub fn seq_add(&mut self, id: SeqId, p0: i32, p1: i32, delta: i32) -> Result<Vec<u32>> {
        let (index, slot) = (self.acquired(id)?, id.slot());
        let (lo, hi) = resolve_range(p0, p1)?;
        if delta == 0 {
            return Ok(Vec::new());
        }
        self.check_no_states("shifts positions")?;
        let ranges = &self.index[index];
        let moved: Vec<u32> = ranges.pieces(lo, hi).flat_map(CellRange::cells).collect();
        let is_shared = |cell: u32| self.cells.n_seqs(cell) > 1 || self.cells.is_cached(cell);
        if let Some(&cell) = moved.iter().find(|&&cell| is_shared(cell)) {
            return Err(rejected(KvError::SharedCells { slot, position: self.cells.position(cell) }));
        }
        for &cell in moved.first().into_iter().chain(moved.last()) {
            let position = self.cells.position(cell);
            if position.checked_add(delta).is_none_or(|p| !(0..i32::MAX).contains(&p)) {
                return Err(rejected(KvError::ShiftRange { slot, position, delta }));
            }
        }
        let shifted = ranges.shifted(lo, hi, delta);
        self.index[index] = shifted.map_err(|position| rejected(KvError::Occupied { slot, position }))?;
        for &cell in &moved {
            self.cells.set_position(cell, self.cells.position(cell) + delta);
        }
        Ok(moved)
    }

    /// Smallest position of a sequence; `None` if it is empty.
    pub fn pos_min(&self, id: SeqId) -> Result<Option<i32>> {
        Ok(self.index[self.acquired(id)?].start())
    }

    /// Largest position of a sequence; `None` if it is empty.
    pub fn pos_max(&self, id: SeqId) -> Result<Option<i32>> {
        Ok(self.index[self.acquired(id)?].end().map(|end| end - 1))
    }

    /// The contiguous ranges of a sequence in ascending order of positions; none if the id is not acquired.
    pub fn ranges(&self, id: SeqId) -> &[CellRange] {
        self.acquired(id).map_or(&[], |slot| self.index[slot].as_slice())
    }

    /// Appends the cells of positions `0..=up_to` of a sequence to `out`, in position order; none if the id is not
    /// acquired.
    pub fn visible_cells(&self, id: SeqId, up_to: i32, out: &mut Vec<u32>) {
        if let Ok(slot) = self.acquired(id) {
            let ranges = self.index[slot].pieces(0, up_to.saturating_add(1));
            ranges.for_each(|range| out.extend(range.cells()));
        }
    }

    /// The stream of a sequence.
    pub fn stream(&self, id: SeqId) -> Result<u32> {
        Ok(self.streams[self.acquired(id)?])
    }

    /// Reserves cells for the rows of a batch ([`KvCache::prepare_rows`]). Further errors: an id that is not acquired,
    /// [`KvError::WrongStream`] for a row that names another stream than that of its sequences.
    pub fn prepare(&mut self, batch: &Batch) -> Result<Reservation<'_>> {
        for &id in &batch.seqs {
            self.acquired(id)?;
        }
        for (row, &stream) in batch.stream.iter().enumerate() {
            let slot = batch.row_seqs(row)[0].slot();
            let expected = self.streams[slot as usize];
            if stream != expected {
                return Err(rejected(KvError::WrongStream { row, stream, slot, expected }));
            }
        }
        let rows: Vec<KvRow<'_>> = (0..batch.n_rows())
            .map(|row| KvRow { position: batch.positions[row], seqs: batch.row_seqs(row) })
            .collect();
        self.reserve(&rows)
    }

    /// Changes the cache as a decode of these rows does, with the same checks and errors. Tokens and outputs are
    /// irrelevant.
    pub fn extend(&mut self, positions: &[i32], n_seq_id: &[i32], seq_ids: &[i64]) -> Result<()> {
        let limits = BatchLimits {
            vocab_size: 1,
            max_positions: i32::MAX as usize,
            n_seq_max: self.n_seq_max(),
            n_streams: self.n_streams(),
        };
        let tokens = vec![0; positions.len()];
        let wants_output = vec![0; positions.len()];
        let arrays = BatchArrays {
            tokens: &tokens,
            positions,
            n_seq_id,
            seq_ids,
            stream: &[],
            wants_output: &wants_output,
        };
        let batch = Batch::new(arrays, limits)?;
        self.prepare(&batch)?.commit();
        Ok(())
    }

    /// Number of cells.
    pub fn n_cells(&self) -> usize {
        self.cells.n_cells()
    }

    /// Cells that no sequence sees and no node caches.
    pub fn n_cells_free(&self) -> usize {
        self.cells.n_free()
    }

    /// Free cells of one stream. Errors: [`KvError::Stream`].
    pub fn n_cells_free_in(&self, stream: u32) -> Result<usize> {
        self.check_stream(stream)?;
        Ok(self.cells.streams[stream as usize].n_free())
    }

    /// True if no sequence sees the cell and no node caches it.
    pub fn is_free(&self, cell: u32) -> bool {
        !self.cells.is_used(cell)
    }

    /// Number of streams.
    pub fn n_streams(&self) -> usize {
        self.cells.streams.len()
    }

    /// Sequences that may exist at a time.
    pub fn n_seq_max(&self) -> usize {
        self.index.len()
    }

    /// Sequence ids that can be acquired.
    pub fn n_seq_free(&self) -> usize {
        self.seqs.n_free()
    }

    /// Returns the cells that became free since the last call, in the order of freeing; some may be in use again. The
    /// first call returns none and starts the recording.
    pub fn take_freed_cells(&mut self) -> Vec<u32> {
        self.cells.take_freed()
    }

    /// Checks that an id is acquired. Errors: [`Rejected::StaleSequence`].
    pub fn check_acquired(&self, id: SeqId) -> Result<()> {
        self.acquired(id).map(|_| ())
    }

    /// Returns the slot of an acquired id, as an index. Errors: as [`KvCache::check_acquired`].
    fn acquired(&self, id: SeqId) -> Result<usize> {
        self.seqs.check_acquired(id)?;
        Ok(id.slot() as usize)
    }

    /// Checks that a stream has `needed` free cells. Errors: [`Exhausted::Cells`].
    fn check_free(&self, stream: u32, needed: usize) -> Result<()> {
        let cells = &self.cells.streams[stream as usize];
        let (free, capacity) = (cells.n_free(), cells.n_cells());
        if needed > free { Err(Exhausted::Cells { needed, free, capacity }.into()) } else { Ok(()) }
    }

    /// Checks that a stream exists. Errors: [`KvError::Stream`].
    fn check_stream(&self, stream: u32) -> Result<()> {
        let n_streams = self.n_streams();
        let exists = (stream as usize) < n_streams;
        if exists { Ok(()) } else { Err(rejected(KvError::Stream { stream, n_streams })) }
    }

    /// Returns all allocated cells. Takes time linear in the number of ranges.
    pub fn snapshot(&self) -> Snapshot {
        let sequence = |id: SeqId| {
            let slot = id.slot() as usize;
            Allocation { id, stream: self.streams[slot], ranges: self.index[slot].as_slice().to_vec() }
        };
        let node = |(&id, node): (&u64, &Node)| Allocation {
            id,
            stream: node.stream,
            ranges: node.ranges.as_slice().to_vec(),
        };
        Snapshot {
            sequences: self.seqs.acquired().map(sequence).collect(),
            nodes: self.nodes.iter().map(node).collect(),
            n_free: self.cells.streams.iter().map(free::FreeCells::n_free).collect(),
        }
    }
}

/// Resolves negative ends of a range. Errors: [`KvError::Range`].
pub(crate) fn resolve_range(p0: i32, p1: i32) -> Result<(i32, i32)> {
    let (lo, hi) = (p0.max(0), if p1 < 0 { i32::MAX } else { p1 });
    if lo > hi { Err(rejected(KvError::Range { p0, p1 })) } else { Ok((lo, hi)) }
}

/// Wraps an error of the cache.
fn rejected(error: KvError) -> Error {
    Rejected::Kv(error).into()
}
