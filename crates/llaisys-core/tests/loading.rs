//! How files are read while a model is loaded: every byte of a tensor once, in pieces that change nothing, and a file
//! that becomes shorter meanwhile is refused by name.

mod common;
mod formats_common;

use common::{Tiny, load, settings};
use formats_common::folder::{Folder, shard_name};
use formats_common::gguf::{Gguf, Meta};
use formats_common::{Scratch, assert_names, bytes_of, format_error, gguf_error};
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::formats::file::ModelFile;
use llaisys_core::formats::{FormatError, GgufError};
use llaisys_core::model::checkpoint::Checkpoint;
use llaisys_core::model::shard::Shard;
use llaisys_core::model::weights::{FeedForward, PackSettings, Weights};
use llaisys_core::ops::packed::PackedMatrix;
use llaisys_core::progress::Progress;
use llaisys_core::threads::Pool;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use xxhash_rust::xxh3::xxh3_128;

/// The system counts the reads of the whole process: tests that read files take turns.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn in_mode(mode: ComputeMode) -> ContextConfig {
    ContextConfig { mode, max_model_len: 64, ..settings() }
}

/// Makes the file `n_bytes` long.
fn cut(path: &Path, n_bytes: u64) {
    File::options().write(true).open(path).unwrap().set_len(n_bytes).unwrap();
}

