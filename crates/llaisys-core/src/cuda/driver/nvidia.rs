//! The [`Device`] implementation for a GPU, with the driver's API through cudarc.
//!
//! It has one context (the process's primary one), one stream, and memory that is freed with the device. It does not
//! use cudarc's own buffers, because they record events that break a capture (`docs/decisions/0013`). Every address
//! comes from [`Device::alloc`]. The emulator's tests verify that kernels stay inside their arrays.

use super::blas::{Blas, workspace_bytes};
use super::compile::Cubins;
use super::nccl::{Communicator, NcclRank};
use super::nvrtc::Source;
use super::pinned::Pinned;
use super::probe::{CAPABILITY_MIN, Cuda};
use super::status::{self, Severity, fail};
use crate::cuda::device::{Arg, Device, DeviceFacts, DevicePtr, Event, Exchange, GraphId, Launch, Product};
use crate::cuda::kernel_source::{Function, KernelModule};
use crate::error::DeviceError;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::ptr;

/// Pinned memory for uploads, and the largest piece of an upload. While one piece is copied, the next is filled.
const UPLOAD_BYTES: usize = 64 << 20;
const PIECE_BYTES: usize = 16 << 20;
/// Pinned memory for read-backs.
const READ_BACK_BYTES: usize = 8 << 20;
/// The most parameters of a kernel.
const ARGS_MAX: usize = 48;

/// Settings of an opened GPU.
#[derive(Debug, Clone)]
pub struct NvidiaSettings {
    /// Its number in the driver's order.
    pub ordinal: usize,
    /// The folder of the disk cache of machine code; `None`: no cache.
    pub cubin_folder: Option<PathBuf>,
    /// Threads that compile kernels.
    pub n_threads: usize,
    /// Wait after every launch, so that an error names the kernel that caused it. Slow.
    pub synchronous: bool,
}

/// A GPU with one stream. The thread that opened it uses it; any thread may drop it.
#[derive(Debug)]
pub struct Nvidia {
    facts: DeviceFacts,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    cubins: Cubins,
    n_threads: usize,
    synchronous: bool,
    modules: RefCell<HashMap<KernelModule, sys::CUmodule>>,
    functions: RefCell<HashMap<Function, sys::CUfunction>>,
    memory: RefCell<Vec<DevicePtr>>,
    /// `None` only while the value is opened or dropped.
    blas: RefCell<Option<Blas>>,
    uploads: Pinned<sys::CUevent>,
    read_backs: Pinned<(Event, sys::CUevent)>,
    n_events: Cell<Event>,
    free_events: RefCell<Vec<sys::CUevent>>,
    graphs: RefCell<Vec<sys::CUgraphExec>>,
    is_capturing: Cell<bool>,
    /// `None` for a device with a whole model.
    others: Option<Communicator>,
}

// SAFETY: the driver's objects belong to the process's context, not to a thread. One thread at a time has the value. A
// thread that did not open it can only drop it, and `drop` makes the context current on that thread.
unsafe impl Send for Nvidia {}

