//! The meaning of every op: plain loops, never optimised. Kernels are tested against these.

pub mod linear;
