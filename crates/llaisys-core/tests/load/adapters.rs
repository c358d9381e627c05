//! LoRA adapters: what is read, and what is refused by name. Their outputs are compared with PEFT in `tests/parity`.

use crate::model_files::adapter::{Adapter, gguf as gguf_adapter};
use crate::model_files::folder::Folder;
use crate::model_files::gguf::{F32, Gguf, Meta, Q8_0};
use crate::model_files::{TempFolder, assert_names};
use llaisys_core::arch::spec::LayerWeight;
use llaisys_core::error::Error;
use llaisys_core::load::lora::{LoraCheckpoint, LoraModule};
use llaisys_core::threads::Pool;
use serde_json::{Value, json};

fn query(adapter: &LoraCheckpoint) -> LoraModule {
    adapter.module(0, LayerWeight::Q).unwrap()
}

#[test]
fn an_adapter_has_the_rank_and_scale_of_its_settings() {
    let scale = |adapter: Adapter| query(&adapter.open().unwrap()).scale;
    assert_eq!(scale(Adapter::small()), 3.0);
    assert_eq!(scale(Adapter::small().with("use_rslora", true)), (6.0 / 2_f64.sqrt()) as f32);
    assert_eq!(scale(Adapter::small().with("alpha_pattern", json!({"q_proj": 1}))), 0.5);
    assert_eq!(scale(Adapter::small().with("alpha_pattern", json!({"self_attn.q_proj": 1}))), 0.5);
    assert_eq!(
        scale(Adapter::small().with("alpha_pattern", json!({"^model.layers.0.self_attn.q_proj": 1}))),
        0.5
    );
    // Not the end of the name.
    for other in ["attn.q_proj", "proj", "^self_attn.q_proj", "k_proj"] {
        assert_eq!(scale(Adapter::small().with("alpha_pattern", json!({other: 1}))), 3.0, "{other}");
    }
    let ranks = Adapter::small().with("rank_pattern", json!({"q_proj": 5}));
    let ranks = ranks.without_tensor("q_proj.lora_A.weight").without_tensor("q_proj.lora_B.weight");
    let mut ranks = ranks;
    ranks.module("self_attn.q_proj", 5, [16, 16]);
    let opened = ranks.open().unwrap();
    assert_eq!((query(&opened).rank, opened.rank()), (5, 5));
    assert_eq!(opened.module(0, LayerWeight::Down).unwrap().rank, 2);
    assert!(opened.module(0, LayerWeight::K).is_none());
}

#[test]
fn modules_are_named_as_in_the_models_folder() {
    // Phi-3 has fused projections, whatever the container of the base.
    let mut fused = Adapter::small().with("target_modules", json!(["qkv_proj"]));
    fused.tensors.clear();
    fused.module("self_attn.qkv_proj", 2, [32, 16]);
    assert_names(&fused.error(), &["module", "model.layers.0.self_attn.qkv_proj", "is not supported"]);
    // A list of targets is complete; a regular expression may be anything.
    let some = Adapter::small().with("target_modules", "all-linear");
    assert!(
        some.without_tensor("down_proj.lora_A.weight")
            .without_tensor("down_proj.lora_B.weight")
            .open()
            .is_ok()
    );
    let layers = Adapter::small().with("layers_to_transform", json!([0]));
    assert!(layers.open().is_ok());
}

#[test]
fn hashes_distinguish_numbers_and_scales_only() {
    let hash = |adapter: Adapter| adapter.open().unwrap().hash().unwrap();
    let own = hash(Adapter::small());
    assert_eq!(own, hash(Adapter::small().with("lora_dropout", 0.5)));
    assert_ne!(own, hash(Adapter::small().with("lora_alpha", 7)));
    assert_ne!(own, hash(Adapter::small().changed("q_proj.lora_B.weight", |tensor| tensor.data[5] = 1)));
}