impl Nvidia {
    /// Opens a GPU.
    ///
    /// Errors: the GPU is too old or does not exist; CUDA failed before in this process; the driver's; too little
    /// memory.
    pub fn open(cuda: Cuda, settings: &NvidiaSettings) -> Result<Self, DeviceError> {
        let refuse = |status| DeviceError::Cuda { op: format!("open GPU {}", settings.ordinal), status };
        if let Some(lost) = status::lost() {
            return Err(refuse(lost));
        }
        let Some(info) = cuda.info.devices.get(settings.ordinal) else {
            return Err(refuse(format!("there are {} GPUs, numbered from 0", cuda.info.devices.len())));
        };
        if info.capability < CAPABILITY_MIN {
            return Err(refuse(format!("{} is older than compute capability 8.0", info.name)));
        }
        let cubins = Cubins::new(cuda.nvrtc, info.capability, settings.cubin_folder.as_deref())?;
        let device = result::device::get(settings.ordinal as i32).map_err(|e| fail("cuDeviceGet", e))?;
        // SAFETY: the driver just returned the device; `drop` releases the context.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = context.map_err(|e| fail("retain the primary context", e))?;
        // SAFETY: the context was just retained.
        unsafe { result::ctx::set_current(context) }.map_err(|e| fail("make the context current", e))?;
        let attribute = |attribute| {
            // SAFETY: the driver returned the device.
            let value = unsafe { result::device::get_attribute(device, attribute) };
            value.map(i32::unsigned_abs).map_err(|e| fail("cuDeviceGetAttribute", e))
        };
        let facts = DeviceFacts {
            name: info.name.clone(),
            capability: info.capability,
            n_sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            max_shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            total_bytes: info.total_bytes,
        };
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        let opened = Self {
            facts,
            device,
            context,
            stream: stream.map_err(|e| fail("create a stream", e))?,
            cubins,
            n_threads: settings.n_threads,
            synchronous: settings.synchronous,
            modules: RefCell::default(),
            functions: RefCell::default(),
            memory: RefCell::default(),
            blas: RefCell::new(None),
            // The CPU writes it in order and never reads it.
            uploads: Pinned::new(UPLOAD_BYTES, sys::CU_MEMHOSTALLOC_WRITECOMBINED)?,
            // The CPU reads it, so it is cached.
            read_backs: Pinned::new(READ_BACK_BYTES, 0)?,
            n_events: Cell::new(0),
            free_events: RefCell::default(),
            graphs: RefCell::default(),
            is_capturing: Cell::new(false),
            others: None,
        };
        let n_bytes = workspace_bytes(opened.facts.capability);
        let workspace = opened.alloc("the workspace of products", n_bytes)?;
        *opened.blas.borrow_mut() = Some(Blas::new(workspace, n_bytes)?);
        Ok(opened)
    }

    /// Joins a group as the device of one rank. Returns when every rank has joined.
    ///
    /// Errors: another rank did not join; NCCL's.
    pub fn join(&mut self, member: NcclRank) -> Result<(), DeviceError> {
        self.others = Some(member.join()?);
        Ok(())
    }

    /// Returns the number of modules that were compiled because the disk cache did not have them.
    pub fn n_compiled(&self) -> usize {
        self.cubins.n_compiled()
    }

    /// Refuses a call during a capture that the capture must not contain. The driver would record a copy in the graph,
    /// with the contents of the staging memory at each replay.
    fn uncaptured(&self, op: &str) -> Result<(), DeviceError> {
        if self.is_capturing.get() {
            let status = "not allowed in a capture".to_owned();
            return Err(DeviceError::Cuda { op: op.to_owned(), status });
        }
        Ok(())
    }

    /// Loads the machine code of a module and all its functions, so that none is loaded during a capture.
    fn load(&self, module: &KernelModule, cubin: &[u8]) -> Result<(), DeviceError> {
        self.uncaptured("load a kernel")?;
        let fails = |e| fail(format!("load {module} for {}", self.facts.name), e);
        // SAFETY: the image is complete: the compiler returned it, or the disk cache checked its digest.
        let loaded = unsafe { result::module::load_data(cubin.as_ptr().cast()) }.map_err(fails)?;
        self.modules.borrow_mut().insert(module.clone(), loaded);
        for kernel in module.source.kernels {
            let name = CString::new(kernel.name).expect("names of kernels have no zero");
            // SAFETY: the module was just loaded and stays loaded as long as the device.
            let function = unsafe { result::module::get_function(loaded, name) }.map_err(fails)?;
            use sys::CUfunction_attribute as Of;
            // SAFETY: the function belongs to the module above.
            unsafe {
                sys::cuFuncLoad(function).result().map_err(fails)?;
                let of_text = Of::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
                let used = result::function::get_function_attribute(function, of_text).map_err(fails)?;
                let left = self.facts.max_shared_bytes as i32 - used;
                let dynamic = Of::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                result::function::set_function_attribute(function, dynamic, left).map_err(fails)?;
            }
            let key = Function { module: module.clone(), name: kernel.name };
            self.functions.borrow_mut().insert(key, function);
        }
        Ok(())
    }

    fn event(&self) -> Result<sys::CUevent, DeviceError> {
        let free = self.free_events.borrow_mut().pop();
        let new = || result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        free.map_or_else(new, Ok).map_err(|e| fail("create an event", e))
    }