/// A Llama whose tensors differ, as one file, as shards and as GGUF: what to open, and the files with tensors.
fn layouts(scratch: &Scratch) -> [(PathBuf, Vec<PathBuf>); 3] {
    let mut folder = Folder::small("LlamaForCausalLM");
    for (i, tensor) in folder.tensors.iter_mut().enumerate() {
        tensor.data.iter_mut().enumerate().for_each(|(j, byte)| *byte = ((i + j) % 64) as u8);
    }
    let parts = ["single", "sharded"].map(|name| scratch.file(name));
    let [single, sharded] = parts.each_ref().map(|path| {
        fs::create_dir(path).unwrap();
        Scratch::new()
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

/// A shorter file ends a process that has mapped it (SIGBUS), and all models that it serves.
#[test]
fn a_file_truncated_while_it_is_loaded_is_refused_by_name_and_costs_no_other_model() {
    let _alone = alone();
    let model = Tiny::odd("LlamaForCausalLM", true);
    let mut other = load(&model, settings());
    let mut answer = || {
        let seq = other.context.seq_acquire(0).unwrap();
        let rows = common::Rows::default().run(seq, 0, &model.tokens(1, 5));
        let logits = rows.decode(&mut other.context).unwrap().logits.unwrap();
        other.context.seq_release(seq).unwrap();
        logits
    };
    let before = answer();
    let scratch = Scratch::new();
    for (path, files) in layouts(&scratch) {
        for mode in [ComputeMode::Auto, ComputeMode::Int8] {
            if mode == ComputeMode::Int8 && path.extension().is_some() {
                continue; // the GGUF file is quantized already
            }
            for file in &files {
                let whole = fs::read(file).unwrap();
                let n_bytes = whole.len() as u64;
                for end in [n_bytes - 1, n_bytes / 2, 7, 0] {
                    let checkpoint = Checkpoint::open(&path).unwrap();
                    cut(file, end);
                    let refused = format_error(Context::new(checkpoint, in_mode(mode), Arc::default()));
                    let name = file.file_name().unwrap().to_string_lossy();
                    assert_names(&refused, &[&name, "truncated while it was loaded", "at offset"]);
                    let FormatError::Truncated { offset, expected, n_bytes, .. } = refused else {
                        panic!("{refused}")
                    };
                    assert!((offset + expected) as u64 > end && n_bytes == end, "{offset} {expected} {end}");
                    fs::write(file, &whole).unwrap();
                }
            }
            Context::load(&path, in_mode(mode)).unwrap();
        }
    }
    assert_eq!(answer(), before);
}

#[test]
fn a_read_behind_the_end_names_file_offset_and_bytes() {
    let scratch = Scratch::new();
    let path = scratch.write("x.bin", [7; 100]);
    let file = ModelFile::open(&path).unwrap();
    let mut out = [0; 40];
    file.read_at(60, &mut out).unwrap();
    assert_eq!(out, [7; 40]);
    cut(&path, 90);
    let refused = file.read_at(60, &mut out).unwrap_err();
    assert_names(&refused, &["x.bin", "40 bytes", "offset 60", "only 90 bytes"]);
    assert_names(&file.front(91).unwrap_err(), &["91 bytes", "offset 0"]);
    file.read_at(50, &mut out).unwrap();
}

/// Bytes that this process has read from files so far.
fn n_bytes_read() -> u64 {
    let counters = fs::read_to_string("/proc/self/io").unwrap();
    counters.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

#[test]
fn every_byte_of_a_tensor_is_read_once() {
    let _alone = alone();
    let scratch = Scratch::new();
    let written = |model: Tiny| model.write();
    let odd = |architecture| written(Tiny::odd(architecture, false));
    let mut paths: Vec<PathBuf> = layouts(&scratch).into_iter().map(|(path, _)| path).collect();
    let folders = [
        odd("LlamaForCausalLM"),
        odd("Qwen2ForCausalLM"),
        odd("Qwen3ForCausalLM"),
        written(Tiny::odd("LlamaForCausalLM", true)),
        written(Tiny::odd("Phi3ForCausalLM", false).joined()),
        written(Tiny::experts(4)),
        // Rows of whole blocks, which are quantized.
        written(Tiny::sized("LlamaForCausalLM", false, |model| (model.d_model, model.d_ff) = (64, 96))),
        // A head that is the embedding again, which the model passes over but the fingerprint does not.
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
            // The counters themselves are a file of less than this.
            assert!((n_bytes..n_bytes + 512).contains(&n_read), "{path:?} {mode:?}: {n_read} of {n_bytes}");
        }
    }
    folders.iter().for_each(|folder| fs::remove_dir_all(folder).unwrap());
}

#[test]
fn hashes_are_those_of_the_bytes_whatever_was_read_before() {
    let _alone = alone();
    let scratch = Scratch::new();
    for (path, _) in layouts(&scratch) {
        let hashes = |read: &dyn Fn(&Checkpoint)| -> Vec<(String, u128)> {
            let checkpoint = Checkpoint::open(&path).unwrap();
            read(&checkpoint);
            checkpoint
                .hashes()
                .map(|tensor| tensor.map(|(t, hash)| (t.name.clone(), hash)).unwrap())
                .collect()
        };
        let checkpoint = Checkpoint::open(&path).unwrap();
        let mut want = Vec::new();
        for slot in checkpoint.slots() {
            let name = checkpoint.tensor(slot).unwrap().name.clone();
            want.push((name, xxh3_128(&bytes_of(&checkpoint, slot).unwrap())));
        }
        want.sort();
        let pool = Pool::new(2).unwrap();
        let read_rows = |checkpoint: &Checkpoint, order: &[usize]| {
            for slot in checkpoint.slots().filter(|&slot| checkpoint.config().shape(slot).len() > 1) {
                let half = checkpoint.config().shape(slot)[0] / 2;
                for &i in order {
                    checkpoint.read(slot, i * half..(i + 1) * half, &mut Vec::new(), &pool).unwrap();
                }
            }
        };
        for order in [&[][..], &[0, 1], &[1, 0], &[0], &[1], &[0, 0, 1, 1]] {
            assert_eq!(hashes(&|checkpoint| read_rows(checkpoint, order)), want, "{order:?}");
        }
    }
}

/// All rows that matrices of `weights` hold, in the order of the model.
fn rows_of(weights: &Weights) -> Vec<f32> {
    let mut matrices: Vec<&PackedMatrix> = vec![&weights.embed, weights.head()];
    for layer in &weights.layers {
        matrices.extend([&layer.q.matrix, &layer.k.matrix, &layer.v.matrix, &layer.o]);
        match &layer.feed_forward {
            FeedForward::Dense(mlp) => matrices.extend([&mlp.gate_up, &mlp.down]),
            FeedForward::Experts { router, experts } => {
                matrices.push(router);
                matrices.extend(experts.iter().flat_map(|mlp| [&mlp.gate_up, &mlp.down]));
            }
        }
    }
    let mut values = Vec::new();
    for matrix in matrices {
        let mut row = vec![0.0; matrix.n_columns()];
        for n in 0..matrix.n_rows() {
            matrix.read_row(n, &mut row);
            values.extend_from_slice(&row);
        }
    }
    values
}

#[test]
fn pieces_of_any_size_pack_the_same_weights() {
    let _alone = alone();
    let scratch = Scratch::new();
    let mut paths: Vec<PathBuf> = layouts(&scratch).into_iter().map(|(path, _)| path).collect();
    let large = |model: &mut Tiny| {
        (model.d_model, model.d_ff, model.vocab_size) = (40, 200, 531);
        (model.n_heads, model.n_kv_heads, model.d_head) = (8, 4, 24);
    };
    let folders = [
        Tiny::sized("Qwen3ForCausalLM", false, large).write(),
        Tiny::sized("Phi3ForCausalLM", false, large).joined().write(),
        Tiny::experts_sized(3, large).write(),
    ];
    paths.extend(folders.iter().cloned());
    let pool = Pool::new(2).unwrap();
    for path in &paths {
        for (rank, world) in [(0, 1), (0, 2), (1, 2)] {
            let packed = |piece_bytes| {
                let checkpoint = Checkpoint::open(path).unwrap();
                let (shard, mode) = (Shard { rank, world }, ComputeMode::Auto);
                if shard.config(checkpoint.config()).is_err() {
                    return Vec::new(); // not a model that two ranks can share
                }
                let settings = PackSettings { piece_bytes, ..PackSettings::new(mode, shard) };
                let weights = Weights::pack(&checkpoint, settings, &pool, &Progress::default());
                rows_of(&weights.unwrap())
            };
            let whole = packed(usize::MAX / 2);
            for piece_bytes in [1, 3000, 20_000] {
                assert!(packed(piece_bytes) == whole, "{path:?} {rank} of {world}, {piece_bytes}");
            }
        }
    }
    folders.iter().for_each(|folder| fs::remove_dir_all(folder).unwrap());
}

#[test]
fn a_long_gguf_header_is_read_whole_and_one_without_end_is_not() {
    let _alone = alone();
    let text = |n_bytes: usize| Meta::Str("x".repeat(n_bytes));
    let mut long = Gguf::small("llama");
    for i in 0..3 {
        long = long.with(&format!("a.{i}"), text(3 << 20));
    }
    let checkpoint = long.open().unwrap();
    formats_common::check(&checkpoint);
    let endless = (0..5).fold(Gguf::small("llama"), |file, i| file.with(&format!("a.{i}"), text(15 << 20)));
    let refused = gguf_error(endless.open());
    assert!(matches!(refused, GgufError::HeaderBytes { read: 0x400_0000, .. }), "{refused}");
    assert_names(&refused, &["header", "67108864"]);
}
