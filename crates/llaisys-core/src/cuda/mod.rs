//! The CUDA backend:
//!
//! - `device.rs`: the `Device` trait, which the GPU (`driver/nvidia.rs`) and the tests' emulator implement
//! - `kernel_source.rs`: a kernel's source, its compile-time constants and its resource limits
//! - `kernels/<op>.cu`, `ops/<op>.rs`: each op's kernel, and the code that checks its arrays and launches it
//! - `driver/`: the driver, NVRTC, cublasLt and NCCL
//! - `forward/`: the forward pass of a model, and decode steps whose state stays on the device
//! - `backend/`: the `Backend` of a `Context` on one or several GPUs
//!
//! `ops/reference/<op>.rs` defines what an op computes, as for the CPU.

mod backend;
pub mod device;
pub mod driver;
mod element;
pub mod forward;
pub mod kernel_source;
pub mod ops;

pub use backend::Gpu;
