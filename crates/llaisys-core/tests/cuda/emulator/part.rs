//! A device that passes on only the uploads of a pass, or only its launches, so that a pass can be captured.

use llaisys_core::cuda::device::{Device, DeviceFacts, DevicePtr, Event, GraphId, Launch, Product};
use llaisys_core::cuda::kernel_source::Function;
use llaisys_core::error::DeviceError;

/// A device that passes on only a part of the calls.
#[derive(Debug)]
pub(crate) struct Part<'a> {
    pub(crate) device: &'a dyn Device,
    /// Pass on uploads; otherwise launches, products and fills.
    pub(crate) uploads: bool,
}

// SAFETY: the tests never move a part to another thread: it stays on the stack of the thread whose device it borrows.
unsafe impl Send for Part<'_> {}

impl Device for Part<'_> {
    fn facts(&self) -> &DeviceFacts {
        self.device.facts()
    }

    fn free_bytes(&self) -> Result<usize, DeviceError> {
        self.device.free_bytes()
    }

    fn alloc(&self, what: &'static str, n_bytes: usize) -> Result<DevicePtr, DeviceError> {
        panic!("a step allocates {n_bytes} bytes of {what}")
    }

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), DeviceError> {
        if self.uploads { self.device.upload(to, from) } else { Ok(()) }
    }

    fn download(&self, from: DevicePtr, _: &mut [u8]) -> Result<(), DeviceError> {
        panic!("a step reads {from:?}")
    }

    fn fill(&self, to: DevicePtr, value: u8, n_bytes: usize) -> Result<(), DeviceError> {
        if self.uploads { Ok(()) } else { self.device.fill(to, value, n_bytes) }
    }

    fn prepare(&self, functions: &[&Function]) -> Result<(), DeviceError> {
        panic!("a step compiles {functions:?}")
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        if self.uploads { Ok(()) } else { unsafe { self.device.launch(launch) } }
    }

    fn product(&self, product: &Product) -> Result<(), DeviceError> {
        if self.uploads { Ok(()) } else { self.device.product(product) }
    }

    fn read_back(&self, from: DevicePtr, _: usize) -> Result<Event, DeviceError> {
        panic!("a step reads {from:?}")
    }

    fn collect(&self, event: Event, _: &mut [u8]) -> Result<(), DeviceError> {
        panic!("a step waits for {event}")
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        panic!("a step waits")
    }

    fn begin_capture(&self) -> Result<(), DeviceError> {
        self.device.begin_capture()
    }

    fn end_capture(&self) -> Result<GraphId, DeviceError> {
        self.device.end_capture()
    }

    fn replay(&self, graph: GraphId) -> Result<(), DeviceError> {
        self.device.replay(graph)
    }
}
