//! `Batch`: the rows of one decode as a structure of arrays, checked when it is built.

use crate::error::Rejected;
use crate::seq::SeqId;

pub use crate::error::BatchError;

/// The outputs of a row; flags may be combined with `|`.
pub mod output {
    /// No output: the row only fills the KV cache.
    pub const NONE: u8 = 0;
    /// Logits, and the id sampled from them.
    pub const LOGITS: u8 = 1;
    /// The final hidden state (after the last norm).
    pub const HIDDEN: u8 = 2;
    /// The row's token is a draft (speculative decoding). It is kept only if the row before it samples this token.
    /// The row before it is the previous position of the same sequence; both rows request logits and belong to no
    /// other sequence.
    pub const DRAFT: u8 = 4;
}

/// The arrays of a batch. One row is one token at one position of one or more
/// sequences.
#[derive(Debug, Clone, Copy, Default)]
pub struct BatchArrays<'a> {
    /// Token ids, `[n_rows]`.
    pub tokens: &'a [i32],
    /// Positions, `[n_rows]`, from 0.
    pub positions: &'a [i32],
    /// Number of sequences that each row belongs to, `[n_rows]`, at least 1.
    pub n_seq_id: &'a [i32],
    /// The rows' sequence ids one after the other, `[sum of n_seq_id]`, as [`SeqId::to_raw`].
    pub seq_ids: &'a [i64],
    /// KV stream of each row, `[n_rows]`, or empty. It is only compared with the stream of the row's sequences.
    pub stream: &'a [u32],
    /// Flags of [`output`], `[n_rows]`.
    pub wants_output: &'a [u8],
}

/// The limits that rows are checked against.
#[derive(Debug, Clone, Copy)]
pub struct BatchLimits {
    /// Token ids must be below this.
    pub vocab_size: usize,
    /// Positions must be below this.
    pub max_positions: usize,
    /// The most sequences at a time.
    pub n_seq_max: usize,
    /// Number of KV streams.
    pub n_streams: usize,
}

/// A checked batch. Rows keep the caller's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Token ids, each below the vocabulary size.
    pub tokens: Vec<i32>,
    /// Positions, each in `0..max_positions`.
    pub positions: Vec<i32>,
    /// Row `r` belongs to `seqs[seq_start[r]..seq_start[r + 1]]`; `[n_rows + 1]`.
    pub seq_start: Vec<u32>,
    /// Sequence ids; [`crate::kv::KvCache::prepare`] checks that they are acquired.
    pub seqs: Vec<SeqId>,
    /// KV stream of each row, `[n_rows]` or empty; [`crate::kv::KvCache::prepare`] checks it.
    pub stream: Vec<u32>,
    /// Flags of [`output`].
    pub wants_output: Vec<u8>,
}

impl Batch {
    /// Checks every row. Errors: [`Rejected::Length`] if the arrays disagree, [`BatchError`] for a wrong row.
    pub fn new(arrays: BatchArrays<'_>, limits: BatchLimits) -> Result<Self, Rejected> {
        let n_rows = arrays.tokens.len();
        if n_rows == 0 {
            return Err(BatchError::Empty.into());
        }
        check_len("positions", arrays.positions.len(), n_rows)?;
        check_len("n_seq_id", arrays.n_seq_id.len(), n_rows)?;
        check_len("wants_output", arrays.wants_output.len(), n_rows)?;
        if !arrays.stream.is_empty() {
            check_len("stream", arrays.stream.len(), n_rows)?;
        }
        let mut batch = Batch {
            tokens: arrays.tokens.to_vec(),
            positions: arrays.positions.to_vec(),
            seq_start: Vec::with_capacity(n_rows + 1),
            seqs: arrays.seq_ids.iter().map(|&raw| SeqId::from_raw(raw)).collect(),
            stream: arrays.stream.to_vec(),
            wants_output: arrays.wants_output.to_vec(),
        };
        batch.seq_start.push(0);
        let mut end = 0_usize;
        for row in 0..n_rows {
            check_row(&arrays, limits, row)?;
            end += usize::try_from(arrays.n_seq_id[row]).expect("check_row saw a positive count");
            if end > batch.seqs.len() {
                break;
            }
            batch.seq_start.push(u32::try_from(end).expect("fewer than 2^32 sequence ids"));
            check_distinct(row, batch.row_seqs(row))?;
            batch.check_draft(row)?;
        }
        check_len("seq_ids", batch.seqs.len(), end)?;
        Ok(batch)
    }

