//! `gate`: SwiGLU or GeGLU. Definition: `ops/reference/{swiglu,geglu}.rs`.

use crate::cuda::device::{Arg, Device, DevicePtr, Element, Launch};
use crate::cuda::kernel_source::{self, Function, Kernel, KernelSource};
use crate::error::DeviceError;
use crate::ops::Gate as GateKind;

/// `kernels/gate.cu`
pub static SOURCE: KernelSource = KernelSource {
    name: "gate",
    text: include_str!("../kernels/gate.cu"),
    variants,
    kernels: &[Kernel {
        name: "gate",
        max_threads: 256,
        max_registers: 40,
        max_shared_bytes: Kernel::NO_SHARED,
    }],
};

fn variants() -> Vec<Vec<(&'static str, u32)>> {
    let kinds = |element| [GateKind::Silu, GateKind::GeluTanh].map(|kind| constants(element, kind).to_vec());
    [Element::Bf16, Element::F16].into_iter().flat_map(kinds).collect()
}

fn constants(element: Element, kind: GateKind) -> [(&'static str, u32); 2] {
    let number = match kind {
        GateKind::Silu => 0,
        GateKind::GeluTanh => 1,
        GateKind::ClampedSilu(_) => unreachable!("models with it run on the CPU"),
        GateKind::Gelu => unreachable!("only encoders have it, which run on the CPU"),
    };
    [kernel_source::storage(element), ("LL_GATE", number)]
}

/// Returns the kernel for a storage type and an activation.
pub fn function(element: Element, kind: GateKind) -> Function {
    SOURCE.function(&constants(element, kind), "gate")
}

/// `out = f(gate) * up`.
#[derive(Debug, Clone, Copy)]
pub struct Gate {
    /// Type of the input and the result.
    pub element: Element,
    /// The activation f.
    pub kind: GateKind,
    /// `[n_rows, 2 width]`: gate, then up.
    pub gate_up: DevicePtr,
    /// `[n_rows, width]`
    pub out: DevicePtr,
    /// Rows, at least one.
    pub n_rows: usize,
    /// Elements of a row of the result: a multiple of 8.
    pub width: usize,
}

impl Gate {
    /// Launches the kernel.
    ///
    /// Panics if `width` is not a multiple of 8. Errors: an array ends too early; those of [`Device::launch`].
    pub fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        assert!(self.width.is_multiple_of(8), "rows of {} elements", self.width);
        let n_bytes = self.element.n_bytes(self.n_rows * self.width);
        self.gate_up.array(SOURCE.name, 2 * n_bytes)?;
        self.out.array(SOURCE.name, n_bytes)?;
        let launch = Launch {
            function: &function(self.element, self.kind),
            grid: [self.n_rows as u32, self.width.div_ceil(256 * 8) as u32, 1],
            block: 256,
            shared_bytes: 0,
            args: &[Arg::Ptr(self.gate_up), Arg::Ptr(self.out), Arg::I32(self.width as i32)],
        };
        // SAFETY: the kernel indexes by row and column only, and `array` checked both arrays for all rows.
        unsafe { device.launch(&launch) }
    }
}