#[test]
fn settings_that_change_outputs_are_refused_by_name() {
    let refused: [(&str, Value); 19] = [
        ("use_dora", json!(true)),
        ("bias", json!("all")),
        ("lora_bias", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("fan_in_fan_out", json!(true)),
        ("layer_replication", json!([[0, 1]])),
        ("use_qalora", json!(true)),
        ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
        ("trainable_token_indices", json!([1])),
        ("alora_invocation_tokens", json!([1, 2])),
        ("kasa_config", json!({"x": 1})),
        ("a_key_of_the_future", json!("on")),
        ("peft_type", json!("LOHA")),
        ("task_type", json!("SEQ_CLS")),
        ("init_lora_weights", json!("pissa")),
        ("rank_pattern", json!({".*q_proj": 4})),
        ("target_modules", json!(["q_proj", "lm_head"])),
        ("target_modules", json!(["q_proj", "embed_tokens"])),
        ("target_modules", json!(["q_proj", "c_attn"])),
    ];
    for (key, value) in refused {
        let error = Adapter::small().with(key, value.clone()).error();
        assert!(matches!(error, Error::Unsupported(_)), "{key}: {error}");
        let value = value.as_array().and_then(|list| list.last()).unwrap_or(&value);
        let named = if key == "target_modules" { value.as_str().unwrap() } else { key };
        assert_names(&error, &[named, "is not supported"]);
    }
    for (key, value) in [
        ("rank_pattern", json!({"q_proj": 2.5})),
        ("alpha_pattern", json!({"q_proj": 1, "self_attn.q_proj": 2})),
    ] {
        assert_names(&Adapter::small().with(key, value).error(), &[key]);
    }
}

#[test]
fn tensors_of_other_modules_are_refused_by_name() {
    for name in [
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.gate.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "model.layers.0.self_attn.k_proj.lora_A.weight",
    ] {
        let error = Adapter::small().with_tensor(name, &[2, 16]).error();
        let module = name.trim_start_matches("base_model.model.").trim_end_matches(".lora_A.weight");
        assert_names(
            &error,
            &[module, "is not supported", "projections of attention and of dense feed-forward"],
        );
    }
}

#[test]
fn damaged_adapters_are_rejected_with_what_is_wrong() {
    let cases: [(Adapter, &[&str]); 15] = [
        (
            Adapter::small().without_tensor("q_proj.lora_A.weight"),
            &["q_proj", "needs both matrices, A and B"],
        ),
        (
            Adapter::small().without_tensor("q_proj.lora_A.weight").without_tensor("q_proj.lora_B.weight"),
            &["lists \"q_proj\"", "model.layers.0.self_attn.q_proj", "has no matrices"],
        ),
        (Adapter::small().with("r", 3), &["lora_A.weight", "[2, 16]", "[3, 16]"]),
        (Adapter::small().with("r", 0), &["r of the adapter is 0"]),
        (Adapter::small().with("r", "2"), &["\"r\" is not a whole number"]),
        (Adapter::small().with("r", u64::MAX), &["r of the adapter"]),
        (Adapter::small().with("lora_alpha", 0), &["lora_alpha of the adapter is 0"]),
        (Adapter::small().with("lora_alpha", 1e300), &["lora_alpha of the adapter"]),
        (Adapter::small().with("rank_pattern", json!({"q_proj": -1})), &["rank of rank_pattern is -1"]),
        (
            Adapter::small().with("rank_pattern", json!({"q_proj": "x"})),
            &["rank_pattern", "object of numbers"],
        ),
        (Adapter::small().with("rank_pattern", json!({"q_proj": 9})), &["rank 9", "max_lora_rank is 8"]),
        (Adapter::small().with("layers_to_transform", json!([1])), &["layer 0", "layers_to_transform"]),
        (
            Adapter::small().with("layers_to_transform", json!(["x"])),
            &["layers_to_transform", "list of layers"],
        ),
        (Adapter::small().with("target_modules", json!([1])), &["target_modules", "list of strings"]),
        (Adapter::small().with("target_modules", Value::Null), &["no \"target_modules\""]),
    ];
    for (adapter, words) in cases {
        let error = adapter.error();
        assert!(matches!(error, Error::Rejected(_)), "{error}");
        assert_names(&error, words);
    }
    let transposed = Adapter::small().changed("q_proj.lora_A.weight", |tensor| tensor.shape.reverse());
    assert_names(&transposed.error(), &["q_proj.lora_A.weight", "[16, 2]", "[2, 16]"]);
    let integers = Adapter::small().changed("q_proj.lora_A.weight", |tensor| {
        (tensor.dtype, tensor.data) = ("I32", vec![0; 2 * 16 * 4]);
    });
    assert_names(&integers.error(), &["q_proj.lora_A.weight", "I32", "F32, F16, BF16"]);
    let mut empty = Adapter::small().with("target_modules", json!([]));
    empty.tensors.clear();
    assert_names(&empty.error(), &["the adapter has no matrices"]);
}

#[test]
fn numbers_that_are_not_finite_are_rejected_as_they_are_read() {
    let nan = Adapter::small().changed("q_proj.lora_A.weight", |tensor| tensor.data[..2].fill(0xff));
    let opened = nan.open().unwrap();
    let error = opened.a(query(&opened), &Pool::new(1).unwrap()).unwrap_err();
    assert_names(&error, &["q_proj.lora_A.weight", "infinity or NaN"]);
}

#[test]
fn files_that_are_missing_cut_or_changed_are_rejected() {
    let model = Folder::small("LlamaForCausalLM").open().unwrap();
    let open = |scratch: &TempFolder| LoraCheckpoint::open(scratch.path(), model.config(), 8);
    for (missing, present) in [
        ("adapter_config.json", "adapter_model.safetensors"),
        ("adapter_model.safetensors", "adapter_config.json"),
    ] {
        let scratch = TempFolder::new();
        Adapter::small().write(&scratch);
        std::fs::remove_file(scratch.file(missing)).unwrap();
        assert_names(&open(&scratch).unwrap_err(), &["has no", missing]);
        // Any prefix of either file, and any changed byte, is an error or another valid adapter; never a panic.
        Adapter::small().write(&scratch);
        let whole = std::fs::read(scratch.file(present)).unwrap();
        for end in (0..whole.len()).step_by(7) {
            scratch.write(present, &whole[..end]);
            assert!(open(&scratch).is_err(), "{present} cut to {end} bytes");
        }
        for at in 0..whole.len().min(1500) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 7);
            scratch.write(present, &bytes);
            if let Ok(adapter) = open(&scratch) {
                assert!(adapter.rank() <= 8);
            }
        }
        scratch.write(present, &whole);
        assert!(open(&scratch).is_ok());
    }
}