    /// Rows in the batch, at least 1.
    pub fn n_rows(&self) -> usize {
        self.tokens.len()
    }

    /// The sequences of row `row`, at least one, all distinct.
    pub fn row_seqs(&self, row: usize) -> &[SeqId] {
        &self.seqs[self.seq_start[row] as usize..self.seq_start[row + 1] as usize]
    }

    /// True if the token of `row` is a draft.
    pub(crate) fn is_draft(&self, row: usize) -> bool {
        self.wants_output[row] & output::DRAFT != 0
    }

    /// Returns the drafts that `row` follows and its own token if that is one, `[0..]`: the tokens that count as output
    /// when the row is sampled and that its sequence does not have yet.
    pub(crate) fn drafts_up_to(&self, row: usize) -> &[i32] {
        let n_drafts = (0..=row).rev().take_while(|&row| self.is_draft(row)).count();
        &self.tokens[row + 1 - n_drafts..=row]
    }

    /// Checks a draft against the row before it. Errors: [`BatchError::Draft`].
    fn check_draft(&self, row: usize) -> Result<(), BatchError> {
        let follows = |before: usize| {
            let have_logits = self.wants_output[before] & self.wants_output[row] & output::LOGITS != 0;
            let is_alone = self.row_seqs(row).len() == 1 && self.row_seqs(before) == self.row_seqs(row);
            have_logits && is_alone && self.positions[before] + 1 == self.positions[row]
        };
        if self.is_draft(row) && !row.checked_sub(1).is_some_and(follows) {
            return Err(BatchError::Draft { row });
        }
        Ok(())
    }
}

fn check_len(what: &'static str, got: usize, want: usize) -> Result<(), Rejected> {
    if got == want { Ok(()) } else { Err(Rejected::Length { what, got, want }) }
}

fn check_row(arrays: &BatchArrays<'_>, limits: BatchLimits, row: usize) -> Result<(), BatchError> {
    let token = arrays.tokens[row];
    if usize::try_from(token).map_or(true, |id| id >= limits.vocab_size) {
        return Err(BatchError::Token { row, token, vocab_size: limits.vocab_size });
    }
    let position = arrays.positions[row];
    if usize::try_from(position).map_or(true, |p| p >= limits.max_positions) {
        let max = i32::try_from(limits.max_positions).unwrap_or(i32::MAX) - 1;
        return Err(BatchError::Position { row, position, max });
    }
    let n_seq_id = arrays.n_seq_id[row];
    if usize::try_from(n_seq_id).map_or(true, |n| n == 0 || n > limits.n_seq_max) {
        return Err(BatchError::SequenceCount { row, n_seq_id, max: limits.n_seq_max });
    }
    if let Some(&stream) = arrays.stream.get(row)
        && stream as usize >= limits.n_streams
    {
        return Err(BatchError::Stream { row, stream, n_streams: limits.n_streams });
    }
    let flags = arrays.wants_output[row];
    if flags & !(output::LOGITS | output::HIDDEN | output::DRAFT) != 0 {
        return Err(BatchError::OutputFlags { row, flags });
    }
    Ok(())
}

fn check_distinct(row: usize, seqs: &[SeqId]) -> Result<(), BatchError> {
    for (i, seq) in seqs.iter().enumerate() {
        if seqs[..i].contains(seq) {
            return Err(BatchError::RepeatedSequence { row, slot: seq.slot() });
        }
    }
    Ok(())
}
