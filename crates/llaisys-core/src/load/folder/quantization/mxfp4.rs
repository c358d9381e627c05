//! MXFP4 checkpoints: `quant_method` "mxfp4", as gpt-oss is published. Only the experts are quantized.
//!
//! A stack of matrices `NAME` of `[n, N outputs, K inputs]` is stored as these tensors.
//!
//! ```text
//! NAME_blocks   [n, N, K/32, 16] U8: two inputs a byte, the first in the low nibble
//! NAME_scales   [n, N, K/32] U8: exponents
//! ```
//! Rows are read as blocks of GGUF's layout ([`mxfp4`](crate::quant::mxfp4)), which has the same numbers.
//!
//! Source: transformers (`quantizers/quantizer_mxfp4`, `integrations/mxfp4`).

use super::check_tensor;
use crate::dtype::DType;
use crate::error::{FormatError, Result, Unsupported};
use crate::load::tensor_files::{TensorFiles, buffer_of};
use crate::quant::mxfp4::{BYTES, NAN};
use crate::quant::{BLOCK_LEN, HALF_LEN};
use crate::threads::Pool;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows that a thread converts at a time.
const ROWS_AT_ONCE: usize = 16;

/// A stack of matrices, by the indices of its tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mxfp4Matrix {
    blocks: usize,
    scales: usize,
    n_columns: usize,
}

impl Mxfp4Matrix {
    /// As [`Quantization::find`](super::Quantization::find).
    pub(super) fn find(files: &TensorFiles, name: &str, shape: &[usize]) -> Result<Option<Self>> {
        let Some(blocks) = files.find(&format!("{name}_blocks")) else { return Ok(None) };
        let Some((&n_columns, above)) = shape.split_last() else { return Ok(None) };
        if !n_columns.is_multiple_of(BLOCK_LEN) {
            let what = format!("{name} of {shape:?}");
            return Err(Unsupported::feature("a quantized matrix", what, "multiples of 32 columns").into());
        }
        let first = format!("{name}_scales");
        let scales = files.find(&first).ok_or(FormatError::MissingTensors { n_missing: 1, first })?;
        let of_scales = [above, &[n_columns / BLOCK_LEN]].concat();
        check_tensor(files, blocks, &[&of_scales[..], &[HALF_LEN]].concat(), &[DType::U8])?;
        check_tensor(files, scales, &of_scales, &[DType::U8])?;
        Ok(Some(Self { blocks, scales, n_columns }))
    }

    /// The indices of its tensors.
    pub(super) fn indices(&self) -> [usize; 2] {
        [self.blocks, self.scales]
    }

    /// As [`QuantizedMatrix::read`](super::QuantizedMatrix::read).
    pub(super) fn read<'b>(
        &self,
        files: &TensorFiles,
        rows: Range<usize>,
        buffer: &'b mut Vec<u8>,
        pool: &Pool,
    ) -> Result<&'b [u8]> {
        let (mut numbers, mut exponents) = (Vec::new(), Vec::new());
        let n_blocks = self.n_columns / BLOCK_LEN;
        let row_bytes = n_blocks * BYTES;
        let bytes = buffer_of(&mut numbers, rows.len() * n_blocks * HALF_LEN)?;
        files.read(self.blocks, rows.start * n_blocks * HALF_LEN, bytes, pool)?;
        let numbers = &*bytes;
        let bytes = buffer_of(&mut exponents, rows.len() * n_blocks)?;
        files.read(self.scales, rows.start * n_blocks, bytes, pool)?;
        let exponents = &*bytes;
        let out = buffer_of(buffer, rows.len() * row_bytes)?;
        let first_nan = AtomicUsize::new(rows.end);
        pool.run_chunks(out, ROWS_AT_ONCE * row_bytes, &|chunk, out| {
            for (i, block) in out.chunks_exact_mut(BYTES).enumerate() {
                let at = chunk * ROWS_AT_ONCE * n_blocks + i;
                if exponents[at] == NAN {
                    first_nan.fetch_min(rows.start + at / n_blocks, Ordering::Relaxed);
                }
                write_block(block, exponents[at], &numbers[at * HALF_LEN..][..HALF_LEN]);
            }
        });
        match first_nan.into_inner() {
            row if row == rows.end => Ok(out),
            row => Err(FormatError::NanScale { name: files.tensors()[self.scales].name.clone(), row }.into()),
        }
    }
}

/// Writes a block of GGUF's layout. Neighbors share a stored byte; in a block, elements j and j + 16 do.
fn write_block(block: &mut [u8], exponent: u8, numbers: &[u8]) {
    let at = |i: usize| numbers[i / 2] >> (4 * (i % 2)) & 15;
    block[0] = exponent;
    for (j, byte) in block[1..].iter_mut().enumerate() {
        *byte = at(j) | at(j + HALF_LEN) << 4;
    }
}