    /// Records an event after all work that is in the stream.
    fn record(&self) -> Result<sys::CUevent, DeviceError> {
        let event = self.event()?;
        // SAFETY: event and stream belong to this device.
        unsafe { result::event::record(event, self.stream) }.map_err(|e| fail("record an event", e))?;
        Ok(event)
    }

    /// Waits for an event, and makes it available for reuse.
    fn wait(&self, event: sys::CUevent, what: &str) -> Result<(), DeviceError> {
        // SAFETY: `record` recorded the event.
        let query = || unsafe { result::event::query(event) };
        // SAFETY: as above.
        let waited = self.wait_with(what, query, || unsafe { result::event::synchronize(event) });
        self.free_events.borrow_mut().push(event);
        waited
    }

    fn upload_piece(&self, to: DevicePtr, from: &[u8]) -> Result<(), DeviceError> {
        let start = loop {
            let start = self.uploads.ring.borrow().find_free(from.len());
            if let Some(start) = start {
                break start;
            }
            let oldest = self.uploads.ring.borrow_mut().free_oldest();
            self.wait(oldest.expect("a full ring has an oldest piece"), "an upload")?;
        };
        // SAFETY: the ring has just returned this range as free, so no running upload uses it.
        let staged = unsafe { self.uploads.slice(start, from.len()) };
        staged.copy_from_slice(from);
        let address = to.array("upload", staged.len())?;
        // SAFETY: the ring keeps the piece until the event after the copy; `array` checked the destination.
        unsafe { result::memcpy_htod_async(address, staged, self.stream) }.map_err(|e| fail("upload", e))?;
        let event = self.record()?;
        self.uploads.ring.borrow_mut().allocate(start, from.len(), event);
        Ok(())
    }
}

impl Device for Nvidia {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn free_bytes(&self) -> Result<usize, DeviceError> {
        result::mem_get_info().map(|(free, _)| free).map_err(|e| fail("query free memory", e))
    }

