//! `config.json` and `generation_config.json` in old and new spellings. Unimplemented settings are rejected by name.

use crate::model_files::folder::Folder;
use crate::model_files::{TempFolder, assert_names, format_error, golden, unsupported};
use llaisys_core::arch::config::ModelConfig;
use llaisys_core::arch::spec::{LayerWeight, WeightId};
use llaisys_core::error::FormatError;
use llaisys_core::load::checkpoint::Checkpoint;
use serde_json::{Value, json};

fn small() -> Folder {
    Folder::small("LlamaForCausalLM")
}

fn config_of(folder: &Folder) -> ModelConfig {
    folder.open().expect("a valid folder").config().clone()
}

/// Opens `small` with `text` as its `config.json`.
fn with_text(text: impl AsRef<[u8]>) -> FormatError {
    let scratch = TempFolder::new();
    small().write(&scratch);
    scratch.write("config.json", text);
    format_error(Checkpoint::open(scratch.path()))
}

#[test]
fn hyper_parameters_of_the_golden_models_are_read() {
    let facts = |name: &str| {
        let checkpoint = Checkpoint::open(&golden(name)).unwrap();
        let c = checkpoint.config();
        assert_eq!(
            (c.vocab_size, c.max_positions, c.bos, c.eos.as_slice()),
            (600, 512, None, [599].as_slice())
        );
        let flags = (c.tied_head, c.qkv_bias, c.qk_norm);
        ((c.n_layers, c.d_model, c.n_heads, c.n_kv_heads, c.d_head, c.d_ff), c.rope.theta, flags)
    };
    assert_eq!(facts("llama-untied-bf16"), ((2, 64, 4, 2, 16, 176), 5e5, (false, false, false)));
    assert_eq!(facts("qwen2-f16"), ((2, 128, 2, 1, 64, 320), 1e6, (true, true, false)));
    assert_eq!(facts("qwen2-odd-f32-sharded"), ((3, 112, 7, 1, 16, 200), 1e6, (false, true, false)));
    assert_eq!(facts("qwen2-tied-bf16"), ((2, 64, 4, 2, 16, 176), 1e4, (true, true, false)));
    assert_eq!(facts("qwen3-tied-bf16"), ((2, 64, 4, 2, 32, 176), 1e6, (true, false, true)));
}

#[test]
fn info_has_the_fields_of_the_python_type() {
    let checkpoint = Checkpoint::open(&golden("qwen3-tied-bf16")).unwrap();
    // 5 norms of the width and 4 of a head in f32; the embedding's 600 rows are padded to 608.
    let n_vectors = 5 * 64 + 4 * 32;
    let packed = |bytes: usize| (155_584 - n_vectors + 8 * 64) * bytes + n_vectors * 4;
    // Panels of 32 outputs: groups of 32 inputs (scales and integers, with 4 bits zero points too), and the units.
    let fitted = |n_panels: usize, n_columns: usize, column: usize| {
        n_panels * (n_columns / 32 * 32 * column + 128).next_multiple_of(64)
    };
    // Per layer: Q, K, V and 22 panels of gate and up together; O has 128 inputs; d_ff is 176, which is not a multiple
    // of the group size, so down stays in bf16.
    let layer = |column| fitted(4 + 2 + 2 + 11, 64, column) + fitted(2, 128, column) + 64 * 176 * 2;
    let int8 = 19 * 32 * (2 * 34) + 2 * layer(33) + n_vectors * 4;
    let int4 = fitted(19, 64, 25) + 2 * layer(18) + n_vectors * 4;
    let screen = 19 * 32 * (2 * 34) + 19 * 2 * 32 * 4;
    let want = json!({
        "path": golden("qwen3-tied-bf16"), "file_format": "safetensors", "architecture": "Qwen3ForCausalLM",
        "dtype": "bf16", "n_layers": 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_head": 32, "d_ff": 176,
        "vocab_size": 600, "max_position_embeddings": 512, "n_parameters": 155_584, "weight_bytes": 311_168,
        "packed_bytes": {
            "auto": packed(2), "float32": packed(4), "bfloat16": packed(2), "int8": int8, "int4": int4,
        },
        // 19 panels: the copy, and the lengths of 32 differences and 32 rows each.
        "screen_bytes": {"auto": screen, "float32": screen, "bfloat16": screen, "int8": 0, "int4": 0},
        "kv_bytes_per_cell": {"float32": 1024, "float16": 512, "bfloat16": 512, "int8": 2 * 2 * 2 * (32 + 4)},
        "state_bytes": 0, "recurrent_width": 0, "journal_width": 0, "generates": true, "is_encoder": false, "has_score_head": false,
        "bos_token_id": null, "eos_token_ids": [599], "generation": {}, "tokenizer": null,
    });
    assert_eq!(serde_json::to_value(checkpoint.info()).unwrap(), want);
}

