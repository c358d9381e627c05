//! The forward pass on the CPU: packed weights (`weights`), a rank's part of them (`shard`), and the layers as a list
//! of op calls (`decoder`, its recurrent ones in `delta_net` and `short_conv`, with `journal` and `replay`, its
//! `experts`, what only Gemma 4 has in `gemma4`, and `encoder`) in memory that is allocated once (`workspace`). LoRA
//! adapters (`lora`) add to its projections.

pub mod decoder;
mod delta_net;
pub mod encoder;
mod experts;
mod gemma4;
pub mod journal;
pub mod lora;
pub mod replay;
pub mod shard;
mod short_conv;
pub mod weights;
mod workspace;
