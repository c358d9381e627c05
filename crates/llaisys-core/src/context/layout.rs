//! Which cells each row of a forward pass sees, from the cell table.

use crate::batch::Batch;
use crate::kv::Run;
use crate::kv::cells::Cells;
use crate::ops::{AttentionRow, AttentionRows, window_span};
use std::ops::Range;

/// Reused from pass to pass.
#[derive(Debug)]
pub(super) struct Layout {
    /// Visible cells of each sequence in position order, one sequence after the other.
    cells: Vec<u32>,
    rows: Vec<AttentionRow>,
    by_slot: Vec<SlotRange>,
    /// What layers with a sliding window see, if the model has any.
    near: Option<Near>,
}

/// Rows that keep to a window, as [`AttentionRows`] wants them.
#[derive(Debug)]
struct Near {
    window: usize,
    cells: Vec<u32>,
    rows: Vec<AttentionRow>,
}

/// One sequence's part of a pass.
#[derive(Debug, Clone, Copy, Default)]
struct SlotRange {
    /// Its last position in the pass.
    last_position: i32,
    /// Its cells up to that position: `cells[start..end]`; empty until they are listed.
    start: usize,
    end: usize,
    /// Where its list with a window begins, and the rank of the cell there.
    near: (usize, usize),
}

impl Layout {
    /// For up to `n_seq_max` sequences, and a model some of whose layers have this window.
    pub(super) fn new(n_seq_max: usize, window: Option<usize>) -> Self {
        let near = window.map(|window| Near { window, cells: Vec::new(), rows: Vec::new() });
        let by_slot = vec![SlotRange::default(); n_seq_max];
        Self { cells: Vec::new(), rows: Vec::new(), by_slot, near }
    }

    /// Lists what `rows` of `batch` see. `placed` is the cell of each row of the batch, already linked in
    /// `cells`. A row of several sequences looks through its first: preparing the batch has checked that they
    /// all see the same.
    pub(super) fn fill(&mut self, cells: &Cells, batch: &Batch, placed: &[u32], rows: Range<usize>) {
        self.cells.clear();
        self.rows.clear();
        if let Some(near) = &mut self.near {
            near.cells.clear();
            near.rows.clear();
        }
        let slot_of = |row: usize| batch.row_seqs(row)[0].slot() as usize;
        for row in rows.clone() {
            let last_position = batch.positions[row];
            self.by_slot[slot_of(row)] = SlotRange { last_position, ..SlotRange::default() };
        }
        for row in rows {
            let (slot, position) = (slot_of(row), batch.positions[row]);
            let range = &mut self.by_slot[slot];
            let is_first = range.end == 0;
            if is_first {
                range.start = self.cells.len();
                cells.visible_cells(slot as u32, range.last_position, &mut self.cells);
                range.end = self.cells.len();
            }
            // A batch continues its sequences without gaps, so what lies behind a row is its distance to the last.
            let behind = (range.last_position - position) as usize;
            let end = range.end - behind;
            assert_eq!(self.cells[end - 1], placed[row], "the last cell that a row sees is its own");
            let n_visible = (end - range.start) as u32;
            self.rows.push(AttentionRow { start: range.start as u32, n_hidden: 0, n_visible });
            if let Some(near) = &mut self.near {
                let listed = &self.cells[range.start..range.end];
                near.push(cells.runs(slot as u32), listed, (range, position, is_first));
            }
        }
    }

    /// What [`Layout::fill`] listed.
    pub(super) fn attention(&self) -> AttentionRows<'_> {
        AttentionRows { cells: &self.cells, rows: &self.rows, window: None }
    }

    /// What it listed for layers with a sliding window.
    pub(super) fn near(&self) -> Option<AttentionRows<'_>> {
        let near = self.near.as_ref()?;
        Some(AttentionRows { cells: &near.cells, rows: &near.rows, window: Some(near.window) })
    }
}

impl Near {
    /// Adds the row at `position` of a sequence with these runs, whose cells up to its last row are `listed`.
    ///
    /// Cells are counted by their rank, which is the position where no positions are missing: a sequence's last
    /// cell has its position, the cell before it one less, and so on. Neither going on nor forgetting the
    /// oldest cells changes a rank, so the list's cuts at multiples of the span do not move.
    fn push(
        &mut self,
        runs: &[Run],
        listed: &[u32],
        (range, position, is_first): (&mut SlotRange, i32, bool),
    ) {
        let before_window = i64::from(position) - self.window as i64 + 1;
        let n_outside: i64 = runs
            .iter()
            .map(|run| (before_window - i64::from(run.position)).clamp(0, i64::from(run.len)))
            .sum();
        let first_seen = n_outside as usize;
        let rank = |index: usize| range.last_position as usize + 1 + index - listed.len();
        let first_rank = rank(first_seen);
        if is_first {
            let span = window_span(self.window);
            let base = first_rank / span * span;
            range.near = (self.cells.len(), base);
            let seen = &listed[first_seen..];
            self.cells.extend(std::iter::repeat_n(seen[0], first_rank - base));
            self.cells.extend_from_slice(seen);
        }
        let (start, base) = range.near;
        let (n_hidden, n_visible) = ((first_rank - base) as u32, (position as usize + 1 - base) as u32);
        self.rows.push(AttentionRow { start: start as u32, n_hidden, n_visible });
    }
}
