//! Model files: reading them, rejecting invalid ones, and packing their weights.

#[path = "../common/mod.rs"]
mod common;
#[path = "../model_files/mod.rs"]
mod model_files;
#[path = "../stored/mod.rs"]
mod stored;

mod adapters;
mod architectures;
mod attacks;
mod attacks_on_families;
mod block_types;
mod config;
mod families;
mod folder;
mod gemma4;
mod gemma4_file;
mod gguf;
mod gguf_config;
mod gpt_oss;
mod hybrid_files;
mod hybrids;
mod lfm2;
mod mutations;
mod quantize;
mod quantized_folder;
mod read_ahead;
mod reading;
mod rotation;
mod scaled_folder;
mod spellings;
mod wrapped;
