//! Matrices are packed in pieces. Each thread reads a piece, hashes it after the pieces before it, and packs it.
//!
//! What one thread cannot read alone (tensors that are converted, or whose rows are not in order) is read and packed by
//! all threads, piece by piece.

use super::{Packer, Source};
use crate::arch::spec::WeightId;
use crate::error::Result;
use crate::load::weight_format::{check_finite, quantizes};
use crate::ops::packed::{PANEL, PackedMatrix, Panels};
use crate::tensor::TensorRows;
use crate::threads::{Pool, Turn, Turns};
use std::ops::Range;
use std::sync::PoisonError;

/// Bytes that a thread reads at a time: they are still in its second-level cache when they are packed.
pub(crate) const PIECE_BYTES: usize = 512 << 10;

/// For the rows of a piece. Gate and up need one each.
type Buffers = [Vec<u8>; 2];

/// How a matrix is divided.
#[derive(Clone, Copy)]
pub(super) struct Pieces {
    /// Rows of each; the last may have fewer.
    pub(super) n_rows: usize,
    /// All threads share each piece. Otherwise each has its own.
    pub(super) are_shared: bool,
}

/// Reads the rows of a piece.
pub(super) struct Reader<'a> {
    /// The threads that read and pack it.
    pool: &'a Pool,
    /// The turn in which its rows are hashed; None if all threads share the piece.
    turn: Option<Turn<'a>>,
}

impl<'a> Reader<'a> {
    /// Ends the turn: every row of the piece was read.
    pub(super) fn into_pool(self) -> &'a Pool {
        self.pool
    }
}

/// What a thread needs to pack a piece by itself.
pub(super) struct Worker {
    /// With this thread only.
    pool: Pool,
    buffers: Buffers,
}

impl Packer<'_> {
    /// Divides `n_rows` rows of `source`: into whole panels and whole heads, because rows are reordered only within a
    /// head. Rows in groups between others are in one piece, so that the tensor is read in order.
    pub(super) fn pieces(&self, source: &Source, n_rows: usize) -> Pieces {
        if self.checkpoint.is_read_whole(source.stored) || !source.map.is_contiguous() {
            return Pieces { n_rows: n_rows.next_multiple_of(PANEL), are_shared: true };
        }
        let d_head = match source.stored {
            WeightId::Layer(index, _) => self.checkpoint.config().kv_heads(index).d_head,
            _ => PANEL,
        };
        let group = if d_head.is_multiple_of(PANEL) { d_head } else { d_head * PANEL };
        let row_bytes = source.dtype.bytes_of(source.n_columns).unwrap_or(1);
        if self.checkpoint.tensor(source.stored).is_none() {
            let n_rows = rows_at_once(self.pool, self.piece_bytes, row_bytes, group);
            return Pieces { n_rows, are_shared: true };
        }
        // As many for each thread, and of equal sizes.
        let n_pieces =
            (n_rows * row_bytes).div_ceil(self.piece_bytes).next_multiple_of(self.pool.n_threads());
        let n_rows = n_rows.div_ceil(n_pieces.max(1)).next_multiple_of(group).max(group);
        Pieces { n_rows, are_shared: false }
    }

    /// Reads stored rows of `source`. Errors: as [`Checkpoint::read`](crate::load::checkpoint::Checkpoint::read).
    pub(super) fn read<'b>(
        &self,
        source: &Source,
        stored: Range<usize>,
        buffer: &'b mut Vec<u8>,
        reader: &Reader<'_>,
    ) -> Result<TensorRows<'b>> {
        match &reader.turn {
            Some(turn) => self.checkpoint.read_in_turn(source.stored, stored, buffer, turn),
            None => self.checkpoint.read(source.stored, stored, buffer, reader.pool),
        }
    }

    /// Checks stored rows, which begin at row `first`, if the mode quantizes. Errors: as [`check_finite`].
    pub(super) fn check(
        &self,
        source: &Source,
        rows: &TensorRows<'_>,
        first: usize,
        pool: &Pool,
    ) -> Result<()> {
        if quantizes(self.mode) {
            check_finite(rows.view(), first, &|| self.name(source.stored), pool)?;
        }
        Ok(())
    }

    /// Packs `matrix` in pieces. `pack` reads and packs one; the buffers are its own.
    pub(super) fn fill_pieces(
        &self,
        matrix: &mut PackedMatrix,
        pieces: Pieces,
        pack: &(dyn Fn(Panels<'_>, Reader<'_>, &mut Buffers) -> Result<()> + Sync),
    ) -> Result<()> {
        let turns = Turns::default();
        let one = pieces.are_shared.then(|| Pool::new(1)).transpose()?;
        matrix.fill_in_pieces(one.as_ref().unwrap_or(self.pool), pieces.n_rows, &|i, panels| {
            // Before anything that can fail: the pieces after this one wait for the end of its turn.
            let turn = turns.of(i);
            let known = self.workers.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut worker = match known {
                Some(worker) => worker,
                None => Worker { pool: Pool::new(1)?, buffers: Default::default() },
            };
            let reader = if pieces.are_shared {
                Reader { pool: self.pool, turn: None }
            } else {
                Reader { pool: &worker.pool, turn: Some(turn) }
            };
            let packed = pack(panels, reader, &mut worker.buffers);
            self.workers.lock().unwrap_or_else(PoisonError::into_inner).push(worker);
            packed
        })?;
        self.progress.bytes_packed(matrix.n_bytes());
        Ok(())
    }
}

/// Returns the number of rows in a piece of `piece_bytes` for each thread: whole groups of `group` rows, at least one.
pub(crate) fn rows_at_once(pool: &Pool, piece_bytes: usize, row_bytes: usize, group: usize) -> usize {
    let n_bytes = piece_bytes.saturating_mul(pool.n_threads());
    (n_bytes / (row_bytes * group)).max(1) * group
}
