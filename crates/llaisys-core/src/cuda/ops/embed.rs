//! `embed`: rows of the embedding table. Definition: `ops/reference/embed.rs`.

use crate::cuda::device::{Arg, Device, DevicePtr, Element, Launch};
use crate::cuda::kernel_source::{self, Function, Kernel, KernelSource};
use crate::error::DeviceError;

/// `kernels/embed.cu`
pub static SOURCE: KernelSource = KernelSource {
    name: "embed",
    text: include_str!("../kernels/embed.cu"),
    variants: kernel_source::by_storage,
    kernels: &[Kernel {
        name: "embed",
        max_threads: 128,
        max_registers: 40,
        max_shared_bytes: Kernel::NO_SHARED,
    }],
};

/// Returns the kernel for a storage type.
pub fn function(element: Element) -> Function {
    SOURCE.function(&[kernel_source::storage(element)], "embed")
}

/// `out[r] = table[tokens[r]]`.
#[derive(Debug, Clone, Copy)]
pub struct Embed {
    /// Type of the table and the result.
    pub element: Element,
    /// `[vocab_size, width]`
    pub table: DevicePtr,
    /// `[n_rows]` i32, each in `0..vocab_size`.
    pub tokens: DevicePtr,
    /// `[n_rows, width]`
    pub out: DevicePtr,
    /// Rows, at least one.
    pub n_rows: usize,
    /// Elements of a row: a multiple of 8.
    pub width: usize,
}

impl Embed {
    /// Launches the kernel.
    ///
    /// Panics if `width` is not a multiple of 8. Errors: an array ends too early; those of [`Device::launch`].
    ///
    /// # Safety
    /// When the kernel runs, `table` has a row for each of `tokens`.
    pub unsafe fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        assert!(self.width.is_multiple_of(8), "rows of {} elements", self.width);
        self.tokens.array(SOURCE.name, 4 * self.n_rows)?;
        self.out.array(SOURCE.name, self.element.n_bytes(self.n_rows * self.width))?;
        let launch = Launch {
            function: &function(self.element),
            grid: [self.n_rows as u32, 1, 1],
            block: 128,
            shared_bytes: 0,
            args: &[
                Arg::Ptr(self.table),
                Arg::Ptr(self.tokens),
                Arg::Ptr(self.out),
                Arg::I32(self.width as i32),
            ],
        };
        // SAFETY: `array` checked the arrays for all rows; the caller promises the tokens.
        unsafe { device.launch(&launch) }
    }
}
