//! Exchanges between the GPUs of a model's ranks, by NCCL (`nccl.h`, NCCL's user guide). The few functions that are
//! needed are loaded here, as for NVRTC: cudarc searches only for `libnccl.so`, and NVIDIA's package has
//! `libnccl.so.2`.
//!
//! Each rank is a thread with a GPU. The ranks have a [`LocalRank`] group on the host in addition to NCCL's
//! communicator. All ranks join it before any of them calls NCCL, which would wait forever for a rank that could not
//! open its GPU.
//!
//! The group also tells when a rank has ended. NCCL's kernels would wait for it forever, and so would a thread that
//! waits for the GPU. A rank therefore polls for the end of its work ([`Communicator::wait`]). If another rank has
//! ended, it aborts its own communicator, which ends the kernels. No thread uses the communicator of another.

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
/// The first version that sums bf16, in the format of `NCCL_VERSION`.
const VERSION_MIN: u32 = 21_000;

/// `ncclResult_t`
type Status = c_int;
/// `ncclComm_t`
type Comm = *mut c_void;
/// `cudaStream_t`, the same as the driver's `CUstream`.
pub type Stream = *mut c_void;

/// `ncclUniqueId`: identifies a group to its ranks.
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
    /// Keeps the functions loaded.
    _library: Library,
}

impl Nccl {
    /// Loads NCCL from the first of `folders` that has it, otherwise from the system's loader path.
    ///
    /// Errors: NCCL is missing, with what to install; the library is not NCCL; it is too old.
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

    /// Returns the version in NCCL's format: 22809 is 2.28.9.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Creates a group and returns its `world` members, in the order of the ranks, one for each rank's thread.
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

/// A rank of a group whose ranks have not joined yet. If it is dropped, the other ranks get an error.
#[derive(Debug)]
pub struct NcclRank {
    nccl: Arc<Nccl>,
    id: UniqueId,
    host: LocalRank,
}

impl NcclRank {
    /// Joins the group with the GPU whose context is current on this thread. Returns when every rank has joined.
    ///
    /// Errors: another rank did not join; NCCL's.
    pub fn join(self) -> Result<Communicator, DeviceError> {
        let Self { nccl, id, mut host } = self;
        host.broadcast(&mut [], 0)?;
        let (rank, world) = (host.rank(), host.world());
        let mut comm = ptr::null_mut();
        // SAFETY: the signature is nccl.h's; it writes one pointer. The group's other ranks pass the same id.
        let status = unsafe { (nccl.init_rank)(&mut comm, world as c_int, id, rank as c_int) };
        nccl.check(|| format!("join {world} GPUs as rank {rank}"), status)?;
        Ok(Communicator { nccl, comm: Cell::new(comm), host })
    }
}

/// A rank's communicator, used by the thread that joined. Dropping it ends the group for all ranks, including one that
/// still waits for its last exchange.
#[derive(Debug)]
pub struct Communicator {
    nccl: Arc<Nccl>,
    /// Null after an abort.
    comm: Cell<Comm>,
    host: LocalRank,
}

impl Communicator {
    /// Returns this rank, from 0.
    pub fn rank(&self) -> usize {
        self.host.rank()
    }

    /// Returns the number of ranks.
    pub fn world(&self) -> usize {
        self.host.world()
    }

    /// Launches an exchange on `stream`.
    ///
    /// Errors: another rank is lost; NCCL's.
    ///
    /// # Safety
    ///
    /// The stream belongs to the GPU that joined, [`Exchange::check`] accepted the arrays, and they live until the
    /// exchange is done.
    pub unsafe fn start(&self, exchange: &Exchange, stream: Stream) -> Result<(), DeviceError> {
        self.check()?;
        let (nccl, comm) = (&self.nccl, self.comm.get());
        // SAFETY: the signatures are nccl.h's; the communicator is this thread's and not aborted (`check`); the caller
        // promises stream and arrays.
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

    /// Polls until `is_done` returns true. Errors: those of `is_done`; another rank is lost, or NCCL has failed. After
    /// the latter two no exchange is running any more.
    pub fn wait(&self, mut is_done: impl FnMut() -> Result<bool, DeviceError>) -> Result<(), DeviceError> {
        loop {
            // Polled first, because work also ends after an abort, without its result.
            let is_done = is_done()?;
            self.check()?;
            if is_done {
                return Ok(());
            }
            std::thread::yield_now();
        }
    }

    /// Ends the exchanges of this rank, and those of each other rank when it polls next.
    pub fn abort(&self) {
        self.host.abort();
        let comm = self.comm.replace(ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: the communicator is this thread's, and nothing uses it after this, because the cell is null.
            unsafe { (self.nccl.abort)(comm) };
        }
    }

    /// Checks the group. Errors: another rank is lost, or NCCL has failed; this rank's exchanges have ended then.
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
