//! What the host asks of a device: memory, kernels, products, order.
//!
//! The one edge between the CUDA ops and whatever runs them: a GPU in `nvidia.rs`, and in tests an emulator that
//! runs the kernels' own text on the CPU. Nothing above it knows which.

pub use crate::cuda::element::Element;
use crate::cuda::kernel_source::Function;
use crate::error::DeviceError;
use std::fmt::Debug;

/// A place in an allocation of device memory, and how many bytes of the allocation follow. Safe code gets one from
/// [`Device::alloc`] alone, and cannot move it out of its allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DevicePtr {
    address: u64,
    n_bytes: usize,
}

impl DevicePtr {
    /// Stands for an optional array that is absent.
    pub const NULL: Self = Self { address: 0, n_bytes: 0 };

    /// Returns the pointer to the start of an allocation.
    ///
    /// # Safety
    /// `n_bytes` bytes at `address` are device memory that lives as long as the device.
    #[allow(unsafe_code, reason = "declares the one way to make a pointer; runs nothing unsafe")]
    pub unsafe fn from_raw(address: u64, n_bytes: usize) -> Self {
        Self { address, n_bytes }
    }

    /// A pointer to no memory, for tests that follow none.
    #[cfg(test)]
    pub(super) fn of_test(address: u64, n_bytes: usize) -> Self {
        Self { address, n_bytes }
    }

    /// Returns the place `n_bytes` further on. Panics if the allocation ends before it.
    pub fn at(self, n_bytes: usize) -> Self {
        let left = self.n_bytes.checked_sub(n_bytes);
        let left = left.unwrap_or_else(|| panic!("{n_bytes} bytes behind a pointer to {}", self.n_bytes));
        Self { address: self.address + n_bytes as u64, n_bytes: left }
    }

    /// Returns the address as kernels get it.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Returns the number of bytes from here to the end of the allocation.
    pub fn n_bytes(self) -> usize {
        self.n_bytes
    }

    /// Returns the address of an array of `n_bytes` bytes. Errors: the allocation ends before the array does.
    pub fn array(self, op: &str, n_bytes: usize) -> Result<u64, DeviceError> {
        if n_bytes <= self.n_bytes {
            return Ok(self.address);
        }
        let status = format!("{n_bytes} bytes at a pointer to {}", self.n_bytes);
        Err(DeviceError::Cuda { op: op.to_owned(), status })
    }
}

/// One argument of a kernel, by value, as the kernel's signature has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg {
    /// A pointer of any type.
    Ptr(DevicePtr),
    /// `int`
    I32(i32),
    /// `unsigned`
    U32(u32),
    /// `unsigned long long`
    U64(u64),
    /// `float`
    F32(f32),
}

/// A kernel with what it is started with.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// Which kernel of which module.
    pub function: &'a Function,
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block, in x.
    pub block: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// In the order of the kernel's parameters.
    pub args: &'a [Arg],
}

/// `out[m, n] = input[m, k] . weight[n, k]^T (+ bias[n])`, row-major, sums in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// Rows of input and result.
    pub m: usize,
    /// Rows of the weight: columns of the result.
    pub n: usize,
    /// Columns of input and weight.
    pub k: usize,
    /// Of input, weight and bias.
    pub element: Element,
    /// Of the result: `element` or F32.
    pub out_element: Element,
    /// `[m, k]`
    pub input: DevicePtr,
    /// `[n, k]`
    pub weight: DevicePtr,
    /// `[n]`, or NULL.
    pub bias: DevicePtr,
    /// `[m, n]`
    pub out: DevicePtr,
}

impl Product {
    /// Checks that every array is inside its allocation. Errors: the first one that is not.
    pub fn check(&self) -> Result<(), DeviceError> {
        let Self { m, n, k, element, out_element, .. } = *self;
        let op = format!("product {m} x {n} x {k}");
        self.input.array(&op, element.n_bytes(m * k))?;
        self.weight.array(&op, element.n_bytes(n * k))?;
        if self.bias != DevicePtr::NULL {
            self.bias.array(&op, element.n_bytes(n))?;
        }
        self.out.array(&op, out_element.n_bytes(m * n)).map(|_| ())
    }
}

/// What the devices of a model's ranks say to each other. Every rank asks for the same exchanges in the same order, with
/// the same numbers of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the text of each variant names its fields")]
pub enum Exchange {
    /// Puts the sum over all ranks in place of each element at `at`, `[n]`. All ranks get the same bits.
    AllReduceSum { at: DevicePtr, n: usize, element: Element },
    /// Puts the ranks' `from`, `[n]` each, one after the other to `to`, `[world, n]`.
    AllGather { from: DevicePtr, to: DevicePtr, n: usize, element: Element },
    /// Puts what rank `root` has at `at`, `[n]`, to every other's.
    Broadcast { at: DevicePtr, n: usize, element: Element, root: usize },
}

