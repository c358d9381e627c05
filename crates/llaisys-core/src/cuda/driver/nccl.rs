//! Exchanges between the GPUs of a model's ranks, by NCCL (`nccl.h`, NCCL's user guide). A table of our own of the few
//! functions that are needed, as for NVRTC: cudarc looks for `libnccl.so` only, and NVIDIA's package has `libnccl.so.2`.
//!
//! Each rank is a thread with a GPU. Besides NCCL's communicator the ranks have a [`LocalRank`] group on the host. There they
//! meet before any of them enters NCCL, which would wait for ever for one that could not open its GPU; and there
//! they see that one has ended. NCCL's kernels would wait for that one, too, and with them whoever waits for the GPU: so
//! a rank asks for the end of work again and again ([`Communicator::wait`]), and aborts its own communicator, which ends
//! the kernels, when another rank is gone. No thread ever uses another's communicator.

use super::library::{CudaUnavailable, locate, open, searched, symbol};
use crate::collective::{Collective, LocalRank};
use crate::cuda::device::{DevicePtr, Element, Exchange};
use crate::error::DeviceError;
use libloading::Library;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

const LIBRARY: &str = "libnccl.so.2";
/// The first that sums bf16, as `NCCL_VERSION` writes it.
const VERSION_MIN: u32 = 21_000;

/// `ncclResult_t`
type Status = c_int;
/// `ncclComm_t`
type Comm = *mut c_void;
/// `cudaStream_t`, the same as the driver's `CUstream`.
pub type Stream = *mut c_void;

/// `ncclUniqueId`: names a group to its ranks.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct UniqueId([c_char; 128]);

/// `ncclSum`
const SUM: c_int = 0;

/// NCCL, loaded.
#[derive(Debug)]
pub struct Nccl {
    version: u32,
    error: unsafe extern "C" fn(Status) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> Status,
    async_error: unsafe extern "C" fn(Comm, *mut Status) -> Status,
    destroy: unsafe extern "C" fn(Comm) -> Status,
    abort: unsafe extern "C" fn(Comm) -> Status,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Status,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> Status,
    broadcast: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Status,
    /// Keeps the functions where they are.
    _library: Library,
}

impl Nccl {
    /// Loads it from the first of `folders` that has it, else as the system's loader finds it.
    ///
    /// Errors: it is not there, with what to install; it is no NCCL, or an old one.
    pub fn find(folders: &[PathBuf]) -> Result<Arc<Self>, CudaUnavailable> {
        let path = locate(LIBRARY, folders);
        let library = open(&path).map_err(|e| match e {
            CudaUnavailable::LibraryBroken { .. } if !path.is_absolute() => {
                CudaUnavailable::ExchangesMissing {
                    library: LIBRARY,
                    package: "nvidia-nccl-cu13",
                    looked_in: searched(folders),
                }
            }
            other => other,
        })?;
        Self::of(library, &path).map(Arc::new)
    }

    fn of(library: Library, path: &Path) -> Result<Self, CudaUnavailable> {
        let get_version: unsafe extern "C" fn(*mut c_int) -> Status =
            symbol(&library, path, "ncclGetVersion")?;
        let mut version: c_int = 0;
        // SAFETY: the signature is nccl.h's; it writes one int.
        let status = unsafe { get_version(&mut version) };
        if status != 0 {
            let (library, status) = (path.to_owned(), format!("error {status}"));
            return Err(CudaUnavailable::Call { library, op: "ncclGetVersion", status });
        }
        let version = version.unsigned_abs();
        if version < VERSION_MIN {
            let library = path.to_owned();
            return Err(CudaUnavailable::ExchangesTooOld { library, got: version, needed: "2.10" });
        }
        Ok(Self {
            version,
            error: symbol(&library, path, "ncclGetErrorString")?,
            unique_id: symbol(&library, path, "ncclGetUniqueId")?,
            init_rank: symbol(&library, path, "ncclCommInitRank")?,
            async_error: symbol(&library, path, "ncclCommGetAsyncError")?,
            destroy: symbol(&library, path, "ncclCommDestroy")?,
            abort: symbol(&library, path, "ncclCommAbort")?,
            all_reduce: symbol(&library, path, "ncclAllReduce")?,
            all_gather: symbol(&library, path, "ncclAllGather")?,
            broadcast: symbol(&library, path, "ncclBroadcast")?,
            _library: library,
        })
    }

    /// As NCCL writes it: 22809 is 2.28.9.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Makes a new group and returns its `world` members, in the order of the ranks, one for each rank's thread.
    ///
    /// Errors: NCCL's.
    pub fn group(self: &Arc<Self>, world: usize) -> Result<Vec<NcclRank>, DeviceError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the signature is nccl.h's; it writes the 128 bytes.
        self.check(|| "make a group".to_owned(), unsafe { (self.unique_id)(&mut id) })?;
        let member = |host| NcclRank { nccl: Arc::clone(self), id, host };
        Ok(LocalRank::group(world).into_iter().map(member).collect())
    }

    fn check(&self, op: impl FnOnce() -> String, status: Status) -> Result<(), DeviceError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the signature is nccl.h's; the texts are static strings that end with a zero.
        let text = unsafe { CStr::from_ptr((self.error)(status)) }.to_string_lossy();
        Err(DeviceError::Cuda { op: op(), status: format!("NCCL: {text} ({status})") })
    }
}

