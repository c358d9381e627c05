//! Models split over ranks: every architecture agrees with one rank, every run has the same bits, and models that
//! cannot be split are rejected by name.

use crate::common::{Loaded, Outputs, Random, Rows, Tiny, feed, load, settings};
use crate::model_files::gguf::{Gguf, Meta, Q8_0};
use crate::model_files::{assert_names, unsupported};
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::dtype::{ComputeMode, KvDType};
use llaisys_core::seq::SeqId;

/// Two layers that can be split over four ranks, with 32 inner columns each: a whole block. The vocabulary is not
/// divisible.
fn sized(architecture: &'static str, tied_head: bool, more_keys: &str) -> Tiny {
    Tiny::sized(architecture, tied_head, |model| sizes(model, more_keys))
}

fn sizes(model: &mut Tiny, more_keys: &str) {
    (model.d_model, model.n_heads, model.n_kv_heads, model.d_head, model.d_ff) = (64, 8, 4, 16, 128);
    model.more_keys = more_keys.to_owned();
}

/// Adds a norm to each layer.
fn add_norm(model: &mut Tiny, name: &str, n: usize) {
    for layer in 0..model.n_layers {
        let values = (0..n).map(|i| 0.8 + 0.4 * (i % 7) as f32 / 7.0).collect();
        model.tensors.insert(format!("model.layers.{layer}.{name}.weight"), (vec![n], values));
    }
}

fn gemma(architecture: &'static str, more_keys: &str) -> Tiny {
    let mut model = sized(architecture, true, more_keys);
    add_norm(&mut model, "pre_feedforward_layernorm", 64);
    add_norm(&mut model, "post_feedforward_layernorm", 64);
    model
}

