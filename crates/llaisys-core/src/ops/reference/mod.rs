//! Reference implementations: every op defined as plain loops, never optimized. Tests compare the kernels with them.

pub mod add;
pub mod argmax;
pub mod attention;
pub mod causal_conv;
pub mod clamped_swiglu;
pub mod delta_gates;
pub mod delta_rule;
pub mod embed;
pub mod gated_norm;
pub mod gather;
pub mod geglu;
pub mod gelu;
pub mod kv_store;
pub mod layer_norm;
pub mod linear;
pub mod lora;
pub mod multiply;
pub mod rms_norm;
pub mod rope;
pub mod route;
pub mod scale;
pub mod scale_rows;
pub mod scatter_add;
pub mod sigmoid_gate;
pub mod soft_cap;
pub mod swiglu;
