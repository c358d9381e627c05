//! The metadata of GGUF files about model and tokenizer. Unimplemented settings are rejected by name.

use crate::model_files::gguf::{D_HEAD, F32, Gguf, Meta, N_HEADS, Q8_0, array_head};
use crate::model_files::{assert_names, bytes_of, check, format_error, gguf_error, unsupported};
use llaisys_core::arch::rope::RopeScaling;
use llaisys_core::arch::spec::{LayerWeight, WeightId};
use llaisys_core::dtype::DType;
use llaisys_core::error::{FormatError, GgufError};
use serde_json::json;

fn small() -> Gguf {
    Gguf::small("llama")
}

#[test]
fn hyper_parameters_of_a_small_file_are_read() {
    let checkpoint = small().open().unwrap();
    let config = checkpoint.config();
    assert_eq!((config.n_layers, config.d_model, config.n_heads, config.n_kv_heads), (1, 32, 2, 1));
    assert_eq!((config.d_head, config.d_ff, config.vocab_size, config.max_positions), (16, 32, 8, 64));
    assert_eq!((config.rms_eps, config.rope.theta), (1e-5, 1e5));
    assert_eq!((config.tied_head, config.qkv_bias, config.qk_norm), (true, false, false));
    assert_eq!((config.bos, config.eos.as_slice()), (Some(5), [6].as_slice()));
    assert_eq!(checkpoint.tensor(WeightId::Embed).unwrap().dtype, DType::Q8_0);
    assert!(checkpoint.tensor(WeightId::LmHead).is_none());
}

#[test]
fn info_has_the_fields_of_the_python_type() {
    let checkpoint = small().open().unwrap();
    let mut info = serde_json::to_value(checkpoint.info()).unwrap();
    assert!(info["path"].as_str().unwrap().ends_with("small.gguf"));
    info.as_object_mut().unwrap().remove("path");
    let n_q8_0 = (8 + 32 + 3 * 32) * 32;
    let n_f32 = 3 * 32 + (32 + 16 + 16) * 32;
    // Rows are packed in panels of 32: the 8 of the tokens and the 16 of K and V are padded; vectors are not.
    let (q8_0, f32) = ((32 + 32 + 3 * 32) * 32, (32 + 32 + 32) * 32);
    let vectors = 3 * 32 * 4;
    let packed = json!({
        "auto": q8_0 / 32 * 34 + f32 * 4 + vectors,
        "float32": (q8_0 + f32) * 4 + vectors,
        "bfloat16": (q8_0 + f32) * 2 + vectors,
        // Each panel has one group of 32 inputs: its numbers and integers, and the units.
        "int8": 32 * 34 + 7 * (32 * 33 + 128_usize).next_multiple_of(64) + vectors,
        "int4": (32 * 25 + 128_usize).next_multiple_of(64) + 7 * (32 * 18 + 128) + vectors,
    });
    // One panel, and for its 32 rows their lengths and those of their differences.
    let screen = 32 * 34 + 2 * 32 * 4;
    let want = json!({
        "file_format": "gguf", "architecture": "LlamaForCausalLM", "dtype": "f32",
        "n_layers": 1, "d_model": 32, "n_heads": 2, "n_kv_heads": 1, "d_head": 16, "d_ff": 32,
        "vocab_size": 8, "max_position_embeddings": 64,
        "n_parameters": n_q8_0 + n_f32, "weight_bytes": n_q8_0 / 32 * 34 + n_f32 * 4,
        "packed_bytes": packed,
        "screen_bytes": {"auto": 0, "float32": screen, "bfloat16": screen, "int8": 0, "int4": 0},
        "kv_bytes_per_cell": {"float32": 128, "float16": 64, "bfloat16": 64, "int8": 2 * (16 + 4)},
        "state_bytes": 0, "recurrent_width": 0, "journal_width": 0, "generates": true, "is_encoder": false, "has_score_head": false,
        "bos_token_id": 5, "eos_token_ids": [6], "generation": {},
        "tokenizer": {
            "model": "gpt2", "pre": "smollm",
            "tokens": ["a", "b", "c", "ab", "bc", "<s>", "</s>", "<u>"],
            "token_types": [1, 1, 1, 1, 1, 3, 3, 2],
            "merges": ["a b", "b c"], "add_bos": false,
            "bos": 5, "eos": 6, "unk": 7, "chat_template": "{{ messages }}",
        },
    });
    assert_eq!(info, want);
}