impl Exchange {
    /// Checks that every array is inside its allocation, for `world` ranks. Errors: one that is not.
    pub fn check(&self, world: usize) -> Result<(), DeviceError> {
        let op = self.to_string();
        match *self {
            Self::AllReduceSum { at, n, element } | Self::Broadcast { at, n, element, .. } => {
                at.array(&op, element.n_bytes(n)).map(|_| ())
            }
            Self::AllGather { from, to, n, element } => {
                from.array(&op, element.n_bytes(n))?;
                to.array(&op, element.n_bytes(world * n)).map(|_| ())
            }
        }
    }

    /// The error of a device that has joined no other ranks.
    pub fn alone(&self) -> DeviceError {
        let status = "the device has joined no others".to_owned();
        DeviceError::Cuda { op: self.to_string(), status }
    }
}

impl std::fmt::Display for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AllReduceSum { n, element, .. } => write!(f, "all-reduce of {n} x {element:?}"),
            Self::AllGather { n, element, .. } => write!(f, "all-gather of {n} x {element:?}"),
            Self::Broadcast { n, element, root, .. } => {
                write!(f, "broadcast of {n} x {element:?} from {root}")
            }
        }
    }
}

/// What grids are cut for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// As the driver says it.
    pub name: String,
    /// Compute capability: 90 is 9.0.
    pub capability: u32,
    /// Streaming multiprocessors.
    pub n_sms: u32,
    /// Dynamic shared memory that a block may ask for, bytes.
    pub max_shared_bytes: u32,
    /// Device memory, bytes.
    pub total_bytes: usize,
}

/// A point in the order of a device's work; 0 is before all of it.
pub type Event = u64;

/// Work that was captured, to be done again as one launch. Belongs to the device that captured it.
pub type GraphId = u32;

/// A device with one order of work: what is asked first happens first. The thread that opened it uses it; another may
/// drop it.
///
/// Errors of all methods: [`DeviceError::Cuda`]; an asynchronous fault may show at any later call.
pub trait Device: Debug + Send {
    /// Facts that do not change.
    fn facts(&self) -> &DeviceFacts;

    /// Free device memory now, bytes.
    fn free_bytes(&self) -> Result<usize, DeviceError>;

    /// Memory that lives as long as the device, aligned to 256 bytes; `what` names it in errors. Nothing is
    /// allocated after a model's start, so nothing is freed one by one.
    fn alloc(&self, what: &'static str, n_bytes: usize) -> Result<DevicePtr, DeviceError>;

    /// Copies to the device, in order; `from` may be changed when this returns.
    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), DeviceError>;

    /// Copies from the device when all work before is done; returns with the copy.
    fn download(&self, from: DevicePtr, to: &mut [u8]) -> Result<(), DeviceError>;

    /// Sets `n_bytes` bytes to `value`, in order.
    fn fill(&self, to: DevicePtr, value: u8, n_bytes: usize) -> Result<(), DeviceError>;

    /// Compiles what is needed of `functions` (or finds it compiled), so that no launch does.
    fn prepare(&self, functions: &[&Function]) -> Result<(), DeviceError>;

    /// Starts a kernel.
    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError>;

    /// Starts a matrix product.
    fn product(&self, product: &Product) -> Result<(), DeviceError>;

    /// This device's rank of the model's, from 0.
    fn rank(&self) -> usize {
        0
    }

    /// Ranks that the model is split over: a device that never joined others has all of it.
    fn world(&self) -> usize {
        1
    }

    /// Starts an exchange with the other ranks' devices. Errors besides: [`DeviceError::RankLost`], here or at a later
    /// call that waits, if another rank has ended; the device is of no use for exchanges then.
    fn exchange(&self, exchange: &Exchange) -> Result<(), DeviceError> {
        Err(exchange.alone())
    }

    /// Ends the exchanges of all ranks: whoever waits for this one, or comes to, gets an error.
    fn abort(&self) {}

    /// Copies `n_bytes` to a read-back buffer, in order, and returns the event after it: the copy is taken with
    /// [`Device::collect`], in the order of the calls, while later work goes on.
    fn read_back(&self, from: DevicePtr, n_bytes: usize) -> Result<Event, DeviceError>;

    /// Waits for the event of a [`Device::read_back`] and gives what it copied.
    fn collect(&self, event: Event, to: &mut [u8]) -> Result<(), DeviceError>;

    /// Waits for everything.
    fn synchronize(&self) -> Result<(), DeviceError>;

    /// From here to [`Device::end_capture`] launches, products, exchanges and fills are noted, not done.
    fn begin_capture(&self) -> Result<(), DeviceError>;

    /// Ends the capture; after an error the device is out of it, and nothing was captured.
    fn end_capture(&self) -> Result<GraphId, DeviceError>;

    /// Does what was captured, in its order.
    fn replay(&self, graph: GraphId) -> Result<(), DeviceError>;
}

impl dyn Device + '_ {
    /// As [`Device::upload`] of words as kernels read them; nothing is asked for none.
    pub fn upload_words(
        &self,
        to: DevicePtr,
        words: impl IntoIterator<Item = u32>,
    ) -> Result<(), DeviceError> {
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        if bytes.is_empty() { Ok(()) } else { self.upload(to, &bytes) }
    }
}
