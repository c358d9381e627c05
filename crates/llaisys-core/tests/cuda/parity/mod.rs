//! Parity tests of each op and the whole decoder with their references, on the emulator or on a GPU.
//! `benches/gpu/bundle.py` bundles them for a machine with a GPU.

#[allow(unsafe_code, reason = "launches kernels")]
mod attention;
mod decoder;
mod gemv;
mod graph;
mod product;
#[allow(unsafe_code, reason = "launches kernels")]
mod rows;
#[allow(unsafe_code, reason = "launches kernels")]
mod sampling;
#[allow(unsafe_code, reason = "launches kernels")]
mod state;
