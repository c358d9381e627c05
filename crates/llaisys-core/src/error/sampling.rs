//! Errors of sampling parameters.

use thiserror::Error;

/// A sampling parameter out of its bounds.
#[derive(Debug, Clone, PartialEq, Error)]
#[allow(missing_docs, reason = "the error text names each field")]
pub enum SamplingError {
    /// A number outside its range.
    #[error("{name} is {value}, allowed are {min} to {max}")]
    OutOfRange { name: &'static str, value: f64, min: f64, max: f64 },
    /// A token id outside the vocabulary.
    #[error("{name} names token id {id}, outside the vocabulary of {vocab_size}")]
    Token { name: &'static str, id: i64, vocab_size: usize },
    /// An empty sequence of tokens.
    #[error("{name} contains an empty sequence of tokens")]
    Empty { name: &'static str },
}
