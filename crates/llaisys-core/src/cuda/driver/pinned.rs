//! Pinned host memory for copies, in pieces that a ring allocates.

use super::ring::Ring;
use super::status::fail;
use crate::error::DeviceError;
use cudarc::driver::result;
use std::cell::RefCell;

/// Pinned host memory for copies.
#[derive(Debug)]
pub(super) struct Pinned<T> {
    bytes: *mut u8,
    pub(super) ring: RefCell<Ring<T>>,
}

impl<T> Pinned<T> {
    /// Allocates the memory. Errors: the driver's.
    pub(super) fn new(n_bytes: usize, flags: u32) -> Result<Self, DeviceError> {
        // SAFETY: every byte is written before it is read (by a copy of ours or of the device).
        let bytes = unsafe { result::malloc_host(n_bytes, flags) };
        let bytes = bytes.map_err(|e| fail(format!("pin {n_bytes} bytes of host memory"), e))?;
        Ok(Self { bytes: bytes.cast(), ring: RefCell::new(Ring::new(n_bytes)) })
    }

    /// Returns bytes `start..start + n_bytes`. Panics if the range exceeds the memory.
    ///
    /// # Safety
    ///
    /// While the slice lives, no other slice and no running copy has any of its bytes: the ring has just returned this
    /// range as free, or the copy to it is done. [`Pinned::free`] was not called.
    #[allow(clippy::mut_from_ref, reason = "the ring allocates each piece to one user")]
    pub(super) unsafe fn slice(&self, start: usize, n_bytes: usize) -> &mut [u8] {
        let end = start.checked_add(n_bytes);
        assert!(end.is_some_and(|end| end <= self.ring.borrow().capacity()), "range outside the memory");
        // SAFETY: the range is within the allocation (asserted); the caller promises that it is exclusive and alive.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.add(start), n_bytes) }
    }

    /// Frees the memory.
    ///
    /// # Safety
    ///
    /// No copy is running, and none starts after this.
    pub(super) unsafe fn free(&self) {
        // SAFETY: `new` allocated it, and the caller ends its use.
        let _ = unsafe { result::free_host(self.bytes.cast()) };
    }
}