/// A rank of a group whose ranks have not joined yet. Dropping it tells the others that this rank will not join.
#[derive(Debug)]
pub struct NcclRank {
    nccl: Arc<Nccl>,
    id: UniqueId,
    host: LocalRank,
}

impl NcclRank {
    /// Joins the group with the GPU whose context is current on this thread; returns when every rank has.
    ///
    /// Errors: another rank did not come; NCCL's.
    pub fn join(self) -> Result<Communicator, DeviceError> {
        let Self { nccl, id, mut host } = self;
        host.broadcast(&mut [], 0)?;
        let (rank, world) = (host.rank(), host.world());
        let mut comm = ptr::null_mut();
        // SAFETY: the signature is nccl.h's; it writes one pointer. The group's other ranks come with the same id.
        let status = unsafe { (nccl.init_rank)(&mut comm, world as c_int, id, rank as c_int) };
        nccl.check(|| format!("join {world} GPUs as rank {rank}"), status)?;
        Ok(Communicator { nccl, comm: Cell::new(comm), host })
    }
}

/// A rank's end of its group. Used by the thread that joined. Dropping it ends the group for all: also for one that still
/// waits for its last exchange.
#[derive(Debug)]
pub struct Communicator {
    nccl: Arc<Nccl>,
    /// Null once it is aborted.
    comm: Cell<Comm>,
    host: LocalRank,
}

impl Communicator {
    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.host.rank()
    }

    /// Ranks in all.
    pub fn world(&self) -> usize {
        self.host.world()
    }

    /// Puts an exchange into the order of `stream`.
    ///
    /// Errors: another rank is lost; NCCL's.
    ///
    /// # Safety
    ///
    /// The stream is of the GPU that joined, and the arrays live until the exchange is done.
    pub unsafe fn start(&self, exchange: &Exchange, stream: Stream) -> Result<(), DeviceError> {
        self.check()?;
        let (nccl, comm) = (&self.nccl, self.comm.get());
        // SAFETY: the signatures are nccl.h's; the communicator is this thread's and not aborted; stream and arrays
        // are as the caller says.
        let status = unsafe {
            match *exchange {
                Exchange::AllReduceSum { at, n, element } => {
                    (nccl.all_reduce)(pointer(at), pointer(at), n, number(element), SUM, comm, stream)
                }
                Exchange::AllGather { from, to, n, element } => {
                    (nccl.all_gather)(pointer(from), pointer(to), n, number(element), comm, stream)
                }
                Exchange::Broadcast { at, n, element, root } => {
                    let root = root as c_int;
                    (nccl.broadcast)(pointer(at), pointer(at), n, number(element), root, comm, stream)
                }
            }
        };
        nccl.check(|| exchange.to_string(), status)
    }

    /// Returns when `is_done` says so. Errors: its own; another rank is lost, or NCCL has failed: then no exchange is
    /// under way any more.
    pub fn wait(&self, mut is_done: impl FnMut() -> Result<bool, DeviceError>) -> Result<(), DeviceError> {
        loop {
            // Asked first: what is done after an abort is not what was wanted.
            let is_done = is_done()?;
            self.check()?;
            if is_done {
                return Ok(());
            }
            std::thread::yield_now();
        }
    }

    /// Ends the exchanges of this rank, and of all others as soon as they look.
    pub fn abort(&self) {
        self.host.abort();
        let comm = self.comm.replace(ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: the communicator is this thread's, and nobody uses it after this.
            unsafe { (self.nccl.abort)(comm) };
        }
    }

    /// Errors: another rank is lost, or NCCL has failed since; this rank's exchanges are ended.
    fn check(&self) -> Result<(), DeviceError> {
        if self.comm.get().is_null() || self.host.is_aborted() {
            self.abort();
            return Err(self.host.lost());
        }
        let mut status = 0;
        // SAFETY: the signature is nccl.h's; it writes one status.
        let asked = unsafe { (self.nccl.async_error)(self.comm.get(), &mut status) };
        let healthy = self.nccl.check(|| "exchange".to_owned(), if asked == 0 { status } else { asked });
        healthy.inspect_err(|_| self.abort())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort();
        }
        let comm = self.comm.replace(ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: the communicator is this thread's; its device has waited for all exchanges.
            unsafe { (self.nccl.destroy)(comm) };
        }
    }
}

fn pointer(at: DevicePtr) -> *mut c_void {
    at.address() as *mut c_void
}

/// `ncclDataType_t`
fn number(element: Element) -> c_int {
    match element {
        Element::F16 => 6,
        Element::F32 => 7,
        Element::Bf16 => 9,
    }
}