/// The row that the converter writes row `n` to: a reshape to `[heads, 2, d_head / 2, columns]` with the middle axes
/// swapped.
fn converted_row(n: usize) -> usize {
    let (d_head, half) = (D_HEAD as usize, D_HEAD as usize / 2);
    let (head, side, pair) = (n / d_head, n % d_head / half, n % half);
    (head * half + pair) * 2 + side
}

#[test]
fn rows_of_q_and_k_are_reordered_for_llama_only() {
    for architecture in ["llama", "qwen2", "qwen3"] {
        let checkpoint = Gguf::small(architecture).open().unwrap();
        let is_llama = architecture == "llama";
        for (part, n_rows) in
            [(LayerWeight::Q, N_HEADS * D_HEAD), (LayerWeight::K, D_HEAD), (LayerWeight::V, D_HEAD)]
        {
            let id = WeightId::Layer(0, part);
            let moved = is_llama && part != LayerWeight::V;
            let bytes = bytes_of(&checkpoint, id).unwrap();
            let row_bytes = bytes.len() / n_rows as usize;
            for n in 0..n_rows as usize {
                let want = if moved { converted_row(n) } else { n };
                let at = checkpoint.stored_row(id, n) * row_bytes;
                // The writer fills a row with its number.
                assert_eq!(bytes[at..at + 4], (want as f32).to_le_bytes(), "{architecture} {part:?} {n}");
            }
        }
        assert_eq!(checkpoint.stored_row(WeightId::Embed, 5), 5);
    }
}

#[test]
fn names_are_those_of_the_file() {
    let checkpoint = Gguf::small("qwen2").open().unwrap();
    assert_eq!(checkpoint.weight_id("blk.0.attn_k.bias"), Some(WeightId::Layer(0, LayerWeight::KBias)));
    assert_eq!(checkpoint.weight_id("model.norm.weight"), None);
    let names = checkpoint.into_names();
    assert_eq!(names.weight_id("token_embd.weight"), Some(WeightId::Embed));
    assert_eq!(names.shape(WeightId::Embed), [8, 32]);
}

#[test]
fn head_is_tied_unless_the_file_has_output_weight() {
    let mut file = small();
    file.matrix("output.weight", 8, 32, 0);
    let checkpoint = file.open().unwrap();
    assert!(!checkpoint.config().tied_head);
    assert_eq!(checkpoint.tensor(WeightId::LmHead).unwrap().shape, [8, 32]);
}

#[test]
fn end_tokens_of_all_keys_are_combined() {
    let file = small()
        .with("tokenizer.ggml.eot_token_id", Meta::U32(3))
        .with("tokenizer.ggml.eom_token_id", Meta::U32(6));
    assert_eq!(file.open().unwrap().config().eos, [6, 3]);
}

#[test]
fn numbers_of_other_widths_are_accepted() {
    let file = small().with("llama.block_count", Meta::U64(1)).with("llama.context_length", Meta::I32(64));
    check(&file.open().unwrap());
    let negative = small().with("llama.block_count", Meta::I32(-1));
    assert!(matches!(gguf_error(negative.open()), GgufError::KeyType { found: "negative", .. }));
}

#[test]
fn defaults_of_absent_keys() {
    let file = small().without("llama.rope.freq_base").without("llama.vocab_size");
    let checkpoint =
        file.without("tokenizer.ggml.token_type").without("tokenizer.chat_template").open().unwrap();
    assert_eq!(checkpoint.config().rope.theta, 1e4);
    let tokenizer = checkpoint.info().tokenizer.as_ref().unwrap();
    assert_eq!((tokenizer.token_types.len(), tokenizer.chat_template.as_ref()), (8, None));
}

#[test]
fn required_keys_are_named_when_missing() {
    for key in [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
    ] {
        assert_eq!(gguf_error(small().without(key).open()), GgufError::KeyMissing { key: key.into() });
        let wrong = small().with(key, Meta::Bool(true));
        assert!(matches!(gguf_error(wrong.open()), GgufError::KeyType { .. }), "{key}");
    }
}

#[test]
fn unknown_architectures_are_rejected_by_name() {
    let error = unsupported(small().with("general.architecture", "gemma3n").open());
    assert_names(
        &error,
        &[
            "gemma3n",
            "llama, qwen2, qwen3, phi3, olmo2, smollm3, mistral3, glm4, ernie4_5, granite, seed_oss, hunyuan-dense",
        ],
    );
}

