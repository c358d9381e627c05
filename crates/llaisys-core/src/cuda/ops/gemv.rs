//! Products of few rows with a weight by our own kernel. Reading the weight bounds their time.

use crate::cuda::device::{Arg, Device, Element, Launch, Product};
use crate::cuda::kernel_source::{self, Function, Kernel, KernelSource};
use crate::error::DeviceError;

/// `kernels/gemv.cu`
pub static SOURCE: KernelSource = KernelSource {
    name: "gemv",
    text: include_str!("../kernels/gemv.cu"),
    variants: kernel_source::by_storage,
    kernels: &[
        Kernel { name: "gemv", max_threads: 256, max_registers: 128, max_shared_bytes: Kernel::NO_SHARED },
        Kernel {
            name: "gemv_f32",
            max_threads: 256,
            max_registers: 128,
            max_shared_bytes: Kernel::NO_SHARED,
        },
    ],
};

/// The most rows of the input.
pub const MAX_ROWS: usize = 8;
/// Rows of the weight that one block computes.
const BLOCK_ROWS: usize = 16;

/// Returns whether the kernel computes this product: up to [`MAX_ROWS`] rows, and columns in multiples of 8.
pub fn fits(product: &Product) -> bool {
    (1..=MAX_ROWS).contains(&product.m)
        && product.k.is_multiple_of(8)
        && product.element != Element::F32
        && (product.out_element == Element::F32 || product.out_element == product.element)
}

/// Returns the kernel for these types.
pub fn function(element: Element, out_element: Element) -> Function {
    let name = if out_element == Element::F32 { "gemv_f32" } else { "gemv" };
    SOURCE.function(&[kernel_source::storage(element)], name)
}

/// Launches a product that [`fits`]. Input and weight are aligned to 16 bytes.
///
/// Panics on a product that does not fit. Errors: an array ends too early; those of [`Device::launch`].
pub fn launch(device: &dyn Device, product: &Product) -> Result<(), DeviceError> {
    assert!(fits(product), "{product:?}");
    product.check()?;
    let launch = Launch {
        function: &function(product.element, product.out_element),
        grid: [product.n.div_ceil(BLOCK_ROWS) as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
        args: &[
            Arg::Ptr(product.input),
            Arg::Ptr(product.weight),
            Arg::Ptr(product.bias),
            Arg::Ptr(product.out),
            Arg::I32(product.m as i32),
            Arg::I32(product.n as i32),
            Arg::I32(product.k as i32),
        ],
    };
    // SAFETY: the kernel indexes by m, n and k only, and `check` accepted the arrays.
    unsafe { device.launch(&launch) }
}
