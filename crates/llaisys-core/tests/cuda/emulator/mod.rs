//! An emulated device: `emu.h` runs kernels, products are plain loops, and all work runs during the call.
//!
//! A kernel that faults gives an error that names it. As with a GPU, every later call fails then.

pub(crate) mod arrays;
#[path = "../../common/close.rs"]
pub(crate) mod close;
pub(crate) mod compare;
mod exchange;
#[allow(unsafe_code, reason = "passes launches on")]
pub(crate) mod flaky;
#[allow(unsafe_code, reason = "maps memory with guard pages")]
mod memory;
#[allow(unsafe_code, reason = "loads compiled kernels")]
mod modules;
#[allow(unsafe_code, reason = "is `Send`, and passes launches on")]
pub(crate) mod part;
pub(crate) mod pick;
mod product;

use llaisys_core::collective::{Collective, LocalRank};
use llaisys_core::cuda::device::{
    Arg, Device, DeviceFacts, DevicePtr, Event, Exchange, GraphId, Launch, Product,
};
use llaisys_core::cuda::kernel_source::{Function, Kernel, KernelModule};
use llaisys_core::error::DeviceError;
use llaisys_core::ops::cases::SplitMix64;
use memory::Memory;
use modules::{EmuArg, Request};
use pick::is_gpu;
use std::cell::RefCell;
use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};

/// The emulated device. A seed determines its order of threads. The device prints the seed, and `LLAISYS_EMU_SEED` sets
/// it.
#[derive(Debug)]
pub(crate) struct Emulator {
    facts: DeviceFacts,
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    memory: Memory,
    seed: u64,
    dead: Option<String>,
    capture: Option<Vec<Work>>,
    /// The modules whose kernels a capture may contain.
    loaded: HashSet<KernelModule>,
    graphs: Vec<Vec<Work>>,
    read: VecDeque<(Event, Vec<u8>)>,
    last_event: Event,
    /// This device's rank in its group, if it has a part of a model.
    others: Option<LocalRank>,
}

/// Work of a captured graph.
#[derive(Debug, Clone)]
enum Work {
    Launch { function: Function, grid: [u32; 3], block: u32, shared_bytes: u32, args: Vec<Arg> },
    Product(Product),
    Exchange(Exchange),
    Fill(DevicePtr, u8, usize),
}

impl Emulator {
    /// Returns a device whose order of threads is random, or that of `LLAISYS_EMU_SEED`.
    pub(crate) fn new() -> Self {
        #[allow(clippy::disallowed_methods, reason = "a test's replay, not a setting of the core")]
        let given = std::env::var("LLAISYS_EMU_SEED").ok();
        let seed = match given {
            Some(text) => text.parse().expect("LLAISYS_EMU_SEED is a number"),
            None => RandomState::new().hash_one(0),
        };
        Self::with_seed(seed)
    }

    /// Returns the device of a rank, which exchanges through the host's memory. `others` is the rank in its group.
    pub(crate) fn joined(others: LocalRank) -> Self {
        let device = Self::new();
        device.state.borrow_mut().others = Some(others);
        device
    }

    /// Returns a device with this seed.
    pub(crate) fn with_seed(seed: u64) -> Self {
        assert!(!is_gpu(), "LLAISYS_TEST_DEVICE=gpu, but this test runs only on the emulator");
        println!("replay the order of threads with LLAISYS_EMU_SEED={seed}");
        let facts = DeviceFacts {
            name: "emulator".into(),
            capability: 90,
            n_sms: 8,
            // The least of all architectures, so that a launch that fits here fits all of them.
            max_shared_bytes: 99 << 10,
            total_bytes: 1 << 30,
        };
        let state = RefCell::new(State { seed, ..State::default() });
        Self { facts, state }
    }

    /// Records the work if a capture is open, and runs it otherwise.
    fn submit(&self, op: &str, work: Work) -> Result<(), DeviceError> {
        let mut state = self.alive(op)?;
        if let Work::Launch { function, .. } = &work {
            // As on a GPU, where loading is not allowed in a capture.
            if state.capture.is_some() && !state.loaded.contains(&function.module) {
                return Err(error("load a kernel", "not allowed in a capture".into()));
            }
            state.loaded.insert(function.module.clone());
        }
        match &mut state.capture {
            Some(recorded) => {
                recorded.push(work);
                Ok(())
            }
            None => self.run(&mut state, &work),
        }
    }

