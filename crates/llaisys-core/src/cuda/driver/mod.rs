//! NVIDIA's libraries: the driver, the NVRTC compiler, cublasLt and NCCL.

#[allow(unsafe_code, reason = "calls cublasLt")]
pub mod blas;
pub mod compile;
#[allow(unsafe_code, reason = "loads shared libraries")]
pub mod library;
#[allow(unsafe_code, reason = "calls NCCL")]
pub mod nccl;
#[allow(unsafe_code, reason = "calls the driver")]
pub mod nvidia;
#[allow(unsafe_code, reason = "calls NVRTC")]
pub mod nvrtc;
#[allow(unsafe_code, reason = "hands out pinned host memory")]
mod pinned;
#[allow(unsafe_code, reason = "loads the libraries and queries the driver")]
pub mod probe;
mod ring;
pub mod status;
