//! A device that records its calls, and can fail calls and captures.

use super::Emulator;
use llaisys_core::cuda::device::{Device, DeviceFacts, DevicePtr, Event, GraphId, Launch, Product};
use llaisys_core::cuda::kernel_source::Function;
use llaisys_core::error::DeviceError;
use std::cell::{Cell, RefCell};

/// A recorded call. Captured work is not recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Upload(usize),
    /// A kernel, a product or a fill that is not in a graph.
    Launch,
    Replay,
    ReadBack,
    Collect,
}

/// Where a capture fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refuses {
    Nothing,
    /// A launch that the capture does not allow.
    Launch,
    /// The graph does not fit into memory.
    End,
}

#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) emulator: Emulator,
    pub(crate) refuses: Cell<Refuses>,
    /// The number of recorded calls before one call fails; `None`: no call fails.
    pub(crate) fails_in: Cell<Option<usize>>,
    calls: RefCell<Vec<Call>>,
    is_capturing: Cell<bool>,
}

impl Watched {
    pub(crate) fn new() -> Self {
        Self {
            emulator: Emulator::new(),
            refuses: Cell::new(Refuses::Nothing),
            fails_in: Cell::new(None),
            calls: RefCell::default(),
            is_capturing: Cell::new(false),
        }
    }

    /// Returns the calls since the last time.
    pub(crate) fn take_calls(&self) -> Vec<Call> {
        self.calls.take()
    }

    fn record(&self, call: Call) -> Result<(), DeviceError> {
        self.calls.borrow_mut().push(call);
        match self.fails_in.get() {
            Some(0) => {
                self.fails_in.set(None);
                Err(cuda(&format!("{call:?}"), "CUDA_ERROR_INVALID_VALUE (1)"))
            }
            n => {
                self.fails_in.set(n.map(|n| n - 1));
                Ok(())
            }
        }
    }

    fn launched(&self) -> Result<(), DeviceError> {
        if !self.is_capturing.get() {
            self.record(Call::Launch)?;
        } else if self.refuses.get() == Refuses::Launch {
            return Err(cuda("launch", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (900)"));
        }
        Ok(())
    }
}

fn cuda(op: &str, status: &str) -> DeviceError {
    DeviceError::Cuda { op: op.into(), status: status.into() }
}

impl Device for Watched {
    fn facts(&self) -> &DeviceFacts {
        self.emulator.facts()
    }

    fn free_bytes(&self) -> Result<usize, DeviceError> {
        self.emulator.free_bytes()
    }

    fn alloc(&self, what: &'static str, n_bytes: usize) -> Result<DevicePtr, DeviceError> {
        self.emulator.alloc(what, n_bytes)
    }

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), DeviceError> {
        self.record(Call::Upload(from.len()))?;
        self.emulator.upload(to, from)
    }

    fn download(&self, from: DevicePtr, to: &mut [u8]) -> Result<(), DeviceError> {
        self.emulator.download(from, to)
    }

    fn fill(&self, to: DevicePtr, value: u8, n_bytes: usize) -> Result<(), DeviceError> {
        self.launched()?;
        self.emulator.fill(to, value, n_bytes)
    }

    fn prepare(&self, functions: &[&Function]) -> Result<(), DeviceError> {
        self.emulator.prepare(functions)
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.launched()?;
        // SAFETY: the caller's promise.
        unsafe { self.emulator.launch(launch) }
    }

    fn product(&self, product: &Product) -> Result<(), DeviceError> {
        self.launched()?;
        self.emulator.product(product)
    }

    fn read_back(&self, from: DevicePtr, n_bytes: usize) -> Result<Event, DeviceError> {
        self.record(Call::ReadBack)?;
        self.emulator.read_back(from, n_bytes)
    }

    fn collect(&self, event: Event, to: &mut [u8]) -> Result<(), DeviceError> {
        self.record(Call::Collect)?;
        self.emulator.collect(event, to)
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.emulator.synchronize()
    }

    fn begin_capture(&self) -> Result<(), DeviceError> {
        self.emulator.begin_capture()?;
        self.is_capturing.set(true);
        Ok(())
    }

    fn end_capture(&self) -> Result<GraphId, DeviceError> {
        self.is_capturing.set(false);
        let graph = self.emulator.end_capture()?;
        if self.refuses.get() == Refuses::End {
            return Err(cuda("instantiate a graph", "CUDA_ERROR_OUT_OF_MEMORY (2)"));
        }
        Ok(graph)
    }

    fn replay(&self, graph: GraphId) -> Result<(), DeviceError> {
        self.record(Call::Replay)?;
        self.emulator.replay(graph)
    }
}
