//! Inspection of the cache: invariants, contents, digest.

use super::KvCache;
use super::free::FreeCells;
use super::ranges::CellRange;
use std::hash::{DefaultHasher, Hash, Hasher};

/// The contents of the cache in a canonical order.
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
    /// Panics if a numbered invariant is violated. Takes time linear in the size of the cache.
    pub fn check(&self) {
        self.cells.streams.iter().for_each(FreeCells::check);
        let mut n_linked = 0;
        for (slot, ranges) in self.index.iter().enumerate() {
            check_ranges(slot, ranges.as_slice());
            for (position, cell) in ranges.as_slice().iter().flat_map(|range| range.positions_and_cells()) {
                assert!(
                    self.cells.sees(slot, cell) && self.cells.position(cell) == position,
                    "invariant 4: slot {slot} has position {position} in cell {cell}, but the cell has not"
                );
                let stream = self.streams[slot];
                assert_eq!(self.cells.stream_of(cell), stream, "invariant 6: cell {cell} of slot {slot}");
                n_linked += 1;
            }
        }
        let n_of_nodes = self.check_nodes();
        let (mut n_seen, mut n_cached) = (0, 0);
        for cell in self.all_cells() {
            let (n_seqs, cached) = (self.cells.n_seqs(cell), self.cells.is_cached(cell));
            let is_in_use = n_seqs > 0 || cached;
            n_seen += n_seqs;
            n_cached += usize::from(cached);
            assert_eq!(
                self.cells.is_used(cell),
                is_in_use,
                "invariant 1: {n_seqs} sequences see cell {cell}"
            );
            assert!(
                is_in_use || self.cells.position(cell) == 0,
                "invariant 1: free cell {cell} has a position"
            );
        }
        assert_eq!(n_linked, n_seen, "invariant 4: a cell lists a sequence whose ranges do not have it");
        assert_eq!(
            n_of_nodes, n_cached,
            "invariant 5: a cell is cached by two nodes, or marked as cached without a node"
        );
        self.check_seqs();
    }

    /// Checks invariants 5 and 6 of each node and returns the number of their cells.
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
                    "invariant 5: node {id} has position {position} in cell {cell}, but the cell has not"
                );
                let stream = self.cells.stream_of(cell);
                assert_eq!(stream, node.stream, "invariant 6: cell {cell} of node {id}");
                n_cells += 1;
            }
        }
        n_cells
    }

    /// Checks the invariants of the id pool, and invariant 7.
    fn check_seqs(&self) {
        self.seqs.check();
        let mut is_acquired = vec![false; self.n_seq_max()];
        self.seqs.acquired().for_each(|id| is_acquired[id.slot() as usize] = true);
        if let Some(states) = &self.states {
            let kept: Vec<u32> = self.nodes.values().filter_map(|node| node.state).collect();
            states.check(&kept, |slot| !self.index[slot].as_slice().is_empty());
        }
        for slot in (0..self.n_seq_max()).filter(|&slot| !is_acquired[slot]) {
            let is_empty = self.index[slot].as_slice().is_empty() && self.streams[slot] == 0;
            assert!(is_empty, "invariant 7: slot {slot} is not acquired but has cells or a stream");
        }
    }

    /// Returns the contents in the form of the tests' reference model. Takes time linear in the size of the cache.
    pub fn dump(&self) -> KvDump {
        let mut links = Vec::new();
        for (slot, ranges) in (0_u32..).zip(&self.index) {
            let cells = ranges.as_slice().iter().flat_map(|range| range.positions_and_cells());
            links.extend(cells.map(|(position, cell)| (slot, position, cell)));
        }
        let cached = self.nodes.iter().flat_map(|(&id, node)| {
            let cells = node.ranges.as_slice().iter().flat_map(|range| range.positions_and_cells());
            cells.map(move |(position, cell)| (id, position, cell))
        });
        let free = self.all_cells().filter(|&cell| !self.cells.is_used(cell)).collect();
        KvDump { links, cached: cached.collect(), free }
    }

    /// Returns a hash of the whole state: each cell's position, sequences and cached bit, each sequence's stream and
    /// ranges, each node, the acquired ids, and what decides the order in which free cells are allocated (the use bits,
    /// and the stacks with `lifo`). Future generations and the order of future ids are left out: a cache without
    /// sequences and nodes has the digest of a new one. Equal states have equal digests within one build. Takes time
    /// linear in the size of the cache.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.cells.hash_cells(&mut hasher);
        self.streams.hash(&mut hasher);
        self.index.hash(&mut hasher);
        self.nodes.hash(&mut hasher);
        self.seqs.acquired().for_each(|id| id.hash(&mut hasher));
        self.states.iter().for_each(|states| states.digest_parts().hash(&mut hasher));
        hasher.finish()
    }

    fn all_cells(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.n_cells()).expect("checked by KvCache::new")
    }
}

/// Checks invariant 3 of one sequence.
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
