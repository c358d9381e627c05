//! The format of each matrix in memory, and the check of values before they are quantized.

use crate::arch::weight_id::WeightId;
use crate::dtype::{ComputeMode, DType};
use crate::error::FormatError;
use crate::error::Result;
use crate::ops::packed::{PackedFormat, PackedMatrix};
use crate::quant::dequantize_row;
use crate::tensor::TensorView;
use crate::threads::{Chunks, Pool};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows that a thread checks at a time.
const ROWS_AT_ONCE: usize = 64;

/// Returns the format in memory, in `mode`, of the matrix `id`, which is stored as `dtype` with rows of `n_columns`.
///
/// The head (and the embeddings, to which it is often tied) has more precision, because its errors go directly into the
/// logits: 6 bits in a 4-bit model, and finer scales in an 8-bit one. The latter reproduce a head that is stored in
/// Q8_0.
pub fn packed_format(mode: ComputeMode, id: WeightId, dtype: DType, n_columns: usize) -> PackedFormat {
    let stored = PackedFormat::of(dtype);
    let wanted = match (mode, id) {
        (ComputeMode::Float32, _) => PackedFormat::F32,
        (ComputeMode::Bfloat16, _) => PackedFormat::BF16,
        (ComputeMode::Int8, WeightId::Embed | WeightId::LmHead) => PackedFormat::Q8_0,
        (ComputeMode::Int8, _) => PackedFormat::I8,
        (ComputeMode::Int4, WeightId::Embed | WeightId::LmHead) => PackedFormat::I6,
        (ComputeMode::Int4, _) => PackedFormat::I4,
        (ComputeMode::Auto, _) => stored,
    };
    match mode {
        _ if PackedMatrix::can_pack(wanted, n_columns) => wanted,
        // Rows that are not whole blocks are not quantized.
        ComputeMode::Int8 | ComputeMode::Int4 => stored,
        _ => PackedFormat::F32,
    }
}

/// True if `mode` quantizes matrices while they are loaded.
pub fn quantizes(mode: ComputeMode) -> bool {
    matches!(mode, ComputeMode::Int8 | ComputeMode::Int4)
}

/// Checks that `rows`, which begin at row `first` of the tensor `name`, can be quantized.
///
/// Errors: [`FormatError::NotFinite`] names the first row with an infinity or NaN.
pub fn check_finite(
    rows: TensorView<'_>,
    first: usize,
    name: &dyn Fn() -> String,
    pool: &Pool,
) -> Result<(), FormatError> {
    let n_columns = rows.n_columns();
    let n_rows = rows.n_rows();
    let (chunks, first_bad) = (Chunks::new(n_rows, ROWS_AT_ONCE), AtomicUsize::new(n_rows));
    pool.run(&|_| {
        let mut values = vec![0.0; n_columns];
        while let Some(chunk) = chunks.take() {
            for n in chunk {
                dequantize_row(rows.row(n), &mut values);
                if !values.iter().all(|value| value.is_finite()) {
                    first_bad.fetch_min(n, Ordering::Relaxed);
                }
            }
        }
    });
    match first_bad.into_inner() {
        row if row == n_rows => Ok(()),
        row => Err(FormatError::NotFinite { name: name(), row: first + row }),
    }
}