#[test]
fn every_weight_has_an_id_and_a_name() {
    for (architecture, n_in_layer) in
        [("LlamaForCausalLM", 9), ("Qwen2ForCausalLM", 12), ("Qwen3ForCausalLM", 11)]
    {
        let checkpoint = Folder::small(architecture).open().unwrap();
        let ids: Vec<WeightId> = checkpoint.weight_ids().collect();
        assert_eq!(ids.len(), 3 + n_in_layer);
        assert!(ids.iter().all(|&id| checkpoint.stored_row(id, 3) == 3));
        let id = checkpoint.weight_id("model.layers.0.self_attn.k_proj.weight");
        assert_eq!(id, Some(WeightId::Layer(0, LayerWeight::K)));
        assert_eq!(checkpoint.weight_id("model.layers.00.self_attn.k_proj.weight"), None);
        assert!(checkpoint.tensor(WeightId::Layer(1, LayerWeight::K)).is_none());
    }
}

#[test]
fn rope_base_in_old_and_new_spelling() {
    assert_eq!(config_of(&small()).rope.theta, 1e4);
    assert_eq!(config_of(&small().with("rope_theta", 5e5)).rope.theta, 5e5);
    assert_eq!(config_of(&small().with("rope_theta", 1_000_000)).rope.theta, 1e6);
    let new = json!({"rope_type": "default", "rope_theta": 2e5});
    assert_eq!(config_of(&small().with("rope_parameters", new.clone())).rope.theta, 2e5);
    assert_eq!(config_of(&small().with("rope_parameters", new).with("rope_theta", 5e5)).rope.theta, 2e5);
    let old = small().with("rope_theta", 5e5).with("rope_scaling", json!({"type": "default"}));
    assert_eq!(config_of(&old).rope.theta, 5e5);
    assert_eq!(config_of(&small().with("rope_scaling", Value::Null).with("rope_theta", 3e5)).rope.theta, 3e5);
}

#[test]
fn rope_kinds_are_rejected_by_name() {
    for kind in ["dynamic", "mrope", "su", "ntk"] {
        for (key, type_key) in
            [("rope_parameters", "rope_type"), ("rope_scaling", "rope_type"), ("rope_scaling", "type")]
        {
            let folder = small().with(key, json!({type_key: kind, "factor": 8.0}));
            assert_names(&unsupported(folder.open()), &["rope type", kind, "default"]);
        }
    }
    assert_names(
        &unsupported(small().with("rope_scaling", json!({"factor": 2.0})).open()),
        &["rope type", "factor"],
    );
    let nested = json!({"full_attention": {"rope_type": "default"}});
    assert_names(
        &unsupported(small().with("rope_parameters", nested).open()),
        &["rope_parameters", "layer type"],
    );
    assert_names(
        &unsupported(small().with("partial_rotary_factor", 0.5).open()),
        &["partial_rotary_factor", "0.5"],
    );
    let inner = json!({"rope_type": "default", "partial_rotary_factor": 0.25});
    assert_names(
        &unsupported(small().with("rope_parameters", inner).open()),
        &["partial_rotary_factor", "0.25"],
    );
}

#[test]
fn dtype_in_old_and_new_spelling() {
    for key in ["dtype", "torch_dtype"] {
        for dtype in ["float32", "float16", "bfloat16", "torch.bfloat16"] {
            small().with(key, dtype).open().unwrap();
        }
        let error = unsupported(small().with(key, "float8_e4m3fn").open());
        assert_names(&error, &["float8_e4m3fn", "bfloat16"]);
    }
}

#[test]
fn head_dim_explicit_or_derived() {
    assert_eq!(config_of(&small().without("head_dim")).d_head, 8);
    assert_eq!(config_of(&small().with("head_dim", Value::Null)).d_head, 8);
    // The stated width takes precedence over the derived one.
    let error = format_error(small().with("head_dim", 12).open());
    assert!(matches!(error, FormatError::TensorShape { want, .. } if want == [24, 16]));
    let error = format_error(small().without("head_dim").with("num_attention_heads", 3).open());
    assert!(matches!(error, FormatError::NotAMultiple { got: 16, divisor: 3, .. }));
    // Qwen3 has its own default, which does not depend on the width.
    let error = format_error(Folder::small("Qwen3ForCausalLM").without("head_dim").open());
    assert!(matches!(error, FormatError::TensorShape { want, .. } if want == [128] || want[0] == 256));
}

