//! Errors of model files.

use std::path::PathBuf;
use thiserror::Error;

/// A damaged or inconsistent model file.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the error text names each field")]
pub enum FormatError {
    /// The system failed to open or read a file.
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// A file that became shorter after it was opened.
    #[error(
        "{} was truncated while it was loaded: {expected} bytes were expected at offset {offset}, but it has only \
         {n_bytes} bytes now; replace a model file by renaming a new one over it, and load again", path.display()
    )]
    Truncated { path: PathBuf, offset: usize, expected: usize, n_bytes: u64 },
    /// A pipe, device or folder where a file should be.
    #[error("{} is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    /// A file of a folder that resolves to a path outside of it.
    #[error("{} is a link to a path outside of the model folder {}", path.display(), root.display())]
    OutsideFolder { path: PathBuf, root: PathBuf },
    /// A folder without a file that it must have.
    #[error("the folder {} has no {name}", folder.display())]
    FileMissing { folder: PathBuf, name: &'static str },
    /// A file or header above the size limit.
    #[error("{file} has {bytes} bytes, at most {max} are read")]
    TooLarge { file: String, bytes: u64, max: u64 },
    /// Not JSON, or JSON with a repeated key or too many levels.
    #[error("{file} is not acceptable JSON: {source}")]
    Json { file: String, source: serde_json::Error },
    /// A required key that is missing.
    #[error("{file} has no {key:?}")]
    KeyMissing { file: &'static str, key: &'static str },
    /// A key of the wrong type.
    #[error("{file}: {key:?} is not {expected}")]
    KeyType { file: &'static str, key: &'static str, expected: &'static str },
    /// A number outside its bounds.
    #[error("{what} is {got}, allowed are {min} to {max}")]
    Bounds { what: &'static str, got: f64, min: f64, max: f64 },
    /// Two sizes of which one must be a multiple of the other.
    #[error("{what} is {got}, which is not a multiple of {of} ({divisor})")]
    NotAMultiple { what: &'static str, got: usize, of: &'static str, divisor: usize },
    /// A token id outside of the vocabulary.
    #[error("{what} is {got}, the vocabulary has {vocab_size} tokens")]
    TokenId { what: &'static str, got: u64, vocab_size: usize },
    /// Two values that must agree.
    #[error("{what} is {got}, expected {want} (from {other})")]
    Disagree { what: &'static str, got: u64, other: &'static str, want: u64 },
    /// A safetensors header that the format does not allow.
    #[error("{file} is not a valid safetensors file: {source}")]
    Safetensors { file: String, source: safetensors::SafeTensorError },
    /// A weight that cannot be quantized.
    #[error("tensor {name:?} holds an infinity or NaN in row {row}; such a model cannot be quantized")]
    NotFinite { name: String, row: usize },
    /// A NaN in a matrix of FP8 numbers.
    #[error("tensor {name:?} holds a NaN (0x7f or 0xff in E4M3) in row {row}; convert the checkpoint again")]
    Nan { name: String, row: usize },
    /// A NaN among the exponents of a matrix in MXFP4.
    #[error("tensor {name:?} holds a NaN (exponent 255) in row {row}; convert the checkpoint again")]
    NanScale { name: String, row: usize },
    /// A scale of a quantized matrix that cannot be used.
    #[error(
        "tensor {name:?} holds the scale {value:e}; scales are finite, not zero and up to {max} in magnitude: \
         convert the checkpoint again"
    )]
    Scale { name: String, value: f32, max: f32 },
    /// A tensor with too many dimensions.
    #[error("{file}: tensor {name:?} has {n_dims} dimensions, at most {max} are read")]
    Dimensions { file: String, name: String, n_dims: usize, max: usize },
    /// A tensor name above the length limit.
    #[error("{file}: a tensor's name has {bytes} bytes, at most {max} are read")]
    LongName { file: String, bytes: usize, max: usize },
    /// A shard name that is not a plain `*.safetensors` file name.
    #[error(
        "model.safetensors.index.json names the shard {shard:?}, which is not a plain *.safetensors file name"
    )]
    ShardName { shard: String },
    /// A tensor that the index lists for a shard that does not have it.
    #[error("model.safetensors.index.json lists {tensor:?} in {shard:?}, which does not have it")]
    NotInShard { tensor: String, shard: String },
    /// A tensor in a shard for which the index does not list it.
    #[error("{shard:?} has the tensor {tensor:?}, which model.safetensors.index.json does not list for it")]
    NotInIndex { tensor: String, shard: String },
    /// A regular expression that can take exponential time.
    #[error("tokenizer.json has the pattern {pattern:?}: {why}")]
    Pattern { pattern: String, why: &'static str },
    /// A tokenizer that can make a text much longer.
    #[error("tokenizer.json: {what} is {got}, at most {max} are allowed")]
    Growth { what: &'static str, got: u64, max: u64 },
    /// Damage in a GGUF file.
    #[error("the GGUF file is damaged: {0}")]
    Gguf(#[from] GgufError),
    /// Tensors that the configuration requires and the file does not have.
    #[error("{n_missing} tensors are missing, the first is {first:?}")]
    MissingTensors { n_missing: usize, first: String },
    /// Tensors that the configuration does not have. To ignore them could change the output.
    #[error("{n_extra} tensors are not part of this model, the first is {first:?}")]
    ExtraTensors { n_extra: usize, first: String },
    /// A tensor of another shape than the configuration requires.
    #[error("tensor {name:?} has shape {got:?}, the configuration requires {want:?}")]
    TensorShape { name: String, got: Vec<usize>, want: Vec<usize> },
}

/// Damage in a GGUF file. Offsets are bytes from the start of the file, except where the text names the data part.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the error text names each field")]
pub enum GgufError {
    /// The first four bytes are not `GGUF`.
    #[error("it starts with {found:02x?}, not with \"GGUF\"")]
    Magic { found: Vec<u8> },
    /// The file ends in the middle of an item.
    #[error("{what} at offset {at} needs {needed} bytes, {left} are left")]
    Truncated { what: &'static str, at: usize, needed: u64, left: usize },
    /// A header that is longer than the part of the file that is read.
    #[error("the header has at least {needed} bytes, {read} are read")]
    HeaderBytes { needed: usize, read: usize },
    /// A count that is larger than the file or the limit allows.
    #[error("{count} {what}, at most {max} are possible or allowed")]
    Count { what: &'static str, count: u64, max: u64 },
    /// A string that is not UTF-8.
    #[error("{what} at offset {at} is not UTF-8")]
    Utf8 { what: &'static str, at: usize },
    /// An empty metadata key or tensor name.
    #[error("{what} at offset {at} is empty")]
    EmptyName { what: &'static str, at: usize },
    /// A metadata key or tensor name above the length limit.
    #[error("{what} at offset {at} has {bytes} bytes, at most {max} are read")]
    LongName { what: &'static str, at: usize, bytes: usize, max: usize },
    /// A value type that the format does not have, or does not allow in an array.
    #[error("metadata key {key:?} has the value type {type_id}{}", if *in_array { " in an array" } else { "" })]
    UnknownValueType { key: String, type_id: u32, in_array: bool },
    /// A boolean that is neither 0 nor 1.
    #[error("metadata key {key:?} is a boolean with the value {value}, expected 0 or 1")]
    Bool { key: String, value: u8 },
    /// A repeated metadata key.
    #[error("metadata key {key:?} occurs twice")]
    DuplicateKey { key: String },
    /// A required metadata key that is missing.
    #[error("metadata key {key:?} is missing")]
    KeyMissing { key: String },
    /// A metadata value of the wrong type.
    #[error("metadata key {key:?} is {found}, expected {expected}")]
    KeyType { key: String, expected: &'static str, found: &'static str },
    /// A repeated tensor name.
    #[error("tensor {name:?} occurs twice")]
    DuplicateTensor { name: String },
    /// No dimensions, or more than four.
    #[error("tensor {name:?} has {n_dims} dimensions, allowed are 1 to 4")]
    Dimensions { name: String, n_dims: u32 },
    /// A size of zero, or a product that overflows.
    #[error("tensor {name:?} has impossible sizes {sizes:?}")]
    Sizes { name: String, sizes: Vec<u64> },
    /// Rows that are not whole blocks.
    #[error("tensor {name:?} has rows of {columns} elements, its type needs a multiple of {block}")]
    PartialBlock { name: String, columns: u64, block: usize },
    /// An alignment that is not a power of two, or too large.
    #[error("the alignment is {alignment}, allowed are powers of two up to {max}")]
    Alignment { alignment: u64, max: u64 },
    /// Tensor data that does not start at a multiple of the alignment.
    #[error("the data of tensor {name:?} starts at {offset} in the data part, the alignment is {alignment}")]
    Misaligned { name: String, offset: u64, alignment: usize },
    /// Tensor data outside of the file.
    #[error("tensor {name:?} has {bytes} bytes at {offset} in the data part of {data_bytes}")]
    OutsideFile { name: String, offset: u64, bytes: u64, data_bytes: usize },
    /// Two tensors whose data overlaps.
    #[error("the data of tensors {first:?} and {second:?} overlaps")]
    Overlap { first: String, second: String },
}

impl From<FormatError> for crate::error::Error {
    fn from(error: FormatError) -> Self {
        Self::Rejected(error.into())
    }
}

impl From<GgufError> for crate::error::Error {
    fn from(error: GgufError) -> Self {
        FormatError::from(error).into()
    }
}
