//! Models: facts (`family`, `slot`, `config` and its readers), files (`checkpoint`), what others may know of
//! them (`info`), packed tensors (`weights`), the ranks' parts of them (`shard`) and the forward pass (`decoder`),
//! on a GPU (`device`).

pub mod checkpoint;
pub mod config;
pub mod decoder;
#[cfg(feature = "cuda")]
pub mod device;
pub mod family;
pub mod fields;
mod folder_config;
pub mod generation;
mod gguf_config;
pub mod held;
pub mod info;
pub mod packed_size;
mod quantized;
pub mod rope;
pub mod shard;
pub mod slot;
pub mod tokenizer;
pub mod weights;