#[test]
fn key_value_heads_default_to_all_heads() {
    let error = format_error(small().without("num_key_value_heads").open());
    assert!(
        matches!(error, FormatError::TensorShape { name, want, .. } if name.contains("k_proj") && want == [16, 16])
    );
}

#[test]
fn tied_or_not() {
    assert!(!config_of(&small().without("tie_word_embeddings")).tied_head);
    let tied = small().with("tie_word_embeddings", true);
    assert!(config_of(&tied).tied_head);
    assert!(config_of(&tied.without_tensor("lm_head.weight")).tied_head);
}

#[test]
fn end_tokens_of_both_files_are_combined() {
    let eos = |config: Value, generation: Option<Value>| {
        let mut folder = small().with("eos_token_id", config);
        folder.generation = generation;
        config_of(&folder).eos
    };
    assert_eq!(eos(json!(2), None), [2]);
    assert_eq!(eos(json!([2, 3, 2]), None), [2, 3]);
    assert_eq!(eos(Value::Null, None), Vec::<u32>::new());
    assert_eq!(eos(json!(2), Some(json!({"eos_token_id": [4, 2]}))), [4, 2]);
    assert_eq!(eos(json!([2, 5]), Some(json!({"eos_token_id": 4}))), [4, 2, 5]);
    assert_eq!(eos(json!(2), Some(json!({"eos_token_id": null}))), [2]);
}

#[test]
fn ids_outside_the_vocabulary_are_rejected() {
    for (key, value) in
        [("eos_token_id", json!(12)), ("eos_token_id", json!([2, 99])), ("bos_token_id", json!(12))]
    {
        let error = format_error(small().with(key, value).open());
        assert!(matches!(error, FormatError::TokenId { vocab_size: 12, .. }));
    }
    for value in [json!(-1), json!("2"), json!(2.5), json!([[2]]), json!(1_u64 << 32), json!(vec![2; 2000])] {
        let error = format_error(small().with("eos_token_id", value).open());
        assert!(matches!(error, FormatError::KeyType { key: "eos_token_id", .. }), "{error}");
    }
}

#[test]
fn sampling_defaults_do_not_depend_on_do_sample() {
    let generation = |text: Value| {
        let mut folder = small();
        folder.generation = Some(text);
        serde_json::to_value(&folder.open().unwrap().info().generation).unwrap()
    };
    let all =
        json!({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05});
    assert_eq!(generation(all.clone()), all);
    let mut unasked = all.clone();
    unasked["do_sample"] = false.into();
    assert_eq!(generation(unasked), all);
    assert_eq!(generation(json!({"max_new_tokens": 5, "temperature": null})), json!({}));
    let mut wrong = small();
    wrong.generation = Some(json!({"temperature": "hot"}));
    assert!(matches!(format_error(wrong.open()), FormatError::KeyType { key: "temperature", .. }));
}

#[test]
fn architectures_are_found_by_name() {
    let supported = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM";
    for (name, supported) in [
        ("LlavaForConditionalGeneration", supported),
        ("LlavaForConditionalGeneration", "same text models in Mistral3ForConditionalGeneration, Gemma3"),
        ("", "Llama"),
    ] {
        let error = unsupported(small().with("architectures", json!([name])).open());
        assert_names(&error, &[name, supported]);
    }
    for other in [
        "Qwen2ForSequenceClassification",
        "Qwen2MoeForCausalLM",
        "GraniteMoeForCausalLM",
        "LlamaForCausalLM2",
    ] {
        assert_names(&unsupported(small().with("architectures", json!([other])).open()), &[other]);
    }
    small().without("architectures").with("model_type", "llama").open().unwrap();
    small().with("architectures", json!([])).with("model_type", "llama").open().unwrap();
    let error = unsupported(small().without("architectures").with("model_type", "mamba").open());
    assert_names(&error, &["mamba", "llama, mistral, qwen2, qwen3"]);
    let error = format_error(small().without("architectures").open());
    assert!(matches!(error, FormatError::KeyMissing { key: "architectures", .. }));
}

#[test]
fn other_quantized_checkpoints_are_rejected_by_name() {
    for method in ["FP8", "bitsandbytes", "modelopt", "hqq", "GPTQ"] {
        let folder = small().with("quantization_config", json!({"quant_method": method, "bits": 4}));
        assert_names(
            &unsupported(folder.open()),
            &["quantized", method, "fp8, compressed-tensors, mxfp4, GPTQ and AWQ", "BF16, F16 and F32"],
        );
    }
    let old = small().with("compression_config", json!({"quant_method": "sparseml"}));
    assert_names(&unsupported(old.open()), &["quantized", "sparseml"]);
    assert_names(&unsupported(small().with("quantization_config", json!({})).open()), &["without a name"]);
    small().with("quantization_config", Value::Null).open().unwrap();
}

