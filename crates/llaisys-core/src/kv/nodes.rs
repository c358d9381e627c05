//! Cache nodes: cells of consecutive positions that stay allocated independently of sequences. The prefix cache leases
//! nodes.

use super::ranges::{CellRange, CellRanges};
use super::{Copies, KvCache, KvError, rejected};
use crate::error::Result;
use crate::seq::SeqId;

/// One cache node: one or more cells of one stream, at consecutive positions. `state`: the recurrent state after the last
/// one.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Node {
    pub(super) stream: u32,
    pub(super) ranges: CellRanges,
    pub(super) state: Option<u32>,
}

impl Node {
    /// Returns the first position and the end of the positions.
    pub(super) fn ends(&self) -> (i32, i32) {
        (self.ranges.start().unwrap_or(0), self.ranges.end().unwrap_or(0))
    }
}

/// The caller chooses node ids and uses each for one node only.
impl KvCache {
    /// Caches the cells of a sequence at positions `p0..p1` in a new node.
    ///
    /// Errors: [`KvError::NodeExists`], [`KvError::Range`] unless `0 <= p0 < p1`, [`KvError::SequenceLacks`] if a
    /// position is missing, [`KvError::AlreadyCached`] if another node has one.
    pub fn node_cache(&mut self, node: u64, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        let (index, slot) = (self.acquired(id)?, id.slot());
        self.check_new(node)?;
        check_span(p0, p1)?;
        let lacks = |position| rejected(KvError::SequenceLacks { slot, position });
        let pieces = self.index[index].whole(p0, p1).map_err(lacks)?;
        let cells = || pieces.iter().copied().flat_map(CellRange::cells);
        if let Some(cell) = cells().find(|&cell| self.cells.is_cached(cell)) {
            return Err(rejected(KvError::AlreadyCached { slot, position: self.cells.position(cell) }));
        }
        cells().for_each(|cell| self.cells.cache(cell));
        let stream = self.streams[index];
        self.nodes.insert(node, Node { stream, ranges: CellRanges::of(&pieces), state: None });
        Ok(())
    }

    /// Lets a sequence that ends at `p0` (0 for an empty one) see the node's positions `p0..p1`: the same cells
    /// within a stream, else newly allocated cells whose contents the caller copies. In a model with recurrent layers,
    /// the sequence then has the node's state, or none, with which it cannot be continued.
    ///
    /// Errors: [`KvError::NoNode`], [`KvError::Range`] unless `0 <= p0 < p1`, [`KvError::NotAtEnd`],
    /// [`KvError::NodeLacks`] if a position is missing, [`crate::error::Exhausted::Cells`] if the sequence's stream has
    /// too few free cells for a copy.
    pub fn node_attach(&mut self, node: u64, id: SeqId, p0: i32, p1: i32) -> Result<Copies> {
        let (index, slot) = (self.acquired(id)?, id.slot());
        let cached = self.node(node)?;
        check_span(p0, p1)?;
        let expected = self.index[index].end().unwrap_or(0);
        if p0 != expected {
            return Err(rejected(KvError::NotAtEnd { slot, position: p0, expected }));
        }
        let (stream, pieces) = (cached.stream, node_pieces(cached, node, p0, p1)?);
        let copies = self.share(&pieces, stream, index)?;
        self.attach_state(node, index, p1);
        Ok(copies)
    }

    /// Lets a sequence see the node's cells at positions `p0..p1` in place of its own, which have the same contents. Its
    /// recurrent state stays.
    ///
    /// Errors: [`KvError::NoNode`], [`KvError::Range`] unless `0 <= p0 < p1`, [`KvError::NodeStream`] for a node of
    /// another stream, [`KvError::SequenceLacks`] or [`KvError::NodeLacks`] if a position is missing.
    pub fn node_relink(&mut self, node: u64, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        let (index, slot) = (self.acquired(id)?, id.slot());
        let cached = self.node(node)?;
        check_span(p0, p1)?;
        let (stream, expected) = (cached.stream, self.streams[index]);
        if stream != expected {
            return Err(rejected(KvError::NodeStream { node, stream, slot, expected }));
        }
        let lacks = |position| rejected(KvError::SequenceLacks { slot, position });
        let replaced = self.index[index].whole(p0, p1).map_err(lacks)?;
        let pieces = node_pieces(cached, node, p0, p1)?;
        // Unlinked first: the sequence may see some of the node's cells, which stay in use.
        for cell in replaced.into_iter().flat_map(CellRange::cells) {
            self.cells.unlink(index, cell);
        }
        self.index[index].remove(p0, p1);
        for cell in pieces.iter().copied().flat_map(CellRange::cells) {
            self.cells.link(index, cell);
        }
        self.index[index].insert(pieces.into_iter());
        Ok(())
    }

