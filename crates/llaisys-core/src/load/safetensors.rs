//! Safetensors: `model.safetensors`, or shards named by `model.safetensors.index.json`.
//!
//! The `safetensors` crate parses the header and checks that offsets are contiguous, sizes match shapes and types, and
//! the whole file is covered. This module also checks unique names, the shards and the element types.

use super::file::ModelFile;
use super::folder::ModelFolder;
use super::json::UniqueMap;
use super::tensor_files::{StoredTensor, TensorFiles};
use crate::dtype::DType;
use crate::error::FormatError;
use crate::error::{Result, Unsupported};
use crate::load::NAME_BYTES_MAX;
use safetensors::tensor::Metadata;
use safetensors::{Dtype as FileType, SafeTensorError};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;

/// Bytes of one file's header that are parsed (the format allows 100 MB).
pub const HEADER_BYTES_MAX: u64 = 8 << 20;
/// Bytes of `model.safetensors.index.json` that are read.
pub const INDEX_BYTES_MAX: u64 = 8 << 20;

/// Dimensions of one tensor: those of a convolution over video, in encoders that are skipped.
const DIMENSIONS_MAX: usize = 5;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Bytes of the length before the header.
const LENGTH_BYTES: usize = 8;

/// Opens the tensors of a folder. `model.safetensors` takes precedence over an index, as in transformers.
///
/// Errors: [`FormatError`] for damage; [`Unsupported::TensorType`] for a type other than F32, F16, BF16 and those of
/// quantized matrices.
pub fn open(folder: &ModelFolder) -> Result<TensorFiles> {
    if let Some(path) = folder.file(SINGLE)? {
        let file = ModelFile::open(&path)?;
        let tensors = tensors_of(&file, SINGLE, 0)?;
        return Ok(TensorFiles::new(vec![file], tensors));
    }
    match folder.read(INDEX, INDEX_BYTES_MAX)? {
        Some(index) => open_shards(folder, &index),
        None => Err(FormatError::FileMissing { folder: folder.path().to_owned(), name: SINGLE }.into()),
    }
}

/// Opens the tensors of the one file `name` of a folder. Errors: as [`open`].
pub(super) fn open_file(folder: &ModelFolder, name: &'static str) -> Result<TensorFiles> {
    let missing = || FormatError::FileMissing { folder: folder.path().to_owned(), name };
    let file = ModelFile::open(&folder.file(name)?.ok_or_else(missing)?)?;
    let tensors = tensors_of(&file, name, 0)?;
    Ok(TensorFiles::new(vec![file], tensors))
}

#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

fn open_shards(folder: &ModelFolder, index: &[u8]) -> Result<TensorFiles> {
    let rejected = |source| FormatError::Json { file: INDEX.to_owned(), source };
    let Index { weight_map: UniqueMap(weight_map) } = serde_json::from_slice(index).map_err(rejected)?;
    let mut by_shard: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, shard) in &weight_map {
        by_shard.entry(shard).or_default().push(tensor);
    }
    by_shard.keys().try_for_each(|shard| check_shard_name(shard))?;
    let mut files = Vec::new();
    let mut tensors = Vec::new();
    for (shard, listed) in by_shard {
        let missing = || FormatError::NotInShard { tensor: listed[0].to_owned(), shard: shard.to_owned() };
        let path = folder.file(shard)?.ok_or_else(missing)?;
        let file = ModelFile::open(&path)?;
        let found = tensors_of(&file, shard, files.len())?;
        check_shard(shard, &listed, &found, &weight_map)?;
        files.push(file);
        tensors.extend(found);
    }
    Ok(TensorFiles::new(files, tensors))
}

/// Checks that a shard is a `*.safetensors` file in the folder of the index: no subfolders, no `..`.
fn check_shard_name(shard: &str) -> Result<(), FormatError> {
    let path = Path::new(shard);
    let is_plain = path.file_name() == Some(OsStr::new(shard)) && !shard.contains(['/', '\\', '\0']);
    if is_plain && path.extension() == Some(OsStr::new("safetensors")) {
        return Ok(());
    }
    Err(FormatError::ShardName { shard: shard.to_owned() })
}

