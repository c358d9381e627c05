//! Pinned host memory that copies go through, in pieces that a ring lends.

use super::nvidia::fail;
use super::ring::Ring;
use crate::error::DeviceError;
use cudarc::driver::result;
use std::cell::RefCell;

/// Pinned host memory that copies go through.
#[derive(Debug)]
pub(super) struct Pinned<T> {
    bytes: *mut u8,
    pub(super) ring: RefCell<Ring<T>>,
}

impl<T> Pinned<T> {
    /// New memory. Errors: the driver's.
    pub(super) fn new(n_bytes: usize, flags: u32) -> Result<Self, DeviceError> {
        // SAFETY: every byte is written before it is read (by a copy of ours or of the device).
        let bytes = unsafe { result::malloc_host(n_bytes, flags) };
        let bytes = bytes.map_err(|e| fail(format!("pin {n_bytes} bytes of host memory"), e))?;
        Ok(Self { bytes: bytes.cast(), ring: RefCell::new(Ring::new(n_bytes)) })
    }

    /// A piece that the ring gave out, or will at once: nobody else has it.
    #[allow(clippy::mut_from_ref, reason = "the ring lends each piece once")]
    pub(super) fn slice(&self, start: usize, n_bytes: usize) -> &mut [u8] {
        assert!(start + n_bytes <= self.ring.borrow().capacity());
        // SAFETY: the range is within the allocation, which lives as long as the device, and the ring lends no
        // byte twice.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.add(start), n_bytes) }
    }

    /// Gives the memory back.
    ///
    /// # Safety
    ///
    /// No copy is under way, and none is begun after this.
    pub(super) unsafe fn free(&self) {
        // SAFETY: `new` allocated it, and the caller ends its use.
        let _ = unsafe { result::free_host(self.bytes.cast()) };
    }
}
