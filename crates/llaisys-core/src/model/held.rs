//! The format in which a matrix is held, and what must be true of a checkpoint that is quantised as it is loaded.

use crate::dtype::{ComputeMode, DType};
use crate::error::{Result, Unsupported};
use crate::formats::FormatError;
use crate::model::checkpoint::Checkpoint;
use crate::model::slot::Slot;
use crate::ops::packed::{PackedFormat, PackedMatrix};
use crate::quant::dequantize_row;
use crate::tensor::TensorView;
use crate::threads::{Chunks, Pool};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows that a thread looks at before it takes more.
const ROWS_AT_ONCE: usize = 64;

/// The format in which `mode` holds the matrix of `slot`, stored as `dtype` with rows of `n_columns`.
///
/// The head (and the embeddings that it is often tied to) has more: an error there goes straight into the logits.
/// In a 4-bit model it has 6 bits; in an 8-bit one finer scales, which find those of a head that was in Q8_0 before.
pub fn packed_format(mode: ComputeMode, slot: Slot, dtype: DType, n_columns: usize) -> PackedFormat {
    let own = PackedFormat::of(dtype);
    let wanted = match (mode, slot) {
        (ComputeMode::Float32, _) => PackedFormat::F32,
        (ComputeMode::Bfloat16, _) => PackedFormat::BF16,
        (ComputeMode::Int8, Slot::Embed | Slot::LmHead) => PackedFormat::Q8_0,
        (ComputeMode::Int8, _) => PackedFormat::I8,
        (ComputeMode::Int4, Slot::Embed | Slot::LmHead) => PackedFormat::I6,
        (ComputeMode::Int4, _) => PackedFormat::I4,
        (ComputeMode::Auto, _) => own,
    };
    match mode {
        _ if PackedMatrix::can_pack(wanted, n_columns) => wanted,
        // Rows of an odd length stay as they are.
        ComputeMode::Int8 | ComputeMode::Int4 => own,
        _ => PackedFormat::F32,
    }
}

/// Checks that every matrix of `checkpoint` is of a type that can be quantised, if `mode` asks for that.
///
/// Errors: a matrix is in integers already, by name.
pub fn check_source(checkpoint: &Checkpoint, mode: ComputeMode) -> Result<(), Unsupported> {
    if !quantizes(mode) {
        return Ok(());
    }
    let config = checkpoint.config();
    for slot in config.slots().filter(|&slot| config.shape(slot).len() > 1) {
        // Tensors that stand for a matrix together have another type than its rows.
        let dtype = checkpoint.tensor(slot).map_or(DType::Int4, |tensor| tensor.dtype);
        if dtype.is_quantized() {
            let name = config.names.name(slot).expect("slots are those that the table names");
            return Err(Unsupported::Quantized { tensor: name, dtype: dtype.name().to_uppercase() });
        }
    }
    Ok(())
}

/// True if matrices of numbers become integers in `mode`.
pub fn quantizes(mode: ComputeMode) -> bool {
    matches!(mode, ComputeMode::Int8 | ComputeMode::Int4)
}

/// Checks that integers can stand for `rows`, which are those of the tensor `name` from its row `first` on.
///
/// Errors: the first row with an infinity or NaN.
pub fn check_finite(
    rows: TensorView<'_>,
    first: usize,
    name: &dyn Fn() -> String,
    pool: &Pool,
) -> Result<(), FormatError> {
    let n_columns = rows.n_columns();
    let n_rows = rows.n_rows();
    let (chunks, worst) = (Chunks::new(n_rows, ROWS_AT_ONCE), AtomicUsize::new(n_rows));
    pool.run(&|_| {
        let mut values = vec![0.0; n_columns];
        while let Some(chunk) = chunks.take() {
            for n in chunk {
                dequantize_row(rows.row(n), &mut values);
                if !values.iter().all(|value| value.is_finite()) {
                    worst.fetch_min(n, Ordering::Relaxed);
                }
            }
        }
    });
    match worst.into_inner() {
        row if row == n_rows => Ok(()),
        row => Err(FormatError::NotFinite { name: name(), row: first + row }),
    }
}
