//! `join_columns`: joins the columns of rows, of which each rank has computed a part.

use crate::cuda::device::{Arg, Device, DevicePtr, Element, Launch};
use crate::cuda::kernel_source::{self, Function, Kernel, KernelSource};
use crate::error::DeviceError;

/// `kernels/join_columns.cu`
pub static SOURCE: KernelSource = KernelSource {
    name: "join_columns",
    text: include_str!("../kernels/join_columns.cu"),
    variants,
    kernels: &[Kernel {
        name: "join_columns",
        max_threads: 256,
        max_registers: 32,
        max_shared_bytes: Kernel::NO_SHARED,
    }],
};

/// One variant: the kernel uses f32 only, but `prim.cuh` needs some storage type.
fn variants() -> Vec<Vec<(&'static str, u32)>> {
    vec![vec![kernel_source::storage(Element::Bf16)]]
}

/// Returns the kernel.
pub fn function() -> Function {
    SOURCE.function(&[kernel_source::storage(Element::Bf16)], "join_columns")
}

/// `out[row, part * width + i] = parts[part, row, i]` in f32, for the columns that `out` has.
#[derive(Debug, Clone, Copy)]
pub struct JoinColumns {
    /// `[n_parts, n_rows, width]`, with `n_parts * width >= n_columns`.
    pub parts: DevicePtr,
    /// `[n_rows, n_columns]`
    pub out: DevicePtr,
    /// Rows, at least one.
    pub n_rows: usize,
    /// Columns of a part.
    pub width: usize,
    /// Columns of the result.
    pub n_columns: usize,
}

impl JoinColumns {
    /// Launches the kernel. Errors: an array ends too early; those of [`Device::launch`].
    pub fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        let n_parts = self.n_columns.div_ceil(self.width);
        self.parts.array(SOURCE.name, Element::F32.n_bytes(n_parts * self.n_rows * self.width))?;
        self.out.array(SOURCE.name, Element::F32.n_bytes(self.n_rows * self.n_columns))?;
        let launch = Launch {
            function: &function(),
            grid: [self.n_rows as u32, self.n_columns.div_ceil(256) as u32, 1],
            block: 256,
            shared_bytes: 0,
            args: &[
                Arg::Ptr(self.parts),
                Arg::Ptr(self.out),
                Arg::I32(self.n_rows as i32),
                Arg::I32(self.width as i32),
                Arg::I32(self.n_columns as i32),
            ],
        };
        // SAFETY: the kernel indexes by row and column only, and `array` checked both arrays for all rows.
        unsafe { device.launch(&launch) }
    }
}
