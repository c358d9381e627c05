//! GGUF, versions 2 and 3, little endian.
//!
//! ```text
//! "GGUF" | version u32 | n_tensors u64 | n_keys u64
//! n_keys    x ( key: string, type: u32, value )
//! n_tensors x ( name: string, n_dims: u32, sizes: n_dims x u64 (fastest first), type: u32, offset: u64 )
//! padding to the alignment | data, each tensor at its offset
//! ```
//! A string is its length (u64) and its bytes in UTF-8; an array is an element type (u32), a count (u64)
//! and the elements. Source: the GGUF specification, docs/gguf.md of ggml-org/ggml.

#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
pub(in crate::load) mod config;
mod cursor;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
pub(in crate::load) mod keys;
pub mod metadata;
mod table;
pub mod tokenizer;

use super::file::ModelFile;
use super::tensor_files::{StoredTensor, TensorFiles};
use crate::error::{Error, FormatError, GgufError, Rejected, Result, Unsupported};
use cursor::Cursor;
use metadata::{Metadata, Value};
use std::ops::Range;
use std::path::Path;
use table::TensorEntry;

/// Keys that a file may have.
pub const KEYS_MAX: u64 = 1 << 16;
/// Tensors that a file may have.
pub const TENSORS_MAX: u64 = 1 << 18;
/// Largest alignment of tensor data.
pub const ALIGNMENT_MAX: u64 = 1 << 20;
const ALIGNMENT_DEFAULT: usize = 32;

/// Bytes of a header that are read.
const HEADER_BYTES_MAX: usize = 64 << 20;
/// Bytes of the file that are read at first. Those after the header are read again as tensors.
const FRONT_BYTES: usize = 1 << 20;

/// An open GGUF file.
#[derive(Debug)]
pub struct GgufFile {
    file: ModelFile,
}

/// The parsed header of a GGUF file: metadata, and the table of tensors, whose ranges are not yet checked.
#[derive(Debug)]
pub struct Header<'a> {
    /// Keys and values.
    pub metadata: Metadata<'a>,
    table: Vec<TensorEntry<'a>>,
    alignment: usize,
    data: Range<usize>,
}

impl GgufFile {
    /// Opens the file at `path`. Errors: as [`ModelFile::open`].
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        Ok(Self { file: ModelFile::open(path)? })
    }

    /// Calls `read` with the header. The length of a header is not stored, so more of the file is read until the header
    /// is complete.
    ///
    /// Errors: damage; an unsupported version or byte order; one file of several; errors of `read`.
    pub fn with_header<T>(&self, read: impl FnOnce(&Header<'_>) -> Result<T>) -> Result<T> {
        let file_bytes = self.file.n_bytes();
        let most = file_bytes.min(HEADER_BYTES_MAX);
        let mut n = most.min(FRONT_BYTES);
        loop {
            let front = self.file.front(n)?;
            match Header::parse_front(&front, file_bytes) {
                Ok(header) => return read(&header),
                Err(Error::Rejected(Rejected::Format(FormatError::Gguf(GgufError::HeaderBytes {
                    needed,
                    ..
                }))))
                    if n < most =>
                {
                    n = needed.max(n.saturating_mul(4)).min(most)
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Combines the file with the tensors that [`Header::tensors`] found in it.
    pub(crate) fn into_files(self, tensors: Vec<StoredTensor>) -> TensorFiles {
        TensorFiles::new(vec![self.file], tensors)
    }
}

impl<'a> Header<'a> {
    /// Parses the header of a whole file. Errors: as [`GgufFile::with_header`].
    #[cfg(feature = "testing")]
    pub fn parse(bytes: &'a [u8]) -> Result<Self> {
        Self::parse_front(bytes, bytes.len())
    }

    /// Parses the header of a file of `file_bytes`, of which `bytes` are the first.
    ///
    /// Errors: as [`GgufFile::with_header`]; [`GgufError::HeaderBytes`] if the header is longer than `bytes`.
    fn parse_front(bytes: &'a [u8], file_bytes: usize) -> Result<Self> {
        let mut cursor = Cursor::new(bytes, file_bytes);
        read_magic_and_version(&mut cursor)?;
        let n_tensors = cursor.count("tensors", table::ENTRY_BYTES_MIN, TENSORS_MAX)?;
        let n_keys = cursor.count("metadata keys", metadata::ENTRY_BYTES_MIN, KEYS_MAX)?;
        let metadata = Metadata::read(&mut cursor, bytes, n_keys)?;
        reject_split(&metadata)?;
        let alignment = alignment_of(&metadata)?;
        let table = table::read(&mut cursor, n_tensors)?;
        let data_start = cursor.at().checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
        let data = data_start.min(file_bytes)..file_bytes;
        Ok(Self { metadata, table, alignment, data })
    }

    /// The names in the table, in file order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &'a str> + '_ {
        self.table.iter().map(|entry| entry.name)
    }

    /// Returns all tensors, with checked types, sizes and ranges.
    ///
    /// Errors: [`GgufError`]; [`Unsupported::TensorType`] names the first type that is not implemented.
    pub fn tensors(&self) -> Result<Vec<StoredTensor>> {
        table::check(&self.table, self.alignment, &self.data)
    }
}

fn read_magic_and_version(cursor: &mut Cursor<'_>) -> Result<()> {
    let big_endian = || Unsupported::Feature {
        what: "GGUF byte order",
        value: "big-endian".into(),
        supported: "little-endian",
    };
    let magic = cursor.bytes(4, "the magic number")?;
    if magic == b"FUGG" {
        return Err(big_endian().into());
    }
    if magic != b"GGUF" {
        return Err(GgufError::Magic { found: magic.to_vec() }.into());
    }
    match cursor.u32("the version")? {
        2 | 3 => Ok(()),
        swapped if swapped != 0 && swapped & 0xffff == 0 => Err(big_endian().into()),
        other => {
            Err(Unsupported::Feature { what: "GGUF version", value: other.to_string(), supported: "2 and 3" }
                .into())
        }
    }
}

fn reject_split(metadata: &Metadata<'_>) -> Result<()> {
    match metadata.uint("split.count")? {
        Some(n @ 2..) => Err(Unsupported::Feature {
            what: "a GGUF split over several files",
            value: format!("split.count = {n}"),
            supported: "one file (llama-gguf-split --merge makes one)",
        }
        .into()),
        _ => Ok(()),
    }
}

fn alignment_of(metadata: &Metadata<'_>) -> Result<usize, GgufError> {
    let alignment = match metadata.get("general.alignment") {
        None => return Ok(ALIGNMENT_DEFAULT),
        Some(Value::Uint(alignment)) => *alignment,
        Some(other) => {
            let key = "general.alignment".to_owned();
            return Err(GgufError::KeyType { key, expected: "an unsigned number", found: other.type_name() });
        }
    };
    let rejected = GgufError::Alignment { alignment, max: ALIGNMENT_MAX };
    if !alignment.is_power_of_two() || alignment > ALIGNMENT_MAX {
        return Err(rejected);
    }
    usize::try_from(alignment).map_err(|_| rejected)
}
