//! `gather`: chosen rows, one after the other. Meaning: `ops/reference/gather.rs`. Its kernel is `embed`'s: a token is
//! the number of a row.

use super::embed::Embed;
use crate::cuda::device::{Device, DevicePtr, Element};
use crate::error::DeviceError;

/// `out[i] = x[rows[i]]`.
#[derive(Debug, Clone, Copy)]
pub struct Gather {
    /// Of `x` and the result.
    pub element: Element,
    /// `[n, width]`
    pub x: DevicePtr,
    /// `[n_rows]` i32, each in `0..n`.
    pub rows: DevicePtr,
    /// `[n_rows, width]`
    pub out: DevicePtr,
    /// Rows of the result, at least one.
    pub n_rows: usize,
    /// Elements of a row: a multiple of 8.
    pub width: usize,
}

impl Gather {
    /// Starts it.
    ///
    /// Panics if `width` is no multiple of 8. Errors: [`Device::launch`]'s.
    pub fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        let Self { element, x: table, rows: tokens, out, n_rows, width } = *self;
        Embed { element, table, tokens, out, n_rows, width }.launch(device)
    }
}
