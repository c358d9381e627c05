//! `join_columns`: rows of which several ranks have computed a part of the columns each, put together.

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

/// One: f32 is the same beside every storage type, and `prim.cuh` wants one.
fn variants() -> Vec<Vec<(&'static str, u32)>> {
    vec![vec![kernel_source::storage(Element::Bf16)]]
}

/// The kernel.
pub fn function() -> Function {
    SOURCE.function(&[kernel_source::storage(Element::Bf16)], "join_columns")
}

/// `out[row, part * width + i] = parts[part, row, i]` of f32, as far as the row goes.
#[derive(Debug, Clone, Copy)]
pub struct JoinColumns {
    /// `[n_parts, n_rows, width]`, with `n_parts * width` columns or more than there are.
    pub parts: DevicePtr,
    /// `[n_rows, n_columns]`
    pub out: DevicePtr,
    /// Rows, at least one.
    pub n_rows: usize,
    /// Columns of a part.
    pub width: usize,
    /// Columns of the whole.
    pub n_columns: usize,
}

impl JoinColumns {
    /// Starts it. Errors: [`Device::launch`]'s.
    pub fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        device.launch(&Launch {
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
        })
    }
}
