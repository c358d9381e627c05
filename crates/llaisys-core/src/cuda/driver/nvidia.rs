//! The [`Device`] that is a GPU, on the driver's API through cudarc.
//!
//! One context (the process's primary one), one stream, memory that is freed with the device: so nothing here needs
//! cudarc's own ownership, whose buffers record events that break a capture (`docs/decisions/0013`). Every address
//! comes from [`Device::alloc`]; that kernels stay within what they were given is proved by the emulator.

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

/// Pinned memory for uploads, and the largest piece of one: while a piece is copied, the next is filled.
const UPLOAD_BYTES: usize = 64 << 20;
const PIECE_BYTES: usize = 16 << 20;
/// Pinned memory for what is read back.
const READ_BACK_BYTES: usize = 8 << 20;
/// Parameters of a kernel.
const ARGS_MAX: usize = 48;

/// How a GPU is opened.
#[derive(Debug, Clone)]
pub struct NvidiaSettings {
    /// Its number in the driver's order.
    pub ordinal: usize,
    /// Where machine code is kept; None: nowhere.
    pub cubin_folder: Option<PathBuf>,
    /// Threads that compile.
    pub n_threads: usize,
    /// Waits after every launch, so that an error names the kernel that made it. Slow.
    pub synchronous: bool,
}

/// A GPU with one order of work. Used by the thread that opened it; any may drop it.
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
    /// None only while it is dropped.
    blas: RefCell<Option<Blas>>,
    uploads: Pinned<sys::CUevent>,
    read_backs: Pinned<(Event, sys::CUevent)>,
    n_events: Cell<Event>,
    free_events: RefCell<Vec<sys::CUevent>>,
    graphs: RefCell<Vec<sys::CUgraphExec>>,
    is_capturing: Cell<bool>,
    /// None of a device with a whole model.
    others: Option<Communicator>,
}

// SAFETY: what the pointers name belongs to the driver's context of the process, to no thread. One thread at a time has
// the value; another than the one that opened it can only drop it, and `drop` makes the context current there.
unsafe impl Send for Nvidia {}

