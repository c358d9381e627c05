//! Logits -> token.

use thiserror::Error;

/// A sampling parameter out of bounds.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum SamplingError {}
