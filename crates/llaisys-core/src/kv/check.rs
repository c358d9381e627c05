//! Inspection of the cache: invariants, contents, digest.

use super::KvCache;
use super::free::FreeCells;
use super::ranges::CellRange;
use std::hash::{DefaultHasher, Hash, Hasher};

/// The contents of the cache, in one order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvDump {
    /// `(slot, position, cell)`, ascending.
    pub links: Vec<(u32, i32, u32)>,
    /// `(node, position, cell)`, ascending.
    pub cached: Vec<(u64, i32, u32)>,
    /// Free cells, ascending.
    pub free: Vec<u32>,
}

impl KvCache {
    /// Panics if a numbered invariant is broken. Costs the size of the cache.
    pub fn check(&self) {
        self.cells.streams.iter().for_each(FreeCells::check);
        let mut n_links = 0;
        for (slot, ranges) in self.index.iter().enumerate() {
            check_ranges(slot, ranges.as_slice());
            for (position, cell) in ranges.as_slice().iter().flat_map(|range| range.positions_and_cells()) {
                assert!(
                    self.cells.sees(slot, cell) && self.cells.position(cell) == position,
                    "invariant 4: slot {slot} has position {position} in cell {cell}, the cell disagrees"
                );
                let stream = self.streams[slot];
                assert_eq!(self.cells.stream_of(cell), stream, "invariant 6: cell {cell} of slot {slot}");
                n_links += 1;
            }
        }
        let n_of_nodes = self.check_nodes();
        let (mut n_seen, mut n_cached) = (0, 0);
        for cell in self.all_cells() {
            let (n_seqs, cached) = (self.cells.n_seqs(cell), self.cells.is_cached(cell));
            let is_needed = n_seqs > 0 || cached;
            n_seen += n_seqs;
            n_cached += usize::from(cached);
            assert_eq!(self.cells.is_used(cell), is_needed, "invariant 1: {n_seqs} see cell {cell}");
            assert!(
                is_needed || self.cells.position(cell) == 0,
                "invariant 1: free cell {cell} has a position"
            );
        }
        assert_eq!(n_links, n_seen, "invariant 4: cells are seen by sequences that do not have them");
        assert_eq!(
            n_of_nodes, n_cached,
            "invariant 5: cells are cached twice, or by nodes that do not have them"
        );
        self.check_seqs();
    }

    /// Invariants 5 and 6 of each node; returns the number of their cells.
    fn check_nodes(&self) -> usize {
        let mut n_cells = 0;
        for (id, node) in &self.nodes {
            let ranges = node.ranges.as_slice();
            assert!(!ranges.is_empty(), "invariant 5: node {id} is empty");
            for pair in ranges.windows(2) {
                assert_eq!(pair[0].end(), pair[1].position, "invariant 5: node {id} has a gap: {pair:?}");
                assert!(!pair[0].joins(pair[1]), "invariant 5: ranges of node {id} are not joined: {pair:?}");
            }
            for (position, cell) in ranges.iter().flat_map(|range| range.positions_and_cells()) {
                assert!(
                    self.cells.is_cached(cell) && self.cells.position(cell) == position,
                    "invariant 5: node {id} has position {position} in cell {cell}, the cell disagrees"
                );
                let stream = self.cells.stream_of(cell);
                assert_eq!(stream, node.stream, "invariant 6: cell {cell} of node {id}");
                n_cells += 1;
            }
        }
        n_cells
    }

    /// The id pool's invariants, and invariant 7.
    fn check_seqs(&self) {
        self.seqs.check();
        let mut is_acquired = vec![false; self.n_seq_max()];
        self.seqs.acquired().for_each(|id| is_acquired[id.slot() as usize] = true);
        for slot in (0..self.n_seq_max()).filter(|&slot| !is_acquired[slot]) {
            let is_empty = self.index[slot].as_slice().is_empty() && self.streams[slot] == 0;
            assert!(is_empty, "invariant 7: slot {slot} is not acquired and has cells or a stream");
        }
    }

    /// Everything that a naive model of the cache would hold too. Costs the size of the cache.
    pub fn dump(&self) -> KvDump {
        let mut links = Vec::new();
        for (slot, ranges) in (0_u32..).zip(&self.index) {
            let places = ranges.as_slice().iter().flat_map(|range| range.positions_and_cells());
            links.extend(places.map(|(position, cell)| (slot, position, cell)));
        }
        let places = self.nodes.iter().flat_map(|(&id, node)| {
            let places = node.ranges.as_slice().iter().flat_map(|range| range.positions_and_cells());
            places.map(move |(position, cell)| (id, position, cell))
        });
        let free = self.all_cells().filter(|&cell| !self.cells.is_used(cell)).collect();
        KvDump { links, cached: places.collect(), free }
    }

    /// A hash of the whole state: each cell's position, sequences and cached bit, each sequence's stream and ranges,
    /// each node, what decides the order in which free cells are allocated (the use bits, and the stacks with `lifo`),
    /// and the acquired ids. Future generations and the order of future ids do not count: a cache whose last sequence
    /// and node are gone has the digest of a new one. Equal states have equal digests within one build. Costs the size
    /// of the cache.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.cells.hash_cells(&mut hasher);
        self.streams.hash(&mut hasher);
        self.index.hash(&mut hasher);
        self.nodes.hash(&mut hasher);
        self.seqs.acquired().for_each(|id| id.hash(&mut hasher));
        hasher.finish()
    }

    fn all_cells(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.n_cells()).expect("checked by KvCache::new")
    }
}

/// Invariant 3.
fn check_ranges(slot: usize, ranges: &[CellRange]) {
    assert!(
        ranges.iter().all(|range| range.len > 0 && range.position >= 0),
        "invariant 3: slot {slot} has an empty range or a negative position"
    );
    for pair in ranges.windows(2) {
        assert!(pair[0].end() <= pair[1].position, "invariant 3: ranges of slot {slot} overlap: {pair:?}");
        assert!(!pair[0].joins(pair[1]), "invariant 3: ranges of slot {slot} are not joined: {pair:?}");
    }
}