#[test]
fn tokenizers_are_rejected_by_name() {
    for model in ["bert", "t5", "rwkv"] {
        let error = unsupported(small().with("tokenizer.ggml.model", model).open());
        assert_names(&error, &["tokenizer.ggml.model", model, "gpt2"]);
    }
    let error = unsupported(small().with("tokenizer.ggml.pre", "deepseek-llm").open());
    assert_names(
        &error,
        &["tokenizer.ggml.pre", "deepseek-llm", "smollm, qwen2, qwen35, llama-bpe, lfm2, gpt-4o, default"],
    );
    assert_names(
        &unsupported(small().without("tokenizer.ggml.pre").open()),
        &["tokenizer.ggml.pre", "absent"],
    );
    for pre in ["smollm", "qwen2", "llama-bpe", "lfm2", "default"] {
        small().with("tokenizer.ggml.pre", pre).open().unwrap();
    }
}

#[test]
fn scored_tokenizers_are_read() {
    let scored = || {
        let scores = [0.0_f32, -1.0, -2.0, -3.0, -4.0, 0.0, 0.0, 0.0];
        let mut bytes = array_head(6, 8);
        bytes.extend(scores.iter().flat_map(|score| score.to_le_bytes()));
        let file = small().with("tokenizer.ggml.model", "llama").without("tokenizer.ggml.pre");
        file.without("tokenizer.ggml.merges").with("tokenizer.ggml.scores", Meta::Raw(9, bytes))
    };
    let tokenizer = |file: Gguf| file.open().unwrap().info().tokenizer.clone().unwrap();
    let facts = tokenizer(scored());
    assert_eq!((facts.model.as_str(), facts.pre.as_str(), facts.merges.len()), ("llama", "default", 0));
    assert_eq!(facts.scores.unwrap()[3], -3.0);
    assert_eq!((facts.add_space_prefix, facts.add_bos), (Some(true), false));
    let bare = scored().with("tokenizer.ggml.add_space_prefix", Meta::Bool(false));
    assert_eq!(tokenizer(bare).add_space_prefix, Some(false));
    assert!(tokenizer(scored().without("tokenizer.ggml.add_bos_token")).add_bos);
    tokenizer(scored().with("tokenizer.ggml.pre", "default"));
    let key = || "tokenizer.ggml.scores".to_owned();
    assert_eq!(gguf_error(scored().without(&key()).open()), GgufError::KeyMissing { key: key() });
    let short = scored().with(&key(), Meta::Raw(9, [array_head(6, 1), vec![0; 4]].concat()));
    assert!(matches!(format_error(short.open()), FormatError::Disagree { got: 1, want: 8, .. }));
    let nan = scored().with(&key(), Meta::Raw(9, [array_head(6, 8), vec![0xff; 32]].concat()));
    assert!(matches!(format_error(nan.open()), FormatError::Bounds { what: "a token's score", .. }));
    let pre = unsupported(scored().with("tokenizer.ggml.pre", "qwen2").open());
    assert_names(&pre, &["tokenizer.ggml.pre", "qwen2", "default"]);
    let squeezed = scored().with("tokenizer.ggml.remove_extra_whitespaces", Meta::Bool(true));
    assert_names(&unsupported(squeezed.open()), &["remove_extra_whitespaces", "true"]);
}

#[test]
fn add_bos_defaults_by_pre() {
    let add_bos = |file: Gguf| file.open().unwrap().info().tokenizer.as_ref().unwrap().add_bos;
    let silent = small().without("tokenizer.ggml.add_bos_token");
    assert!(!add_bos(silent.clone()));
    for pre in ["llama-bpe", "lfm2"] {
        assert!(add_bos(silent.clone().with("tokenizer.ggml.pre", pre)));
    }
    assert!(add_bos(small().with("tokenizer.ggml.add_bos_token", Meta::Bool(true))));
    let without_id = silent.with("tokenizer.ggml.pre", "llama-bpe").without("tokenizer.ggml.bos_token_id");
    assert_eq!(
        gguf_error(without_id.open()),
        GgufError::KeyMissing { key: "tokenizer.ggml.bos_token_id".into() }
    );
}

#[test]
fn ids_outside_of_the_vocabulary_are_rejected() {
    for key in ["bos", "eos", "unknown", "eot", "eom"] {
        for id in [Meta::U32(8), Meta::U32(u32::MAX), Meta::U64(u64::MAX)] {
            let file = small().with(&format!("tokenizer.ggml.{key}_token_id"), id);
            assert!(matches!(format_error(file.open()), FormatError::TokenId { vocab_size: 8, .. }), "{key}");
        }
    }
}

#[test]
fn lists_of_unequal_length_are_rejected() {
    let types = small().with("tokenizer.ggml.token_type", Meta::I32s(vec![1; 7]));
    assert!(matches!(format_error(types.open()), FormatError::Disagree { got: 7, want: 8, .. }));
    let tokens = small().with("llama.vocab_size", Meta::U32(9));
    assert!(matches!(format_error(tokens.open()), FormatError::Disagree { got: 8, want: 9, .. }));
}

