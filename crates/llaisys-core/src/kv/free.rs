//! Which cells are free, and which one is allocated next.

use std::hash::{Hash, Hasher};

/// Cells of one block. A sequence is allocated whole free blocks while there are any, so its contiguous ranges have at
/// least this length and attention reads consecutive memory.
pub const BLOCK_CELLS: usize = 32;

/// A set of bits that finds its lowest clear bit in time proportional to the depth of a tree (4 levels for 16 Mi bits).
///
/// A bit of level `k + 1` is set exactly if the word of level `k` is full. Bits past the end are always set.
/// New memory is all zero bits, so an unused part of a large pool is never touched.
#[derive(Debug)]
struct BitTree {
    levels: Vec<Vec<u64>>,
}

impl BitTree {
    /// `n_bits` clear bits.
    fn new(n_bits: usize) -> Self {
        let mut levels = Vec::new();
        let mut n = n_bits;
        loop {
            let n_words = n.div_ceil(64).max(1);
            let mut words = vec![0_u64; n_words];
            let n_in_last = n - (n_words - 1) * 64;
            words[n_words - 1] = if n_in_last == 64 { 0 } else { u64::MAX << n_in_last };
            levels.push(words);
            if n_words == 1 {
                return Self { levels };
            }
            n = n_words;
        }
    }

    fn get(&self, bit: usize) -> bool {
        self.levels[0][bit / 64] >> (bit % 64) & 1 == 1
    }

    fn set(&mut self, mut bit: usize) {
        for words in &mut self.levels {
            let word = &mut words[bit / 64];
            *word |= 1 << (bit % 64);
            if *word != u64::MAX {
                return;
            }
            bit /= 64;
        }
    }

    fn clear(&mut self, mut bit: usize) {
        for words in &mut self.levels {
            let word = &mut words[bit / 64];
            let was_full = *word == u64::MAX;
            *word &= !(1 << (bit % 64));
            if !was_full {
                return;
            }
            bit /= 64;
        }
    }

    fn first_clear(&self) -> Option<usize> {
        let mut index = 0;
        for words in self.levels.iter().rev() {
            let word = words[index];
            if word == u64::MAX {
                return None;
            }
            index = index * 64 + word.trailing_ones() as usize;
        }
        Some(index)
    }

    /// Panics unless every summary bit agrees with its word.
    fn check(&self) {
        for pair in self.levels.windows(2) {
            for (i, &word) in pair[0].iter().enumerate() {
                let summary = pair[1][i / 64] >> (i % 64) & 1 == 1;
                assert!(summary == (word == u64::MAX), "invariant 2: summary bit {i} is {summary}");
            }
        }
    }
}

/// The free cells of one stream, numbered from `base`. The order of allocation depends only on which cells are in use:
/// a rollback has no list to restore. Low cells are used first, so the memory of a large cache is touched as it fills.
///
/// With `lifo` (for tests) the cell freed last is allocated next, so that a stale use of it shows immediately. Freeing
/// in the reverse order of allocation restores that stack too.
#[derive(Debug)]
pub(super) struct FreeCells {
    /// The stream's first cell.
    base: u32,
    /// One bit per cell, set if it is in use.
    used: BitTree,
    /// One bit per whole block, set if one of its cells is in use. A short block at the end has no bit.
    touched: BitTree,
    n_cells: usize,
    n_free: usize,
    /// The free cells, the next one last; only with `lifo`.
    stack: Option<Vec<u32>>,
}

impl FreeCells {
    /// Cells `base..base + n_cells`, all free.
    pub(super) fn new(base: u32, n_cells: usize, lifo: bool) -> Self {
        let n = u32::try_from(n_cells).expect("KvCache::new has checked the size");
        Self {
            base,
            used: BitTree::new(n_cells),
            touched: BitTree::new(n_cells / BLOCK_CELLS),
            n_cells,
            n_free: n_cells,
            stack: lifo.then(|| (base..base + n).rev().collect()),
        }
    }

