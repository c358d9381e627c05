//! Models with recurrent layers: their keys of `config.json`, where fused projections have their rows, and what is
//! rejected by name. Their outputs are compared with transformers in `tests/parity`.

use crate::model_files::{TempFolder, assert_names, format_error, golden, unsupported};
use llaisys_core::arch::config::ModelConfig;
use llaisys_core::arch::delta_net::DeltaNet;
use llaisys_core::arch::recurrent::RecurrentLayer;
use llaisys_core::arch::row_map::RowMap;
use llaisys_core::arch::spec::{DeltaWeight, LayerWeight};
use llaisys_core::error::Result;
use llaisys_core::forward::shard::Shard;
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::ops::{DeltaHeads, ValueOrder};
use serde_json::{Map, Value, json};

/// Opens a golden with some keys of the text model changed (null: removed).
pub(super) fn with(name: &str, keys: &[(&str, Value)]) -> Result<Checkpoint> {
    let folder = TempFolder::new();
    let (source, file) = (golden(name), "config.json");
    std::fs::copy(source.join("model.safetensors"), folder.file("model.safetensors")).unwrap();
    let mut config: Map<String, Value> =
        serde_json::from_slice(&std::fs::read(source.join(file)).unwrap()).unwrap();
    let is_wrapped = config.contains_key("text_config");
    let text = if is_wrapped { config["text_config"].as_object_mut().unwrap() } else { &mut config };
    for (key, value) in keys {
        text.insert((*key).to_owned(), value.clone());
    }
    folder.write(file, serde_json::to_vec(&config).unwrap());
    Checkpoint::open(folder.path())
}

pub(super) fn config(name: &str) -> ModelConfig {
    Checkpoint::open(&golden(name)).unwrap().config().clone()
}

const HEADS: DeltaHeads =
    DeltaHeads { n_keys: 2, n_values: 4, d_key: 16, d_value: 16, order: ValueOrder::Grouped };

#[test]
fn layers_are_recurrent_by_list_or_interval() {
    let dense = config("qwen3_5_bf16");
    assert_eq!(dense.recurrent, [true, true, false, true, true, false]);
    let delta_net = DeltaNet { heads: HEADS, n_taps: 4 };
    assert_eq!(dense.recurrent_layer, Some(RecurrentLayer::DeltaNet(delta_net)));
    assert_eq!((dense.d_rope, dense.d_head, dense.norm_offset), (8, 32, 1.0));
    // Four layers: a window of 3 inputs of 128 channels, and four matrices.
    assert_eq!(dense.state_len(), 4 * (3 * 128 + 4 * 16 * 16));
    let next = config("qwen3_next_bf16");
    assert_eq!(next.recurrent, [true, false, true, false]);
    assert_eq!((next.d_ff, next.d_shared), (16, Some(24)));
    let experts = config("qwen3_5_moe_bf16").experts.unwrap();
    assert!((experts.n, experts.n_used, experts.normalize) == (6, 2, true));
}

#[test]
fn parts_of_fused_projections_are_rows_in_groups() {
    let rows = |config: &ModelConfig, part| config.stored_in(part);
    let dense = config("qwen3_5_bf16");
    assert_eq!(rows(&dense, LayerWeight::Q), (LayerWeight::QAndGate, RowMap::groups(0, 32, 64)));
    assert_eq!(rows(&dense, LayerWeight::AttnGate), (LayerWeight::QAndGate, RowMap::groups(32, 32, 64)));
    let qkv = LayerWeight::Delta(DeltaWeight::Qkv);
    assert_eq!(rows(&dense, LayerWeight::Delta(DeltaWeight::V)), (qkv, RowMap::from_row(64)));
    // By key head: 16 rows of queries, 16 of keys, 32 of values and 32 of gates.
    let next = config("qwen3_next_bf16");
    let at = |part| rows(&next, LayerWeight::Delta(part));
    let qkvz = LayerWeight::Delta(DeltaWeight::Qkvz);
    assert_eq!(at(DeltaWeight::Q), (qkvz, RowMap::groups(0, 16, 96)));
    assert_eq!(at(DeltaWeight::K), (qkvz, RowMap::groups(16, 16, 96)));
    assert_eq!(at(DeltaWeight::V), (qkvz, RowMap::groups(32, 32, 96)));
    assert_eq!(at(DeltaWeight::Z), (qkvz, RowMap::groups(64, 32, 96)));
    let ba = LayerWeight::Delta(DeltaWeight::Ba);
    assert_eq!(at(DeltaWeight::B), (ba, RowMap::groups(0, 2, 4)));
    assert_eq!(at(DeltaWeight::A), (ba, RowMap::groups(2, 2, 4)));
    let map = RowMap::groups(32, 32, 96);
    assert_eq!((map.row(31), map.row(32), map.span(&(31..33))), (63, 128, 63..129));
}

