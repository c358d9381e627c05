//! Async scheduling: a decode step is launched before the tokens of the step before it are known.
//!
//! On the device tokens flow from step to step (`step_begin` reads the ids that `sample` wrote), so the host can launch
//! the next step of the same rows without them. The scheduler is not involved. A decode of a batch is:
//!
//! 1. [`OverlapState::match_batch`]: rows of the batch that are in flight already need no launch. Rows in flight that the
//!    batch does not hold are dropped, and their cells are free again.
//! 2. The other rows of the batch are launched, each with its token, because the device may have another one.
//! 3. [`OverlapState::launched`]: one more step of the batch's rows is launched, with a free cell for each. This is left
//!    out where a row's next token needs the host (a grammar's mask), where cells are short, and when overlap is off.
//! 4. Only now the host waits for the batch's tokens, and passes them to [`OverlapState::set_token`].
//!
//! While the scheduler processes these tokens, the device computes the step of 3. A sequence that ended, paused or was
//! preempted in between costs the device one row. Nothing waits for a cell: the cell that a dropped row wrote is written
//! again only by work that is launched later, and the device keeps the order of launches.
//!
//! A row in flight is not part of a sequence's state: its cell is free in the KV cache. Every change of a sequence other
//! than a decode calls [`OverlapState::invalidate_sequence`], and every change of the cells calls
//! [`OverlapState::invalidate_cells`], so a row in flight always belongs to the sequence as it is.

use crate::cuda::device::Event;

/// A decode row of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The sequence; ids are never reused.
    pub sequence: i64,
    /// The token's position.
    pub position: u32,
    /// The token to compute.
    pub token: u32,
}

/// A row that was launched before its token was known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextRow {
    /// The sequence.
    pub sequence: i64,
    /// The position of its token.
    pub position: u32,
    /// The cell of its key and value, which is free in the KV cache.
    pub cell: u32,
}

/// Where a row of a batch is in the step in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InFlightRow {
    /// The row of the step.
    pub index: usize,
    /// The cell that it writes.
    pub cell: u32,
}

/// The part of a batch that is in flight.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct InFlight {
    /// By row of the batch; `None`: the row must be launched.
    pub rows: Vec<Option<InFlightRow>>,
    /// The event after the step's results; `None` if no row of the batch is in flight.
    pub event: Option<Event>,
}

/// A launched row, and the token that it computes once that is known.
#[derive(Debug, Clone, Copy)]
struct Launched {
    row: NextRow,
    token: Option<u32>,
}

/// The step in flight, if there is one.
#[derive(Debug)]
pub struct OverlapState {
    is_on: bool,
    event: Event,
    /// In the order of the launch; `None`: dropped.
    rows: Vec<Option<Launched>>,
}

impl OverlapState {
    /// Nothing is in flight. With `is_on` false nothing ever is: every batch waits for the one before.
    pub fn new(is_on: bool) -> Self {
        Self { is_on, event: 0, rows: Vec::new() }
    }

    /// Returns whether a step of `n_rows` rows may be launched early, if there is a free cell for each.
    pub fn may_launch(&self, n_rows: usize) -> bool {
        self.is_on && n_rows > 0
    }

    /// Ends the step in flight: returns the rows of `batch` that it has, and drops the others.
    pub fn match_batch(&mut self, batch: &[Row]) -> InFlight {
        let mut in_flight = std::mem::take(&mut self.rows);
        let rows: Vec<_> = batch.iter().map(|row| take_row(&mut in_flight, row)).collect();
        let event = rows.iter().any(Option::is_some).then_some(self.event);
        InFlight { rows, event }
    }

    /// Records that a step of these rows was launched; `event` is after it.
    ///
    /// Panics if a step is in flight or overlap is off.
    pub fn launched(&mut self, event: Event, rows: Vec<NextRow>) {
        assert!(self.is_on && self.rows.is_empty(), "{} rows are in flight", self.rows.len());
        self.event = event;
        self.rows = rows.into_iter().map(|row| Some(Launched { row, token: None })).collect();
    }

    /// Sets the token that `sequence` got from the batch, which its row in flight computes.
    pub fn set_token(&mut self, sequence: i64, token: u32) {
        for launched in self.rows.iter_mut().flatten() {
            if launched.row.sequence == sequence {
                launched.token = Some(token);
            }
        }
    }

    /// Drops the row in flight of `sequence`, which is about to change.
    pub fn invalidate_sequence(&mut self, sequence: i64) {
        for row in &mut self.rows {
            row.take_if(|launched| launched.row.sequence == sequence);
        }
    }

    /// Drops the rows in flight whose cell `is_taken`.
    pub fn invalidate_cells(&mut self, is_taken: &dyn Fn(u32) -> bool) {
        for row in &mut self.rows {
            row.take_if(|launched| is_taken(launched.row.cell));
        }
    }
}

/// Removes the row in flight that is `row`.
fn take_row(in_flight: &mut [Option<Launched>], row: &Row) -> Option<InFlightRow> {
    let is_row = |launched: &Launched| {
        let NextRow { sequence, position, .. } = launched.row;
        (sequence, position, launched.token) == (row.sequence, row.position, Some(row.token))
    };
    let index = in_flight.iter().position(|launched| launched.as_ref().is_some_and(is_row))?;
    in_flight[index].take().map(|launched| InFlightRow { index, cell: launched.row.cell })
}
