//! Looking at the cells from outside: invariants, contents, digest.

use super::cells::Cells;
use super::runs::Run;
use std::hash::{DefaultHasher, Hash, Hasher};

/// The contents of the cells, in one order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CellsDump {
    /// `(slot, position, cell)`, ascending.
    pub links: Vec<(u32, i32, u32)>,
    /// Free cells, ascending.
    pub free: Vec<u32>,
}

impl Cells {
    /// Panics if a numbered invariant is broken. Costs the size of the pool.
    pub fn check(&self) {
        self.table.free.check();
        let mut n_links = 0;
        for (slot, runs) in (0_u32..).zip(&self.index) {
            check_runs(slot, runs.as_slice());
            for run in runs.as_slice() {
                for (position, cell) in run.places() {
                    assert!(
                        self.table.sees(slot, cell) && self.table.position(cell) == position,
                        "invariant 4: slot {slot} has position {position} in cell {cell}, the cell disagrees"
                    );
                    n_links += 1;
                }
            }
        }
        let mut n_seen = 0;
        for cell in self.all_cells() {
            let n_seqs = self.table.n_seqs(cell);
            n_seen += n_seqs;
            assert_eq!(self.table.free.is_used(cell), n_seqs > 0, "invariant 1: {n_seqs} see cell {cell}");
            assert!(
                n_seqs > 0 || self.table.position(cell) == 0,
                "invariant 1: free cell {cell} has a position"
            );
        }
        assert_eq!(n_links, n_seen, "invariant 4: cells are seen by sequences that do not have them");
    }

    /// Everything that a naive model of the cells would hold too. Costs the size of the pool.
    pub fn dump(&self) -> CellsDump {
        let mut links = Vec::new();
        for (slot, runs) in (0_u32..).zip(&self.index) {
            let places = runs.as_slice().iter().flat_map(|run| run.places());
            links.extend(places.map(|(position, cell)| (slot, position, cell)));
        }
        let free = self.all_cells().filter(|&cell| !self.table.free.is_used(cell)).collect();
        CellsDump { links, free }
    }

    /// A hash of the whole state: each cell's position and sequences, each sequence's runs, and the use bits,
    /// which decide alone in which order free cells are handed out. Equal states have equal digests within
    /// one build. Costs the size of the pool.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.stream.hash(&mut hasher);
        self.table.free.words().hash(&mut hasher);
        self.table.free.n_free().hash(&mut hasher);
        self.table.hash_cells(&mut hasher);
        self.index.hash(&mut hasher);
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