/// Checks that the index lists exactly the tensors of a shard. A name occurs once in the index, so no tensor can be in
/// two shards.
fn check_shard(
    shard: &str,
    listed: &[&str],
    found: &[StoredTensor],
    weight_map: &BTreeMap<String, String>,
) -> Result<(), FormatError> {
    let mut names: Vec<&str> = found.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    if let Some(name) = names.iter().find(|&&name| weight_map.get(name).is_none_or(|other| other != shard)) {
        return Err(FormatError::NotInIndex { tensor: (*name).to_owned(), shard: shard.to_owned() });
    }
    match listed.iter().find(|name| names.binary_search(name).is_err()) {
        Some(name) => Err(FormatError::NotInShard { tensor: (*name).to_owned(), shard: shard.to_owned() }),
        None => Ok(()),
    }
}

fn tensors_of(file: &ModelFile, name: &str, index: usize) -> Result<Vec<StoredTensor>> {
    let rejected = |source| FormatError::Safetensors { file: name.to_owned(), source };
    let header = read_header(file, name)?;
    let invalid = || rejected(SafeTensorError::InvalidHeaderLength);
    let data_start = header.len().checked_add(LENGTH_BYTES).ok_or_else(invalid)?;
    // Deserialization checks offsets, shapes and sizes.
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|source| rejected(SafeTensorError::InvalidHeaderDeserialization(source)))?;
    if data_start.checked_add(metadata.data_len()) != Some(file.n_bytes()) {
        return Err(rejected(SafeTensorError::MetadataIncompleteBuffer).into());
    }
    let mut tensors = Vec::new();
    let by_name: BTreeMap<String, _> = metadata.tensors().into_iter().collect();
    for (tensor, info) in by_name {
        let (start, end) = info.data_offsets;
        let at = |offset: usize| data_start.checked_add(offset).filter(|&at| at <= file.n_bytes());
        let (Some(start), Some(end)) = (at(start), at(end)) else { return Err(invalid().into()) };
        check_entry(name, &tensor, info.shape.len())?;
        let dtype = dtype_of(&tensor, info.dtype)?;
        tensors.push(StoredTensor {
            name: tensor,
            dtype,
            shape: info.shape.clone(),
            file: index,
            range: start..end,
        });
    }
    Ok(tensors)
}

/// Reads the bytes of the header, and checks what the crate does not: a plausible size and unique names.
fn read_header(file: &ModelFile, name: &str) -> Result<Vec<u8>, FormatError> {
    let rejected = |source| FormatError::Safetensors { file: name.to_owned(), source };
    let Some(rest) = file.n_bytes().checked_sub(LENGTH_BYTES) else {
        return Err(rejected(SafeTensorError::HeaderTooSmall));
    };
    let mut length = [0; LENGTH_BYTES];
    file.read_at(0, &mut length)?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > HEADER_BYTES_MAX {
        let file = format!("the header of {name}");
        return Err(FormatError::TooLarge { file, bytes: header_bytes, max: HEADER_BYTES_MAX });
    }
    let n_bytes = usize::try_from(header_bytes).ok().filter(|&n| n <= rest);
    let mut header = vec![0; n_bytes.ok_or_else(|| rejected(SafeTensorError::InvalidHeaderLength))?];
    file.read_at(LENGTH_BYTES, &mut header)?;
    match serde_json::from_slice::<UniqueMap<IgnoredAny>>(&header) {
        Ok(_) => Ok(header),
        Err(source) => Err(FormatError::Json { file: format!("the header of {name}"), source }),
    }
}

/// Checks that a name is short enough for an error message and that a shape is plausible for a model.
fn check_entry(file: &str, tensor: &str, n_dims: usize) -> Result<(), FormatError> {
    let file = || file.to_owned();
    if tensor.len() > NAME_BYTES_MAX {
        return Err(FormatError::LongName { file: file(), bytes: tensor.len(), max: NAME_BYTES_MAX });
    }
    if n_dims > DIMENSIONS_MAX {
        let name = tensor.to_owned();
        return Err(FormatError::Dimensions { file: file(), name, n_dims, max: DIMENSIONS_MAX });
    }
    Ok(())
}

fn dtype_of(tensor: &str, dtype: FileType) -> Result<DType, Unsupported> {
    match dtype {
        FileType::F32 => Ok(DType::F32),
        FileType::F16 => Ok(DType::F16),
        FileType::BF16 => Ok(DType::BF16),
        // Parts of quantized matrices. As weights they are rejected later.
        FileType::I8 => Ok(DType::I8),
        FileType::U8 => Ok(DType::U8),
        FileType::I32 => Ok(DType::I32),
        FileType::I64 => Ok(DType::I64),
        FileType::F8_E4M3 => Ok(DType::F8E4M3),
        other => Err(Unsupported::TensorType {
            tensor: tensor.to_owned(),
            dtype: other.to_string(),
            supported: "F32, F16, BF16",
        }),
    }
}
