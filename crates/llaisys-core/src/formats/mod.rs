//! Untrusted model files -> checked tables of tensors, and their bytes.
//!
//! Two containers: Hugging Face folders (`safetensors`, with their JSON files) and GGUF files. A file is never
//! trusted: counts are checked against the bytes that are left before anything is allocated, sizes are
//! multiplied with overflow checks, every range lies in its file and overlaps no other, names are unique, and
//! a folder's files stay in the folder. What is well formed but not implemented is [`Unsupported`] by name.
//!
//! A file that is truncated while it is read is refused by name. Replace a model file by renaming a new one over it:
//! one that is written into is read partly old and partly new.
//!
//! [`Unsupported`]: crate::error::Unsupported
#![warn(
    clippy::arithmetic_side_effects,
    reason = "release builds wrap silently: sizes from a file are untrusted"
)]

pub mod error;
pub mod file;
pub mod folder;
pub mod gguf;
pub mod json;
pub mod safetensors;
pub mod tensors;
pub mod tokenizer_json;

pub use error::{FormatError, GgufError};

/// Bytes of a tensor's name or a metadata key.
pub const NAME_BYTES_MAX: usize = 1024;
