//! `add_rms_norm`: `add`, then `rms_norm`. Definition: `ops/reference/{add,rms_norm}.rs`.

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

/// The widest row that a block keeps in its registers.
pub const MAX_WIDTH: usize = 256 * 8 * 8;

/// Returns the kernel for a storage type.
pub fn function(element: Element) -> Function {
    SOURCE.function(&[kernel_source::storage(element)], "add_rms_norm")
}

/// `residual += x; out = rms_norm(residual)`.
#[derive(Debug, Clone, Copy)]
pub struct AddRmsNorm {
    /// Type of the residual stream, the branch and the result.
    pub element: Element,
    /// `[n_rows, width]`; replaced by the sum unless `x` is NULL.
    pub residual: DevicePtr,
    /// The branch `[n_rows, width]`; NULL: nothing is added.
    pub x: DevicePtr,
    /// `[width]` f32
    pub weight: DevicePtr,
    /// `[n_rows, width]`; may be `x`, but not `residual`.
    pub out: DevicePtr,
    /// Rows, at least one.
    pub n_rows: usize,
    /// Elements of a row: a multiple of 8, at most [`MAX_WIDTH`].
    pub width: usize,
    /// Added to the mean square.
    pub eps: f32,
}

impl AddRmsNorm {
    /// Launches the kernel.
    ///
    /// Panics if `width` is not a multiple of 8 or is over [`MAX_WIDTH`]. Errors: an array ends too early; those of
    /// [`Device::launch`].
    pub fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        assert!(self.width.is_multiple_of(8) && self.width <= MAX_WIDTH, "rows of {} elements", self.width);
        let n_bytes = self.element.n_bytes(self.n_rows * self.width);
        self.residual.array(SOURCE.name, n_bytes)?;
        if self.x != DevicePtr::NULL {
            self.x.array(SOURCE.name, n_bytes)?;
        }
        self.weight.array(SOURCE.name, Element::F32.n_bytes(self.width))?;
        self.out.array(SOURCE.name, n_bytes)?;
        let launch = Launch {
            function: &function(self.element),
            grid: [self.n_rows as u32, 1, 1],
            // At most one thread for each 8 elements.
            block: (self.width / 8).next_multiple_of(32).min(256) as u32,
            shared_bytes: 0,
            args: &[
                Arg::Ptr(self.residual),
                Arg::Ptr(self.x),
                Arg::Ptr(self.weight),
                Arg::Ptr(self.out),
                Arg::I32(self.width as i32),
                Arg::F32(self.eps),
            ],
        };
        // SAFETY: the kernel indexes by row and column only, and `array` checked each array for all rows.
        unsafe { device.launch(&launch) }
    }
}