    fn alloc(&self, what: &'static str, n_bytes: usize) -> Result<DevicePtr, DeviceError> {
        self.uncaptured("allocate")?;
        // SAFETY: the host never reads the memory; device work that reads it first gets some bytes, which are a value.
        let memory = unsafe { result::malloc_sync(n_bytes.max(1)) };
        match memory {
            Ok(address) => {
                // SAFETY: the driver has just allocated these bytes, and they are freed with the device.
                let at = unsafe { DevicePtr::from_raw(address, n_bytes) };
                self.memory.borrow_mut().push(at);
                Ok(at)
            }
            Err(e) if status::severity(e.0 as u32) == Severity::OutOfMemory => {
                let (free, total) = result::mem_get_info().unwrap_or((0, self.facts.total_bytes));
                let status = status::out_of_memory(n_bytes, free, total);
                Err(DeviceError::Cuda { op: format!("allocate {what}"), status })
            }
            Err(e) => Err(fail(format!("allocate {what}"), e)),
        }
    }

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), DeviceError> {
        self.uncaptured("upload")?;
        let pieces = from.chunks(PIECE_BYTES).enumerate();
        pieces.into_iter().try_for_each(|(i, piece)| self.upload_piece(to.at(i * PIECE_BYTES), piece))
    }

    fn download(&self, from: DevicePtr, to: &mut [u8]) -> Result<(), DeviceError> {
        self.uncaptured("download")?;
        let address = from.array("download", to.len())?;
        // SAFETY: `to` outlives the copy, because `synchronize` waits for it; `array` checked the source.
        let copied = unsafe { result::memcpy_dtoh_async(to, address, self.stream) };
        copied.map_err(|e| fail("download", e))?;
        self.synchronize()
    }

    fn fill(&self, to: DevicePtr, value: u8, n_bytes: usize) -> Result<(), DeviceError> {
        let address = to.array("fill", n_bytes)?;
        // SAFETY: `array` checked that the allocation has `n_bytes` bytes there.
        unsafe { result::memset_d8_async(address, value, n_bytes, self.stream) }.map_err(|e| fail("fill", e))
    }

    fn prepare(&self, functions: &[&Function]) -> Result<(), DeviceError> {
        let mut missing: Vec<&KernelModule> = Vec::new();
        for Function { module, .. } in functions {
            if !missing.contains(&module) && !self.modules.borrow().contains_key(module) {
                missing.push(module);
            }
        }
        let source = |module: &&KernelModule| Source {
            name: module.to_string(),
            text: module.source.full_text(),
            options: module.constants.iter().map(|(name, value)| format!("-D{name}={value}")).collect(),
        };
        let sources: Vec<_> = missing.iter().map(source).collect();
        let cubins = self.cubins.get(&sources, self.n_threads)?;
        missing.iter().zip(cubins).try_for_each(|(module, cubin)| self.load(module, &cubin))
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        if !self.functions.borrow().contains_key(launch.function) {
            self.prepare(&[launch.function])?;
        }
        let function = self.functions.borrow()[launch.function];
        let mut values = [0_u64; ARGS_MAX];
        for (value, arg) in values.iter_mut().zip(launch.args) {
            *value = bits(*arg);
        }
        let mut args = values.each_mut().map(|value| ptr::from_mut(value).cast::<c_void>());
        let [x, y, z] = launch.grid;
        // SAFETY: the caller promises the kernel's parameters, in its order, and that the kernel stays inside the
        // arrays, which live as long as the device. The driver copies the values during the call.
        let started = unsafe {
            let grid = (x, y, z);
            let block = (launch.block, 1, 1);
            let args = &mut args[..launch.args.len()];
            result::launch_kernel(function, grid, block, launch.shared_bytes, self.stream, args)
        };
        started.map_err(|e| fail(status::launch_name(launch.function), e))?;
        if self.synchronous { self.finish(&status::launch_name(launch.function)) } else { Ok(()) }
    }

    fn product(&self, product: &Product) -> Result<(), DeviceError> {
        product.check()?;
        let mut blas = self.blas.borrow_mut();
        let blas = blas.as_mut().expect("`open` created it");
        // SAFETY: the stream and the memory belong to this device; `check` accepted the arrays.
        unsafe { blas.start(product, self.stream) }?;
        if self.synchronous { self.finish("a product") } else { Ok(()) }
    }

    fn rank(&self) -> usize {
        self.others.as_ref().map_or(0, Communicator::rank)
    }

    fn world(&self) -> usize {
        self.others.as_ref().map_or(1, Communicator::world)
    }

    fn exchange(&self, exchange: &Exchange) -> Result<(), DeviceError> {
        let others = self.others.as_ref().ok_or_else(|| exchange.alone())?;
        exchange.check(others.world())?;
        // SAFETY: the stream and the memory belong to this device; `check` accepted the arrays.
        unsafe { others.start(exchange, self.stream.cast()) }?;
        if self.synchronous { self.finish(&exchange.to_string()) } else { Ok(()) }
    }

    fn abort(&self) {
        if let Some(others) = &self.others {
            others.abort();
        }
    }

    fn read_back(&self, from: DevicePtr, n_bytes: usize) -> Result<Event, DeviceError> {
        self.uncaptured("read back")?;
        let Some(start) = self.read_backs.ring.borrow().find_free(n_bytes) else {
            let status =
                format!("{n_bytes} bytes and the uncollected read-backs do not fit into {READ_BACK_BYTES}");
            return Err(DeviceError::Cuda { op: "read back".to_owned(), status });
        };
        // SAFETY: the ring has just returned this range as free, so no uncollected read-back uses it.
        let to = unsafe { self.read_backs.slice(start, n_bytes) };
        let address = from.array("read back", n_bytes)?;
        // SAFETY: the ring keeps the piece until it is collected, after the event; `array` checked the source.
        unsafe { result::memcpy_dtoh_async(to, address, self.stream) }.map_err(|e| fail("read back", e))?;
        let number = self.n_events.get() + 1;
        self.n_events.set(number);
        self.read_backs.ring.borrow_mut().allocate(start, n_bytes, (number, self.record()?));
        Ok(number)
    }

    fn collect(&self, event: Event, to: &mut [u8]) -> Result<(), DeviceError> {
        let (start, recorded) = {
            let ring = self.read_backs.ring.borrow();
            let (start, &(number, recorded)) = ring.oldest().expect("something was read back");
            assert_eq!(number, event, "read-backs are collected in their order");
            (start, recorded)
        };
        let waited = self.wait(recorded, "a step");
        // SAFETY: the copy to this piece is done, because its event was waited for, and the ring has not freed it yet.
        let copied = waited.map(|()| to.copy_from_slice(unsafe { self.read_backs.slice(start, to.len()) }));
        // Also after an error: `wait` has made the event available for reuse.
        self.read_backs.ring.borrow_mut().free_oldest();
        copied
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.uncaptured("synchronize")?;
        self.finish("wait for the device")
    }

    fn begin_capture(&self) -> Result<(), DeviceError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream belongs to this device and is not the default one.
        unsafe { result::stream::begin_capture(self.stream, mode) }
            .map_err(|e| fail("begin a capture", e))?;
        self.is_capturing.set(true);
        Ok(())
    }

    fn end_capture(&self) -> Result<GraphId, DeviceError> {
        self.is_capturing.set(false);
        // SAFETY: the stream belongs to this device.
        let graph = unsafe { result::stream::end_capture(self.stream) };
        let graph = graph.map_err(|e| fail("end a capture", e))?;
        // SAFETY: the graph was just created; the executable graph does not need it after its creation.
        let made = unsafe {
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            made
        };
        let graph = made.map_err(|e| fail("instantiate a graph", e))?;
        self.graphs.borrow_mut().push(graph);
        // SAFETY: graph and stream belong to this device.
        unsafe { result::graph::upload(graph, self.stream) }.map_err(|e| fail("upload a graph", e))?;
        Ok((self.graphs.borrow().len() - 1) as GraphId)
    }

    fn replay(&self, graph: GraphId) -> Result<(), DeviceError> {
        let graph = self.graphs.borrow()[graph as usize];
        // SAFETY: graph and stream belong to this device; the memory that the graph uses lives as long as the device.
        unsafe { result::graph::launch(graph, self.stream) }.map_err(|e| fail("launch a graph", e))?;
        if self.synchronous { self.finish("a graph") } else { Ok(()) }
    }
}

