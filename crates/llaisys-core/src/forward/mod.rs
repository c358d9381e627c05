//! The forward pass on the CPU: packed weights (`weights`), a rank's part of them (`shard`), and the layers as a list
//! of op calls (`decoder`, recurrent ones in `delta_net`) in memory that is allocated once (`workspace`).

pub mod decoder;
mod delta_net;
pub mod shard;
pub mod weights;
mod workspace;
