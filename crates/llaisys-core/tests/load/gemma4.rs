//! Gemma 4: its keys, which layers read the keys and values of others, the tensors that are skipped, and what is rejected
//! by name. Its outputs are compared with transformers in `tests/parity`.

use super::hybrids::{config, with};
use crate::common::settings;
use crate::model_files::{TempFolder, assert_names, check, format_error, golden, unsupported};
use llaisys_core::arch::gemma4::Placeholders;
use llaisys_core::arch::rope::{NOT_TURNED, RopeConfig, RopeScaling};
use llaisys_core::arch::spec::{LayerWeight, WeightId};
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::error::Result;
use llaisys_core::forward::shard::Shard;
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::ops::{HeadWidths, KvHeads};
use serde_json::{Map, Value, json};

const DENSE: &str = "gemma4_bf16";
const EXPERTS: &str = "gemma4_moe_bf16";

#[test]
fn keys_of_a_folder() {
    let dense = config(DENSE);
    assert_eq!((dense.window, dense.score_scale, dense.norm_offset), (Some(24), 1.0, 0.0));
    assert_eq!((dense.logit_soft_cap, dense.attn_soft_cap), (Some(8.0), None));
    assert_eq!((dense.d_inputs(), dense.embed_scale), (64, 48_f32.sqrt()));
    let heads = |index| dense.kv_heads(index);
    assert_eq!(heads(0), KvHeads { n_kv_heads: 1, d_head: 16 });
    assert_eq!(heads(7), KvHeads { n_kv_heads: 1, d_head: 32 });
    assert_eq!(dense.head_widths(1), HeadWidths::whole(32));
    // The last four layers read the last ones of their kind before them, and are twice as wide.
    let sources: Vec<usize> = (0..8).map(|index| dense.kv_source(index)).collect();
    assert_eq!(sources, [0, 1, 2, 3, 2, 3, 2, 3]);
    assert_eq!(dense.kv_layers().collect::<Vec<usize>>(), [0, 1, 2, 3]);
    assert_eq!((dense.d_dense_of(3), dense.d_dense_of(4), dense.d_ff_max()), (32, 64, 64));
    // A quarter of the pairs turns, with the frequencies of the whole head.
    let factors = [[1.0; 4].as_slice(), &[NOT_TURNED; 12]].concat();
    let scaling = RopeScaling::PerPair { factors, amplitude: 1.0 };
    assert_eq!(dense.rope, RopeConfig { theta: 1e6, scaling });
    assert_eq!(dense.local_rope, Some(RopeConfig::plain(1e4)));
    let placeholders = Placeholders { ids: [Some(1001), Some(1005), Some(1002)], embeds_as: 597 };
    assert_eq!(dense.gemma4.unwrap().placeholders, placeholders);
    assert_eq!([1001, 1000, 1002].map(|token| placeholders.embedded(token)), [597, 1000, 597]);

    let experts = config(EXPERTS);
    let (mixture, gemma4) = (experts.experts.unwrap(), experts.gemma4.unwrap());
    assert!((mixture.n, mixture.n_used, mixture.normalize) == (5, 2, true) && gemma4.values_are_keys);
    assert_eq!(
        (experts.d_ff, experts.d_dense_of(0), experts.d_ff_max(), experts.d_inputs()),
        (12, 32, 32, 0)
    );
    assert_eq!(experts.kv_heads(2), KvHeads { n_kv_heads: 1, d_head: 32 });
    assert!(experts.has_v(1) && !experts.has_v(2));
    for name in [DENSE, EXPERTS] {
        check(&Checkpoint::open(&golden(name)).unwrap());
    }
}

#[test]
fn encoders_of_images_are_skipped_and_counted() {
    let info = Checkpoint::inspect(&golden(DENSE)).unwrap();
    assert_eq!(info.skipped_tensors.values().sum::<usize>(), 16);
    assert_eq!((info.d_head, info.d_ff, info.n_layers), (32, 64, 8));
    // Two layers of each kind: K and V of one head of 16, or of 32.
    assert_eq!(info.kv_bytes_per_cell.float32, 2 * (2 * 16 + 2 * 32) * 4);
}

