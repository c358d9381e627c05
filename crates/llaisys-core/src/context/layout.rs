//! Which cells each row of a forward pass sees, from the cell table.

use crate::batch::Batch;
use crate::kv::cells::Cells;
use crate::ops::{AttentionRow, AttentionRows};
use std::ops::Range;

/// Reused from pass to pass.
#[derive(Debug)]
pub(super) struct Layout {
    /// Visible cells of each sequence in position order, one sequence after the other.
    cells: Vec<u32>,
    rows: Vec<AttentionRow>,
    by_slot: Vec<SlotRange>,
}

/// One sequence's part of a pass.
#[derive(Debug, Clone, Copy, Default)]
struct SlotRange {
    /// Its last position in the pass.
    last_position: i32,
    /// Its cells up to that position: `cells[start..end]`; empty until they are listed.
    start: usize,
    end: usize,
}

impl Layout {
    pub(super) fn new(n_seq_max: usize) -> Self {
        Self { cells: Vec::new(), rows: Vec::new(), by_slot: vec![SlotRange::default(); n_seq_max] }
    }

    /// Lists what `rows` of `batch` see. `placed` is the cell of each row of the batch, already linked in
    /// `cells`. A row of several sequences looks through its first: preparing the batch has checked that they
    /// all see the same.
    pub(super) fn fill(&mut self, cells: &Cells, batch: &Batch, placed: &[u32], rows: Range<usize>) {
        self.cells.clear();
        self.rows.clear();
        let slot_of = |row: usize| batch.row_seqs(row)[0].slot() as usize;
        for row in rows.clone() {
            let last_position = batch.positions[row];
            self.by_slot[slot_of(row)] = SlotRange { last_position, start: 0, end: 0 };
        }
        for row in rows {
            let slot = slot_of(row);
            if self.by_slot[slot].end == 0 {
                let range = &mut self.by_slot[slot];
                range.start = self.cells.len();
                cells.visible_cells(slot as u32, range.last_position, &mut self.cells);
                range.end = self.cells.len();
            }
            let range = self.by_slot[slot];
            // A batch continues its sequences without gaps, so what lies behind a row is its distance to the last.
            let behind = (range.last_position - batch.positions[row]) as usize;
            let end = range.end - behind;
            assert_eq!(self.cells[end - 1], placed[row], "the last cell that a row sees is its own");
            self.rows.push(AttentionRow { start: range.start as u32, n_visible: (end - range.start) as u32 });
        }
    }

    /// What [`Layout::fill`] listed.
    pub(super) fn attention(&self) -> AttentionRows<'_> {
        AttentionRows { cells: &self.cells, rows: &self.rows }
    }
}
