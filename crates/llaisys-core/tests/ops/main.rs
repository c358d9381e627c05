//! Ops on the CPU, the threads and memory below them, sampling, and the detection of stalls.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/parity.rs"]
mod parity;
#[path = "../seeded/mod.rs"]
mod seeded;
#[path = "../stored/mod.rs"]
mod stored;

mod attention;
mod experts;
mod kv_cells;
mod linear;
mod lora;
mod packed;
mod pruned_argmax;
mod pruned_head;
mod recurrent;
mod rowwise;
mod sampling;
mod shared_prefix;
mod softmax_weights;
mod stall;
mod tensor;
mod threads;
