//! The inference core: model files in, sampled ids out.
//!
//! No Python, no network, no clock, no environment variables. `unsafe` is denied but in the modules that say
//! so below: aligned memory, kernels and the thread pool.

#![warn(clippy::unwrap_used, reason = "input never panics; a broken invariant panics with a message")]
#![warn(unreachable_pub, reason = "what is `pub` here is the crate's surface")]

pub mod batch;
pub mod books;
pub mod collective;
pub mod context;
pub mod dtype;
pub mod error;
pub mod faults;
pub mod formats;
pub mod kv;
pub mod model;
#[allow(unsafe_code, reason = "SIMD kernels and disjoint writes of panel-split outputs")]
pub mod ops;
pub mod progress;
pub mod quant;
pub mod sample;
pub mod seq;
#[allow(unsafe_code, reason = "owns aligned allocations")]
pub mod tensor;
#[allow(unsafe_code, reason = "hands borrowed jobs to worker threads")]
pub mod threads;
pub mod watch;

pub use error::{Error, Result};
