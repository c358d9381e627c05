//! The context: decodes, shared and moved cells, KV streams, sliding windows, rows that fail.

#[path = "../common/mod.rs"]
mod common;

mod decode;
mod export;
mod row_faults;
mod streams;
mod windows;