    /// Moves the positions from `at` on, and the recurrent state after the last one, to the new node `tail`; the
    /// positions below `at` stay in the node.
    ///
    /// Errors: [`KvError::NoNode`], [`KvError::NodeExists`], [`KvError::NodeBounds`] unless both parts have a position.
    pub fn node_split(&mut self, node: u64, at: i32, tail: u64) -> Result<()> {
        let (start, end) = self.node(node)?.ends();
        self.check_new(tail)?;
        if at <= start || at >= end {
            return Err(rejected(KvError::NodeBounds { node, at, start, end }));
        }
        let head = self.nodes.get_mut(&node).expect("found above");
        let pieces: Vec<CellRange> = head.ranges.pieces(at, end).collect();
        head.ranges.remove(at, end);
        let (stream, state) = (head.stream, head.state.take());
        self.nodes.insert(tail, Node { stream, ranges: CellRanges::of(&pieces), state });
        Ok(())
    }

    /// Removes the node's positions from `at` on, with its recurrent state, and the node if none is left. Cells that no
    /// sequence sees become free.
    ///
    /// Errors: [`KvError::NoNode`], [`KvError::NodeBounds`] unless `start <= at <= end`.
    pub fn node_trim(&mut self, node: u64, at: i32) -> Result<()> {
        let (start, end) = self.node(node)?.ends();
        if at < start || at > end {
            return Err(rejected(KvError::NodeBounds { node, at, start, end }));
        }
        if at < end {
            self.drop_kept(node);
        }
        let cached = self.nodes.get_mut(&node).expect("found above");
        for cell in cached.ranges.pieces(at, end).flat_map(CellRange::cells) {
            self.cells.release(cell);
        }
        cached.ranges.remove(at, end);
        if at == start {
            self.nodes.remove(&node);
        }
        Ok(())
    }

    /// Creates a node of `n` newly allocated cells of a stream, at positions from `p0`. The caller writes their
    /// contents. Returns the cells in position order.
    ///
    /// Errors: [`KvError::NodeExists`], [`KvError::Stream`], [`KvError::Range`] unless `p0 >= 0`, `n > 0` and
    /// the positions stay below `i32::MAX`, [`crate::error::Exhausted::Cells`].
    pub fn node_create(&mut self, node: u64, stream: u32, p0: i32, n: usize) -> Result<Vec<u32>> {
        self.check_new(node)?;
        self.check_stream(stream)?;
        let p1 = i32::try_from(n).ok().and_then(|n| p0.checked_add(n)).unwrap_or(i32::MIN);
        check_span(p0, p1)?;
        self.check_free(stream, n)?;
        let mut ranges = CellRanges::default();
        for position in p0..p1 {
            let cell = self.cells.allocate(stream, ranges.last_cell(), position);
            self.cells.cache(cell);
            ranges.push(position, cell);
        }
        let cells = ranges.as_slice().iter().copied().flat_map(CellRange::cells).collect();
        self.nodes.insert(node, Node { stream, ranges, state: None });
        Ok(cells)
    }

    /// Returns the cells of a node's positions `p0..p1`, in position order.
    ///
    /// Errors: [`KvError::NoNode`], [`KvError::Range`] unless `0 <= p0 < p1`, [`KvError::NodeLacks`].
    pub fn node_cells(&self, node: u64, p0: i32, p1: i32) -> Result<Vec<u32>> {
        let cached = self.node(node)?;
        check_span(p0, p1)?;
        Ok(node_pieces(cached, node, p0, p1)?.into_iter().flat_map(CellRange::cells).collect())
    }

    pub(super) fn node(&self, node: u64) -> Result<&Node> {
        self.nodes.get(&node).ok_or_else(|| rejected(KvError::NoNode { node }))
    }

    fn check_new(&self, node: u64) -> Result<()> {
        let exists = self.nodes.contains_key(&node);
        if exists { Err(rejected(KvError::NodeExists { node })) } else { Ok(()) }
    }
}

fn node_pieces(cached: &Node, node: u64, p0: i32, p1: i32) -> Result<Vec<CellRange>> {
    cached.ranges.whole(p0, p1).map_err(|position| rejected(KvError::NodeLacks { node, position }))
}

/// Rejects empty ranges and ranges with open ends.
fn check_span(p0: i32, p1: i32) -> Result<()> {
    if 0 <= p0 && p0 < p1 { Ok(()) } else { Err(rejected(KvError::Range { p0, p1 })) }
}