    fn run(&self, state: &mut State, work: &Work) -> Result<(), DeviceError> {
        let (op, done) = match work {
            Work::Launch { function, .. } => {
                let op = format!("{} of {}", function.name, function.module);
                (op, self.run_kernel(state, work))
            }
            Work::Product(p) => {
                (format!("product {} x {} x {}", p.m, p.n, p.k), product::product(&mut state.memory, p))
            }
            // A lost rank does not make this rank's memory invalid.
            Work::Exchange(exchange) => {
                let State { memory, others, .. } = state;
                let others = others.as_mut().ok_or_else(|| exchange.alone())?;
                return exchange::exchange(memory, others, exchange);
            }
            Work::Fill(to, value, n) => {
                ("fill".into(), state.memory.bytes_mut(*to, *n).map(|bytes| bytes.fill(*value)))
            }
        };
        done.map_err(|status| {
            state.dead = Some(format!("{op}: {status}"));
            error(&op, status)
        })
    }

    #[allow(unsafe_code, reason = "calls the compiled kernel")]
    fn run_kernel(&self, state: &mut State, work: &Work) -> Result<(), String> {
        let Work::Launch { function, grid, block, shared_bytes, args } = work else {
            return Ok(());
        };
        let kernel = find(function)?;
        self.check(&function.module, kernel, (grid, *block, *shared_bytes))?;
        let start = modules::start_of(&function.module, function.name);
        let args: Vec<_> = args.iter().map(emu_arg).collect();
        state.seed = SplitMix64::new(state.seed).bits();
        let mut request = Request {
            grid: *grid,
            block: *block,
            shared_bytes: *shared_bytes,
            n_args: args.len() as u32,
            args: args.as_ptr(),
            seed: state.seed,
            fault_address: 0,
            message: [0; 512],
        };
        // SAFETY: the request is emu.h's struct and outlives the call. `Device::launch`'s caller promised the arrays,
        // and guard pages stop most accesses outside of them. The kernel runs on this thread, which has borrowed all
        // memory.
        let failed = unsafe { start(&raw mut request) } != 0;
        if failed {
            let text = request.message.split(|&byte| byte == 0).next().unwrap_or_default();
            let text = String::from_utf8_lossy(text).into_owned();
            return Err(match request.fault_address {
                0 => text,
                address => format!("{text} ({})", state.memory.describe(address)),
            });
        }
        match state.memory.overrun() {
            Some(what) => Err(format!("{} wrote behind the end of `{what}`", function.name)),
            None => Ok(()),
        }
    }

    /// Refuses a launch that a GPU would refuse.
    fn check(
        &self,
        module: &KernelModule,
        kernel: &Kernel,
        shape: (&[u32; 3], u32, u32),
    ) -> Result<(), String> {
        let (grid, block, shared) = shape;
        if grid.contains(&0) || grid[0] > i32::MAX as u32 || grid[1] > 65535 || grid[2] > 65535 {
            return Err(format!("a grid of {grid:?}"));
        }
        if block == 0 || !block.is_multiple_of(32) || block > kernel.max_threads {
            return Err(format!("{block} threads; expected whole warps, up to {}", kernel.max_threads));
        }
        let most = (kernel.max_shared_bytes)(module).min(self.facts.max_shared_bytes);
        if shared > most {
            return Err(format!("{shared} bytes of shared memory; expected up to {most}"));
        }
        Ok(())
    }

    fn alive(&self, op: &str) -> Result<std::cell::RefMut<'_, State>, DeviceError> {
        let state = self.state.borrow_mut();
        match &state.dead {
            Some(why) => Err(error(op, format!("the device is lost since: {why}"))),
            None => Ok(state),
        }
    }

    /// As [`Emulator::alive`]. Errors: also during a capture.
    fn uncaptured(&self, op: &str) -> Result<std::cell::RefMut<'_, State>, DeviceError> {
        let state = self.alive(op)?;
        match state.capture {
            Some(_) => Err(error(op, "not allowed in a capture".into())),
            None => Ok(state),
        }
    }
}

fn error(op: &str, status: String) -> DeviceError {
    DeviceError::Cuda { op: op.into(), status }
}

fn emu_arg(arg: &Arg) -> EmuArg {
    match *arg {
        Arg::Ptr(pointer) => EmuArg { kind: 0, bits: pointer.address() },
        Arg::I32(x) => EmuArg { kind: 1, bits: u64::from(x as u32) },
        Arg::U32(x) => EmuArg { kind: 2, bits: u64::from(x) },
        Arg::U64(x) => EmuArg { kind: 3, bits: x },
        Arg::F32(x) => EmuArg { kind: 4, bits: u64::from(x.to_bits()) },
    }
}