fn gemma3() -> Tiny {
    let mut model = gemma("Gemma3ForCausalLM", r#", "sliding_window": 9, "sliding_window_pattern": 2"#);
    add_norm(&mut model, "self_attn.q_norm", 16);
    add_norm(&mut model, "self_attn.k_norm", 16);
    model
}

fn olmo2() -> Tiny {
    let mut model = gemma("Olmo2ForCausalLM", "");
    model.tensors.retain(|name, _| !name.contains("input_layernorm") && !name.contains("pre_feedforward"));
    add_norm(&mut model, "self_attn.q_norm", 128);
    add_norm(&mut model, "self_attn.k_norm", 64);
    model
}

fn mixtral() -> Tiny {
    Tiny::experts_sized(3, |model| sizes(model, ""))
}

fn qwen3_moe() -> Tiny {
    let mut model = mixtral();
    model.architecture = "Qwen3MoeForCausalLM";
    model.more_keys = r#", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128"#.into();
    let parts = [
        ("block_sparse_moe", "mlp"),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    ];
    let renamed = |name: String| parts.iter().fold(name, |name, (from, to)| name.replace(from, to));
    model.tensors = model.tensors.into_iter().map(|(name, tensor)| (renamed(name), tensor)).collect();
    add_norm(&mut model, "self_attn.q_norm", 16);
    add_norm(&mut model, "self_attn.k_norm", 16);
    model
}

/// Every architecture that can be split: windows, biases, experts, separate and tied heads, norms after the blocks,
/// soft caps.
fn splittable_models() -> Vec<Tiny> {
    let half_windowed = r#", "use_sliding_window": true, "max_window_layers": 1, "sliding_window": 9"#;
    let multipliers = r#", "embedding_multiplier": 3, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
        "logits_scaling": 2"#;
    vec![
        sized("LlamaForCausalLM", false, ""),
        sized("LlamaForCausalLM", false, "").with_biases(),
        sized("HunYuanDenseV1ForCausalLM", true, ""),
        sized("MistralForCausalLM", true, r#", "sliding_window": 9"#),
        sized("Qwen2ForCausalLM", true, half_windowed),
        sized("Qwen3ForCausalLM", false, ""),
        sized("Phi3ForCausalLM", false, "").joined(),
        sized("GraniteForCausalLM", true, multipliers),
        gemma("Gemma2ForCausalLM", r#", "sliding_window": 9"#),
        gemma3(),
        mixtral(),
        qwen3_moe(),
    ]
}

/// One thread for each rank. More threads do not change the bits, and are slow on busy CPUs.
fn split(n_ranks: usize) -> ContextConfig {
    ContextConfig { n_ranks, n_threads: n_ranks, n_streams: 2, ..settings() }
}

fn start(model: &Tiny, config: ContextConfig) -> (Loaded, SeqId) {
    let mut loaded = load(model, config);
    let seq = loaded.context.seq_acquire(0).unwrap();
    (loaded, seq)
}

/// Hidden states and logits of 40 tokens, in chunks.
fn outputs(model: &Tiny, config: ContextConfig, chunk: usize) -> Outputs {
    let (mut loaded, seq) = start(model, config);
    feed(&mut loaded.context, seq, &model.tokens(5, 40), chunk)
}

/// Largest difference relative to the largest expected value.
fn relative_error(got: &[u32], want: &[u32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let value = |bits: &u32| f32::from_bits(*bits);
    let largest = want.iter().fold(0.0, |m: f32, w| m.max(value(w).abs()));
    got.iter().zip(want).fold(0.0, |m: f32, (g, w)| m.max((value(g) - value(w)).abs())) / largest
}

#[test]
fn several_ranks_agree_with_one_rank_for_every_architecture() {
    for model in splittable_models() {
        let want = outputs(&model, split(1), 13);
        for n_ranks in [2, 4] {
            let got = outputs(&model, split(n_ranks), 13);
            let (hidden, logits) =
                (relative_error(&got.hidden, &want.hidden), relative_error(&got.logits, &want.logits));
            // The same f32 sums of 128 terms, split into two or four parts. Their errors have the bound of whole sums,
            // which `decoder.rs` derives.
            let name = model.architecture;
            assert!(hidden < 1e-5 && logits < 1e-5, "{name} on {n_ranks} ranks: {hidden:e}, {logits:e}");
        }
    }
}

/// A row's bits depend on its sequence and on the number of ranks, but not on the run, chunks, threads or batch.
#[test]
fn every_run_has_the_same_bits() {
    let biased = sized("LlamaForCausalLM", false, "").with_biases();
    for model in [sized("Qwen2ForCausalLM", true, ""), biased, mixtral()] {
        for n_ranks in [2, 4] {
            let want = outputs(&model, split(n_ranks), 13);
            for (n_threads, n_batch, chunk) in [(n_ranks, 16, 13), (4, 40, 40), (1, 3, 7)] {
                let got = outputs(&model, ContextConfig { n_threads, n_batch, ..split(n_ranks) }, chunk);
                let what =
                    format!("{n_ranks} ranks, {n_threads} threads, passes of {n_batch}, chunks of {chunk}");
                assert!(got == want, "{}: {what}", model.architecture);
            }
            assert!(
                first_of(&model, n_ranks, 8) == first_of(&model, n_ranks, 1),
                "in a batch of 8, {n_ranks} ranks"
            );
        }
    }
}

/// The outputs of 12 tokens, decoded one by one as the first of `n` sequences.
fn first_of(model: &Tiny, n_ranks: usize, n: usize) -> Outputs {
    let mut loaded = load(model, split(n_ranks));
    let context = &mut loaded.context;
    let seqs: Vec<SeqId> = (0..n).map(|_| context.seq_acquire(0).unwrap()).collect();
    let tokens: Vec<Vec<i32>> = (0..n).map(|i| model.tokens(i as u64, 12)).collect();
    let mut outputs = Outputs::default();
    for position in 0..12 {
        let rows = seqs.iter().zip(&tokens).fold(Rows::default(), |rows, (seq, tokens)| {
            rows.run(*seq, position, &tokens[position..=position])
        });
        let mut result = rows.decode(context).unwrap();
        result.logits.as_mut().unwrap().truncate(model.vocab_size);
        result.hidden.as_mut().unwrap().truncate(model.d_model);
        outputs.push(&result);
    }
    outputs
}

#[test]
fn greedy_ids_equal_those_of_one_rank() {
    for model in [sized("LlamaForCausalLM", false, ""), qwen3_moe()] {
        let want = greedy(&model, split(1), 2);
        for n_ranks in [2, 4] {
            assert_eq!(greedy(&model, split(n_ranks), 2), want, "{} on {n_ranks}", model.architecture);
        }
    }
}

/// 64 greedy ids of each of `n` sequences that are decoded together.
fn greedy(model: &Tiny, config: ContextConfig, n: usize) -> Vec<Vec<i32>> {
    let mut loaded = load(model, ContextConfig { n_cells: 2048, ..config });
    let context = &mut loaded.context;
    let seqs: Vec<SeqId> = (0..n).map(|_| context.seq_acquire(0).unwrap()).collect();
    let mut last: Vec<i32> = (0..n).map(|i| model.tokens(i as u64, 1)[0]).collect();
    let mut ids = vec![Vec::new(); n];
    for position in 0..64 {
        let rows = seqs.iter().zip(&last).fold(Rows::default(), |rows, (seq, &token)| {
            rows.row(token, position, &[*seq], llaisys_core::batch::output::LOGITS)
        });
        last = rows.decode(context).unwrap().token_ids;
        ids.iter_mut().zip(&last).for_each(|(ids, &id)| ids.push(id));
    }
    ids
}

/// Quantized models add their biases: without them, the error would be at least the effect of the biases.
#[test]
fn quantized_modes_add_every_bias() {
    let plain = sized("LlamaForCausalLM", false, "");
    let biased = sized("LlamaForCausalLM", false, "").with_biases();
    let exact = outputs(&biased, split(1), 13);
    let effect = relative_error(&outputs(&plain, split(1), 13).logits, &exact.logits);
    for mode in [ComputeMode::Int8, ComputeMode::Int4] {
        let error =
            relative_error(&outputs(&biased, ContextConfig { mode, ..split(1) }, 13).logits, &exact.logits);
        assert!(error < 0.8 * effect, "{mode:?}: {error:e}, the effect of the biases {effect:e}");
    }
}

/// Modes with rounding: on several ranks the roundings differ, but the errors are not larger.
#[test]
fn every_mode_is_as_close_to_float32_as_on_one_rank() {
    let llama = || sized("LlamaForCausalLM", false, "");
    for model in [llama(), llama().with_biases()] {
        let exact = outputs(&model, split(1), 13);
        for mode in [ComputeMode::Bfloat16, ComputeMode::Int8, ComputeMode::Int4] {
            let error = |n_ranks| {
                relative_error(
                    &outputs(&model, ContextConfig { mode, ..split(n_ranks) }, 13).logits,
                    &exact.logits,
                )
            };
            let whole = error(1);
            for n_ranks in [2, 4] {
                let got = error(n_ranks);
                let fits = got > 0.0 && got < 2.0 * whole;
                assert!(fits, "{mode:?} on {n_ranks} ranks: {got:e}, on one {whole:e}");
            }
        }
    }
}

/// Copies, shifts, removes, exports and imports cells. Returns the outputs of the following decode and the bytes of the
/// export.
fn moved(context: &mut Context, tokens: &[i32]) -> (Outputs, usize) {
    let [a, b] = [(); 2].map(|()| context.seq_acquire(0).unwrap());
    let abroad = context.seq_acquire(1).unwrap();
    feed(context, a, &tokens[..20], 20);
    context.kv_seq_cp(a, b, 0, 12).unwrap();
    context.kv_seq_cp(a, abroad, 0, 15).unwrap();
    context.kv_seq_rm(abroad, 3, 6).unwrap();
    context.kv_seq_add(abroad, 6, -1, -3).unwrap();
    context.kv_node_cache(1, a, 0, 18).unwrap();
    let data = context.kv_node_export(1, 0, 18).unwrap();
    context.kv_node_import(2, 1, 0, &data).unwrap();
    assert_eq!(context.kv_node_export(2, 0, 18).unwrap(), data);
    context.seq_release(a).unwrap();
    let back = context.seq_acquire(1).unwrap();
    context.kv_node_attach(2, back, 0, 18).unwrap();
    let mut outputs = Outputs::default();
    for (seq, start) in [(b, 12), (abroad, 12), (back, 18)] {
        outputs.push(&Rows::default().run(seq, start, &tokens[start..24]).decode(context).unwrap());
    }
    (outputs, data.len())
}

#[test]
fn cell_operations_apply_to_every_rank() {
    let model = sized("Qwen3ForCausalLM", true, "");
    let tokens = model.tokens(9, 24);
    for kv_dtype in KvDType::ALL {
        let config = |n_ranks| ContextConfig { kv_dtype: Some(kv_dtype), lifo: true, ..split(n_ranks) };
        let mut whole = load(&model, config(1));
        let (want, n_bytes) = moved(&mut whole.context, &tokens);
        for n_ranks in [2, 4] {
            let mut parts = load(&model, config(n_ranks));
            let (got, n_parts) = moved(&mut parts.context, &tokens);
            // Where an f32 sum rounds to the other side, keys in bf16 differ by a unit in the last place, 2^-8. In f16
            // they differ by less, in int8 by a 127th of the largest.
            let bound = if kv_dtype == KvDType::Float32 { 1e-5 } else { 0.02 };
            let error = relative_error(&got.logits, &want.logits);
            assert!(error < bound, "{kv_dtype:?} on {n_ranks} ranks: {error:e}");
            assert_eq!(n_parts, n_bytes, "every head is on one rank");
            assert_ne!(parts.context.fingerprint(), whole.context.fingerprint(), "cells have another layout");
        }
    }
}

#[test]
fn models_that_cannot_be_split_are_rejected_by_name() {
    let rejected = |model: &Tiny, config: ContextConfig| {
        let folder = model.write();
        let error = unsupported(Context::load(&folder, config));
        std::fs::remove_dir_all(folder).unwrap();
        error
    };
    let llama = sized("LlamaForCausalLM", false, "");
    let error = rejected(&llama, split(3));
    assert_names(&error, &["3 ranks", "tensor_parallel_size", "key-value heads is 4", "multiple of 3"]);
    assert_names(&rejected(&llama, split(8)), &["key-value heads is 4", "multiple of 8"]);
    let narrow = Tiny::sized("LlamaForCausalLM", false, |model| {
        sizes(model, "");
        model.d_ff = 129;
    });
    assert_names(&rejected(&narrow, split(2)), &["feed-forward width is 129", "multiple of 2"]);
    assert_names(&rejected(&olmo2(), split(2)), &["Olmo2ForCausalLM", "norm"]);
    load(&olmo2(), split(1));
    // A row of 96 has three blocks of 32.
    let uneven = Tiny::sized("LlamaForCausalLM", false, |model| {
        sizes(model, "");
        model.d_ff = 96;
    });
    load(&uneven, split(2));
    let error = rejected(&uneven, ContextConfig { mode: ComputeMode::Int8, ..split(2) });
    assert_names(&error, &["model.layers.0.mlp.down_proj.weight", "blocks of 32", "is 96", "multiple of 64"]);
    let mut loaded = load(&llama, split(2));
    let (shape, values) = &llama.tensors["model.norm.weight"];
    let error = unsupported(loaded.context.replace_weight("model.norm.weight", shape, values));
    assert_names(&error, &["model.norm.weight", "several ranks"]);
    let folder = llama.write();
    let error = Context::load(&folder, ContextConfig { n_ranks: 0, ..settings() }).unwrap_err();
    std::fs::remove_dir_all(folder).unwrap();
    assert_names(&error, &["n_ranks is 0"]);
}

/// A GGUF file of one layer of Q8_0 blocks, with two key-value heads of 16 and four heads.
fn gguf(d_ff: u64) -> Gguf {
    let mut file = Gguf::small("llama");
    let sizes = [("embedding_length", 64), ("attention.head_count", 4), ("attention.head_count_kv", 2)];
    for (key, size) in sizes.into_iter().chain([("feed_forward_length", d_ff as u32)]) {
        file = file.with(&format!("llama.{key}"), Meta::U32(size));
    }
    file.tensors.clear();
    for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
        file.vector(&format!("{name}.weight"), 64);
    }
    let matrices = [("token_embd", 8, 64), ("blk.0.attn_q", 64, 64), ("blk.0.attn_k", 32, 64)];
    let more = [("blk.0.attn_v", 32, 64), ("blk.0.attn_output", 64, 64), ("blk.0.ffn_gate", d_ff, 64)];
    let rest = [("blk.0.ffn_up", d_ff, 64), ("blk.0.ffn_down", 64, d_ff)];
    let mut random = Random(7);
    for (name, n_rows, n_columns) in matrices.into_iter().chain(more).chain(rest) {
        file.matrix(&format!("{name}.weight"), n_rows, n_columns, Q8_0);
        let data = &mut file.tensors.last_mut().unwrap().data;
        for block in data.chunks_exact_mut(34) {
            block[..2].copy_from_slice(&half::f16::from_f32(0.002).to_le_bytes());
            block[2..].fill_with(|| random.next_u64() as u8);
        }
    }
    file
}

#[test]
fn quantized_file_is_split_between_blocks_or_rejected() {
    let scratch = crate::model_files::TempFolder::new();
    let path = scratch.write("even.gguf", gguf(64).bytes());
    let logits = |n_ranks| {
        let config = ContextConfig { mode: ComputeMode::Auto, max_model_len: 64, ..split(n_ranks) };
        let mut context = Context::load(&path, config).unwrap();
        let seq = context.seq_acquire(0).unwrap();
        feed(&mut context, seq, &[1, 2, 3, 4, 3, 0, 2, 1], 8).logits
    };
    // Activations are rounded in the same groups of 32. A value between two of its 127 steps may round to the other
    // side.
    let error = relative_error(&logits(2), &logits(1));
    assert!(error < 1.0 / 127.0, "{error:e}");
    let path = scratch.write("uneven.gguf", gguf(96).bytes());
    let error = unsupported(Context::load(&path, ContextConfig { max_model_len: 64, ..split(2) }));
    assert_names(&error, &["blk.0.ffn_down.weight", "blocks of 32", "is 96", "multiple of 64"]);
}
