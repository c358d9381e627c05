//! The state of each cell: its position, the sequences that see it, and whether a node caches it.

use super::KvShape;
use super::free::FreeCells;
use std::hash::{Hash, Hasher};

/// The state of every cell. A free cell is all zeros, so new memory is not touched before use.
#[derive(Debug)]
pub(super) struct Cells {
    /// Position of each cell; 0 for a free one.
    position: Vec<i32>,
    /// `words_per_cell` words per cell: bit `slot` is set if that sequence sees the cell.
    seqs: Vec<u64>,
    words_per_cell: usize,
    /// One bit per cell, set if a node caches it.
    cached: Vec<u64>,
    /// The free cells of each stream.
    pub(super) streams: Vec<FreeCells>,
    /// Cells of one stream.
    stream_len: u32,
    /// Cells that became free since the last [`Cells::take_freed`]; `None` before the first call.
    freed: Option<Vec<u32>>,
}

impl Cells {
    /// Creates cells that are all free, with 12 bytes and 2.1 bits per cell up to 64 sequences.
    /// [`super::KvCache::new`] has checked `shape`.
    pub(super) fn new(shape: KvShape) -> Self {
        let words_per_cell = shape.n_seq_max.div_ceil(64);
        let n_in_stream = shape.n_cells / shape.n_streams;
        let stream_len = u32::try_from(n_in_stream).expect("cells are numbered in 32 bits");
        let bases = (0_u32..).take(shape.n_streams).map(|stream| stream * stream_len);
        Self {
            position: vec![0; shape.n_cells],
            seqs: vec![0; shape.n_cells * words_per_cell],
            words_per_cell,
            cached: vec![0; shape.n_cells.div_ceil(64)],
            streams: bases.map(|base| FreeCells::new(base, n_in_stream, shape.lifo)).collect(),
            stream_len,
            freed: None,
        }
    }

    pub(super) fn n_cells(&self) -> usize {
        self.position.len()
    }

    pub(super) fn n_free(&self) -> usize {
        self.streams.iter().map(FreeCells::n_free).sum()
    }

    /// The stream that a cell is in.
    pub(super) fn stream_of(&self, cell: u32) -> u32 {
        cell / self.stream_len
    }

    pub(super) fn is_used(&self, cell: u32) -> bool {
        self.streams[self.stream_of(cell) as usize].is_used(cell)
    }

    /// Allocates a cell of a stream for `position`, which the caller links or caches next. `last` is the cell of the
    /// previous position.
    pub(super) fn allocate(&mut self, stream: u32, last: Option<u32>, position: i32) -> u32 {
        let cell =
            self.streams[stream as usize].allocate(last).expect("the caller has counted the free cells");
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
    pub(super) fn sees(&self, slot: usize, cell: u32) -> bool {
        self.words(cell)[slot / 64] >> (slot % 64) & 1 == 1
    }

    /// Sequences that see the cell.
    pub(super) fn n_seqs(&self, cell: u32) -> u32 {
        self.words(cell).iter().map(|word| word.count_ones()).sum()
    }

    /// The sequence slots that see the cell, ascending.
    pub(super) fn seqs(&self, cell: u32) -> impl Iterator<Item = usize> {
        (0_usize..).zip(self.words(cell)).flat_map(|(word, &bits)| {
            let (mut bits, base) = (bits, word * 64);
            std::iter::from_fn(move || {
                let slot = (bits != 0).then(|| base + bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(slot)
            })
        })
    }

    /// The lowest sequence slot that sees the cell.
    pub(super) fn first_seq(&self, cell: u32) -> Option<usize> {
        self.seqs(cell).next()
    }

    /// Lets a sequence see a used cell.
    pub(super) fn link(&mut self, slot: usize, cell: u32) {
        self.seqs[cell as usize * self.words_per_cell + slot / 64] |= 1 << (slot % 64);
    }

    /// The inverse of [`Cells::link`]. A cell without sequences and without a node becomes free.
    pub(super) fn unlink(&mut self, slot: usize, cell: u32) {
        self.seqs[cell as usize * self.words_per_cell + slot / 64] &= !(1 << (slot % 64));
        self.free_if_unused(cell);
    }

    /// True if a node caches the cell.
    pub(super) fn is_cached(&self, cell: u32) -> bool {
        self.cached[cell as usize / 64] >> (cell % 64) & 1 == 1
    }

    /// Marks a used cell as cached by a node.
    pub(super) fn cache(&mut self, cell: u32) {
        self.cached[cell as usize / 64] |= 1 << (cell % 64);
    }

    /// The inverse of [`Cells::cache`]. A cell without sequences and without a node becomes free.
    pub(super) fn release(&mut self, cell: u32) {
        self.cached[cell as usize / 64] &= !(1 << (cell % 64));
        self.free_if_unused(cell);
    }

    fn free_if_unused(&mut self, cell: u32) {
        if self.is_cached(cell) || self.words(cell).iter().any(|word| *word != 0) {
            return;
        }
        self.position[cell as usize] = 0;
        let stream = self.stream_of(cell);
        self.streams[stream as usize].free(cell);
        self.freed.iter_mut().for_each(|freed| freed.push(cell));
    }

    /// Number of cells recorded as freed.
    pub(super) fn n_freed(&self) -> usize {
        self.freed.as_ref().map_or(0, Vec::len)
    }

    /// Keeps the first `n` recorded cells; the others were allocated and freed by a prediction.
    pub(super) fn truncate_freed(&mut self, n: usize) {
        self.freed.iter_mut().for_each(|freed| freed.truncate(n));
    }

    /// Returns the cells that became free since the last call. The first call starts the recording.
    pub(super) fn take_freed(&mut self) -> Vec<u32> {
        self.freed.replace(Vec::new()).unwrap_or_default()
    }

    /// Hashes every cell's position, sequences and cached bit, and the order of the free ones.
    pub(super) fn hash_cells(&self, hasher: &mut impl Hasher) {
        self.position.hash(hasher);
        self.seqs.hash(hasher);
        self.cached.hash(hasher);
        self.streams.iter().for_each(|free| free.hash_order(hasher));
    }
}
