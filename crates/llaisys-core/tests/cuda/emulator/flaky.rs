//! An emulator whose memory size is set, and one launch of which can fail.

use super::Emulator;
use llaisys_core::collective::LocalRank;
use llaisys_core::cuda::device::{Device, DeviceFacts, DevicePtr, Event, Exchange, GraphId, Launch, Product};
use llaisys_core::cuda::kernel_source::Function;
use llaisys_core::error::DeviceError;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// The number of launches until one fails; negative: none fails.
#[derive(Debug, Clone)]
pub(crate) struct Fuse(Arc<AtomicI64>);

impl Fuse {
    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicI64::new(-1)))
    }

    /// Makes the `n`th launch from now fail, and no other.
    pub(crate) fn fail(&self, n: i64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// Returns the number of launches until one fails.
    pub(crate) fn left(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// An emulator with a fuse.
#[derive(Debug)]
pub(crate) struct Flaky {
    inner: Emulator,
    facts: DeviceFacts,
    fuse: Fuse,
}

impl Flaky {
    pub(crate) fn new(fuse: &Fuse, total_bytes: usize) -> Self {
        let inner = Emulator::new();
        let facts = DeviceFacts { total_bytes, ..inner.facts().clone() };
        Self { inner, facts, fuse: fuse.clone() }
    }

    /// Returns the device of a rank.
    pub(crate) fn joined(fuse: &Fuse, others: LocalRank) -> Self {
        let inner = Emulator::joined(others);
        Self { facts: inner.facts().clone(), inner, fuse: fuse.clone() }
    }
}

impl Device for Flaky {
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        if self.fuse.0.fetch_sub(1, Ordering::Relaxed) == 1 {
            let op = format!("launch {}", launch.function.name);
            return Err(DeviceError::Cuda { op, status: "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701)".into() });
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.launch(launch) }
    }

    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn free_bytes(&self) -> Result<usize, DeviceError> {
        Ok(self.facts.total_bytes)
    }

    fn alloc(&self, what: &'static str, n_bytes: usize) -> Result<DevicePtr, DeviceError> {
        self.inner.alloc(what, n_bytes)
    }

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), DeviceError> {
        self.inner.upload(to, from)
    }

    fn download(&self, from: DevicePtr, to: &mut [u8]) -> Result<(), DeviceError> {
        self.inner.download(from, to)
    }

    fn fill(&self, to: DevicePtr, value: u8, n_bytes: usize) -> Result<(), DeviceError> {
        self.inner.fill(to, value, n_bytes)
    }

    fn prepare(&self, functions: &[&Function]) -> Result<(), DeviceError> {
        self.inner.prepare(functions)
    }

    fn product(&self, product: &Product) -> Result<(), DeviceError> {
        self.inner.product(product)
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn exchange(&self, exchange: &Exchange) -> Result<(), DeviceError> {
        self.inner.exchange(exchange)
    }

    fn abort(&self) {
        self.inner.abort();
    }

    fn read_back(&self, from: DevicePtr, n_bytes: usize) -> Result<Event, DeviceError> {
        self.inner.read_back(from, n_bytes)
    }

    fn collect(&self, event: Event, to: &mut [u8]) -> Result<(), DeviceError> {
        self.inner.collect(event, to)
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.inner.synchronize()
    }

    fn begin_capture(&self) -> Result<(), DeviceError> {
        self.inner.begin_capture()
    }

    fn end_capture(&self) -> Result<GraphId, DeviceError> {
        self.inner.end_capture()
    }

    fn replay(&self, graph: GraphId) -> Result<(), DeviceError> {
        self.inner.replay(graph)
    }
}
