//! The tensor table of a GGUF file: the entries of the file, then checked tensors.

use super::cursor::Cursor;
use crate::dtype::DType;
use crate::error::GgufError;
use crate::error::{Result, Unsupported};
use crate::load::tensor_files::StoredTensor;
use std::collections::BTreeSet;
use std::ops::Range;

/// The shortest entry: a name of one byte, one size.
pub(super) const ENTRY_BYTES_MIN: u64 = 33;
const DIMENSIONS_MAX: u32 = 4;
/// The supported types, for the error message.
const SUPPORTED: &str =
    "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, MXFP4";

/// An entry of the table, unchecked.
#[derive(Debug)]
pub(super) struct TensorEntry<'a> {
    pub(super) name: &'a str,
    /// Fastest first, as in the file.
    sizes: Vec<u64>,
    type_id: u32,
    /// From the start of the data part.
    offset: u64,
}

/// Reads `n_tensors` entries. Errors: the file is too short, a repeated name, not 1 to 4 dimensions.
pub(super) fn read<'a>(cursor: &mut Cursor<'a>, n_tensors: u64) -> Result<Vec<TensorEntry<'a>>, GgufError> {
    let mut entries = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..n_tensors {
        let name = cursor.name("a tensor's name")?;
        if !names.insert(name) {
            return Err(GgufError::DuplicateTensor { name: name.to_owned() });
        }
        let n_dims = cursor.u32("a tensor's number of dimensions")?;
        if n_dims == 0 || n_dims > DIMENSIONS_MAX {
            return Err(GgufError::Dimensions { name: name.to_owned(), n_dims });
        }
        let sizes: Result<Vec<u64>, GgufError> =
            (0..n_dims).map(|_| cursor.u64("a tensor's sizes")).collect();
        let type_id = cursor.u32("a tensor's type")?;
        let offset = cursor.u64("a tensor's offset")?;
        entries.push(TensorEntry { name, sizes: sizes?, type_id, offset });
    }
    Ok(entries)
}

/// Checks the entries and returns their types, shapes and ranges. `data` is the data part of the file.
///
/// Errors: [`Unsupported::TensorType`]; sizes that are zero or overflow, rows that are not whole blocks,
/// offsets that are not aligned or outside the file, overlaps.
pub(super) fn check(
    entries: &[TensorEntry<'_>],
    alignment: usize,
    data: &Range<usize>,
) -> Result<Vec<StoredTensor>> {
    let mut tensors = Vec::new();
    for entry in entries {
        let dtype = dtype_of(entry)?;
        let (shape, n_bytes) = sizes_of(entry, dtype)?;
        let range = range_of(entry, n_bytes, alignment, data)?;
        tensors.push(StoredTensor { name: entry.name.to_owned(), dtype, shape, file: 0, range });
    }
    reject_overlap(&tensors)?;
    Ok(tensors)
}

fn dtype_of(entry: &TensorEntry<'_>) -> Result<DType, Unsupported> {
    Ok(match entry.type_id {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::Q4_0,
        3 => DType::Q4_1,
        6 => DType::Q5_0,
        7 => DType::Q5_1,
        8 => DType::Q8_0,
        10 => DType::Q2_K,
        11 => DType::Q3_K,
        12 => DType::Q4_K,
        13 => DType::Q5_K,
        14 => DType::Q6_K,
        20 => DType::IQ4_NL,
        30 => DType::BF16,
        39 => DType::MXFP4,
        other => {
            return Err(Unsupported::TensorType {
                tensor: entry.name.to_owned(),
                dtype: ggml_type_name(other),
                supported: SUPPORTED,
            });
        }
    })
}

/// Returns the name of an unsupported `ggml_type` (ggml.h) for the error message.
fn ggml_type_name(type_id: u32) -> String {
    let name = match type_id {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => return format!("number {type_id}"),
    };
    name.to_owned()
}

/// Returns the shape (slowest first) and the number of bytes.
fn sizes_of(entry: &TensorEntry<'_>, dtype: DType) -> Result<(Vec<usize>, usize), GgufError> {
    let impossible = || GgufError::Sizes { name: entry.name.to_owned(), sizes: entry.sizes.clone() };
    let columns = entry.sizes.first().copied().unwrap_or(0);
    if !columns.is_multiple_of(dtype.block_len() as u64) {
        return Err(GgufError::PartialBlock {
            name: entry.name.to_owned(),
            columns,
            block: dtype.block_len(),
        });
    }
    let mut shape = Vec::new();
    for &size in entry.sizes.iter().rev() {
        shape.push(usize::try_from(size).ok().filter(|&size| size > 0).ok_or_else(impossible)?);
    }
    let n_elements = shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
    let n_bytes = n_elements.and_then(|n| dtype.bytes_of(n)).ok_or_else(impossible)?;
    Ok((shape, n_bytes))
}

fn range_of(
    entry: &TensorEntry<'_>,
    n_bytes: usize,
    alignment: usize,
    data: &Range<usize>,
) -> Result<Range<usize>, GgufError> {
    let (name, offset) = (entry.name, entry.offset);
    if !offset.is_multiple_of(alignment as u64) {
        return Err(GgufError::Misaligned { name: name.to_owned(), offset, alignment });
    }
    let start = usize::try_from(offset).ok().and_then(|offset| data.start.checked_add(offset));
    let end = start.and_then(|start| start.checked_add(n_bytes)).filter(|&end| end <= data.end);
    match (start, end) {
        (Some(start), Some(end)) => Ok(start..end),
        _ => {
            let (name, data_bytes) = (name.to_owned(), data.len());
            Err(GgufError::OutsideFile { name, offset, bytes: n_bytes as u64, data_bytes })
        }
    }
}

fn reject_overlap(tensors: &[StoredTensor]) -> Result<(), GgufError> {
    let mut by_start: Vec<&StoredTensor> = tensors.iter().collect();
    by_start.sort_by_key(|tensor| tensor.range.start);
    for pair in by_start.windows(2) {
        if let [first, second] = pair
            && second.range.start < first.range.end
        {
            let (first, second) = (first.name.clone(), second.name.clone());
            return Err(GgufError::Overlap { first, second });
        }
    }
    Ok(())
}
