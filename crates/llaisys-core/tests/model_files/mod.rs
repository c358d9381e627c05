//! Writers of small model files, valid and damaged ones.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of these writers")]
pub mod adapter;
pub mod encoder;
pub mod folder;
pub mod gemma4;
pub mod gguf;
pub mod gpt_oss;
pub mod scaled;
#[path = "../common/temp_folder.rs"]
mod temp_folder;

use folder::{Folder, shard_name};
use gguf::Gguf;
use llaisys_core::arch::weight_id::WeightId;
use llaisys_core::error::{Error, Rejected, Result, Unsupported};
use llaisys_core::error::{FormatError, GgufError};
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::threads::Pool;
use std::fs;
use std::path::{Path, PathBuf};

pub use temp_folder::TempFolder;

/// The golden folder `name`: in the source, or next to a binary that was copied elsewhere (`benches/gpu/bundle.py`).
pub fn golden(name: &str) -> PathBuf {
    let copied = std::env::current_exe().unwrap().with_file_name("goldens").join(name);
    if copied.is_dir() {
        return copied;
    }
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/goldens").join(name)
}

/// Writes a Llama with random tensors as one file, as shards and as GGUF. Returns the paths to open, each with its
/// tensor files.
pub fn containers(scratch: &TempFolder) -> [(PathBuf, Vec<PathBuf>); 3] {
    let mut folder = Folder::small("LlamaForCausalLM");
    for (i, tensor) in folder.tensors.iter_mut().enumerate() {
        tensor.data.iter_mut().enumerate().for_each(|(j, byte)| *byte = ((i + j) % 64) as u8);
    }
    let parts = ["single", "sharded"].map(|name| scratch.file(name));
    let [single, sharded] = parts.each_ref().map(|path| {
        fs::create_dir(path).unwrap();
        TempFolder::new()
    });
    folder.write(&single);
    folder.write_sharded(&sharded, 2);
    for (made, path) in [&single, &sharded].into_iter().zip(&parts) {
        for file in fs::read_dir(made.path()).unwrap() {
            let file = file.unwrap();
            fs::rename(file.path(), path.join(file.file_name())).unwrap();
        }
    }
    let gguf = scratch.write("x.gguf", Gguf::small("llama").bytes());
    let [single, sharded] = parts;
    let shards = [0, 1].map(|i| sharded.join(shard_name(i))).to_vec();
    [(single.clone(), vec![single.join("model.safetensors")]), (sharded, shards), (gguf.clone(), vec![gguf])]
}

/// Writes a folder, changes the first 4,096 bytes of `file`, and opens it; None if it is rejected.
pub fn damaged(folder: &Folder, file: &str, change: impl FnOnce(&mut [u8])) -> Option<Checkpoint> {
    let scratch = TempFolder::new();
    folder.write(&scratch);
    let mut bytes = fs::read(scratch.file(file)).unwrap();
    let n_front = bytes.len().min(4096);
    change(&mut bytes[..n_front]);
    scratch.write(file, bytes);
    // Its files stay open.
    Checkpoint::open(scratch.path()).ok()
}

/// All bytes of a weight's tensor.
pub fn bytes_of(checkpoint: &Checkpoint, id: WeightId) -> Result<Vec<u8>> {
    let shape = checkpoint.config().shape(id);
    let n_rows = shape[..shape.len() - 1].iter().product();
    let mut bytes = Vec::new();
    let n_bytes = checkpoint.read(id, 0..n_rows, &mut bytes, &Pool::new(1).unwrap())?.bytes.len();
    assert_eq!(bytes.len(), n_bytes);
    Ok(bytes)
}

/// Checks the properties of every opened checkpoint. Reads every tensor, which fails if a range is outside of the file.
pub fn check(checkpoint: &Checkpoint) {
    let config = checkpoint.config();
    assert!(config.d_head.is_multiple_of(2) && config.n_heads.is_multiple_of(config.n_kv_heads));
    assert!(config.eos.iter().chain(&config.bos).all(|&id| (id as usize) < config.vocab_size));
    for id in checkpoint.weight_ids() {
        let n_elements = config.shape(id).iter().product();
        let bytes = match (checkpoint.tensor(id), bytes_of(checkpoint, id)) {
            (Some(tensor), bytes) => {
                assert_eq!(tensor.shape, config.shape(id), "{id:?}");
                bytes.unwrap()
            }
            // A quantized matrix.
            (None, Ok(bytes)) => bytes,
            (None, Err(error)) => {
                assert_names(&error, &["NaN"]);
                continue;
            }
        };
        assert_eq!(checkpoint.dtype(id).bytes_of(n_elements), Some(bytes.len()), "{id:?}");
    }
}

pub fn format_error(result: Result<impl Sized>) -> FormatError {
    match result.err() {
        Some(Error::Rejected(Rejected::Format(error))) => error,
        other => panic!("expected a format error, got {other:?}"),
    }
}

pub fn gguf_error(result: Result<impl Sized>) -> GgufError {
    match format_error(result) {
        FormatError::Gguf(error) => error,
        other => panic!("expected a GGUF error, got {other:?}"),
    }
}

pub fn unsupported(result: Result<impl Sized>) -> Unsupported {
    match result.err() {
        Some(Error::Unsupported(error)) => error,
        other => panic!("expected something unsupported, got {other:?}"),
    }
}

/// Asserts that the text of an error contains each of `words`.
pub fn assert_names(error: &impl std::fmt::Display, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} does not name {word:?}");
    }
}