#[test]
fn hostile_values_are_rejected_by_name() {
    let huge = json!(u64::MAX);
    for (key, value, words) in [
        ("linear_num_key_heads", json!(0), &["number of linear key heads is 0"][..]),
        ("linear_num_value_heads", huge.clone(), &["number of linear value heads is"]),
        ("linear_num_value_heads", json!(5), &["number of linear value heads", "5", "2"]),
        ("linear_key_head_dim", json!(257), &["width of linear key heads is 257"]),
        ("linear_value_head_dim", json!(0), &["width of linear value heads is 0"]),
        ("linear_conv_kernel_dim", json!(1), &["kernel size of the short convolution is 1"]),
        ("linear_conv_kernel_dim", huge.clone(), &["kernel size of the short convolution is"]),
        ("linear_conv_kernel_dim", json!("4"), &["linear_conv_kernel_dim", "whole number"]),
        ("linear_key_head_dim", Value::Null, &["linear_key_head_dim"]),
        ("linear_key_head_dim", json!(8), &["linear_attn", "[128"]),
        (
            "layer_types",
            json!(["linear_attention"]),
            &["layer_types is 1", "expected 6", "num_hidden_layers"],
        ),
        ("layer_types", json!(vec!["linear_attention"; 6]), &["number of layers with attention is 0"]),
    ] {
        assert_names(&format_error(with("qwen3_5_bf16", &[(key, value)])), words);
    }
    let interval = |every: Value| with("qwen3_next_bf16", &[("full_attention_interval", every)]);
    assert_names(&format_error(interval(json!(0))), &["full_attention_interval is 0"]);
    assert_names(&format_error(interval(json!(9))), &["number of layers with attention is 0"]);
    assert_names(&format_error(interval(json!(1))), &["tensors are missing", "self_attn"]);
    for width in [json!(0), huge] {
        let error = format_error(with("qwen3_next_bf16", &[("shared_expert_intermediate_size", width)]));
        assert_names(&error, &["width of the shared expert is"]);
    }
}

#[test]
fn what_the_forward_pass_does_not_compute_is_refused_by_name() {
    for (key, value, words) in [
        ("attn_output_gate", json!(false), &["attn_output_gate", "true in this family"][..]),
        ("attention_bias", json!(true), &["attention_bias"]),
        ("layer_types", json!(["mamba", "full_attention", "mamba", "mamba", "mamba", "mamba"]), &["mamba"]),
    ] {
        assert_names(&unsupported(with("qwen3_5_bf16", &[(key, value)])), words);
    }
    let dense_layers = with("qwen3_next_bf16", &[("mlp_only_layers", json!([1]))]);
    assert_names(&unsupported(dense_layers), &["mlp_only_layers"]);
    // Two ranks could have a key-value head each, but not the states.
    let whole = ModelConfig { n_heads: 4, n_kv_heads: 2, ..config("qwen3_5_bf16") };
    let error = Shard { rank: 0, world: 2 }.config(&whole).unwrap_err();
    assert_names(&error, &["tensor parallelism", "Qwen3_5ForCausalLM", "without recurrent layers"]);
    // In another family the type of layer is unknown.
    let llama = crate::model_files::folder::Folder::small("LlamaForCausalLM");
    let error = unsupported(llama.with("layer_types", json!(["linear_attention"])).open());
    assert_names(&error, &["the layer type", "linear_attention"]);
}
