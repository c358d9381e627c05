//! What each cell holds: a position and the set of sequences that see it.

use super::free::FreeCells;
use std::hash::{Hash, Hasher};

/// The cells' side of the bookkeeping. Zero is "free" everywhere, so new memory is not touched before use.
#[derive(Debug)]
pub(super) struct Table {
    /// Position of each cell; 0 for a free one.
    position: Vec<i32>,
    /// `words_per_cell` words a cell: bit `slot` is set if that sequence sees the cell.
    seqs: Vec<u64>,
    words_per_cell: usize,
    pub(super) free: FreeCells,
}

impl Table {
    /// `n_cells` free cells for `n_seq_max` sequences: 12 bytes and 1.1 bits a cell up to 64 sequences.
    pub(super) fn new(n_cells: usize, n_seq_max: usize) -> Self {
        let words_per_cell = n_seq_max.div_ceil(64);
        Self {
            position: vec![0; n_cells],
            seqs: vec![0; n_cells * words_per_cell],
            words_per_cell,
            free: FreeCells::new(n_cells),
        }
    }

    pub(super) fn position(&self, cell: u32) -> i32 {
        self.position[cell as usize]
    }

    pub(super) fn set_position(&mut self, cell: u32, position: i32) {
        self.position[cell as usize] = position;
    }

    fn words(&self, cell: u32) -> &[u64] {
        &self.seqs[cell as usize * self.words_per_cell..][..self.words_per_cell]
    }

    /// True if the sequence sees the cell.
    pub(super) fn sees(&self, slot: u32, cell: u32) -> bool {
        self.words(cell)[slot as usize / 64] >> (slot % 64) & 1 == 1
    }

    /// Sequences that see the cell.
    pub(super) fn n_seqs(&self, cell: u32) -> u32 {
        self.words(cell).iter().map(|word| word.count_ones()).sum()
    }

    /// The lowest sequence slot that sees the cell.
    pub(super) fn first_seq(&self, cell: u32) -> Option<u32> {
        let (word, bits) = (0_u32..).zip(self.words(cell)).find(|(_, bits)| **bits != 0)?;
        Some(word * 64 + bits.trailing_zeros())
    }

    /// Lets a sequence see a used cell.
    pub(super) fn link(&mut self, slot: u32, cell: u32) {
        self.seqs[cell as usize * self.words_per_cell + slot as usize / 64] |= 1 << (slot % 64);
    }

    /// Ends that; a cell that nobody sees any more is free.
    pub(super) fn unlink(&mut self, slot: u32, cell: u32) {
        self.seqs[cell as usize * self.words_per_cell + slot as usize / 64] &= !(1 << (slot % 64));
        if self.words(cell).iter().all(|word| *word == 0) {
            self.position[cell as usize] = 0;
            self.free.give_back(cell);
        }
    }

    /// Feeds every cell's position and set of sequences to `hasher`.
    pub(super) fn hash_cells(&self, hasher: &mut impl Hasher) {
        self.position.hash(hasher);
        self.seqs.hash(hasher);
    }
}
