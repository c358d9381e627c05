//! Checks of single numbers.

use crate::error::FormatError;

/// Upper bound of the inner width of a feed-forward block.
pub(super) const D_FF_MAX: usize = 1 << 20;
/// Bounds of multipliers and soft caps.
pub(super) const SCALE: (f64, f64) = (1e-6, 1e6);

/// Checks that a number is within its bounds. Errors: [`FormatError::Bounds`], for NaN too.
pub(crate) fn bounded(what: &'static str, got: f64, min: f64, max: f64) -> Result<(), FormatError> {
    // Written so that NaN is rejected.
    if got >= min && got <= max { Ok(()) } else { Err(FormatError::Bounds { what, got, min, max }) }
}

/// Checks that a token id is in the vocabulary. Errors: [`FormatError::TokenId`].
pub(crate) fn check_id(what: &'static str, id: u32, vocab_size: usize) -> Result<(), FormatError> {
    if (id as usize) < vocab_size {
        return Ok(());
    }
    Err(FormatError::TokenId { what, got: id.into(), vocab_size })
}
