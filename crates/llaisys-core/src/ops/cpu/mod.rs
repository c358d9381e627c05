//! The CPU kernels: each op once, with a body per instruction set where that is faster.

pub(super) mod activations;
pub(super) mod add;
pub(super) mod argmax;
pub(super) mod attention;
pub(super) mod causal_conv;
pub(super) mod delta_gates;
pub(super) mod delta_rule;
pub mod dispatch;
pub(super) mod embed;
pub(super) mod gate;
pub(super) mod gated_norm;
pub(super) mod gather;
pub(super) mod gelu;
pub(super) mod isa;
mod kv_element;
pub(super) mod kv_store;
pub(super) mod layer_norm;
pub(super) mod linear;
pub(super) mod rms_norm;
pub(super) mod rope;
pub(super) mod route;
mod rows;
pub(super) mod scale;
pub(super) mod scale_rows;
pub(super) mod scatter_add;
pub(super) mod sigmoid_gate;
pub(super) mod soft_cap;
