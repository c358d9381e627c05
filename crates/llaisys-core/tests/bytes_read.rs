//! Loading a model reads every byte of a tensor once. This test has its own process, because the system counts the
//! reads of all threads.

mod common;
mod model_files;

use common::{Tiny, settings};
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::load::checkpoint::Checkpoint;
use model_files::{TempFolder, containers};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

fn in_mode(mode: ComputeMode) -> ContextConfig {
    ContextConfig { mode, max_model_len: 64, ..settings() }
}

/// Bytes that this process has read from files so far.
fn n_bytes_read() -> u64 {
    let counters = fs::read_to_string("/proc/self/io").unwrap();
    counters.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

#[test]
fn every_byte_of_a_tensor_is_read_once() {
    let scratch = TempFolder::new();
    let written = |model: Tiny| model.write();
    let odd = |architecture| written(Tiny::odd(architecture, false));
    let mut paths: Vec<PathBuf> = containers(&scratch).into_iter().map(|(path, _)| path).collect();
    let folders = [
        odd("LlamaForCausalLM"),
        odd("Qwen2ForCausalLM"),
        odd("Qwen3ForCausalLM"),
        written(Tiny::odd("LlamaForCausalLM", true)),
        written(Tiny::odd("Phi3ForCausalLM", false).joined()),
        written(Tiny::experts(4)),
        // Rows are whole blocks, which can be quantized.
        written(Tiny::sized("LlamaForCausalLM", false, |model| (model.d_model, model.d_ff) = (64, 96))),
        // Threads read several pieces of the embeddings at the same time.
        written(Tiny::sized("LlamaForCausalLM", false, |model| model.vocab_size = 40_000)),
        // A stored head of a tied model, which the model ignores but the fingerprint includes.
        {
            let mut tied = Tiny::odd("LlamaForCausalLM", true);
            let embed = tied.tensors["model.embed_tokens.weight"].clone();
            tied.tensors.insert("lm_head.weight".into(), embed);
            tied.write()
        },
    ];
    paths.extend(folders.iter().cloned());
    for path in &paths {
        for mode in [ComputeMode::Auto, ComputeMode::Float32, ComputeMode::Int8, ComputeMode::Int4] {
            let checkpoint = Checkpoint::open(path).unwrap();
            if path.extension().is_some() && matches!(mode, ComputeMode::Int8 | ComputeMode::Int4) {
                continue;
            }
            let n_bytes: u64 = checkpoint.hashes().map(|tensor| tensor.unwrap().0.range.len() as u64).sum();
            let checkpoint = Checkpoint::open(path).unwrap();
            let before = n_bytes_read();
            let context = Context::new(checkpoint, in_mode(mode), Arc::default()).unwrap();
            let n_read = n_bytes_read() - before;
            assert!(context.fingerprint().len() == 32);
            // Less than this are the file with the counters, and a byte of each tensor, which tells whether it is cached.
            assert!((n_bytes..n_bytes + 512).contains(&n_read), "{path:?} {mode:?}: {n_read} of {n_bytes}");
        }
    }
    folders.iter().for_each(|folder| fs::remove_dir_all(folder).unwrap());
}
