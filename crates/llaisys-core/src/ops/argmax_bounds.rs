//! The bounds of pruned argmax, which finds the largest output of a matrix and reads only a small part of the matrix:
//! a copy in 8 bits, and for each output a bound on the error of the copy.
//!
//! `ops/cpu/linear/pruned_argmax.rs` uses them and derives the formula.

use super::packed::{PANEL, PackedFormat, PackedMatrix};
use crate::error::DeviceError;
use crate::threads::Pool;

/// The format of the copy.
const FORMAT: PackedFormat = PackedFormat::Q8_0;
/// The largest number of inputs at which the rounding of a sum stays a small part of it: 2^18 roundings of 2^-24.
const MAX_COLUMNS: usize = 1 << 18;
/// Rows and inputs whose Euclidean norm is this large are not pruned. Below it no sum overflows.
pub(crate) const MAX_NORM: f64 = (1_u64 << 60) as f64;

/// A copy of a matrix `[n, k]` in 8 bits, with the Euclidean norms that bound its error.
#[derive(Debug)]
pub struct ArgmaxBounds {
    copy: PackedMatrix,
    lengths: Vec<Lengths>,
    longest: f64,
}

/// The norms of the 32 outputs of a panel, each rounded up; zeros after the last output.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lengths {
    /// Norms of `row - copied row`.
    pub(crate) errors: [f32; PANEL],
    /// Norms of the copied rows.
    pub(crate) copies: [f32; PANEL],
}

impl ArgmaxBounds {
    /// Whether a matrix in `format` with `n_columns` inputs can have bounds: only 16-bit and 32-bit formats can.
    pub const fn can_have(format: PackedFormat, n_columns: usize) -> bool {
        !format.is_grouped() && PackedMatrix::can_pack(FORMAT, n_columns) && n_columns <= MAX_COLUMNS
    }

    /// Bytes of the bounds of a matrix `[n_rows, n_columns]`.
    pub const fn bytes_for(n_rows: usize, n_columns: usize) -> usize {
        let lengths = n_rows.div_ceil(PANEL) * size_of::<Lengths>();
        FORMAT.matrix_bytes(n_rows, n_columns).saturating_add(lengths)
    }

    /// The bounds of `matrix`. `None` if an element is huge or not finite, or if [`Self::can_have`] is false.
    ///
    /// Errors: [`DeviceError::Allocation`].
    pub fn new(pool: &Pool, matrix: &PackedMatrix) -> Result<Option<Self>, DeviceError> {
        if !Self::can_have(matrix.format(), matrix.n_columns()) {
            return Ok(None);
        }
        let mut squares = vec![Squares::default(); matrix.n_panels()];
        let copy = matrix.to_q8_0(pool, &mut squares, &|of_panel, group, copied| {
            group.iter().zip(copied).for_each(|(values, copied)| of_panel.add(values, copied));
        })?;
        let lengths: Vec<_> = squares.iter().map(Squares::lengths).collect();
        let pairs = lengths.iter().flat_map(|of| of.errors.iter().zip(&of.copies));
        let sums = pairs.map(|(error, copy)| f64::from(*error) + f64::from(*copy));
        // NaN fails the comparison too and becomes infinity.
        let longest =
            sums.fold(0.0, |longest, sum| if sum < MAX_NORM { sum.max(longest) } else { f64::INFINITY });
        Ok((longest < MAX_NORM).then_some(Self { copy, lengths, longest }))
    }

    /// Bytes of memory that the bounds take.
    pub fn n_bytes(&self) -> usize {
        self.copy.n_bytes() + size_of_val(&self.lengths[..])
    }

    /// The matrix in 8 bits.
    pub(crate) fn copy(&self) -> &PackedMatrix {
        &self.copy
    }

    /// The norms of panel `p`.
    pub(crate) fn lengths(&self, p: usize) -> &Lengths {
        &self.lengths[p]
    }

    /// An upper bound for the norm of every row and of every copied row.
    pub(crate) fn longest(&self) -> f64 {
        self.longest
    }
}

/// The squares of the norms of a panel; NaN where an element is NaN.
#[derive(Clone, Default)]
struct Squares {
    errors: [f64; PANEL],
    copies: [f64; PANEL],
}

impl Squares {
    /// Adds an input of each column.
    fn add(&mut self, values: &[f32; PANEL], copied: &[f32; PANEL]) {
        for c in 0..PANEL {
            let (value, copied) = (f64::from(values[c]), f64::from(copied[c]));
            self.errors[c] += (value - copied) * (value - copied);
            self.copies[c] += copied * copied;
        }
    }

    fn lengths(&self) -> Lengths {
        let roots = |squares: [f64; PANEL]| squares.map(|square| round_up(square.sqrt()));
        Lengths { errors: roots(self.errors), copies: roots(self.copies) }
    }
}

/// An f32 that is at least `x >= 0`, even if `x` has the rounding error of a sum of 2^18 f64 numbers.
pub(crate) fn round_up(x: f64) -> f32 {
    const SLACK: f64 = 1.0 + 1.0 / (1 << 20) as f64;
    (x * SLACK + f64::from(f32::MIN_POSITIVE)) as f32
}
