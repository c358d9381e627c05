//! What each cell holds: a position, the set of sequences that see it, and whether a segment holds it.

use super::KvShape;
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
    /// Bit per cell: a segment holds it.
    retained: Vec<u64>,
    /// The free cells of each arena.
    pub(super) arenas: Vec<FreeCells>,
    per_arena: u32,
    /// Cells that became free since [`Table::take_freed`], if anybody asks for them.
    freed: Option<Vec<u32>>,
}

impl Table {
    /// Free cells: 12 bytes and 2.1 bits a cell up to 64 sequences. [`super::Cells::new`] has checked `shape`.
    pub(super) fn new(shape: KvShape) -> Self {
        let words_per_cell = shape.n_seq_max.div_ceil(64);
        let n_in_arena = shape.n_cells / shape.n_streams;
        let per_arena = u32::try_from(n_in_arena).expect("cells are numbered in 32 bits");
        let bases = (0_u32..).take(shape.n_streams).map(|stream| stream * per_arena);
        Self {
            position: vec![0; shape.n_cells],
            seqs: vec![0; shape.n_cells * words_per_cell],
            words_per_cell,
            retained: vec![0; shape.n_cells.div_ceil(64)],
            arenas: bases.map(|base| FreeCells::new(base, n_in_arena, shape.lifo)).collect(),
            per_arena,
            freed: None,
        }
    }

    pub(super) fn n_cells(&self) -> usize {
        self.position.len()
    }

    /// The arena that a cell lies in.
    pub(super) fn stream_of(&self, cell: u32) -> u32 {
        cell / self.per_arena
    }

    pub(super) fn is_used(&self, cell: u32) -> bool {
        self.arenas[self.stream_of(cell) as usize].is_used(cell)
    }

    /// Takes a cell of an arena for `position`, to be linked or retained next; `last` is the cell of the position
    /// before it.
    pub(super) fn take(&mut self, stream: u32, last: Option<u32>, position: i32) -> u32 {
        let cell = self.arenas[stream as usize].take(last).expect("the caller has counted the free cells");
        self.position[cell as usize] = position;
        cell
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

    /// The sequence slots that see the cell, ascending.
    pub(super) fn seqs(&self, cell: u32) -> impl Iterator<Item = u32> {
        (0_u32..).zip(self.words(cell)).flat_map(|(word, &bits)| {
            let (mut bits, base) = (bits, word * 64);
            std::iter::from_fn(move || {
                let slot = (bits != 0).then(|| base + bits.trailing_zeros())?;
                bits &= bits - 1;
                Some(slot)
            })
        })
    }

    /// The lowest sequence slot that sees the cell.
    pub(super) fn first_seq(&self, cell: u32) -> Option<u32> {
        self.seqs(cell).next()
    }

    /// Lets a sequence see a used cell.
    pub(super) fn link(&mut self, slot: u32, cell: u32) {
        self.seqs[cell as usize * self.words_per_cell + slot as usize / 64] |= 1 << (slot % 64);
    }

    /// Ends that; a cell that nobody sees or holds any more is free.
    pub(super) fn unlink(&mut self, slot: u32, cell: u32) {
        self.seqs[cell as usize * self.words_per_cell + slot as usize / 64] &= !(1 << (slot % 64));
        self.free_if_unused(cell);
    }

    /// True if a segment holds the cell.
    pub(super) fn is_retained(&self, cell: u32) -> bool {
        self.retained[cell as usize / 64] >> (cell % 64) & 1 == 1
    }

    /// Holds a used cell for a segment.
    pub(super) fn retain(&mut self, cell: u32) {
        self.retained[cell as usize / 64] |= 1 << (cell % 64);
    }

    /// Ends that; a cell that nobody sees or holds any more is free.
    pub(super) fn let_go(&mut self, cell: u32) {
        self.retained[cell as usize / 64] &= !(1 << (cell % 64));
        self.free_if_unused(cell);
    }

    fn free_if_unused(&mut self, cell: u32) {
        if self.is_retained(cell) || self.words(cell).iter().any(|word| *word != 0) {
            return;
        }
        self.position[cell as usize] = 0;
        let stream = self.stream_of(cell);
        self.arenas[stream as usize].give_back(cell);
        self.freed.iter_mut().for_each(|freed| freed.push(cell));
    }

    /// Cells that became free since the last [`Table::take_freed`].
    pub(super) fn n_freed(&self) -> usize {
        self.freed.as_ref().map_or(0, Vec::len)
    }

    /// Remembers the first `n` of these alone: the others were never really used.
    pub(super) fn forget_freed(&mut self, n: usize) {
        self.freed.iter_mut().for_each(|freed| freed.truncate(n));
    }

    /// The cells that became free since the last call; the first call starts the count with nothing.
    pub(super) fn take_freed(&mut self) -> Vec<u32> {
        self.freed.replace(Vec::new()).unwrap_or_default()
    }

    /// Feeds every cell's position, sequences and holder, and the order of the free ones, to `hasher`.
    pub(super) fn hash_cells(&self, hasher: &mut impl Hasher) {
        self.position.hash(hasher);
        self.seqs.hash(hasher);
        self.retained.hash(hasher);
        self.arenas.iter().for_each(|arena| arena.hash_order(hasher));
    }
}
