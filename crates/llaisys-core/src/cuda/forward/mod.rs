//! The decoder on a [`Device`](crate::cuda::device::Device). Weights are copied once and memory is sized once. A forward
//! pass is a list of launches in the order of [`Decoder::forward`](crate::forward::decoder::Decoder::forward).
//! Activations and the residual stream have the weights' 16-bit type and are rounded where transformers rounds them. Sums
//! and norms are computed in f32.
//!
//! A model may be split over ranks ([`crate::forward::shard`]). Each rank's device has its heads and inner columns, a part
//! of the head's rows, and all embeddings. The outputs of attention and of the feed-forward network are rounded and then
//! summed over the ranks, twice per layer. Logits are gathered from all ranks. All ranks run the same passes at the same
//! time.

pub mod arena;
#[allow(unsafe_code, reason = "launches kernels")]
mod cells;
mod decoder;
mod graphs;
pub mod load;
pub mod overlap;
#[allow(unsafe_code, reason = "launches kernels")]
mod pass;
mod replace;
pub mod rows;
mod slots;
#[allow(unsafe_code, reason = "launches kernels")]
mod state;
#[allow(unsafe_code, reason = "launches steps")]
pub mod steps;
pub mod support;

pub use arena::{CellCount, DeviceLimits};
pub use decoder::DeviceDecoder;
