//! Converts NumPy arrays and strings to core values. Arrays are copied while the GIL is held, because another Python
//! thread may write to them once it is released.

use crate::errors::Fault;
use llaisys_core::Error;
use llaisys_core::batch::BatchArrays;
use llaisys_core::context::IsaName;
use llaisys_core::context::RowMasks;
use llaisys_core::dtype::{ComputeMode, KvDType};
use llaisys_core::error::Rejected;
use numpy::ndarray::Dimension;
use numpy::{Element, PyReadonlyArray, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};

/// Copies the elements of `values` in C order (the last index fastest). Every array argument of the bindings is copied
/// here; its type has checked dtype and number of dimensions.
///
/// Errors: [`Fault::Argument`] unless the array is in C order in memory and every element is aligned. (NumPy's
/// `is_contiguous`, and so `as_slice`, also accept Fortran order.)
pub(crate) fn owned<T: Element + Copy, D: Dimension>(
    what: &str,
    values: &PyReadonlyArray<'_, T, D>,
) -> Result<Vec<T>, Fault> {
    let aligned = values.is_aligned();
    if let (true, true, Ok(elements)) = (aligned, values.is_c_contiguous(), values.as_slice()) {
        return Ok(elements.to_vec());
    }
    let found = if aligned { "not in C order" } else { "not aligned in memory" };
    Err(Fault::Argument(format!(
        "{what} is {found} (shape {:?}, strides {:?} bytes, elements of {} bytes); pass a copy: numpy.array({what}, \
         order=\"C\")",
        values.shape(),
        values.strides(),
        size_of::<T>(),
    )))
}

/// The arrays of one decode, owned.
#[derive(Default)]
pub(crate) struct OwnedArrays {
    pub(crate) tokens: Vec<i32>,
    pub(crate) positions: Vec<i32>,
    pub(crate) n_seq_id: Vec<i32>,
    pub(crate) seq_ids: Vec<i64>,
    pub(crate) stream: Vec<u32>,
    pub(crate) wants_output: Vec<u8>,
}

impl OwnedArrays {
    /// The view that the core checks and copies once more into its `Batch`.
    pub(crate) fn view(&self) -> BatchArrays<'_> {
        BatchArrays {
            tokens: &self.tokens,
            positions: &self.positions,
            n_seq_id: &self.n_seq_id,
            seq_ids: &self.seq_ids,
            stream: &self.stream,
            wants_output: &self.wants_output,
        }
    }
}

/// Logits masks, owned.
pub(crate) struct OwnedMasks {
    rows: Vec<i32>,
    bits: Vec<u32>,
}

impl OwnedMasks {
    /// Copies rows `[n]` and bits `[n, n_words]`. Errors: as [`owned`], or a different number of rows.
    pub(crate) fn new(
        rows: &PyReadonlyArray1<'_, i32>,
        bits: &PyReadonlyArray2<'_, u32>,
    ) -> Result<Self, Fault> {
        let rows = owned("logits_mask[0]", rows)?;
        let n_bit_rows = bits.shape()[0];
        if n_bit_rows != rows.len() {
            return Err(Fault::Core(
                Rejected::Length {
                    what: "the bits of logits_mask (rows)",
                    got: n_bit_rows,
                    want: rows.len(),
                }
                .into(),
            ));
        }
        Ok(Self { rows, bits: owned("logits_mask[1]", bits)? })
    }

    /// The view that the core checks.
    pub(crate) fn view(&self) -> RowMasks<'_> {
        RowMasks { rows: &self.rows, bits: &self.bits }
    }
}

/// Converts an integer argument of Python. Errors: outside `0..=u32::MAX`.
pub(crate) fn natural(what: &'static str, value: i64) -> Result<u32, Error> {
    u32::try_from(value)
        .map_err(|_| Rejected::OutOfRange { what, got: value, min: 0, max: i64::from(u32::MAX) }.into())
}

/// Converts a count argument of Python. Errors: outside `1..=max`.
pub(crate) fn count(what: &'static str, value: i64, max: i64) -> Result<usize, Error> {
    if value < 1 || value > max {
        return Err(Rejected::OutOfRange { what, got: value, min: 1, max }.into());
    }
    usize::try_from(value).map_err(|_| Rejected::OutOfRange { what, got: value, min: 1, max }.into())
}

/// Parses `auto`, `float32`, `bfloat16`, `int8` or `int4`.
pub(crate) fn compute_mode(name: &str) -> Result<ComputeMode, Fault> {
    match name {
        "auto" => Ok(ComputeMode::Auto),
        "float32" => Ok(ComputeMode::Float32),
        "bfloat16" => Ok(ComputeMode::Bfloat16),
        "int8" => Ok(ComputeMode::Int8),
        "int4" => Ok(ComputeMode::Int4),
        _ => Err(unknown_name("dtype", name, "auto, float32, bfloat16, int8 and int4")),
    }
}

/// Parses `auto` (None), `float32`, `float16`, `bfloat16` or `int8`.
pub(crate) fn parse_kv_dtype(name: &str) -> Result<Option<KvDType>, Fault> {
    match name {
        "auto" => Ok(None),
        "float32" => Ok(Some(KvDType::Float32)),
        "float16" => Ok(Some(KvDType::Float16)),
        "bfloat16" => Ok(Some(KvDType::Bfloat16)),
        "int8" => Ok(Some(KvDType::Int8)),
        _ => Err(unknown_name("kv_dtype", name, "auto, float32, float16, bfloat16 and int8")),
    }
}

/// Parses `auto` (None) or the name of an instruction set.
pub(crate) fn parse_isa(name: &str) -> Result<Option<IsaName>, Error> {
    if name == "auto" { Ok(None) } else { Ok(Some(IsaName::parse(name)?)) }
}

fn unknown_name(what: &str, name: &str, allowed: &str) -> Fault {
    Fault::Argument(format!("{what} is {name:?}, allowed are {allowed}"))
}