/// A golden whose tensors `change` renames or drops.
fn changed(name: &str, change: &dyn Fn(&str) -> Option<String>) -> Result<Checkpoint> {
    let folder = TempFolder::new();
    std::fs::copy(golden(name).join("config.json"), folder.file("config.json")).unwrap();
    let bytes = std::fs::read(golden(name).join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let kept = tensors.iter().filter_map(|(name, view)| Some((change(name)?, view)));
    let kept: Vec<_> = kept.collect();
    folder.write("model.safetensors", safetensors::serialize(kept, None).unwrap());
    Checkpoint::open(folder.path())
}

#[test]
fn missing_tensors_are_named() {
    for (golden, part) in [
        (DENSE, "embed_tokens_per_layer.weight"),
        (DENSE, "per_layer_model_projection.weight"),
        (DENSE, "layers.5.layer_scalar"),
        (DENSE, "layers.5.per_layer_input_gate.weight"),
        (DENSE, "layers.3.self_attn.v_proj.weight"),
        (EXPERTS, "layers.0.router.scale"),
        (EXPERTS, "layers.0.router.per_expert_scale"),
        (EXPERTS, "layers.5.experts.gate_up_proj"),
        (EXPERTS, "layers.5.post_feedforward_layernorm_1.weight"),
        (EXPERTS, "layers.1.self_attn.v_proj.weight"),
    ] {
        let error = format_error(changed(golden, &|name| (!name.ends_with(part)).then(|| name.to_owned())));
        assert_names(&error, &["1 tensors are missing", part]);
    }
}

/// Published files have projections of keys and values also in layers that read those of other layers.
#[test]
fn keys_and_values_of_layers_without_their_own_are_skipped() {
    let prefix = "model.language_model.layers.";
    let from = format!("{prefix}0.self_attn.k_norm.weight");
    let to = |name: &str| Some(name.replace(&from, &format!("{prefix}4.self_attn.k_norm.weight")));
    assert_names(&format_error(changed(DENSE, &to)), &["1 tensors are missing", &from]);
    let moved = with(DENSE, &[("num_kv_shared_layers", json!(6)), ("use_double_wide_mlp", json!(true))]);
    // The tensors of layers 2 and 3 are no longer read, but their blocks would be twice as wide.
    assert_names(&format_error(moved), &["layers.2.mlp.gate_proj.weight", "[32, 48]", "[64, 48]"]);
    let plain = |name: &str, keys: &[(&str, Value)]| format_error(with(name, keys));
    let narrow = plain(DENSE, &[("use_double_wide_mlp", json!(false))]);
    assert_names(&narrow, &["layers.4.mlp.gate_proj.weight", "[64, 48]", "[32, 48]"]);
}

#[test]
fn hostile_keys_are_rejected_by_name() {
    let format = |name: &str, key: &str, value: Value, words: &[&str]| {
        assert_names(&format_error(with(name, &[(key, value)])), words);
    };
    format(DENSE, "num_kv_shared_layers", json!(8), &["num_kv_shared_layers is 8"]);
    format(DENSE, "num_kv_shared_layers", json!(u64::MAX), &["num_kv_shared_layers is 18446744073709552000"]);
    format(DENSE, "num_kv_shared_layers", json!(-1), &["num_kv_shared_layers", "whole number"]);
    format(DENSE, "global_head_dim", json!(33), &["full attention is 33", "2"]);
    format(DENSE, "global_head_dim", json!(0), &["global_head_dim is 0"]);
    format(DENSE, "global_head_dim", json!(1 << 20), &["global_head_dim is 1048576"]);
    format(DENSE, "global_head_dim", json!(64), &["self_attn.q_proj.weight", "[96, 48]", "[192, 48]"]);
    format(DENSE, "head_dim", json!(8), &["self_attn.q_proj.weight", "[48, 48]", "[24, 48]"]);
    format(DENSE, "hidden_size_per_layer_input", json!(16), &["embed_tokens_per_layer", "[600, 64]"]);
    format(DENSE, "hidden_size_per_layer_input", json!(1_u64 << 40), &["per-layer input is 1099511627776"]);
    format(
        DENSE,
        "hidden_size_per_layer_input",
        json!(0),
        &["27 tensors are not part of this model", "per_layer"],
    );
    format(DENSE, "vocab_size_per_layer_input", json!(7), &["vocab_size_per_layer_input", "7", "600"]);
    format(DENSE, "pad_token_id", json!(600), &["pad_token_id", "600"]);
    format(DENSE, "layer_types", json!(["full_attention"]), &["layer_types", "1", "8"]);
    format(DENSE, "rope_parameters", Value::Null, &["rope_parameters"]);
    format(DENSE, "rope_parameters", json!({"sliding_attention": {}}), &["rope_parameters.full_attention"]);
    format(EXPERTS, "moe_intermediate_size", Value::Null, &["moe_intermediate_size"]);
    format(EXPERTS, "top_k_experts", json!(6), &["number of experts used is 6"]);
    format(EXPERTS, "num_experts", json!(4), &["router.proj.weight", "[5, 48]", "[4, 48]"]);
    format(EXPERTS, "num_global_key_value_heads", json!(3), &["number of heads is 4", "3"]);
    format(EXPERTS, "num_global_key_value_heads", json!(0), &["key-value heads of full attention is 0"]);
    let share = json!({"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}});
    format(DENSE, "rope_parameters", share, &["partial_rotary_factor is 1.5"]);
}

#[test]
fn what_is_not_supported_is_rejected_by_name() {
    let refused = |name: &str, key: &str, value: Value, words: &[&str]| {
        assert_names(&unsupported(with(name, &[(key, value)])), words);
    };
    // Layer 7 has no earlier one of its kind.
    let mut kinds = vec!["sliding_attention"; 8];
    kinds[7] = "full_attention";
    let lonely = [("layer_types", json!(kinds)), ("num_kv_shared_layers", json!(1))];
    let error = unsupported(with(DENSE, &lonely));
    assert_names(&error, &["num_kv_shared_layers", "1 of 8, layer 7", "of their kind"]);
    refused(DENSE, "layer_types", json!(vec!["sliding_attention"; 8]), &["last layer", "sliding_attention"]);
    refused(DENSE, "attention_bias", json!(true), &["attention_bias"]);
    refused(DENSE, "use_bidirectional_attention", json!("all"), &["use_bidirectional_attention", "all"]);
    refused(DENSE, "hidden_activation", json!("silu"), &["hidden_activation", "silu"]);
    refused(
        DENSE,
        "num_global_key_value_heads",
        json!(3),
        &["num_global_key_value_heads", "attention_k_eq_v"],
    );
    let yarn = json!({"full_attention": {"rope_type": "dynamic"}});
    refused(DENSE, "rope_parameters", yarn, &["rope type", "dynamic"]);
    let part = json!({"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.25}});
    refused(DENSE, "rope_parameters", part, &["partial_rotary_factor", "0.25"]);
    with(DENSE, &[("use_bidirectional_attention", json!("vision"))]).unwrap();

    let error = Shard { rank: 0, world: 2 }.config(&config(DENSE)).unwrap_err();
    assert_names(&error, &["tensor parallelism", "Gemma4ForCausalLM", "heads of one width"]);
    let mut context = Context::load(&golden(DENSE), settings()).unwrap();
    let name = "model.language_model.layers.0.layer_scalar";
    let error = unsupported(context.replace_weight(name, &[1], &[2.0]));
    assert_names(&error, &[name, "heads of two widths"]);
}

/// A token that stands for an image has the embedding of the padding.
#[test]
fn placeholders_embed_as_padding() {
    let folder = TempFolder::new();
    std::fs::copy(golden(DENSE).join("model.safetensors"), folder.file("model.safetensors")).unwrap();
    let text = std::fs::read(golden(DENSE).join("config.json")).unwrap();
    let mut config: Map<String, Value> = serde_json::from_slice(&text).unwrap();
    config.insert("image_token_id".into(), json!(7));
    folder.write("config.json", serde_json::to_vec(&config).unwrap());
    let load = || Context::load(folder.path(), ContextConfig { n_threads: 1, ..settings() }).unwrap();
    let logits = |tokens: [i32; 3]| super::hybrid_files::logits_of(&mut load(), &tokens);
    assert!(logits([3, 7, 5]) == logits([3, 597, 5]));
    assert!(logits([3, 8, 5]) != logits([3, 597, 5]));
}

/// Layers that read the cells of others have no weights for keys and values.
#[test]
fn weights_are_those_of_the_layers_that_have_them() {
    let dense = config(DENSE);
    let ids: Vec<WeightId> = dense.weight_ids().collect();
    for (part, n) in [(LayerWeight::Q, 8), (LayerWeight::K, 4), (LayerWeight::V, 4), (LayerWeight::KNorm, 4)]
    {
        let own = ids.iter().filter(|id| matches!(id, WeightId::Layer(_, other) if *other == part));
        assert_eq!(own.count(), n, "{part:?}");
    }
}
