//! `gather`: copies the chosen rows. Definition: `ops/reference/gather.rs`. The kernel is that of `embed`, with row
//! indices for tokens.

use super::embed::Embed;
use crate::cuda::device::{Device, DevicePtr, Element};
use crate::error::DeviceError;

/// `out[i] = x[rows[i]]`.
#[derive(Debug, Clone, Copy)]
pub struct Gather {
    /// Type of `x` and the result.
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
    /// Launches the kernel.
    ///
    /// Panics if `width` is not a multiple of 8. Errors: an array ends too early; those of [`Device::launch`].
    ///
    /// # Safety
    /// When the kernel runs, `x` has each of `rows`.
    pub unsafe fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        let Self { element, x: table, rows: tokens, out, n_rows, width } = *self;
        // SAFETY: the caller's promise.
        unsafe { Embed { element, table, tokens, out, n_rows, width }.launch(device) }
    }
}
