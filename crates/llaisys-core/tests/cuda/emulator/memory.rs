//! Device memory of the emulator: every allocation is between guard pages.

use super::arrays::FRESH;
use llaisys_core::cuda::device::DevicePtr;

/// Guard bytes before and behind an allocation: more than a row, so that an index that is off by one row is detected.
const GUARD: usize = 1 << 20;
const PAGE: usize = 4096;

/// One allocation. It ends at its guard, except for the padding to 16 bytes, which must keep [`FRESH`].
#[derive(Debug)]
struct Allocation {
    what: &'static str,
    map: usize,
    map_bytes: usize,
    start: usize,
    n_bytes: usize,
}

/// All allocations of a device.
#[derive(Debug, Default)]
pub(crate) struct Memory(Vec<Allocation>);

impl Memory {
    /// Allocates memory filled with NaN.
    pub(crate) fn alloc(&mut self, what: &'static str, n_bytes: usize) -> DevicePtr {
        let inner = n_bytes.next_multiple_of(16).next_multiple_of(PAGE);
        let map_bytes = inner + 2 * GUARD;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new private mapping, which replaces nothing.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), map_bytes, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(map, libc::MAP_FAILED, "{map_bytes} bytes of address space");
        let map = map as usize;
        // SAFETY: the range is within the new mapping.
        let opened = unsafe {
            libc::mprotect((map + GUARD) as *mut libc::c_void, inner, libc::PROT_READ | libc::PROT_WRITE)
        };
        assert_eq!(opened, 0, "{inner} bytes of memory");
        // SAFETY: as above, readable and writable now.
        unsafe { std::ptr::write_bytes((map + GUARD) as *mut u8, FRESH, inner) };
        let start = map + GUARD + inner - n_bytes.next_multiple_of(16);
        self.0.push(Allocation { what, map, map_bytes, start, n_bytes });
        // SAFETY: the bytes were mapped above, and are unmapped with the device.
        unsafe { DevicePtr::from_raw(start as u64, n_bytes) }
    }

    /// Returns the bytes at an address. Errors: they are not inside one allocation.
    pub(crate) fn bytes(&self, at: DevicePtr, n_bytes: usize) -> Result<&[u8], String> {
        self.check(at, n_bytes)?;
        // SAFETY: `check` accepted the range, and allocations live as long as `self`.
        Ok(unsafe { std::slice::from_raw_parts(at.address() as *const u8, n_bytes) })
    }

    /// As [`Memory::bytes`], mutable.
    pub(crate) fn bytes_mut(&mut self, at: DevicePtr, n_bytes: usize) -> Result<&mut [u8], String> {
        self.check(at, n_bytes)?;
        // SAFETY: as in `bytes`; `&mut self` makes the access exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(at.address() as *mut u8, n_bytes) })
    }

    fn check(&self, at: DevicePtr, n_bytes: usize) -> Result<(), String> {
        let at = at.address() as usize;
        let inside = |a: &&Allocation| a.start <= at && at + n_bytes <= a.start + a.n_bytes;
        match self.0.iter().find(inside) {
            Some(_) => Ok(()),
            None => Err(format!("{n_bytes} bytes at {}", self.describe(at as u64))),
        }
    }

    /// Returns a text that describes an address relative to its allocation.
    pub(crate) fn describe(&self, address: u64) -> String {
        let at = address as usize;
        let Some(a) = self.0.iter().find(|a| a.map <= at && at < a.map + a.map_bytes) else {
            return format!("{address:#x}, which is not close to an allocation");
        };
        let Allocation { what, start, n_bytes, .. } = *a;
        let end = start + n_bytes;
        if at < start {
            format!("{} bytes before `{what}` ({n_bytes} bytes)", start - at)
        } else if at >= end {
            format!("{} bytes behind the end of `{what}` ({n_bytes} bytes)", at - end)
        } else {
            format!("byte {} of `{what}` ({n_bytes} bytes)", at - start)
        }
    }

    /// Returns the name of an allocation whose padding was written.
    pub(crate) fn overrun(&self) -> Option<&'static str> {
        let touched = |a: &&Allocation| {
            let slack = a.n_bytes.next_multiple_of(16) - a.n_bytes;
            // SAFETY: these are the last bytes of the mapping's accessible part, behind the allocation's own.
            let slack = unsafe { std::slice::from_raw_parts((a.start + a.n_bytes) as *const u8, slack) };
            slack.iter().any(|&byte| byte != FRESH)
        };
        self.0.iter().find(touched).map(|a| a.what)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for a in &self.0 {
            // SAFETY: only this allocation uses the mapping, and its addresses are not used after the device is
            // dropped.
            unsafe { libc::munmap(a.map as *mut libc::c_void, a.map_bytes) };
        }
    }
}
