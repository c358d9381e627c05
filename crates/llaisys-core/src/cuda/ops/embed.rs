//! `embed`: rows of the embedding table. Meaning: `ops/reference/embed.rs`.

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

/// The kernel for a storage type.
pub fn function(element: Element) -> Function {
    SOURCE.function(&[kernel_source::storage(element)], "embed")
}

/// `out[r] = table[tokens[r]]`.
#[derive(Debug, Clone, Copy)]
pub struct Embed {
    /// Of table and result.
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
    /// Starts it.
    ///
    /// Panics if `width` is no multiple of 8. Errors: [`Device::launch`]'s.
    pub fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        assert!(self.width.is_multiple_of(8), "rows of {} elements", self.width);
        device.launch(&Launch {
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
        })
    }
}
