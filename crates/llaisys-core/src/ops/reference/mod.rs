//! The meaning of every op: plain loops, never optimised. Kernels are tested against these.

pub mod argmax;
pub mod attention;
pub mod embed;
pub mod kv_store;
pub mod linear;
pub mod rms_norm;
pub mod rope;
pub mod swiglu;
