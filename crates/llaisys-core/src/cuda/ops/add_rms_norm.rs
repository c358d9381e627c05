//! `add_rms_norm`: `add`, then `rms_norm`. Meaning: `ops/reference/{add,rms_norm}.rs`.

use crate::cuda::device::{Arg, Device, DevicePtr, Element, Launch};
use crate::cuda::kernel_source::{self, Function, Kernel, KernelSource};
use crate::error::DeviceError;

/// `kernels/add_rms_norm.cu`
pub static SOURCE: KernelSource = KernelSource {
    name: "add_rms_norm",
    text: include_str!("../kernels/add_rms_norm.cu"),
    variants: kernel_source::by_storage,
    kernels: &[Kernel {
        name: "add_rms_norm",
        max_threads: 256,
        max_registers: 64,
        max_shared_bytes: Kernel::NO_SHARED,
    }],
};

/// The widest row that a block holds in its registers.
pub const MAX_WIDTH: usize = 256 * 8 * 8;

/// The kernel for a storage type.
pub fn function(element: Element) -> Function {
    SOURCE.function(&[kernel_source::storage(element)], "add_rms_norm")
}

/// `residual += x; out = rms_norm(residual)`.
#[derive(Debug, Clone, Copy)]
pub struct AddRmsNorm {
    /// Of residual stream, branch and result.
    pub element: Element,
    /// `[n_rows, width]`, changed unless `x` is NULL.
    pub residual: DevicePtr,
    /// The branch `[n_rows, width]`, or NULL: the residual stream is only normed.
    pub x: DevicePtr,
    /// `[width]` f32
    pub weight: DevicePtr,
    /// `[n_rows, width]`; may be `x`, not `residual`.
    pub out: DevicePtr,
    /// Rows, at least one.
    pub n_rows: usize,
    /// Elements of a row: a multiple of 8, at most [`MAX_WIDTH`].
    pub width: usize,
    /// Added to the mean of squares.
    pub eps: f32,
    /// The normed value is rounded before it meets the weight, as Llama's form does and Gemma's does not.
    pub rounds_twice: bool,
}

impl AddRmsNorm {
    /// Starts it.
    ///
    /// Panics if `width` is no multiple of 8 or over [`MAX_WIDTH`]. Errors: [`Device::launch`]'s.
    pub fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        assert!(self.width.is_multiple_of(8) && self.width <= MAX_WIDTH, "rows of {} elements", self.width);
        device.launch(&Launch {
            function: &function(self.element),
            grid: [self.n_rows as u32, 1, 1],
            // No more threads than pieces of 8.
            block: (self.width / 8).next_multiple_of(32).min(256) as u32,
            shared_bytes: 0,
            args: &[
                Arg::Ptr(self.residual),
                Arg::Ptr(self.x),
                Arg::Ptr(self.weight),
                Arg::Ptr(self.out),
                Arg::I32(self.width as i32),
                Arg::F32(self.eps),
                Arg::I32(self.rounds_twice.into()),
            ],
        })
    }
}