impl Nvidia {
    /// Opens a GPU of a usable CUDA.
    ///
    /// Errors: it is too old or not there; CUDA failed before in this process; the driver's, no memory.
    pub fn open(cuda: Cuda, settings: &NvidiaSettings) -> Result<Self, DeviceError> {
        let refuse = |status| DeviceError::Cuda { op: format!("open GPU {}", settings.ordinal), status };
        if let Some(lost) = status::lost() {
            return Err(refuse(lost));
        }
        let Some(info) = cuda.info.devices.get(settings.ordinal) else {
            return Err(refuse(format!("there are {}", cuda.info.devices.len())));
        };
        if info.capability < CAPABILITY_MIN {
            return Err(refuse(format!("{} is older than compute capability 8.0", info.name)));
        }
        let cubins = Cubins::new(cuda.nvrtc, info.capability, settings.cubin_folder.as_deref())?;
        let device = result::device::get(settings.ordinal as i32).map_err(|e| fail("cuDeviceGet", e))?;
        // SAFETY: the device was just returned by the driver; the context is released when the value goes.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = context.map_err(|e| fail("retain the primary context", e))?;
        // SAFETY: the context was just retained.
        unsafe { result::ctx::set_current(context) }.map_err(|e| fail("make the context current", e))?;
        let attribute = |attribute| {
            // SAFETY: the device was returned by the driver.
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
            // Written in order and never read by the CPU.
            uploads: Pinned::new(UPLOAD_BYTES, sys::CU_MEMHOSTALLOC_WRITECOMBINED)?,
            // Read by the CPU: cached.
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

    /// Makes this the device of a rank; returns when every rank's has come.
    ///
    /// Errors: another rank did not come; NCCL's.
    pub fn join(&mut self, member: NcclRank) -> Result<(), DeviceError> {
        self.others = Some(member.join()?);
        Ok(())
    }

    /// Returns how many modules were compiled because the disk cache did not have them.
    pub fn n_compiled(&self) -> usize {
        self.cubins.n_compiled()
    }

    /// Refuses what a capture would note, or be ended by: the driver would take a copy into the graph, with the staging
    /// memory as it is at each replay.
    fn uncaptured(&self, op: &str) -> Result<(), DeviceError> {
        if self.is_capturing.get() {
            let status = "not allowed in a capture".to_owned();
            return Err(DeviceError::Cuda { op: op.to_owned(), status });
        }
        Ok(())
    }

    /// Loads the machine code of a module, and its functions, so that none is loaded in a capture.
    fn load(&self, module: &KernelModule, cubin: &[u8]) -> Result<(), DeviceError> {
        self.uncaptured("load a kernel")?;
        let fails = |e| fail(format!("load {module} for {}", self.facts.name), e);
        // SAFETY: the image is whole: it came from the compiler, or from the cache that checks it.
        let loaded = unsafe { result::module::load_data(cubin.as_ptr().cast()) }.map_err(fails)?;
        self.modules.borrow_mut().insert(module.clone(), loaded);
        for kernel in module.source.kernels {
            let name = CString::new(kernel.name).expect("names of kernels have no zero");
            // SAFETY: the module was just loaded and stays so as long as the device.
            let function = unsafe { result::module::get_function(loaded, name) }.map_err(fails)?;
            use sys::CUfunction_attribute as Of;
            // SAFETY: the function belongs to the module above.
            unsafe {
                sys::cuFuncLoad(function).result().map_err(fails)?;
                let of_text = Of::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
                let used = result::function::get_function_attribute(function, of_text).map_err(fails)?;
                let room = self.facts.max_shared_bytes as i32 - used;
                let dynamic = Of::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                result::function::set_function_attribute(function, dynamic, room).map_err(fails)?;
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

    /// Notes where the stream is now.
    fn record(&self) -> Result<sys::CUevent, DeviceError> {
        let event = self.event()?;
        // SAFETY: event and stream are this device's.
        unsafe { result::event::record(event, self.stream) }.map_err(|e| fail("record an event", e))?;
        Ok(event)
    }

    /// Waits for an event, which may then be used again.
    fn wait(&self, event: sys::CUevent, what: &str) -> Result<(), DeviceError> {
        // SAFETY: the event was recorded by `record`.
        let query = || unsafe { result::event::query(event) };
        // SAFETY: as above.
        let waited = self.wait_with(what, query, || unsafe { result::event::synchronize(event) });
        self.free_events.borrow_mut().push(event);
        waited
    }

    fn upload_piece(&self, to: DevicePtr, from: &[u8]) -> Result<(), DeviceError> {
        let place = loop {
            let place = self.uploads.ring.borrow().place(from.len());
            if let Some(place) = place {
                break place;
            }
            let oldest = self.uploads.ring.borrow_mut().take_back();
            self.wait(oldest.expect("a full ring has an oldest piece"), "an upload")?;
        };
        // SAFETY: the ring has just said that no upload under way has this place.
        let staged = unsafe { self.uploads.slice(place, from.len()) };
        staged.copy_from_slice(from);
        let address = to.array("upload", staged.len())?;
        // SAFETY: the piece stays as it is until the event after the copy; `array` checked the place.
        unsafe { result::memcpy_htod_async(address, staged, self.stream) }.map_err(|e| fail("upload", e))?;
        let event = self.record()?;
        self.uploads.ring.borrow_mut().lend(place, from.len(), event);
        Ok(())
    }
}

impl Device for Nvidia {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn free_bytes(&self) -> Result<usize, DeviceError> {
        result::mem_get_info().map(|(free, _)| free).map_err(|e| fail("ask for free memory", e))
    }

    fn alloc(&self, what: &'static str, n_bytes: usize) -> Result<DevicePtr, DeviceError> {
        self.uncaptured("allocate")?;
        // SAFETY: the memory is only given to kernels and copies that write before they read, or fill it.
        let memory = unsafe { result::malloc_sync(n_bytes.max(1)) };
        match memory {
            Ok(address) => {
                // SAFETY: the driver has just given these bytes, and they are freed with the device.
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
        // SAFETY: `to` outlives the copy, which is waited for; `array` checked the place.
        let copied = unsafe { result::memcpy_dtoh_async(to, address, self.stream) };
        copied.map_err(|e| fail("download", e))?;
        self.synchronize()
    }

    fn fill(&self, to: DevicePtr, value: u8, n_bytes: usize) -> Result<(), DeviceError> {
        let address = to.array("fill", n_bytes)?;
        // SAFETY: `array` checked that `n_bytes` bytes are there.
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

    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
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
        // SAFETY: there is a value for each parameter of the kernel, in its order and of its size (the emulator
        // calls the same text with the same values); the arrays behind pointers live as long as the device.
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
        let blas = blas.as_mut().expect("open made it");
        // SAFETY: the stream is this device's, whose memory lives as long as it does; `check` accepted the arrays.
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
        // SAFETY: the stream is this device's, whose memory lives as long as it does; `check` accepted the arrays.
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
        let Some(place) = self.read_backs.ring.borrow().place(n_bytes) else {
            let status =
                format!("{n_bytes} bytes, and what waits to be collected, are over {READ_BACK_BYTES}");
            return Err(DeviceError::Cuda { op: "read back".to_owned(), status });
        };
        // SAFETY: the ring has just said that nothing that waits to be collected has this place.
        let to = unsafe { self.read_backs.slice(place, n_bytes) };
        let address = from.array("read back", n_bytes)?;
        // SAFETY: the piece is lent until it is collected, after the event; `array` checked the place.
        unsafe { result::memcpy_dtoh_async(to, address, self.stream) }.map_err(|e| fail("read back", e))?;
        let number = self.n_events.get() + 1;
        self.n_events.set(number);
        self.read_backs.ring.borrow_mut().lend(place, n_bytes, (number, self.record()?));
        Ok(number)
    }

    fn collect(&self, event: Event, to: &mut [u8]) -> Result<(), DeviceError> {
        let (place, recorded) = {
            let ring = self.read_backs.ring.borrow();
            let (place, &(number, recorded)) = ring.oldest().expect("something was read back");
            assert_eq!(number, event, "read-backs are collected in their order");
            (place, recorded)
        };
        let waited = self.wait(recorded, "a step");
        // SAFETY: the copy to this piece is done (its event has come), and the ring still holds the piece for it.
        let copied = waited.map(|()| to.copy_from_slice(unsafe { self.read_backs.slice(place, to.len()) }));
        // The event is free again, whatever came of it.
        self.read_backs.ring.borrow_mut().take_back();
        copied
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.uncaptured("synchronize")?;
        self.finish("wait for the device")
    }

    fn begin_capture(&self) -> Result<(), DeviceError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is this device's, and not the default one.
        unsafe { result::stream::begin_capture(self.stream, mode) }
            .map_err(|e| fail("begin a capture", e))?;
        self.is_capturing.set(true);
        Ok(())
    }

    fn end_capture(&self) -> Result<GraphId, DeviceError> {
        self.is_capturing.set(false);
        // SAFETY: the stream is this device's.
        let graph = unsafe { result::stream::end_capture(self.stream) };
        let graph = graph.map_err(|e| fail("end a capture", e))?;
        // SAFETY: the graph was just made; the executable one does not need it any more.
        let made = unsafe {
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            made
        };
        let graph = made.map_err(|e| fail("instantiate a graph", e))?;
        self.graphs.borrow_mut().push(graph);
        // SAFETY: graph and stream are this device's.
        unsafe { result::graph::upload(graph, self.stream) }.map_err(|e| fail("upload a graph", e))?;
        Ok((self.graphs.borrow().len() - 1) as GraphId)
    }

    fn replay(&self, graph: GraphId) -> Result<(), DeviceError> {
        let graph = self.graphs.borrow()[graph as usize];
        // SAFETY: graph and stream are this device's; what the graph refers to lives as long as it.
        unsafe { result::graph::launch(graph, self.stream) }.map_err(|e| fail("launch a graph", e))?;
        if self.synchronous { self.finish("a graph") } else { Ok(()) }
    }
}

impl Nvidia {
    /// Waits for all work; an error is that of `what`, or of something before it.
    fn finish(&self, what: &str) -> Result<(), DeviceError> {
        // SAFETY: the stream is this device's.
        let query = || unsafe { sys::cuStreamQuery(self.stream) }.result();
        // SAFETY: as above.
        self.wait_with(what, query, || unsafe { result::stream::synchronize(self.stream) })
    }

    /// Waits by `synchronize`. On a rank of several by `query`, so that none waits for ever for one that is lost.
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
    /// In the reverse of the order of making. After a fatal error every call fails, which changes nothing.
    fn drop(&mut self) {
        // SAFETY: `open` retained the context, which is released below.
        let _ = unsafe { result::ctx::set_current(self.context) };
        let _ = self.finish("close");
        self.others.take();
        self.blas.take();
        let mut events = self.free_events.take();
        while let Some(event) = self.uploads.ring.borrow_mut().take_back() {
            events.push(event);
        }
        while let Some((_, event)) = self.read_backs.ring.borrow_mut().take_back() {
            events.push(event);
        }
        // SAFETY: each was made by this device and is used no more: all work is done.
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

/// The first bytes of a parameter: this machine is little-endian, as every host of a GPU is.
fn bits(arg: Arg) -> u64 {
    match arg {
        Arg::Ptr(pointer) => pointer.address(),
        Arg::I32(value) => u64::from(value as u32),
        Arg::U32(value) => u64::from(value),
        Arg::U64(value) => value,
        Arg::F32(value) => u64::from(value.to_bits()),
    }
}
