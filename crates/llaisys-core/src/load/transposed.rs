//! Reads stacked matrices that are stored transposed: `[n, n_columns, n_rows]` instead of `[n, n_rows, n_columns]`.

use crate::error::Result;
use crate::load::tensor_files::{TensorFiles, buffer_of};
use crate::threads::Pool;
use std::ops::Range;

/// Rows that a thread collects at a time: neighbors in the file, so that each line of a cache is read once.
const ROWS_AT_ONCE: usize = 32;

/// A stack of matrices of a plain type.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transposed {
    /// The index of its tensor.
    pub(super) index: usize,
    /// Rows of a matrix: the last dimension of the tensor.
    pub(super) n_rows: usize,
    /// Columns of a matrix.
    pub(super) n_columns: usize,
}

impl Transposed {
    /// Reads rows, numbered through all matrices, into `buffer`. Matrices are read whole.
    ///
    /// Errors: no memory; a file that was truncated, errors of the system. Panics if there are no such rows.
    pub(super) fn read<'b>(
        &self,
        files: &TensorFiles,
        rows: Range<usize>,
        buffer: &'b mut Vec<u8>,
        pool: &Pool,
    ) -> Result<&'b [u8]> {
        let Self { index, n_rows: n, n_columns } = *self;
        let size = files.tensors()[index].dtype.block_bytes();
        let row_bytes = n_columns * size;
        let mut stored = Vec::new();
        let out = buffer_of(buffer, rows.len() * row_bytes)?;
        for matrix in rows.start / n..rows.end.div_ceil(n) {
            let bytes = buffer_of(&mut stored, n * row_bytes)?;
            files.read(index, matrix * n * row_bytes, bytes, pool)?;
            let bytes = &*bytes;
            let own = rows.start.max(matrix * n)..rows.end.min((matrix + 1) * n);
            let out = &mut out[(own.start - rows.start) * row_bytes..][..own.len() * row_bytes];
            pool.run_chunks(out, ROWS_AT_ONCE * row_bytes, &|chunk, out| {
                let first = own.start - matrix * n + chunk * ROWS_AT_ONCE;
                for column in 0..n_columns {
                    let stored = &bytes[(column * n + first) * size..];
                    for (row, element) in out.chunks_exact_mut(row_bytes).zip(stored.chunks_exact(size)) {
                        row[column * size..][..size].copy_from_slice(element);
                    }
                }
            });
        }
        Ok(out)
    }
}
