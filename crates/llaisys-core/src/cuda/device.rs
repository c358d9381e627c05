//! The [`Device`] trait: memory, kernel launches, matrix products, exchanges between ranks, graphs.
//!
//! `driver/nvidia.rs` implements it with a GPU. Tests implement it with an emulator that runs the kernels' source on
//! the CPU. The code above the trait is the same for both.

pub use crate::cuda::element::Element;
use crate::cuda::kernel_source::Function;
use crate::error::DeviceError;
use std::fmt::Debug;

/// A place in an allocation of device memory, and the number of bytes of the allocation that follow. Safe code gets one
/// only from [`Device::alloc`], and cannot move it out of its allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DevicePtr {
    address: u64,
    n_bytes: usize,
}

impl DevicePtr {
    /// An optional array that is absent.
    pub const NULL: Self = Self { address: 0, n_bytes: 0 };

    /// Returns the pointer to the start of an allocation.
    ///
    /// # Safety
    /// `n_bytes` bytes at `address` are device memory that lives as long as the device.
    #[allow(unsafe_code, reason = "declares the one way to make a pointer; runs nothing unsafe")]
    pub unsafe fn from_raw(address: u64, n_bytes: usize) -> Self {
        Self { address, n_bytes }
    }

    /// Returns a pointer to no memory, for tests that do not dereference it.
    #[cfg(test)]
    pub(super) fn of_test(address: u64, n_bytes: usize) -> Self {
        Self { address, n_bytes }
    }

    /// Returns the place `n_bytes` further. Panics if the allocation ends before it.
    pub fn at(self, n_bytes: usize) -> Self {
        let left = self.n_bytes.checked_sub(n_bytes);
        let left = left.unwrap_or_else(|| panic!("{n_bytes} bytes behind a pointer to {}", self.n_bytes));
        Self { address: self.address + n_bytes as u64, n_bytes: left }
    }

    /// Returns the address that kernels get.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Returns the number of bytes up to the end of the allocation.
    pub fn n_bytes(self) -> usize {
        self.n_bytes
    }

    /// Returns the address of an array of `n_bytes` bytes. Errors: the array exceeds the allocation; `op` is in the
    /// text.
    pub fn array(self, op: &str, n_bytes: usize) -> Result<u64, DeviceError> {
        if n_bytes <= self.n_bytes {
            return Ok(self.address);
        }
        let status = format!("{n_bytes} bytes at a pointer to {}", self.n_bytes);
        Err(DeviceError::Cuda { op: op.to_owned(), status })
    }
}

/// One argument of a kernel, by value, with the type in the kernel's signature.
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

/// A kernel with its grid and arguments.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The kernel.
    pub function: &'a Function,
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block, in x.
    pub block: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// The arguments, in the order of the kernel's parameters.
    pub args: &'a [Arg],
}

/// A matrix product: `out[m, n] = input[m, k] . weight[n, k]^T (+ bias[n])`, row-major, with f32 sums. The sum is rounded
/// to the result's type after the bias is added; cublasLt also rounds it before, if `n` is not a multiple of 8.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// Rows of the input and the result.
    pub m: usize,
    /// Rows of the weight, which are the columns of the result.
    pub n: usize,
    /// Columns of the input and the weight.
    pub k: usize,
    /// Type of the input, the weight and the bias.
    pub element: Element,
    /// Type of the result: `element` or F32.
    pub out_element: Element,
    /// `[m, k]`
    pub input: DevicePtr,
    /// `[n, k]`
    pub weight: DevicePtr,
    /// `[n]`, or NULL. Only if `out_element` is `element`: cublasLt has no product of other types with this bias.
    pub bias: DevicePtr,
    /// `[m, n]`
    pub out: DevicePtr,
}

impl Product {
    /// Checks that every array is inside its allocation. Errors: the first array that is not; a bias with a result of
    /// another type.
    pub fn check(&self) -> Result<(), DeviceError> {
        let Self { m, n, k, element, out_element, .. } = *self;
        let op = format!("product {m} x {n} x {k}");
        if self.bias != DevicePtr::NULL && out_element != element {
            let status = format!("a bias of {element:?} cannot be added to a result of {out_element:?}");
            return Err(DeviceError::Cuda { op, status });
        }
        self.input.array(&op, element.n_bytes(m * k))?;
        self.weight.array(&op, element.n_bytes(n * k))?;
        if self.bias != DevicePtr::NULL {
            self.bias.array(&op, element.n_bytes(n))?;
        }
        self.out.array(&op, out_element.n_bytes(m * n)).map(|_| ())
    }
}

/// A collective operation of the devices of a model's ranks. Every rank starts the same exchanges in the same order,
/// with the same numbers of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the text of each variant names its fields")]
pub enum Exchange {
    /// Replaces each element of `at`, `[n]`, by its sum over all ranks. All ranks get the same bits.
    AllReduceSum { at: DevicePtr, n: usize, element: Element },
    /// Concatenates the ranks' `from`, `[n]` each, to `to`, `[world, n]`.
    AllGather { from: DevicePtr, to: DevicePtr, n: usize, element: Element },
    /// Copies `at`, `[n]`, of rank `root` to all other ranks.
    Broadcast { at: DevicePtr, n: usize, element: Element, root: usize },
}

