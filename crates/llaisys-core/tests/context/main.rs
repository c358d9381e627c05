//! The context: decodes, shared and shifted cells, KV streams, sliding windows, drafts and faulty rows.

#[path = "../common/mod.rs"]
mod common;
#[path = "../model_files/mod.rs"]
mod model_files;

mod decode;
mod drafts;
mod export;
mod recurrent;
mod row_faults;
mod streams;
mod windows;
