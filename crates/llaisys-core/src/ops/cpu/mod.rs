//! The CPU kernels: each op once, with a body per instruction set where that pays.

pub(super) mod activations;
pub(super) mod isa;
pub(super) mod linear;
