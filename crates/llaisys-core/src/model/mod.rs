//! Models: facts (`family`, `slot`, `config` and its readers), files (`checkpoint`), what others may know of
//! them (`info`).

pub mod checkpoint;
pub mod config;
pub mod family;
pub mod fields;
mod folder_config;
pub mod generation;
mod gguf_config;
pub mod info;
pub mod slot;
pub mod tokenizer;