impl Exchange {
    /// Checks that every array is inside its allocation, for `world` ranks. Errors: the first array that is not.
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

    /// Returns the error of a device that is in no group.
    pub fn alone(&self) -> DeviceError {
        let status = "the device has joined no other ranks".to_owned();
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

/// Properties of a device that do not change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// The product's name, as the driver returns it.
    pub name: String,
    /// Compute capability: 90 is 9.0.
    pub capability: u32,
    /// Streaming multiprocessors.
    pub n_sms: u32,
    /// The most dynamic shared memory of a block, bytes.
    pub max_shared_bytes: u32,
    /// Device memory, bytes.
    pub total_bytes: usize,
}

/// A point in a device's stream of work; 0 is before all work.
pub type Event = u64;

/// Captured work that is replayed as one launch. It belongs to the device that captured it.
pub type GraphId = u32;

/// A device with one stream of work: work runs in the order of the calls. Only the thread that opened it uses it;
/// another may drop it.
///
/// Errors of all methods: [`DeviceError::Cuda`]. An asynchronous error may be returned by any later call.
pub trait Device: Debug + Send {
    /// Returns the properties that do not change.
    fn facts(&self) -> &DeviceFacts;

    /// Returns the free device memory, bytes.
    fn free_bytes(&self) -> Result<usize, DeviceError>;

    /// Allocates memory that lives as long as the device, aligned to 256 bytes. `what` names it in errors. Nothing is
    /// allocated after a model has started, so single allocations are never freed.
    fn alloc(&self, what: &'static str, n_bytes: usize) -> Result<DevicePtr, DeviceError>;

    /// Copies to the device, in the stream's order. The caller may change `from` when this returns.
    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), DeviceError>;

    /// Waits for all earlier work and copies from the device.
    fn download(&self, from: DevicePtr, to: &mut [u8]) -> Result<(), DeviceError>;

    /// Sets `n_bytes` bytes to `value`, in the stream's order.
    fn fill(&self, to: DevicePtr, value: u8, n_bytes: usize) -> Result<(), DeviceError>;

    /// Compiles and loads the modules of `functions` that are not loaded, so that no launch has to.
    fn prepare(&self, functions: &[&Function]) -> Result<(), DeviceError>;

    /// Launches a kernel.
    ///
    /// # Safety
    /// `args` are the kernel's parameters, in its order. Every address that the kernel computes from them is inside the
    /// allocation of one of the pointers: arrays are as long as the sizes say, and index values are in range when the
    /// kernel runs.
    #[allow(unsafe_code, reason = "declares the launch; runs nothing unsafe")]
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError>;

    /// Launches a matrix product.
    fn product(&self, product: &Product) -> Result<(), DeviceError>;

    /// Returns this device's rank, from 0.
    fn rank(&self) -> usize {
        0
    }

    /// Returns the number of ranks that the model is split over; 1 for a device that is in no group.
    fn world(&self) -> usize {
        1
    }

    /// Launches an exchange with the other ranks' devices.
    ///
    /// Errors: also [`DeviceError::RankLost`] if another rank has ended, here or at a later call that waits. The device
    /// cannot exchange after that.
    fn exchange(&self, exchange: &Exchange) -> Result<(), DeviceError> {
        Err(exchange.alone())
    }

    /// Ends the exchanges of all ranks: a rank that waits for this one, or will, gets an error.
    fn abort(&self) {}

    /// Copies `n_bytes` to a read-back buffer, in the stream's order, and returns the event after the copy.
    /// [`Device::collect`] returns the copies in the order of these calls, while later work runs.
    fn read_back(&self, from: DevicePtr, n_bytes: usize) -> Result<Event, DeviceError>;

    /// Waits for the event of a [`Device::read_back`], and writes what it copied to `to`.
    fn collect(&self, event: Event, to: &mut [u8]) -> Result<(), DeviceError>;

    /// Waits for all work.
    fn synchronize(&self) -> Result<(), DeviceError>;

    /// Begins a capture: until [`Device::end_capture`], launches, products, exchanges and fills are recorded, not run.
    fn begin_capture(&self) -> Result<(), DeviceError>;

    /// Ends the capture and returns its graph. After an error the capture has ended without a graph.
    fn end_capture(&self) -> Result<GraphId, DeviceError>;

    /// Runs captured work, in its order.
    fn replay(&self, graph: GraphId) -> Result<(), DeviceError>;
}

impl dyn Device + '_ {
    /// As [`Device::upload`], of little-endian words. Without words it does nothing.
    pub fn upload_words(
        &self,
        to: DevicePtr,
        words: impl IntoIterator<Item = u32>,
    ) -> Result<(), DeviceError> {
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        if bytes.is_empty() { Ok(()) } else { self.upload(to, &bytes) }
    }
}
