//! Looking at the cells from outside: invariants, contents, digest.

use super::cells::Cells;
use super::free::FreeCells;
use super::runs::Run;
use std::hash::{DefaultHasher, Hash, Hasher};

/// The contents of the cells, in one order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CellsDump {
    /// `(slot, position, cell)`, ascending.
    pub links: Vec<(u32, i32, u32)>,
    /// `(segment, position, cell)`, ascending.
    pub held: Vec<(u64, i32, u32)>,
    /// Free cells, ascending.
    pub free: Vec<u32>,
}

impl Cells {
    /// Panics if a numbered invariant is broken. Costs the size of the pool.
    pub fn check(&self) {
        self.table.arenas.iter().for_each(FreeCells::check);
        let mut n_links = 0;
        for (slot, runs) in (0_u32..).zip(&self.index) {
            check_runs(slot, runs.as_slice());
            for run in runs.as_slice() {
                for (position, cell) in run.places() {
                    assert!(
                        self.table.sees(slot, cell) && self.table.position(cell) == position,
                        "invariant 4: slot {slot} has position {position} in cell {cell}, the cell disagrees"
                    );
                    let home = self.streams[slot as usize];
                    assert_eq!(self.table.stream_of(cell), home, "invariant 6: cell {cell} of slot {slot}");
                    n_links += 1;
                }
            }
        }
        let n_held = self.check_segments();
        let (mut n_seen, mut n_retained) = (0, 0);
        for cell in self.all_cells() {
            let (n_seqs, retained) = (self.table.n_seqs(cell), self.table.is_retained(cell));
            let is_wanted = n_seqs > 0 || retained;
            n_seen += n_seqs;
            n_retained += usize::from(retained);
            assert_eq!(self.table.is_used(cell), is_wanted, "invariant 1: {n_seqs} see cell {cell}");
            assert!(
                is_wanted || self.table.position(cell) == 0,
                "invariant 1: free cell {cell} has a position"
            );
        }
        assert_eq!(n_links, n_seen, "invariant 4: cells are seen by sequences that do not have them");
        assert_eq!(
            n_held, n_retained,
            "invariant 5: cells are held twice, or by segments that do not have them"
        );
    }

    /// Invariants 5 and 6 of each segment; returns the cells that they hold.
    fn check_segments(&self) -> usize {
        let mut n_held = 0;
        for (id, segment) in &self.segments {
            let runs = segment.runs.as_slice();
            assert!(!runs.is_empty(), "invariant 5: segment {id} is empty");
            for pair in runs.windows(2) {
                assert_eq!(pair[0].end(), pair[1].position, "invariant 5: segment {id} has a gap: {pair:?}");
                assert!(
                    !pair[0].joins(pair[1]),
                    "invariant 5: runs of segment {id} are not joined: {pair:?}"
                );
            }
            for (position, cell) in runs.iter().flat_map(|run| run.places()) {
                assert!(
                    self.table.is_retained(cell) && self.table.position(cell) == position,
                    "invariant 5: segment {id} has position {position} in cell {cell}, the cell disagrees"
                );
                let home = self.table.stream_of(cell);
                assert_eq!(home, segment.stream, "invariant 6: cell {cell} of segment {id}");
                n_held += 1;
            }
        }
        n_held
    }

    /// Everything that a naive model of the cells would hold too. Costs the size of the pool.
    pub fn dump(&self) -> CellsDump {
        let mut links = Vec::new();
        for (slot, runs) in (0_u32..).zip(&self.index) {
            let places = runs.as_slice().iter().flat_map(|run| run.places());
            links.extend(places.map(|(position, cell)| (slot, position, cell)));
        }
        let places = self.segments.iter().flat_map(|(&id, segment)| {
            let places = segment.runs.as_slice().iter().flat_map(|run| run.places());
            places.map(move |(position, cell)| (id, position, cell))
        });
        let free = self.all_cells().filter(|&cell| !self.table.is_used(cell)).collect();
        CellsDump { links, held: places.collect(), free }
    }

    /// A hash of the whole state: each cell's position, sequences and holder, each sequence's arena and runs, each
    /// segment, and what decides in which order free cells are handed out (the use bits, and the stacks in the
    /// order of tests). Equal states have equal digests within one build. Costs the size of the pool.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.table.hash_cells(&mut hasher);
        self.streams.hash(&mut hasher);
        self.index.hash(&mut hasher);
        self.segments.hash(&mut hasher);
        hasher.finish()
    }

    fn all_cells(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.n_cells()).expect("checked when made")
    }
}

/// Invariant 3.
fn check_runs(slot: u32, runs: &[Run]) {
    assert!(
        runs.iter().all(|run| run.len > 0 && run.position >= 0),
        "invariant 3: slot {slot} has an empty run or a negative position"
    );
    for pair in runs.windows(2) {
        assert!(pair[0].end() <= pair[1].position, "invariant 3: runs of slot {slot} overlap: {pair:?}");
        assert!(!pair[0].joins(pair[1]), "invariant 3: runs of slot {slot} are not joined: {pair:?}");
    }
}
