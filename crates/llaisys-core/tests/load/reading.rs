//! How files are read while a model is loaded: the size of the pieces does not affect the weights, and a file that is
//! truncated meanwhile is rejected by name.

use crate::common::{Tiny, load, settings};
use crate::model_files::gguf::{Gguf, Meta};
use crate::model_files::{TempFolder, assert_names, bytes_of, containers, format_error, gguf_error};
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::error::{FormatError, GgufError};
use llaisys_core::forward::shard::Shard;
use llaisys_core::forward::weights::{FeedForward, Mixer, PackSettings, Weights};
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::load::file::ModelFile;
use llaisys_core::ops::packed::PackedMatrix;
use llaisys_core::progress::Progress;
use llaisys_core::threads::Pool;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_128;

fn in_mode(mode: ComputeMode) -> ContextConfig {
    ContextConfig { mode, max_model_len: 64, ..settings() }
}

/// Truncates the file to `n_bytes`.
fn cut(path: &Path, n_bytes: u64) {
    File::options().write(true).open(path).unwrap().set_len(n_bytes).unwrap();
}

/// If files were mapped, a truncated one would end the process and all its models (SIGBUS).
#[test]
fn file_truncated_while_loading_is_rejected_by_name_and_affects_no_other_model() {
    let model = Tiny::odd("LlamaForCausalLM", true);
    let mut other = load(&model, settings());
    let mut answer = || {
        let seq = other.context.seq_acquire(0).unwrap();
        let rows = crate::common::Rows::default().run(seq, 0, &model.tokens(1, 5));
        let logits = rows.decode(&mut other.context).unwrap().logits.unwrap();
        other.context.seq_release(seq).unwrap();
        logits
    };
    let before = answer();
    let scratch = TempFolder::new();
    for (path, files) in containers(&scratch) {
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
                    let rejected = format_error(Context::new(checkpoint, in_mode(mode), Arc::default()));
                    let name = file.file_name().unwrap().to_string_lossy();
                    assert_names(&rejected, &[&name, "truncated while it was loaded", "at offset"]);
                    let FormatError::Truncated { offset, expected, n_bytes, .. } = rejected else {
                        panic!("{rejected}")
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
fn read_past_the_end_names_file_offset_and_bytes() {
    let scratch = TempFolder::new();
    let path = scratch.write("x.bin", [7; 100]);
    let file = ModelFile::open(&path).unwrap();
    let mut out = [0; 40];
    file.read_at(60, &mut out).unwrap();
    assert_eq!(out, [7; 40]);
    cut(&path, 90);
    let rejected = file.read_at(60, &mut out).unwrap_err();
    assert_names(&rejected, &["x.bin", "40 bytes", "offset 60", "only 90 bytes"]);
    assert_names(&file.front(91).unwrap_err(), &["91 bytes", "offset 0"]);
    file.read_at(50, &mut out).unwrap();
}

#[test]
fn hashes_do_not_depend_on_earlier_reads() {
    let scratch = TempFolder::new();
    for (path, _) in containers(&scratch) {
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
        for id in checkpoint.weight_ids() {
            let name = checkpoint.tensor(id).unwrap().name.clone();
            want.push((name, xxh3_128(&bytes_of(&checkpoint, id).unwrap())));
        }
        want.sort();
        let pool = Pool::new(2).unwrap();
        let read_rows = |checkpoint: &Checkpoint, order: &[usize]| {
            for id in checkpoint.weight_ids().filter(|&id| checkpoint.config().shape(id).len() > 1) {
                let half = checkpoint.config().shape(id)[0] / 2;
                for &i in order {
                    checkpoint.read(id, i * half..(i + 1) * half, &mut Vec::new(), &pool).unwrap();
                }
            }
        };
        for order in [&[][..], &[0, 1], &[1, 0], &[0], &[1], &[0, 0, 1, 1]] {
            assert_eq!(hashes(&|checkpoint| read_rows(checkpoint, order)), want, "{order:?}");
        }
    }
}

/// All rows of the matrices of `weights`, in the order of the model.
fn rows_of(weights: &Weights) -> Vec<f32> {
    let mut matrices: Vec<&PackedMatrix> = vec![&weights.embed, weights.head()];
    for layer in &weights.layers {
        match &layer.mixer {
            Mixer::Attention(w) => {
                let projections = [Some(&w.q), w.k.as_ref(), w.v.as_ref(), Some(&w.o)];
                matrices.extend(projections.into_iter().flatten().map(|part| &part.matrix).chain(&w.gate));
            }
            Mixer::DeltaNet(w) => matrices.extend([&w.q, &w.k, &w.v, &w.z, &w.b, &w.a, &w.out.matrix]),
            Mixer::ShortConv(w) => {
                matrices.extend([&w.input_gate, &w.output_gate, &w.input, &w.out.matrix]);
            }
        }
        match &layer.feed_forward {
            FeedForward::Dense(mlp) => matrices.extend([&mlp.gate_up, &mlp.down.matrix]),
            FeedForward::Experts { router, bias: _, experts, shared, dense } => {
                matrices.push(&router.matrix);
                let dense = dense.iter().flat_map(|d| [&d.mlp.gate_up, &d.mlp.down.matrix]);
                matrices.extend(dense);
                let shared = shared.iter().flat_map(|s| [&s.mlp.gate_up, &s.mlp.down.matrix, &s.scale]);
                matrices.extend(shared);
                matrices.extend(experts.iter().flat_map(|mlp| [&mlp.gate_up, &mlp.down.matrix]));
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
    let scratch = TempFolder::new();
    let mut paths: Vec<PathBuf> = containers(&scratch).into_iter().map(|(path, _)| path).collect();
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
                    return Vec::new(); // this model cannot be split over two ranks
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
fn long_gguf_header_is_read_and_one_above_the_limit_is_rejected() {
    let text = |n_bytes: usize| Meta::Str("x".repeat(n_bytes));
    let mut long = Gguf::small("llama");
    for i in 0..3 {
        long = long.with(&format!("a.{i}"), text(3 << 20));
    }
    let checkpoint = long.open().unwrap();
    crate::model_files::check(&checkpoint);
    let endless = (0..5).fold(Gguf::small("llama"), |file, i| file.with(&format!("a.{i}"), text(15 << 20)));
    let rejected = gguf_error(endless.open());
    assert!(matches!(rejected, GgufError::HeaderBytes { read: 0x400_0000, .. }), "{rejected}");
    assert_names(&rejected, &["header", "67108864"]);
}