#[test]
fn rope_kinds_are_rejected_by_name() {
    for kind in ["longrope", "dynamic"] {
        let error = unsupported(small().with("llama.rope.scaling.type", kind).open());
        assert_names(&error, &["rope type", kind, "none"]);
    }
    small().with("llama.rope.scaling.type", "none").open().unwrap();
    for key in ["rope.scale_linear", "rope.scaling.factor"] {
        let error = unsupported(small().with(&format!("llama.{key}"), Meta::F32(4.0)).open());
        assert_names(&error, &[key, "4"]);
    }
    let yarn = small().with("llama.rope.scaling.type", "yarn");
    let yarn = yarn.with("llama.rope.scaling.yarn_log_multiplier", Meta::F32(0.1));
    assert_names(&unsupported(yarn.open()), &["yarn_log_multiplier"]);
    let partial = small().with("llama.rope.dimension_count", Meta::U32(8));
    assert_names(&unsupported(partial.open()), &["8 of 16", "whole head"]);
    small().with("llama.rope.dimension_count", Meta::U32(16)).open().unwrap();
}

#[test]
fn pooling_type_is_reported_as_in_the_file() {
    let pooling = |gguf: Gguf| gguf.open().unwrap().info().pooling_type;
    assert_eq!(pooling(small()), None);
    assert_eq!(pooling(small().with("llama.pooling_type", Meta::U32(3))), Some(3));
    assert!(small().with("llama.pooling_type", "last").open().is_err());
}

#[test]
fn other_unimplemented_settings_are_rejected_by_name() {
    let rejected = |key: &str, value: Meta, words: &[&str]| {
        assert_names(&unsupported(small().with(key, value).open()), words);
    };
    rejected("llama.attention.sliding_window", Meta::U32(32), &["sliding window", "32 of 64"]);
    rejected("llama.attention.causal", Meta::Bool(false), &["causal"]);
    rejected("llama.logit_scale", Meta::F32(8.0), &["llama.logit_scale = 8"]);
    rejected("llama.attention.scale", Meta::F32(0.5), &["llama.attention.scale"]);
    rejected("general.type", "adapter".into(), &["adapter", "model"]);
    rejected("llama.attention.head_count_kv", Meta::I32s(vec![1, 2]), &["each layer", "head_count_kv"]);
    let unequal = small().with("llama.attention.key_length", Meta::U32(16));
    let unequal = unequal.with("llama.attention.value_length", Meta::U32(32));
    assert_names(&unsupported(unequal.open()), &["unequal width", "16 and 32"]);
    small().with("llama.attention.sliding_window", Meta::U32(64)).open().unwrap();
    small().with("llama.expert_count", Meta::U32(0)).open().unwrap();
    let dense = Gguf::small("qwen2").with("qwen2.expert_count", Meta::U32(8));
    assert_names(&unsupported(dense.open()), &["mixture of experts", "qwen2.expert_count = 8", "dense"]);
    let sparse = Gguf::small("qwen3").with("general.architecture", "qwen3moe");
    assert_names(&unsupported(sparse.open()), &["mixture of experts", "qwen3moe.expert_count = 0"]);
    rejected("llama.attn_logit_softcapping", Meta::F32(30.0), &["attn_logit_softcapping = 30"]);
    let experts = |key: &str, value: Meta| {
        let file = small().with("llama.expert_count", Meta::U32(4));
        let file = file.with("llama.expert_used_count", Meta::U32(2)).with(key, value);
        unsupported(file.open())
    };
    assert_names(&experts("llama.expert_shared_count", Meta::U32(1)), &["shared experts", "1"]);
    assert_names(&experts("llama.expert_gating_func", Meta::U32(2)), &["expert_gating_func", "softmax"]);
    assert_names(&experts("llama.expert_weights_scale", Meta::F32(2.5)), &["expert_weights_scale = 2.5"]);
}

#[test]
fn experts_in_single_tensors_are_rejected_as_an_old_layout() {
    let mut file = small().with("llama.expert_count", Meta::U32(2));
    file = file.with("llama.expert_used_count", Meta::U32(2));
    for part in ["gate", "up", "down"] {
        file.tensors.retain(|tensor| tensor.name != format!("blk.0.ffn_{part}.weight"));
        for expert in 0..2 {
            file.matrix(&format!("blk.0.ffn_{part}.{expert}.weight"), 32, 32, Q8_0);
        }
    }
    file.matrix("blk.0.ffn_gate_inp.weight", 2, 32, F32);
    let words = ["old GGUF layout", "blk.0.ffn_gate.0.weight", "ffn_gate_exps", "convert the model again"];
    assert_names(&unsupported(file.open()), &words);
}

