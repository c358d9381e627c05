use thiserror::Error;

/// A rejected operation of the KV cache. `row` is an index into the batch, `slot` the slot of a sequence id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the error text names each field")]
pub enum KvError {
    /// A range that ends before it starts.
    #[error("positions {p0} to {p1} are not a range")]
    Range { p0: i32, p1: i32 },
    /// A row without a sequence: nothing could see or free its cell.
    #[error("row {row} belongs to no sequence")]
    NoSequence { row: usize },
    /// A sequence that occurs twice in one row.
    #[error("row {row} names sequence slot {slot} twice")]
    RepeatedSlot { row: usize, slot: u32 },
    /// A negative position, or the largest integer, after which a range cannot end.
    #[error("row {row}: position {position} is outside 0 to {max}")]
    Position { row: usize, position: i32, max: i32 },
    /// A row that does not continue its sequence.
    #[error(
        "row {row}: position {position} does not continue sequence slot {slot}; expected position {expected}"
    )]
    NotNext { row: usize, slot: u32, position: i32, expected: i32 },
    /// A row of several sequences that do not see the same cells below it. Attention reads one list of cells per row.
    #[error("row {row}: coupled sequences differ (slots {first} and {second} do not see the same cells)")]
    CoupledDiffer { row: usize, first: u32, second: u32 },
    /// A shift of a cell that another sequence also sees or a node caches.
    #[error("position {position} of sequence slot {slot} is shared or cached and cannot be shifted")]
    SharedCells { slot: u32, position: i32 },
    /// A copy or shift onto a position that the sequence already has.
    #[error("sequence slot {slot} already has position {position}")]
    Occupied { slot: u32, position: i32 },
    /// A shift to a negative position or past the largest one.
    #[error("shifting position {position} of sequence slot {slot} by {delta} leaves the range of positions")]
    ShiftRange { slot: u32, position: i32, delta: i32 },
    /// A stream that the cache does not have.
    #[error("stream {stream} is outside 0 to {n_streams} - 1")]
    Stream { stream: u32, n_streams: usize },
    /// A row with another stream than that of its sequences.
    #[error("row {row}: stream is {stream}, but sequence slot {slot} is in stream {expected}")]
    WrongStream { row: usize, stream: u32, slot: u32, expected: u32 },
    /// An id that no node has: it was never created, or was trimmed away.
    #[error("there is no cache node {node}")]
    NoNode { node: u64 },
    /// An id for a new node that another node already has.
    #[error("cache node {node} exists already; use a new id for each node")]
    NodeExists { node: u64 },
    /// A cell that another node already caches.
    #[error("position {position} of sequence slot {slot} is already cached by a node")]
    AlreadyCached { slot: u32, position: i32 },
    /// A position to cache that the sequence does not have.
    #[error("sequence slot {slot} has no position {position}")]
    SequenceLacks { slot: u32, position: i32 },
    /// A position that the node does not have.
    #[error("cache node {node} has no position {position}")]
    NodeLacks { node: u64, position: i32 },
    /// Positions of a node that do not continue the sequence.
    #[error("position {position} does not continue sequence slot {slot}; expected position {expected}")]
    NotAtEnd { slot: u32, position: i32, expected: i32 },
    /// A call that needs the recurrent state after another position than the last one of a sequence.
    #[error(
        "the call {does} at positions where recurrent layers have no state; only whole sequences can be used"
    )]
    Recurrent { does: &'static str },
    /// A sequence without the recurrent state after its last position.
    #[error(
        "sequence slot {slot} has no recurrent state; attach a node that has one, or compute it from the start"
    )]
    NoState { slot: u32 },
    /// A node with a recurrent state where one without is expected, or the reverse.
    #[error("cache node {node}: expected one {expected} a recurrent state, in a model with recurrent layers")]
    NodeState { node: u64, expected: &'static str },
    /// A node of another stream than that of the sequence.
    #[error("cache node {node} is in stream {stream}, but sequence slot {slot} is in stream {expected}")]
    NodeStream { node: u64, stream: u32, slot: u32, expected: u32 },
    /// A row of several sequences in a model with recurrent layers.
    #[error("row {row} belongs to several sequences; with recurrent layers each row has its own sequence")]
    RecurrentCoupled { row: usize },
    /// A cut outside the node.
    #[error("cache node {node} has positions {start} to {end} - 1 and cannot be cut at {at}")]
    NodeBounds { node: u64, at: i32, start: i32, end: i32 },
}
