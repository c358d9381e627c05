//! Huge pages for weights.
//!
//! A decode step reads every weight once, so each 4 KiB page costs a walk of the page tables; under a hypervisor
//! that is most expensive. With 2 MiB pages SmolLM2's products took 2.0 ms instead of 2.8 (Zen 4, 2 cores,
//! nested paging). Matrices are often smaller than 2 MiB, but allocators place them side by side, and a block is
//! collapsed as soon as it is covered, whoever owns its parts: to programs nothing changes but the speed.

#![allow(unsafe_code, reason = "advises the system about pages")]

use crate::tensor::AlignedBuf;

/// Asks the system to back the 2 MiB blocks that `buf` touches by one page each. What it refuses (an old kernel,
/// a block that reaches beyond the process's memory, none free) stays as it is.
#[cfg(target_os = "linux")]
pub(crate) fn use_huge_pages(buf: &AlignedBuf) {
    const HUGE: usize = 2 << 20;
    let start = buf.as_slice::<u8>().as_ptr().addr();
    for block in (start / HUGE..(start + buf.len()).div_ceil(HUGE)).map(|i| i * HUGE) {
        let address = std::ptr::with_exposed_provenance_mut(block);
        // SAFETY: the advice changes how memory is mapped, never what it holds nor whether it may be used; a
        // block with unmapped parts is refused.
        unsafe { libc::madvise(address, HUGE, libc::MADV_COLLAPSE) };
    }
}

/// Other systems choose by themselves.
#[cfg(not(target_os = "linux"))]
pub(crate) fn use_huge_pages(_: &AlignedBuf) {}
