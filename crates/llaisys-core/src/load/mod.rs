//! Loading models: turns untrusted files into a checked [`Checkpoint`](checkpoint::Checkpoint) and reads its tensors.
//!
//! There are two containers: Hugging Face folders (`folder`, `safetensors`, `tokenizer_json`) and GGUF files (`gguf`).
//! No file is trusted:
//! - Counts are checked against the remaining bytes before anything is allocated.
//! - Sizes are multiplied with overflow checks.
//! - Every range is within its file and overlaps no other.
//! - Names are unique, and the files of a folder are in the folder.
//!
//! Valid but unimplemented features are rejected with [`Unsupported`](crate::error::Unsupported), which names them.
//!
//! A file that is truncated while it is read is rejected with its name. Replace a model file by renaming a new one over
//! it: a file that is overwritten in place is read partly old and partly new.
#![warn(
    clippy::arithmetic_side_effects,
    reason = "release builds wrap silently: sizes from a file are untrusted"
)]

#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
pub mod checkpoint;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
pub mod encoder;
pub mod file;
pub mod folder;
pub mod gguf;
mod inspect;
pub mod json;
pub mod lora;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
pub mod model_info;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
pub mod packed_size;
pub mod read_ahead;
pub mod safetensors;
pub mod tensor_files;
pub mod tokenizer_json;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
mod transposed;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
pub mod weight_format;

/// Upper bound on the bytes of a tensor's name or a metadata key.
pub const NAME_BYTES_MAX: usize = 1024;
