//! Prefetching of weights while a kernel multiplies. `docs/decisions/0008-cpu-kernels.md` has the measurements.

#![allow(unsafe_code, reason = "prefetch instructions")]

use crate::ops::cpu::isa::{IsaName, detect};
use crate::ops::packed::{PANEL, PackedFormat};
use std::ops::Range;
use std::sync::LazyLock;

/// Sizes in bytes of panels that are prefetched to the second-level cache whatever the number of rows. A first-level
/// cache has no capacity for such a panel and the inputs; a second-level one has capacity for two.
const MIDDLE_PANEL: Range<usize> = 24 << 10..192 << 10;
/// The largest distance in bytes between what a single block of rows reads and what it prefetches.
const DISTANCE: usize = 32 << 10;

/// A block of rows that is multiplied with a panel.
pub(super) struct PanelBlock<'a> {
    pub(super) format: PackedFormat,
    pub(super) panel: &'a [u8],
    /// The weights after the panel.
    pub(super) rest: &'a [u8],
    /// Index of the block, and the number of blocks that this thread multiplies with the panel.
    pub(super) block: usize,
    pub(super) n_blocks: usize,
    /// Rows of the block.
    pub(super) n_rows: usize,
}

/// Cache lines to prefetch, some of them in each step of a kernel.
#[derive(Clone, Copy)]
pub(super) struct Prefetch {
    next: *const u8,
    lines_per_step: usize,
    /// Prefetch to the second-level cache, which can wait for more lines at a time.
    is_far: bool,
}

impl Prefetch {
    /// Nothing to prefetch.
    pub(super) const NONE: Prefetch = Prefetch { next: std::ptr::null(), lines_per_step: 0, is_far: false };

    /// Chooses what to prefetch while a block of rows is multiplied with a panel. A single block prefetches what it
    /// reads soon; several blocks together prefetch the next panel.
    pub(super) fn new(at: PanelBlock<'_>) -> Self {
        let PanelBlock { format, panel, rest, block: i, n_blocks: n, n_rows } = at;
        let n_bytes = panel.len();
        let is_worth_it = match n {
            1 => n_rows >= min_rows(format),
            2 => n_bytes < MIDDLE_PANEL.end,
            _ => true,
        };
        if !is_worth_it {
            return Self::NONE;
        }
        let step = if format.is_grouped() { format.group_bytes() } else { 4 * PANEL };
        let lines_per_step = (step / 64).div_ceil(n);
        let start = match n {
            1 => n_bytes.min(DISTANCE),
            _ => n_bytes + i * lines_per_step * 64 * (n_bytes / step),
        };
        let is_far = n <= 2 || MIDDLE_PANEL.contains(&n_bytes);
        if start >= n_bytes + rest.len().min(n_bytes) {
            return Self::NONE;
        }
        Self { next: panel.as_ptr().wrapping_add(start), lines_per_step, is_far }
    }

    /// Prefetches the lines of one step.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn next_step(&mut self) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        for _ in 0..self.lines_per_step {
            if self.is_far {
                // SAFETY: a prefetch reads nothing and faults on no address.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(self.next.cast()) };
            } else {
                fetch(self.next);
            }
            self.next = self.next.wrapping_add(64);
        }
    }
}

/// Rows from which a single block prefetches. On an AMD CPU with AVX-512: where arithmetic takes at least half of the
/// memory time. With fewer rows its hardware prefetcher is fast enough, and prefetch instructions cost up to a tenth.
/// (Zen 4 multiplies a line of 8-bit or BF16 weights with a row in one cycle, and a 4-bit line in two; two cores get a
/// line from memory every 14.) Others always prefetch: Zen 3, without AVX-512, takes four to seven cycles for a line of
/// any format, and Intel's own prefetcher does not cross pages of 4 KiB.
fn min_rows(format: PackedFormat) -> usize {
    match *IS_AMD && *HAS_AVX512 {
        true if format.is_grouped() => format.bits().div_ceil(2).max(3),
        true => 9,
        false => 1,
    }
}

/// Whether AMD made the CPU, by the vendor's name in leaf 0 of `cpuid`.
static IS_AMD: LazyLock<bool> = LazyLock::new(|| {
    #[cfg(target_arch = "x86_64")]
    return std::arch::x86_64::__cpuid(0).ebx.to_le_bytes() == *b"Auth"; // of "AuthenticAMD"
    #[cfg(not(target_arch = "x86_64"))]
    return false;
});

/// Whether the CPU has the instructions of the AVX-512 kernels.
static HAS_AVX512: LazyLock<bool> = LazyLock::new(|| detect(IsaName::Avx512).is_some());

/// Prefetches the line at `at` to the first-level cache; any address is allowed.
#[inline(always)]
pub(super) fn fetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
