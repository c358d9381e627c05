//! The ops on an NVIDIA GPU: `kernels/<op>.cu` is the kernel, `<op>.rs` checks its arrays and starts it on a
//! [`device::Device`]. What an op means stands in `reference/<op>.rs`, as for the CPU.

pub mod compile;
pub mod device;
pub mod nvrtc;
pub mod probe;
pub mod unit;