#[test]
fn other_unimplemented_settings_are_rejected_by_name() {
    let rejected = |key: &str, value: Value, words: &[&str]| {
        assert_names(&unsupported(small().with(key, value).open()), words);
    };
    for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
        rejected(key, json!(8), &["mixture of experts", key, "8", "dense"]);
        small().with(key, 0).open().unwrap();
    }
    rejected("hidden_act", json!("gelu_pytorch_tanh"), &["hidden_act", "gelu_pytorch_tanh", "silu"]);
    for key in ["attention_out_bias", "use_bias"] {
        rejected(key, json!(true), &[key, "true", "this family"]);
        small().with(key, false).open().unwrap();
    }
    rejected("is_causal", json!(false), &["is_causal"]);
    Folder::small("Qwen2ForCausalLM").with("attention_bias", true).open().unwrap();
}

#[test]
fn required_keys_are_named_when_missing_or_wrong() {
    for key in [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ] {
        let error = format_error(small().without(key).open());
        assert!(matches!(error, FormatError::KeyMissing { key: k, file: "config.json" } if k == key));
        for value in [json!("16"), json!(-1), json!(16.5), json!([16]), json!({}), json!(true)] {
            let error = format_error(small().with(key, value).open());
            assert!(matches!(error, FormatError::KeyType { key: k, .. } if k == key), "{error}");
        }
        for value in [json!(0), json!(u64::MAX), json!(1_u64 << 40)] {
            let error = format_error(small().with(key, value).open());
            assert!(
                matches!(error, FormatError::Bounds { .. } | FormatError::NotAMultiple { .. }),
                "{error}"
            );
        }
    }
}

#[test]
fn numbers_out_of_bounds_are_rejected() {
    for (key, value) in [
        ("rms_norm_eps", json!(0.0)),
        ("rms_norm_eps", json!(1.0)),
        ("rope_theta", json!(0)),
        ("rope_theta", json!(-1e4)),
        ("rope_theta", json!(1e300)),
        ("num_key_value_heads", json!(0)),
        ("head_dim", json!(0)),
        ("head_dim", json!(1 << 20)),
    ] {
        let error = format_error(small().with(key, value).open());
        assert!(matches!(error, FormatError::Bounds { .. }), "{key}: {error}");
    }
    let error = format_error(small().with("head_dim", 7).open());
    assert!(matches!(error, FormatError::NotAMultiple { got: 7, divisor: 2, .. }));
    let error = format_error(small().with("num_attention_heads", 3).with("num_key_value_heads", 2).open());
    assert!(matches!(error, FormatError::NotAMultiple { got: 3, divisor: 2, .. }));
}

#[test]
fn invalid_json_and_repeated_keys_are_rejected() {
    for text in [
        "",
        "{",
        "nothing",
        "{\"hidden_size\": NaN}",
        "{\"hidden_size\": 1e999}",
        "{} {}",
        "{\"a\": \"\u{1}\"}",
        "{\"hidden_size\": 16, \"hidden_size\": 32}",
        "{\"a\": {\"b\": 1, \"b\": 1}}",
    ] {
        assert!(matches!(with_text(text), FormatError::Json { .. }), "{text}");
    }
    assert!(matches!(with_text([b'"', 0xff, b'"']), FormatError::Json { .. }));
    assert!(matches!(with_text("[]"), FormatError::KeyType { expected: "an object", .. }));
}

#[test]
fn depth_bombs_are_rejected() {
    for n in [33, 10_000, 100_000] {
        for text in ["[".repeat(n), "{\"a\":".repeat(n / 2)] {
            let error = with_text(format!("{{\"a\":{text}"));
            assert!(matches!(error, FormatError::Json { .. }));
        }
    }
    let deep = |n: usize| format!("{{\"a\":{}{}}}", "[".repeat(n), "]".repeat(n));
    assert_names(&with_text(deep(32)), &["nested deeper than 32"]);
    assert!(matches!(with_text(deep(31)), FormatError::KeyMissing { .. }));
}

#[test]
fn large_configurations_are_rejected() {
    let error = with_text(vec![b' '; (1 << 20) + 1]);
    assert!(matches!(error, FormatError::TooLarge { max, .. } if max == 1 << 20));
}