fn open_gguf(file: &Gguf) -> Result<LoraCheckpoint, Error> {
    let scratch = TempFolder::new();
    scratch.write("adapter.gguf", file.bytes());
    let model = Folder::small("LlamaForCausalLM").open().unwrap();
    LoraCheckpoint::open(&scratch.file("adapter.gguf"), model.config(), 8)
}

#[test]
fn an_adapter_in_a_gguf_file_has_the_ranks_of_its_matrices() {
    let adapter = open_gguf(&gguf_adapter()).unwrap();
    let down = adapter.module(0, LayerWeight::Down).unwrap();
    assert_eq!((query(&adapter).rank, query(&adapter).scale, down.rank, down.scale), (2, 3.0, 4, 1.5));
    assert_eq!(adapter.rank(), 4);
    // Without alpha, and with 0, llama.cpp's scale is 1.
    for file in [
        gguf_adapter().without("adapter.lora.alpha"),
        gguf_adapter().with("adapter.lora.alpha", Meta::F32(0.0)),
    ] {
        assert_eq!(query(&open_gguf(&file).unwrap()).scale, 1.0);
    }
}

#[test]
fn gguf_files_that_are_no_adapter_of_this_model_are_refused_by_name() {
    let without = |ending: &str| {
        let mut file = gguf_adapter();
        file.tensors.retain(|tensor| !tensor.name.ends_with(ending));
        file
    };
    let with_tensor = |name: &str| {
        let mut file = gguf_adapter();
        file.matrix(name, 2, 16, F32);
        file
    };
    let mut quantized = without("attn_q.weight.lora_a");
    quantized.matrix("blk.0.attn_q.weight.lora_a", 2, 32, Q8_0);
    let cases: [(Gguf, &[&str]); 14] = [
        (gguf_adapter().with("general.type", "model"), &["general.type", "model", "adapter"]),
        (gguf_adapter().without("general.type"), &["general.type", "none", "adapter"]),
        (gguf_adapter().with("adapter.type", "control_vector"), &["adapter.type", "control_vector", "lora"]),
        (gguf_adapter().with("general.architecture", "qwen2"), &["architecture", "qwen2", "llama"]),
        (gguf_adapter().without("general.architecture"), &["architecture", "none", "llama"]),
        (
            gguf_adapter().with("adapter.alora.invocation_tokens", Meta::I32s(vec![1])),
            &["adapter.alora.invocation_tokens", "is not supported"],
        ),
        (gguf_adapter().with("adapter.lora.alpha", Meta::F32(f32::NAN)), &["adapter.lora.alpha"]),
        (gguf_adapter().with("adapter.lora.alpha", "6"), &["adapter.lora.alpha", "a string"]),
        (without("attn_q.weight.lora_a"), &["blk.0.attn_q", "needs both matrices"]),
        (with_tensor("token_embd.weight.lora_a"), &["token_embd", "projections of attention"]),
        (with_tensor("blk.0.attn_norm.weight"), &["blk.0.attn_norm.weight", "projections of attention"]),
        (with_tensor("blk.1.attn_q.weight.lora_a"), &["blk.1.attn_q", "projections of attention"]),
        (quantized, &["blk.0.attn_q.weight.lora_a", "[2, 32]", "[2, 16]"]),
        (Gguf::small("llama"), &["general.type"]),
    ];
    for (file, words) in cases {
        assert_names(&open_gguf(&file).unwrap_err(), words);
    }
    let mut large = without("attn_q.weight.lora_a");
    large.tensors.retain(|tensor| !tensor.name.starts_with("blk.0.attn_q"));
    large.matrix("blk.0.attn_q.weight.lora_a", 9, 16, F32);
    large.matrix("blk.0.attn_q.weight.lora_b", 16, 9, F32);
    assert_names(&open_gguf(&large).unwrap_err(), &["rank 9", "max_lora_rank is 8"]);
    let mut empty = gguf_adapter();
    empty.tensors.clear();
    assert_names(&open_gguf(&empty).unwrap_err(), &["the adapter has no matrices"]);
}
