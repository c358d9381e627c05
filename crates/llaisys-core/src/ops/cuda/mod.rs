//! The ops on an NVIDIA GPU: `kernels/<op>.cu` is the kernel, `<op>.rs` checks its arrays and starts it on a
//! [`device::Device`]. What an op means stands in `reference/<op>.rs`, as for the CPU.

pub mod add_rms_norm;
pub mod ahead;
pub mod attention;
pub mod attn_decode;
pub mod attn_prefill;
pub mod blas;
pub mod compile;
pub mod convert;
pub mod device;
pub mod embed;
pub mod gate;
pub mod gather;
pub mod gemv;
pub mod gemv_quant;
pub mod join_columns;
pub mod nccl;
pub mod nvidia;
pub mod nvrtc;
mod pinned;
pub mod probe;
mod ring;
pub mod rope_kv_store;
pub mod sample;
pub mod sample_tables;
pub mod status;
pub mod step;
pub mod unit;
