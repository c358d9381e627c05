//! `convert`: a file's numbers become the storage type, where the weights lie already on the device.

use super::device::{Arg, Device, DevicePtr, Element, Launch};
use super::unit::{self, Function, Kernel, KernelFile};
use crate::error::DeviceError;

const fn kernel(name: &'static str) -> Kernel {
    Kernel { name, max_threads: 256, max_registers: 16, max_shared_bytes: Kernel::NO_SHARED }
}

/// `kernels/convert.cu`
pub const FILE: KernelFile = KernelFile {
    name: "convert",
    text: include_str!("kernels/convert.cu"),
    variants: unit::by_storage,
    kernels: &[kernel("convert_f32"), kernel("convert_bf16"), kernel("convert_f16")],
};

/// The kernel from a file's type to a storage type.
pub fn function(from: Element, to: Element) -> Function {
    let name = match from {
        Element::F32 => "convert_f32",
        Element::Bf16 => "convert_bf16",
        Element::F16 => "convert_f16",
    };
    FILE.function(&[unit::storage(to)], name)
}

/// `out[i] = x[i]`, to the nearest.
#[derive(Debug, Clone, Copy)]
pub struct Convert {
    /// Of `x`.
    pub from: Element,
    /// Of the result: bf16 or f16.
    pub to: Element,
    /// `[n]`
    pub x: DevicePtr,
    /// `[n]`; another array than `x`.
    pub out: DevicePtr,
    /// Numbers, at least one.
    pub n: usize,
}

impl Convert {
    /// Starts it. Errors: [`Device::launch`]'s.
    pub fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        device.launch(&Launch {
            function: &function(self.from, self.to),
            grid: [self.n.div_ceil(256) as u32, 1, 1],
            block: 256,
            shared_bytes: 0,
            args: &[Arg::Ptr(self.x), Arg::Ptr(self.out), Arg::U64(self.n as u64)],
        })
    }
}