impl Nvidia {
    /// Waits for all work. An error is that of `what` or of earlier work.
    fn finish(&self, what: &str) -> Result<(), DeviceError> {
        // SAFETY: the stream belongs to this device.
        let query = || unsafe { sys::cuStreamQuery(self.stream) }.result();
        // SAFETY: as above.
        self.wait_with(what, query, || unsafe { result::stream::synchronize(self.stream) })
    }

    /// Waits by `synchronize`. On one rank of several it polls `query`, so that it does not wait forever for a lost
    /// rank.
    fn wait_with(
        &self,
        what: &str,
        query: impl Fn() -> Result<(), DriverError>,
        synchronize: impl Fn() -> Result<(), DriverError>,
    ) -> Result<(), DeviceError> {
        let Some(others) = &self.others else { return synchronize().map_err(|e| fail(what, e)) };
        others.wait(|| match query() {
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            other => other.map(|()| true).map_err(|e| fail(what, e)),
        })
    }
}

impl Drop for Nvidia {
    /// Destroys everything in the reverse order of its creation. After a fatal error every call fails, which is
    /// ignored.
    fn drop(&mut self) {
        // SAFETY: `open` retained the context, which is released below.
        let _ = unsafe { result::ctx::set_current(self.context) };
        let _ = self.finish("close");
        self.others.take();
        self.blas.take();
        let mut events = self.free_events.take();
        while let Some(event) = self.uploads.ring.borrow_mut().free_oldest() {
            events.push(event);
        }
        while let Some((_, event)) = self.read_backs.ring.borrow_mut().free_oldest() {
            events.push(event);
        }
        // SAFETY: this device created each, and nothing uses them any more: `finish` waited for all work.
        unsafe {
            for graph in self.graphs.take() {
                let _ = result::graph::exec_destroy(graph);
            }
            for event in events {
                let _ = result::event::destroy(event);
            }
            for module in self.modules.take().into_values() {
                let _ = result::module::unload(module);
            }
            for memory in self.memory.take() {
                let _ = result::free_sync(memory.address());
            }
            self.uploads.free();
            self.read_backs.free();
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// Returns a parameter whose bytes come first in the word: every host of a GPU is little-endian.
fn bits(arg: Arg) -> u64 {
    match arg {
        Arg::Ptr(pointer) => pointer.address(),
        Arg::I32(value) => u64::from(value as u32),
        Arg::U32(value) => u64::from(value),
        Arg::U64(value) => value,
        Arg::F32(value) => u64::from(value.to_bits()),
    }
}
