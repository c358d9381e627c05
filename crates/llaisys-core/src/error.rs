//! The error tree: four kinds, sorted by what the caller can do.
//!
//! ```text
//! Error
//! ├── Rejected     the input is wrong: fix it              ValueError      400
//! ├── Exhausted    not now: wait, preempt or shed          retryable       429 / 503
//! ├── Unsupported  this build, model or device cannot      choose another  400
//! └── Device       the machine failed: context is lost     rebuild         503
//! ```
//!
//! A violated invariant is a bug, not an error: it panics. Errors carry numbers as fields, not as text. Each area has
//! its own enum of rejections; this file combines them.

mod batch;
mod format;
mod kv;
mod lora;
mod sampling;

pub use batch::BatchError;
pub use format::{FormatError, GgufError};
pub use kv::KvError;
pub use lora::LoraError;
pub use sampling::SamplingError;

use thiserror::Error;

/// Result of a fallible operation of the core; `E` where only one kind can occur.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any rejection or failure of the core.
#[derive(Debug, Error)]
pub enum Error {
    /// The input is wrong; the caller must change it.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// A bounded resource is used up; the same call may succeed later.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// Understood, but not implemented by this build, model or device.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The machine failed (memory, device); the context must be rebuilt.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A fault that a test injected.
    #[cfg(feature = "faults")]
    #[error("fault point {point}")]
    #[allow(missing_docs, reason = "the error text names the field")]
    Injected { point: &'static str },
}

/// Wrong input.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the error text names each field")]
pub enum Rejected {
    /// A row of a batch is wrong.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// A cache operation names positions or nodes that do not exist, or conflicts with existing ones.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// A sampling parameter is out of its bounds.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// A LoRA adapter is wrong, or used wrongly.
    #[error(transparent)]
    Lora(#[from] LoraError),
    /// A model file is damaged or inconsistent.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A sequence id that was released or never acquired.
    #[error("sequence id {raw} is not acquired (slot {slot} is at generation {current}, the id has {given})")]
    StaleSequence { raw: i64, slot: u32, given: u32, current: u32 },
    /// An array has the wrong number of elements.
    #[error("{what} has {got} elements, expected {want}")]
    Length { what: &'static str, got: usize, want: usize },
    /// A setting is out of its bounds.
    #[error("{what} is {got}, allowed are {min} to {max}")]
    OutOfRange { what: &'static str, got: i64, min: i64, max: i64 },
    /// The streams would not have equal sizes.
    #[error("n_cells is {n_cells}, expected a multiple of n_streams ({n_streams})")]
    UnevenStreams { n_cells: usize, n_streams: usize },
    /// Imported keys and values that are not a positive number of whole cells.
    #[error("the data has {got} bytes, expected a positive multiple of {of_cell} (the bytes of a cell)")]
    CellBytes { got: usize, of_cell: usize },
    /// An import whose length is not that of a recurrent state.
    #[error("{got} bytes are not a recurrent state, which has {want}")]
    StateBytes { got: usize, want: usize },
    /// `replace_weight` names a tensor that the model does not have.
    #[error("the model has no weight named {name:?}")]
    NoSuchWeight { name: String },
    /// `replace_weight` has values of another shape than the checkpoint's.
    #[error("weight {name:?} has shape {want:?}, the given values have {got:?}")]
    WeightShape { name: String, want: Vec<usize>, got: Vec<usize> },
    /// The context was closed.
    #[error("the context is closed")]
    Closed,
}

/// A bounded resource is used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the error text names each field")]
pub enum Exhausted {
    /// Fewer free KV cells, in one stream, than a call needs.
    #[error("{needed} KV cells are needed, {free} of {capacity} are free")]
    Cells { needed: usize, free: usize, capacity: usize },
    /// All sequence ids are acquired.
    #[error("all {capacity} sequence ids are acquired")]
    SequenceIds { capacity: usize },
    /// As many LoRA adapters are loaded as may be.
    #[error(
        "all {capacity} slots of LoRA adapters are in use (max_loras); unload one first, or raise max_loras"
    )]
    LoraSlots { capacity: usize },
    /// A LoRA adapter does not fit into the memory.
    #[error("{bytes} bytes for a LoRA adapter cannot be allocated; unload another one, or free memory")]
    LoraMemory { bytes: usize },
    /// As many cache nodes have a recurrent state as may.
    #[error("all {capacity} recurrent states of cache nodes are in use; drop one first")]
    States { capacity: usize },
}

/// Understood, not implemented. Each variant names the requested feature and the supported ones.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the error text names each field")]
pub enum Unsupported {
    /// The model's architecture is not in the architecture table.
    #[error("architecture {name:?} is not supported; supported are {supported}")]
    Architecture { name: String, supported: String },
    /// A property of the checkpoint that would make the output wrong if ignored.
    #[error("{what} {value:?} is not supported; supported: {supported}")]
    Feature { what: &'static str, value: String, supported: &'static str },
    /// A tensor's element type.
    #[error("tensor {tensor:?} has type {dtype}; supported are {supported}")]
    TensorType { tensor: String, dtype: String, supported: &'static str },
    /// A quantized checkpoint for which `quantization` is set.
    #[error(
        "tensor {tensor:?} is quantized already ({dtype}), and quantization needs a checkpoint in F32, F16, BF16 or \
         FP8; leave the setting out to load this checkpoint as it is"
    )]
    Quantized { tensor: String, dtype: String },
    /// An instruction set that this machine does not have, or an unknown one.
    #[error("instruction set {name:?} is not available on this machine; available are {available}")]
    Isa { name: String, available: String },
    /// A device that this machine does not have, or whose driver or libraries are missing.
    #[error("device {name:?} cannot be used: {reason}")]
    Device { name: &'static str, reason: String },
    /// A model whose sizes do not divide over the ranks.
    #[error(
        "the model cannot be split over {n_ranks} ranks (tensor_parallel_size): {what} is {got}, expected a multiple \
         of {multiple}"
    )]
    Split { n_ranks: usize, what: String, got: usize, multiple: usize },
    /// A weight that cannot be replaced in its storage format.
    #[error("weight {name:?} is stored as {stored}; it cannot be replaced from {given}")]
    ReplaceWeight { name: String, stored: &'static str, given: &'static str },
}

impl Unsupported {
    /// Creates [`Unsupported::Feature`] with `value` as text.
    pub(crate) fn feature(what: &'static str, value: impl ToString, supported: &'static str) -> Self {
        Self::Feature { what, value: value.to_string(), supported }
    }
}

/// The machine failed.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the error text names each field")]
pub enum DeviceError {
    /// The system refused an allocation.
    #[error("cannot allocate {bytes} bytes for {what}")]
    Allocation { what: &'static str, bytes: usize },
    /// A worker thread could not be started.
    #[error("cannot start {n_threads} worker threads: {source}")]
    Threads { n_threads: usize, source: std::io::Error },
    /// A CUDA call failed; `status` is the driver's or the library's name and number.
    #[error("CUDA: {op} failed: {status}")]
    Cuda { op: String, status: String },
    /// A rank failed while others waited for it in a collective operation.
    #[error("rank {rank} of {world}: another rank failed during a collective operation")]
    RankLost { rank: usize, world: usize },
}
