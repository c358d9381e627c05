//! The rows of each sequence of a forward pass, with its recurrent states.

use crate::batch::Batch;
use crate::kv::KvCache;
use crate::ops::{RecurrentRows, SequenceRows};
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
