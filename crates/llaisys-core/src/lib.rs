//! The inference core of LLAISYS: a model's files in, sampled token ids out.
//!
//! A [`context::Context`] owns one model on the CPU or a GPU: its weights, the KV cache, the samplers and the threads.
//! A decode takes a batch of rows from any number of sequences ([`batch::BatchArrays`]). Each row is one token. The
//! decode returns a sampled id for each row that requests one. Sequences share KV cells through [`kv::KvCache`], which
//! can be used alone:
//!
//! ```
//! use llaisys_core::kv::{KvCache, KvShape};
//!
//! let mut cache = KvCache::new(KvShape { n_cells: 64, n_seq_max: 4, n_streams: 1, lifo: false })?;
//! let prompt = cache.seq_acquire(0)?;
//! cache.extend(&[0, 1, 2], &[1, 1, 1], &[prompt.to_raw(); 3])?;
//! assert_eq!(cache.n_cells_free(), 61);
//!
//! // A second sequence shares the first two cells instead of copying them.
//! let fork = cache.seq_acquire(0)?;
//! cache.seq_cp(prompt, fork, 0, 2)?;
//! assert_eq!(cache.n_cells_free(), 61);
//!
//! cache.seq_release(prompt)?;
//! assert_eq!(cache.n_cells_free(), 62);
//! # Ok::<(), llaisys_core::Error>(())
//! ```
//!
//! `examples/generate.rs` loads a model and generates tokens.
//!
//! The core uses no network, no clock and no environment variables, and it does not tokenize. `unsafe` is denied except
//! in the files that `docs/project/unsafe.md` lists.
//!
//! # Features
//!
//! - `cuda` (default): the CUDA backend. Its libraries are found at run time; a machine without them uses the CPU.
//! - `testing`: makes the internal modules public for tests and benches. They have no stable API.
//! - `faults`: fault points, at which tests make the core fail.

#![warn(clippy::unwrap_used, reason = "no input causes a panic; a violated invariant panics with a message")]
#![cfg_attr(
    feature = "testing",
    warn(unreachable_pub, reason = "every `pub` item is reachable from the API or from tests")
)]

pub mod batch;
pub mod context;
pub mod dtype;
pub mod error;
pub mod kv;
pub mod progress;
pub mod sample;
pub mod seq;

/// Checkpoints: opens, checks and describes Hugging Face folders and GGUF files.
pub mod checkpoint {
    pub use crate::arch::config::ModelConfig;
    pub use crate::arch::encoder::EncoderConfig;
    pub use crate::load::checkpoint::Checkpoint;
    pub use crate::load::model_info::{FileFormat, KvBytesPerCell, ModelInfo};
}

/// NVIDIA GPUs, detected at run time. [`context::Context::on_gpu`](crate::context::Context::on_gpu) uses one.
#[cfg(feature = "cuda")]
pub mod gpu {
    pub use crate::cuda::Gpu;
    pub use crate::cuda::driver::nccl::Nccl;
    pub use crate::cuda::driver::nvidia::{Nvidia, NvidiaSettings};
    pub use crate::cuda::driver::probe::{Cuda, DRIVER};
    pub use crate::cuda::ops::sources_json as kernel_sources_json;
}

// Internal modules, which are public only with the feature `testing`.
#[cfg(not(feature = "testing"))]
mod arch;
#[cfg(feature = "testing")]
pub mod arch;
#[cfg(not(feature = "testing"))]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "some items are only for GPU ranks and tests"))]
mod collective;
#[cfg(feature = "testing")]
pub mod collective;
#[cfg(all(feature = "cuda", not(feature = "testing")))]
#[allow(dead_code, reason = "some items are only for tests")]
mod cuda;
#[cfg(all(feature = "cuda", feature = "testing"))]
pub mod cuda;
#[cfg(not(feature = "faults"))]
mod faults;
#[cfg(feature = "faults")]
pub mod faults;
#[cfg(not(feature = "testing"))]
mod forward;
#[cfg(feature = "testing")]
pub mod forward;
#[cfg(not(feature = "testing"))]
mod load;
#[cfg(feature = "testing")]
pub mod load;
#[cfg(not(feature = "testing"))]
#[allow(dead_code, reason = "the references and cases of ops are only for tests and benches")]
mod ops;
#[cfg(feature = "testing")]
pub mod ops;
#[cfg(not(feature = "testing"))]
#[allow(dead_code, reason = "some items are only for tests")]
mod quant;
#[cfg(feature = "testing")]
pub mod quant;
#[cfg(not(feature = "testing"))]
mod tensor;
#[cfg(feature = "testing")]
pub mod tensor;
#[cfg(not(feature = "testing"))]
mod threads;
#[cfg(feature = "testing")]
pub mod threads;

pub use error::{Error, Result};

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
