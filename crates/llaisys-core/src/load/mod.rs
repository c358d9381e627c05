//! Loading models: untrusted files -> a checked [`Checkpoint`](checkpoint::Checkpoint), and the bytes of its tensors.
//!
//! Two containers: Hugging Face folders (`folder`, `safetensors`, `tokenizer_json`) and GGUF files (`gguf`). A file is
//! never trusted: counts are checked against the bytes that are left before anything is allocated, sizes are multiplied
//! with overflow checks, every range is within its file and overlaps no other, names are unique, and the files of a
//! folder are in the folder. What is well formed but not implemented is refused with
//! [`Unsupported`](crate::error::Unsupported), which names it.
//!
//! A file that is truncated while it is read is refused by name. Replace a model file by renaming a new one over it:
//! a file that is overwritten in place is read partly old and partly new.
#![warn(
    clippy::arithmetic_side_effects,
    reason = "release builds wrap silently: sizes from a file are untrusted"
)]

#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
pub mod checkpoint;
pub mod file;
pub mod folder;
pub mod gguf;
pub mod json;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
pub mod model_info;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
pub mod packed_size;
pub mod safetensors;
pub mod tensor_files;
pub mod tokenizer_json;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
pub mod weight_format;

/// Upper bound on the bytes of a tensor's name or a metadata key.
pub const NAME_BYTES_MAX: usize = 1024;