/// Returns the kernel of a function. Errors: the source has no module with these constants, or no such kernel.
fn find(function: &Function) -> Result<&'static Kernel, String> {
    let Function { module, name } = function;
    if !module.source.modules().any(|known| known == *module) {
        return Err(format!("{}.cu has no module {module}", module.source.name));
    }
    let kernel = module.source.kernels.iter().find(|kernel| kernel.name == *name);
    kernel.ok_or_else(|| format!("{}.cu has no kernel {name}", module.source.name))
}

impl Device for Emulator {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn free_bytes(&self) -> Result<usize, DeviceError> {
        Ok(self.facts.total_bytes)
    }

    /// Aligns only to 16 bytes, so that the allocation ends at its guard.
    fn alloc(&self, what: &'static str, n_bytes: usize) -> Result<DevicePtr, DeviceError> {
        Ok(self.uncaptured("alloc")?.memory.alloc(what, n_bytes))
    }

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), DeviceError> {
        let mut state = self.uncaptured("upload")?;
        let place = state.memory.bytes_mut(to, from.len()).map_err(|e| error("upload", e))?;
        place.copy_from_slice(from);
        Ok(())
    }

    fn download(&self, from: DevicePtr, to: &mut [u8]) -> Result<(), DeviceError> {
        let state = self.uncaptured("download")?;
        to.copy_from_slice(state.memory.bytes(from, to.len()).map_err(|e| error("download", e))?);
        Ok(())
    }

    fn fill(&self, to: DevicePtr, value: u8, n_bytes: usize) -> Result<(), DeviceError> {
        self.submit("fill", Work::Fill(to, value, n_bytes))
    }

    fn prepare(&self, functions: &[&Function]) -> Result<(), DeviceError> {
        let mut state = self.uncaptured("prepare")?;
        for function in functions {
            find(function).map_err(|e| error("prepare", e))?;
            state.loaded.insert(function.module.clone());
            modules::start_of(&function.module, function.name);
        }
        Ok(())
    }

    #[allow(unsafe_code, reason = "implements an unsafe method")]
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let Launch { function, grid, block, shared_bytes, args } = *launch;
        let (function, args) = (function.clone(), args.to_vec());
        self.submit("launch", Work::Launch { function, grid, block, shared_bytes, args })
    }

    fn product(&self, product: &Product) -> Result<(), DeviceError> {
        product.check()?;
        self.submit("product", Work::Product(*product))
    }

    fn rank(&self) -> usize {
        self.state.borrow().others.as_ref().map_or(0, LocalRank::rank)
    }

    fn world(&self) -> usize {
        self.state.borrow().others.as_ref().map_or(1, LocalRank::world)
    }

    fn exchange(&self, exchange: &Exchange) -> Result<(), DeviceError> {
        self.submit("exchange", Work::Exchange(*exchange))
    }

    fn abort(&self) {
        if let Some(others) = &self.state.borrow().others {
            others.abort();
        }
    }

    fn read_back(&self, from: DevicePtr, n_bytes: usize) -> Result<Event, DeviceError> {
        let mut state = self.uncaptured("read_back")?;
        let copy = state.memory.bytes(from, n_bytes).map_err(|e| error("read_back", e))?.to_vec();
        state.last_event += 1;
        let event = state.last_event;
        state.read.push_back((event, copy));
        Ok(event)
    }

    fn collect(&self, event: Event, to: &mut [u8]) -> Result<(), DeviceError> {
        let mut state = self.alive("collect")?;
        let next = state.read.front().map(|(event, copy)| (*event, copy.len()));
        if next != Some((event, to.len())) {
            let status = format!("event {event} of {} bytes; (event, bytes) next is {next:?}", to.len());
            return Err(error("collect", status));
        }
        if let Some((_, copy)) = state.read.pop_front() {
            to.copy_from_slice(&copy);
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.uncaptured("synchronize").map(|_| ())
    }

    fn begin_capture(&self) -> Result<(), DeviceError> {
        self.uncaptured("begin_capture")?.capture = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self) -> Result<GraphId, DeviceError> {
        let mut state = self.alive("end_capture")?;
        let recorded = state.capture.take();
        state.graphs.push(recorded.ok_or_else(|| error("end_capture", "no capture is open".into()))?);
        Ok(state.graphs.len() as GraphId - 1)
    }

    fn replay(&self, graph: GraphId) -> Result<(), DeviceError> {
        let mut state = self.uncaptured("replay")?;
        let recorded = state.graphs.get(graph as usize).cloned();
        for work in recorded.ok_or_else(|| error("replay", format!("there is no graph {graph}")))? {
            self.run(&mut state, &work)?;
        }
        Ok(())
    }
}
