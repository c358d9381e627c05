//! Unified KV cells: bookkeeping (`cells`, `segments`), reservations (`reserve`), tensors (`storage`).
//!
//! `cells` and `storage` are apart on purpose: a live reservation borrows the bookkeeping, not the tensors that
//! kernels write meanwhile.

mod check;
mod free;
mod runs;
mod table;

pub mod cells;
pub mod reserve;
pub mod segments;
pub mod storage;

pub use cells::{Cells, Copies, KvShape, RowPlace};
pub use check::CellsDump;
pub use free::BLOCK_CELLS;
pub use reserve::Reservation;
pub use runs::Run;
pub use storage::Storage;

use thiserror::Error;

/// A refused cache operation. `row` is an index into the batch, `slot` a sequence's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "each field is named by its variant's message")]
pub enum KvError {
    /// A sequence slot that the cells do not have.
    #[error("sequence slot {slot} is outside 0 to {n_seq_max} - 1")]
    Slot { slot: u32, n_seq_max: usize },
    /// A range that ends before it starts.
    #[error("the positions {p0} to {p1} are not a range")]
    Range { p0: i32, p1: i32 },
    /// A row of no sequence: nobody could ever see or free its cell.
    #[error("row {row} belongs to no sequence")]
    NoSequence { row: usize },
    /// The same sequence twice in one row.
    #[error("row {row} names sequence slot {slot} twice")]
    RepeatedSlot { row: usize, slot: u32 },
    /// A negative position, or the largest integer (its end could not be written).
    #[error("row {row}: position {position} is outside 0 to {max}")]
    Position { row: usize, position: i32, max: i32 },
    /// A row that does not continue its sequence.
    #[error("row {row}: position {position} of sequence slot {slot} does not follow on; expected {expected}")]
    NotNext { row: usize, slot: u32, position: i32, expected: i32 },
    /// A row of several sequences that do not see the same cells below it: attention over one list of cells
    /// could not serve all of them.
    #[error("row {row}: coupled sequences differ (slots {first} and {second} do not see the same cells)")]
    CoupledDiffer { row: usize, first: u32, second: u32 },
    /// A shift of a cell that another sequence sees too.
    #[error(
        "position {position} of sequence slot {slot} is shared with another sequence and cannot be shifted"
    )]
    SharedCells { slot: u32, position: i32 },
    /// A copy or shift onto a position that the sequence already has.
    #[error("sequence slot {slot} already has position {position}")]
    Occupied { slot: u32, position: i32 },
    /// A shift to below zero or past the largest position.
    #[error("shifting position {position} of sequence slot {slot} by {delta} leaves the range of positions")]
    ShiftRange { slot: u32, position: i32, delta: i32 },
    /// An arena that the context does not have.
    #[error("stream {stream} is outside 0 to {n_streams} - 1")]
    Stream { stream: u32, n_streams: usize },
    /// A row that names another arena than its sequence's.
    #[error("row {row}: stream {stream}, but sequence slot {slot} lives in stream {home}")]
    WrongStream { row: usize, stream: u32, slot: u32, home: u32 },
    /// An id that no segment has: never made, or trimmed away.
    #[error("there is no segment {segment}")]
    NoSegment { segment: u64 },
    /// An id for a new segment that one has already.
    #[error("segment {segment} exists already; ids are used once")]
    SegmentExists { segment: u64 },
    /// A cell can be held by one segment only.
    #[error("position {position} of sequence slot {slot} is held by a segment already")]
    Retained { slot: u32, position: i32 },
    /// A position to be held that the sequence does not have.
    #[error("sequence slot {slot} has no position {position}")]
    SequenceLacks { slot: u32, position: i32 },
    /// A position that the segment does not have.
    #[error("segment {segment} has no position {position}")]
    SegmentLacks { segment: u64, position: i32 },
    /// A segment's positions that do not follow on the sequence's.
    #[error("position {position} does not follow on sequence slot {slot}; expected {expected}")]
    NotAtEnd { slot: u32, position: i32, expected: i32 },
    /// A cut outside the segment.
    #[error("segment {segment} holds positions {start} to {end} - 1 and cannot be cut at {at}")]
    SegmentBounds { segment: u64, at: i32, start: i32, end: i32 },
}
