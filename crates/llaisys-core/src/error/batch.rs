use thiserror::Error;

/// A wrong row. `row` is its index in the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the error text names each field")]
pub enum BatchError {
    /// No rows at all.
    #[error("the batch is empty")]
    Empty,
    /// A token id outside the vocabulary.
    #[error("row {row}: token id {token} is outside the vocabulary of {vocab_size}")]
    Token { row: usize, token: i32, vocab_size: usize },
    /// A negative position, or one past the model's context.
    #[error("row {row}: position {position} is outside 0 to {max}")]
    Position { row: usize, position: i32, max: i32 },
    /// A row without a sequence, or with more sequences than may exist.
    #[error("row {row}: n_seq_id is {n_seq_id}, allowed are 1 to {max}")]
    SequenceCount { row: usize, n_seq_id: i32, max: usize },
    /// A sequence that occurs twice in one row.
    #[error("row {row}: sequence slot {slot} is named twice")]
    RepeatedSequence { row: usize, slot: u32 },
    /// A stream that the context does not have.
    #[error("row {row}: stream {stream} is outside 0 to {n_streams} - 1")]
    Stream { row: usize, stream: u32, n_streams: usize },
    /// Unknown output flags.
    #[error("row {row}: output flags {flags:#x} are not known")]
    OutputFlags { row: usize, flags: u8 },
    /// A draft that cannot be verified.
    #[error(
        "row {row} is a draft, but not the next position of the row before it, with logits and the same one sequence"
    )]
    Draft { row: usize },
    /// A logits mask for a row without logits, or a second one for a row.
    #[error("logits_mask names row {row}, which requests no logits or is named twice")]
    Mask { row: i32 },
}
