//! One step ahead: a decode step is launched before the tokens of the step before it are known.
//!
//! On the device tokens flow from step to step by themselves (`step_begin` takes what `sample` left), so the host needs
//! none of them to launch the next step of the same rows. The scheduler knows nothing of it. A decode of a batch is:
//!
//! 1. [`Ahead::land`]: rows of the batch that are under way already are taken as they are; those under way that the batch
//!    does not hold are lost, and their cells are free again.
//! 2. The batch's other rows are launched, each with its token, since the device may know another.
//! 3. [`Ahead::launch`]: one more step of the batch's rows, with a free cell for each. It is left out where a row's
//!    next token needs the host (a grammar's mask), where cells are short, and when the machine is off.
//! 4. Only now the batch's tokens are waited for, and [`Ahead::feed`] is told them.
//!
//! While the scheduler settles these tokens and plans, the device computes the step of 3. A sequence that ended, paused
//! or gave way in between costs the device one row. No cell is waited for: a cell that a lost row wrote is written
//! again only by work that was launched later, and the device keeps the order of launches.
//!
//! What is under way is no state of a sequence: to the books its cells are free, and [`Ahead::forget`] comes with every
//! change of a sequence but by a decode, and [`Ahead::forget_taken`] with every change of the cells, so a row under way
//! computed what its sequence still is.

use super::device::Event;

/// A decode row of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The sequence, never the same id for another one.
    pub sequence: i64,
    /// Where its token stands.
    pub position: u32,
    /// The token to compute.
    pub token: u32,
}

/// A row that was launched before its token was known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowAhead {
    /// The sequence.
    pub sequence: i64,
    /// Where its token stands.
    pub position: u32,
    /// Where its key and value go: free to everybody else.
    pub cell: u32,
}

/// What of a batch is under way.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Landing {
    /// For each row of the batch: the row of the step under way that is this one, and the cell that it has.
    pub rows: Vec<Option<(usize, u32)>>,
    /// After which the step's results are there; `None` if no row of the batch is under way.
    pub event: Option<Event>,
}

/// The step under way, if any.
#[derive(Debug)]
pub struct Ahead {
    is_on: bool,
    event: Event,
    /// In the order of the launch, with the token that each computes once it is known; `None`: forgotten.
    rows: Vec<Option<(RowAhead, Option<u32>)>>,
}

impl Ahead {
    /// Nothing is under way. With `is_on` false nothing ever is: every batch waits for the one before.
    pub fn new(is_on: bool) -> Self {
        Self { is_on, event: 0, rows: Vec::new() }
    }

    /// True if a step of `n_rows` rows may be launched ahead, should there be a free cell for each.
    pub fn may_launch(&self, n_rows: usize) -> bool {
        self.is_on && n_rows > 0
    }

    /// Ends the step under way: what of it is in `batch`, and what is lost.
    pub fn land(&mut self, batch: &[Row]) -> Landing {
        let mut under_way = std::mem::take(&mut self.rows);
        let rows: Vec<_> = batch.iter().map(|row| take(&mut under_way, row)).collect();
        let event = rows.iter().any(Option::is_some).then_some(self.event);
        Landing { rows, event }
    }

    /// A step of these rows was launched; `event` is after it.
    ///
    /// Panics if one is under way or the machine is off.
    pub fn launch(&mut self, event: Event, rows: Vec<RowAhead>) {
        assert!(self.is_on && self.rows.is_empty(), "{} rows are under way", self.rows.len());
        self.event = event;
        self.rows = rows.into_iter().map(|row| Some((row, None))).collect();
    }

    /// The token that `sequence` got from the batch: its row under way computes it.
    pub fn feed(&mut self, sequence: i64, token: u32) {
        for (row, of_row) in self.rows.iter_mut().flatten() {
            if row.sequence == sequence {
                *of_row = Some(token);
            }
        }
    }

    /// `sequence` is about to change: its row under way is lost.
    pub fn forget(&mut self, sequence: i64) {
        for row in &mut self.rows {
            row.take_if(|(row, _)| row.sequence == sequence);
        }
    }

    /// Cells are changing hands: rows under way whose own `is_taken` are lost.
    pub fn forget_taken(&mut self, is_taken: &dyn Fn(u32) -> bool) {
        for row in &mut self.rows {
            row.take_if(|(row, _)| is_taken(row.cell));
        }
    }
}

/// Takes the row under way that is `row`, with its index and cell.
fn take(under_way: &mut [Option<(RowAhead, Option<u32>)>], row: &Row) -> Option<(usize, u32)> {
    let is_it = |of: &Option<(RowAhead, Option<u32>)>| {
        of.is_some_and(|(ahead, token)| {
            (ahead.sequence, ahead.position, token) == (row.sequence, row.position, Some(row.token))
        })
    };
    let index = under_way.iter().position(is_it)?;
    under_way[index].take().map(|(ahead, _)| (index, ahead.cell))
}
