//! Huge pages for weights.
//!
//! A decode step reads every weight once, so each 4 KiB page costs a walk of the page tables, which is slowest under a
//! hypervisor. With 2 MiB pages the products of SmolLM2 took 2.0 ms instead of 2.8 (Zen 4, 2 cores, nested paging).
//! Most blocks of 2 MiB get such a page when they are first written (`AlignedBuf`). The others are collapsed afterwards,
//! whichever buffers they belong to. Only the speed changes.

#![allow(unsafe_code, reason = "advises the system about pages")]

use crate::tensor::AlignedBuf;

#[cfg(target_os = "linux")]
const HUGE: usize = 2 << 20;

/// Asks the system to back each 2 MiB block that `buf` touches with one page. If the system refuses (an old kernel,
/// a block that extends beyond mapped memory, no free page), nothing changes.
#[cfg(target_os = "linux")]
pub(crate) fn use_huge_pages(buf: &AlignedBuf) {
    let start = buf.as_slice::<u8>().as_ptr().addr();
    for block in (start / HUGE..(start + buf.len()).div_ceil(HUGE)).map(|i| i * HUGE) {
        let address = std::ptr::with_exposed_provenance_mut(block);
        // SAFETY: the advice changes how memory is mapped, never what it holds nor whether it may be used; a
        // block with unmapped parts is refused.
        unsafe { libc::madvise(address, HUGE, libc::MADV_COLLAPSE) };
    }
}

/// Other systems choose page sizes themselves.
#[cfg(not(target_os = "linux"))]
pub(crate) fn use_huge_pages(_: &AlignedBuf) {}
