//! Untrusted model files -> checked tensor views.

use thiserror::Error;

/// A damaged or inconsistent file.
#[derive(Debug, Error)]
pub enum FormatError {}
