//! Where the rows of a matrix are in the tensor that contains them.

use std::ops::Range;

/// The stored row of each row of a matrix: groups of consecutive rows, at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowMap {
    /// The stored row of row 0.
    first: usize,
    /// Rows of a group.
    group: usize,
    /// Stored rows from the start of a group to the start of the next one.
    stride: usize,
}

impl RowMap {
    /// Consecutive rows from `first` on.
    pub fn from_row(first: usize) -> Self {
        Self { first, group: 1, stride: 1 }
    }

    /// Groups of `group` rows, which follow `first` others in every `stride` rows.
    pub fn groups(first: usize, group: usize, stride: usize) -> Self {
        Self { first, group, stride }
    }

    /// The same rows, after `n_rows` others.
    pub fn after(self, n_rows: usize) -> Self {
        Self { first: self.first + n_rows, ..self }
    }

    /// The stored row of row `n`.
    pub fn row(self, n: usize) -> usize {
        self.first + n / self.group * self.stride + n % self.group
    }

    /// A range of stored rows that contains those of `rows`, which is not empty.
    pub fn span(self, rows: &Range<usize>) -> Range<usize> {
        self.row(rows.start)..self.row(rows.end - 1) + 1
    }

    /// The first stored row.
    pub fn first(self) -> usize {
        self.first
    }

    /// True if consecutive rows are stored one after the other.
    pub fn is_contiguous(self) -> bool {
        self.group == self.stride
    }
}
