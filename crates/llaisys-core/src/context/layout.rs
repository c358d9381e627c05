//! The cells that each row of a forward pass sees, from the KV cache.

use crate::batch::Batch;
use crate::kv::{CellRange, KvCache};
use crate::ops::{AttentionRow, AttentionRows, window_span};
use std::ops::Range;

/// The visible cells of a pass; the buffers are reused.
#[derive(Debug)]
pub(super) struct Layout {
    /// Visible cells of each sequence in position order, one sequence after the other.
    cells: Vec<u32>,
    rows: Vec<AttentionRow>,
    /// As in [`AttentionRows`].
    n_shared: Vec<u32>,
    by_slot: Vec<SlotRange>,
    /// The same for layers with a sliding window, if the model has any.
    windowed: Option<WindowRows>,
}

/// The rows of layers with a sliding window, in the form of [`AttentionRows`].
#[derive(Debug)]
struct WindowRows {
    window: usize,
    cells: Vec<u32>,
    rows: Vec<AttentionRow>,
}

/// A row to be added to [`WindowRows`].
#[derive(Debug, Clone, Copy)]
struct WindowRow<'a> {
    /// The contiguous ranges of its sequence.
    ranges: &'a [CellRange],
    /// The sequence's cells up to its last row of the pass.
    listed: &'a [u32],
    position: i32,
    /// True for its sequence's first row of the pass.
    is_first: bool,
}

/// One sequence's part of a pass.
#[derive(Debug, Clone, Copy, Default)]
struct SlotRange {
    /// Its last position in the pass.
    last_position: i32,
    /// Its cells up to that position: `cells[start..end]`; empty until they are listed.
    start: usize,
    end: usize,
    /// Start of its cells in [`WindowRows::cells`], and the rank of the cell there.
    windowed: (usize, usize),
}

impl Layout {
    /// A layout for up to `n_seq_max` sequences. `window` is the size of the model's sliding window, if it has one.
    pub(super) fn new(n_seq_max: usize, window: Option<usize>) -> Self {
        let windowed = window.map(|window| WindowRows { window, cells: Vec::new(), rows: Vec::new() });
        let by_slot = vec![SlotRange::default(); n_seq_max];
        Self { cells: Vec::new(), rows: Vec::new(), n_shared: Vec::new(), by_slot, windowed }
    }

    /// Lists the cells that `rows` of `batch` see. `row_cells` is the cell of each row of the batch, already linked in
    /// `kv`. For a row of several sequences the first one is used: `prepare` has checked that they all see the same.
    pub(super) fn fill(&mut self, kv: &KvCache, batch: &Batch, row_cells: &[u32], rows: Range<usize>) {
        self.cells.clear();
        self.rows.clear();
        self.n_shared.clear();
        if let Some(windowed) = &mut self.windowed {
            windowed.cells.clear();
            windowed.rows.clear();
        }
        let seq_of = |row: usize| batch.row_seqs(row)[0];
        for row in rows.clone() {
            let last_position = batch.positions[row];
            self.by_slot[seq_of(row).slot() as usize] = SlotRange { last_position, ..SlotRange::default() };
        }
        for row in rows {
            let (seq, position) = (seq_of(row), batch.positions[row]);
            let range = &mut self.by_slot[seq.slot() as usize];
            let is_first = range.end == 0;
            if is_first {
                range.start = self.cells.len();
                kv.visible_cells(seq, range.last_position, &mut self.cells);
                range.end = self.cells.len();
            }
            // A batch continues its sequences without gaps, so the distance to the last position counts the rows after
            // this one.
            let n_after = (range.last_position - position) as usize;
            let end = range.end - n_after;
            assert_eq!(self.cells[end - 1], row_cells[row], "the last cell that a row sees is its own");
            let n_visible = (end - range.start) as u32;
            let before = self.rows.last().filter(|_| is_first);
            let before =
                before.map_or(&[][..], |row| &self.cells[row.start as usize..][..row.n_visible as usize]);
            let n_shared = n_common(before, &self.cells[range.start..]);
            self.n_shared.push(n_shared as u32);
            self.rows.push(AttentionRow { start: range.start as u32, n_hidden: 0, n_visible });
            if let Some(windowed) = &mut self.windowed {
                let listed = &self.cells[range.start..range.end];
                windowed.push(WindowRow { ranges: kv.ranges(seq), listed, position, is_first }, range);
            }
        }
    }

    /// The rows of the last [`Layout::fill`] in layers without a window.
    pub(super) fn attention(&self) -> AttentionRows<'_> {
        AttentionRows { cells: &self.cells, rows: &self.rows, window: None, n_shared: &self.n_shared }
    }

    /// The rows of the last [`Layout::fill`] in layers with a sliding window.
    pub(super) fn windowed(&self) -> Option<AttentionRows<'_>> {
        let windowed = self.windowed.as_ref()?;
        let WindowRows { window, cells, rows } = windowed;
        Some(AttentionRows { cells, rows, window: Some(*window), n_shared: &[] })
    }
}

/// The number of equal cells at the start of two lists, in whole pieces of 128.
fn n_common(a: &[u32], b: &[u32]) -> usize {
    let (a, b) = (a.as_chunks::<128>().0, b.as_chunks::<128>().0);
    128 * a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl WindowRows {
    /// Adds a row of the sequence `slot`.
    ///
    /// Cells are counted by rank: a sequence's last cell has its position as rank, the cell before it one less, and so
    /// on (without missing positions, rank and position are equal). Neither appending nor removing the oldest cells
    /// changes a rank, so the boundaries at multiples of the span do not move.
    fn push(&mut self, row: WindowRow<'_>, slot: &mut SlotRange) {
        let WindowRow { ranges, listed, position, is_first } = row;
        let before_window = i64::from(position) - self.window as i64 + 1;
        let n_outside: i64 = ranges
            .iter()
            .map(|range| (before_window - i64::from(range.position)).clamp(0, i64::from(range.len)))
            .sum();
        let first_seen = n_outside as usize;
        let rank = |index: usize| slot.last_position as usize + 1 + index - listed.len();
        let first_rank = rank(first_seen);
        if is_first {
            let span = window_span(self.window);
            let base = first_rank / span * span;
            slot.windowed = (self.cells.len(), base);
            let seen = &listed[first_seen..];
            self.cells.extend(std::iter::repeat_n(seen[0], first_rank - base));
            self.cells.extend_from_slice(seen);
        }
        let (start, base) = slot.windowed;
        let (n_hidden, n_visible) = ((first_rank - base) as u32, (position as usize + 1 - base) as u32);
        self.rows.push(AttentionRow { start: start as u32, n_hidden, n_visible });
    }
}
