//! The KV cache without a model: cells, sequence ids, cache nodes, streams, reservations, batches and tensors.

mod batch;
mod cells;
mod exhaustive;
mod kv_cache;
mod model;
mod reserve;
#[path = "../seeded/mod.rs"]
mod seeded;
mod seq_ids;
mod states;
mod storage;