    pub(super) fn n_cells(&self) -> usize {
        self.n_cells
    }

    pub(super) fn n_free(&self) -> usize {
        self.n_free
    }

    pub(super) fn is_used(&self, cell: u32) -> bool {
        self.used.get((cell - self.base) as usize)
    }

    /// Allocates one cell for a sequence whose last cell is `last`. Candidates in order: the next cell, in the same
    /// block or at the start of a wholly free one; the first cell of the lowest wholly free block; the lowest free
    /// cell, which may be in another sequence's block.
    pub(super) fn allocate(&mut self, last: Option<u32>) -> Option<u32> {
        let cell = match &mut self.stack {
            Some(stack) => (stack.pop()? - self.base) as usize,
            None => self
                .next_cell(last)
                .or_else(|| self.touched.first_clear().map(|block| block * BLOCK_CELLS))
                .or_else(|| self.used.first_clear())?,
        };
        self.used.set(cell);
        if cell / BLOCK_CELLS < self.n_cells / BLOCK_CELLS {
            self.touched.set(cell / BLOCK_CELLS);
        }
        self.n_free -= 1;
        Some(self.base + u32::try_from(cell).expect("a cache has fewer than 2^32 cells"))
    }

    fn next_cell(&self, last: Option<u32>) -> Option<usize> {
        let next = (last? - self.base) as usize + 1;
        if next >= self.n_cells || self.used.get(next) {
            return None;
        }
        (!next.is_multiple_of(BLOCK_CELLS) || self.is_free_block(next / BLOCK_CELLS)).then_some(next)
    }

    fn is_free_block(&self, block: usize) -> bool {
        block < self.n_cells / BLOCK_CELLS && !self.touched.get(block)
    }

    /// Frees a used cell.
    pub(super) fn free(&mut self, cell: u32) {
        self.stack.iter_mut().for_each(|stack| stack.push(cell));
        let cell = (cell - self.base) as usize;
        debug_assert!(self.used.get(cell), "cell {cell} was free");
        self.used.clear(cell);
        self.n_free += 1;
        let block = cell / BLOCK_CELLS;
        if block < self.n_cells / BLOCK_CELLS && self.block_bits(block) == 0 {
            self.touched.clear(block);
        }
    }

    /// Returns the use bits of one block, lowest cell first.
    fn block_bits(&self, block: usize) -> u64 {
        const BLOCKS_PER_WORD: usize = 64 / BLOCK_CELLS;
        let word = self.used.levels[0][block / BLOCKS_PER_WORD];
        word >> (block % BLOCKS_PER_WORD * BLOCK_CELLS) & ((1 << BLOCK_CELLS) - 1)
    }

    /// Hashes what decides which cell is allocated next: the use bits, and the stack if there is one.
    pub(super) fn hash_order(&self, hasher: &mut impl Hasher) {
        self.used.levels[0].hash(hasher);
        self.n_free.hash(hasher);
        self.stack.hash(hasher);
    }

    /// Panics if invariant 2 of [`super::KvCache`] is violated.
    pub(super) fn check(&self) {
        self.used.check();
        self.touched.check();
        let n_used = (0..self.n_cells).filter(|&cell| self.used.get(cell)).count();
        assert_eq!(n_used + self.n_free, self.n_cells, "invariant 2: the counts of used and free cells");
        for block in 0..self.n_cells / BLOCK_CELLS {
            let touched = self.block_bits(block) != 0;
            assert_eq!(self.touched.get(block), touched, "invariant 2: block {block} is in use: {touched}");
        }
        if let Some(stack) = &self.stack {
            let in_use = stack.iter().find(|&&cell| self.is_used(cell));
            assert!(in_use.is_none(), "invariant 2: cell {in_use:?} is in use and on the stack");
            assert_eq!(stack.len(), self.n_free, "invariant 2: the stack does not have every free cell once");
        }
    }
}
