//! The rows of each sequence of a forward pass, with its recurrent states.

use crate::batch::Batch;
use crate::forward::replay::Replay;
use crate::kv::KvCache;
use crate::ops::{RecurrentRows, SequenceRows};
use crate::seq::SeqId;
use std::ops::Range;

/// The sequences of a pass; the buffers are reused.
#[derive(Debug)]
pub(super) struct StateRows {
    sequences: Vec<SequenceRows>,
    order: Vec<u32>,
    /// By slot: its number in `sequences`.
    number: Vec<Option<usize>>,
}

impl StateRows {
    /// For up to `n_seq_max` sequences.
    pub(super) fn new(n_seq_max: usize) -> Self {
        Self { sequences: Vec::new(), order: Vec::new(), number: vec![None; n_seq_max] }
    }

    /// Groups `rows` of `batch`, each of one sequence, by sequence. A sequence with earlier rows in the batch continues
    /// from the state that these wrote.
    pub(super) fn fill(&mut self, kv: &KvCache, batch: &Batch, rows: Range<usize>) -> RecurrentRows<'_> {
        self.sequences.clear();
        self.number.fill(None);
        let slot_of = |row: usize| batch.row_seqs(row)[0].slot() as usize;
        for row in rows.clone() {
            let number = *self.number[slot_of(row)].get_or_insert_with(|| {
                let (before, after) = kv
                    .step_states(batch.row_seqs(row)[0])
                    .expect("the reservation has a state for each sequence");
                let is_first = (0..rows.start).all(|earlier| slot_of(earlier) != slot_of(row));
                let before = if is_first { before } else { Some(after) };
                self.sequences.push(SequenceRows { before, after, start: 0, n_rows: 0 });
                self.sequences.len() - 1
            });
            self.sequences[number].n_rows += 1;
        }
        let mut start = 0;
        for sequence in &mut self.sequences {
            sequence.start = start;
            start += std::mem::take(&mut sequence.n_rows);
        }
        self.order.resize(rows.len(), 0);
        for row in rows.clone() {
            let number = self.number[slot_of(row)].expect("numbered above");
            let sequence = &mut self.sequences[number];
            self.order[sequence.start + sequence.n_rows] = (row - rows.start) as u32;
            sequence.n_rows += 1;
        }
        RecurrentRows { sequences: &self.sequences, order: &self.order }
    }
}

/// The rows of sequences with drafts in a batch. Their inputs are recorded, because a rejected draft cuts the sequence.
#[derive(Debug)]
pub(super) struct VerifiedRows {
    /// By slot: the sequence has a draft.
    has_draft: Vec<bool>,
    /// Batch rows in the order of the journal.
    journal: Vec<usize>,
    in_pass: Vec<u32>,
}

impl VerifiedRows {
    /// For a batch, each row of one sequence.
    pub(super) fn new(batch: &Batch, n_seq_max: usize) -> Self {
        let mut has_draft = vec![false; n_seq_max];
        for row in (0..batch.n_rows()).filter(|&row| batch.is_draft(row)) {
            has_draft[batch.row_seqs(row)[0].slot() as usize] = true;
        }
        Self { has_draft, journal: Vec::new(), in_pass: Vec::new() }
    }

    /// Returns the rows of a pass to record, counted from its first one.
    pub(super) fn in_pass(&mut self, batch: &Batch, rows: Range<usize>) -> &[u32] {
        self.in_pass.clear();
        for row in rows.clone() {
            if self.has_draft[batch.row_seqs(row)[0].slot() as usize] {
                self.journal.push(row);
                self.in_pass.push((row - rows.start) as u32);
            }
        }
        &self.in_pass
    }

    /// Returns the recorded sequences of which some rows are kept and others removed, and how to compute their states
    /// after the rows that are kept: those before the first of `removed`, which is ascending.
    pub(super) fn cut(&self, batch: &Batch, kv: &KvCache, removed: &[usize]) -> (Vec<SeqId>, Vec<Replay>) {
        let mut cut: Vec<(SeqId, usize)> = Vec::new();
        for &row in removed {
            let id = batch.row_seqs(row)[0];
            if self.has_draft[id.slot() as usize] && cut.iter().all(|(other, _)| *other != id) {
                cut.push((id, row));
            }
        }
        let replay = |&(id, end): &(SeqId, usize)| {
            let is_kept = |row: usize| row < end && batch.row_seqs(row)[0] == id;
            let rows: Vec<u32> =
                (0..).zip(&self.journal).filter(|(_, row)| is_kept(**row)).map(|(n, _)| n).collect();
            let (before, after) = kv.step_states(id)?;
            (!rows.is_empty()).then_some((id, Replay { before, after, rows }))
        };
        cut.iter().filter_map(replay).unzip()
    }
}