#[test]
fn rope_scalings_are_read() {
    let rope = |file: Gguf| file.open().unwrap().config().rope.scaling.clone();
    let linear = small().with("llama.rope.scaling.type", "linear");
    let linear = linear.with("llama.rope.scaling.factor", Meta::F32(4.0));
    assert_eq!(rope(linear), RopeScaling::Linear { factor: 4.0 });
    let yarn = small().with("llama.rope.scaling.type", "yarn");
    let yarn = yarn.with("llama.rope.scaling.factor", Meta::F32(4.0));
    let yarn = yarn.with("llama.rope.scaling.original_context_length", Meta::U32(16));
    let amplitude = 0.1 * 4_f64.ln() + 1.0;
    let (factor, original) = (4.0, 16.0);
    let want =
        RopeScaling::Yarn { factor, beta_fast: 32.0, beta_slow: 1.0, original, truncate: true, amplitude };
    assert_eq!(rope(yarn), want);
    let mut llama3 = small();
    llama3.vector("rope_freqs.weight", 8);
    let want = RopeScaling::PerPair { factors: vec![1.0; 8], amplitude: 1.0 };
    assert_eq!(rope(llama3), want);
    let mut wrong = small();
    wrong.vector("rope_freqs.weight", 7);
    assert!(matches!(format_error(wrong.open()), FormatError::TensorShape { want, .. } if want == [8]));
    let mut zero = small();
    zero.vector("rope_freqs.weight", 8);
    zero.tensor("rope_freqs.weight").data.fill(0);
    assert!(matches!(format_error(zero.open()), FormatError::Bounds { what: "a rope factor", .. }));
    let missing = small().with("llama.rope.scaling.type", "linear");
    assert_eq!(gguf_error(missing.open()), GgufError::KeyMissing { key: "llama.rope.scaling.factor".into() });
}

#[test]
fn sizes_out_of_bounds_are_rejected() {
    for key in
        ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"]
    {
        for size in [0, u64::MAX] {
            let file = small().with(&format!("llama.{key}"), Meta::U64(size));
            let error = format_error(file.open());
            assert!(
                matches!(error, FormatError::Bounds { .. } | FormatError::NotAMultiple { .. }),
                "{error}"
            );
        }
    }
    for eps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let file = small().with("llama.attention.layer_norm_rms_epsilon", Meta::F32(eps));
        assert!(matches!(format_error(file.open()), FormatError::Bounds { .. }));
        let file = small().with("llama.rope.freq_base", Meta::F32(eps));
        assert!(matches!(format_error(file.open()), FormatError::Bounds { .. }));
    }
    let heads = small().with("llama.attention.head_count_kv", Meta::U32(3));
    assert!(matches!(format_error(heads.open()), FormatError::NotAMultiple { got: 2, divisor: 3, .. }));
    let odd = small().with("llama.attention.key_length", Meta::U32(15));
    assert!(matches!(format_error(odd.open()), FormatError::NotAMultiple { got: 15, divisor: 2, .. }));
}

#[test]
fn missing_extra_and_wrongly_shaped_tensors_are_rejected() {
    let mut missing = small();
    missing.tensors.retain(|tensor| !tensor.name.starts_with("blk.0.ffn"));
    let error = format_error(missing.open());
    assert!(
        matches!(&error, FormatError::MissingTensors { n_missing: 4, first } if first == "blk.0.ffn_norm.weight")
    );

    let mut extra = small();
    extra.vector("blk.0.attn_q_norm.weight", 16);
    let error = format_error(extra.open());
    assert!(
        matches!(&error, FormatError::ExtraTensors { n_extra: 1, first } if first == "blk.0.attn_q_norm.weight")
    );

    let mut shape = small();
    shape.tensor("blk.0.attn_k.weight").sizes = vec![16, 32];
    let error = format_error(shape.open());
    assert!(
        matches!(&error, FormatError::TensorShape { got, want, .. } if got == &[32, 16] && want == &[16, 32])
    );

    // One more layer than in the file.
    let layers = small().with("llama.block_count", Meta::U32(2));
    assert!(matches!(format_error(layers.open()), FormatError::MissingTensors { n_missing: 9, .. }));
}

#[test]
fn unknown_architecture_is_reported_before_unknown_tensor_types() {
    let mut file = small().with("general.architecture", "phi4");
    file.tensor("blk.0.ffn_up.weight").type_id = 12;
    assert_names(&unsupported(file.open()), &["phi4"]);
}
