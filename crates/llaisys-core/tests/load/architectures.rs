//! The keys of each architecture in `config.json`: windows by layer, rotary embeddings, experts, multipliers and caps.
//! Unimplemented settings are rejected by name.

use crate::model_files::folder::Folder;
use crate::model_files::{assert_names, format_error, unsupported};
use llaisys_core::arch::config::ModelConfig;
use llaisys_core::arch::experts::Experts;
use llaisys_core::arch::rope::{RopeConfig, RopeScaling};
use llaisys_core::arch::row_map::RowMap;
use llaisys_core::arch::spec::{ExpertPart, LayerWeight, WeightId};
use llaisys_core::error::FormatError;
use serde_json::{Value, json};

fn llama() -> Folder {
    Folder::small("LlamaForCausalLM")
}

/// The small Llama as another architecture. `add` are additional tensors of its layer; tensors whose names contain one
/// of `drop` are removed.
fn changed_llama(architecture: &str, drop: &[&str], add: &[(&str, &[usize])]) -> Folder {
    let mut folder = llama().with("architectures", json!([architecture]));
    folder.tensors.retain(|tensor| !drop.iter().any(|part| tensor.name.contains(part)));
    for (name, shape) in add {
        folder.tensor(&format!("model.layers.0.{name}.weight"), shape);
    }
    folder
}

fn gemma2() -> Folder {
    let norms = ["pre_feedforward_layernorm", "post_feedforward_layernorm"];
    changed_llama("Gemma2ForCausalLM", &[], &norms.map(|name| (name, &[16][..])))
}

fn gemma3() -> Folder {
    let mut folder = gemma2().with("architectures", json!(["Gemma3ForCausalLM"]));
    for name in ["q_norm", "k_norm"] {
        folder.tensor(&format!("model.layers.0.self_attn.{name}.weight"), &[8]);
    }
    folder
}

fn phi3() -> Folder {
    let fused: [(&str, &[usize]); 2] = [("self_attn.qkv_proj", &[32, 16]), ("mlp.gate_up_proj", &[48, 16])];
    changed_llama("Phi3ForCausalLM", &["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], &fused)
}

fn qwen3_moe() -> Folder {
    let mut folder = changed_llama(
        "Qwen3MoeForCausalLM",
        &["mlp"],
        &[("self_attn.q_norm", &[8]), ("self_attn.k_norm", &[8]), ("mlp.gate", &[3, 16])],
    );
    for expert in 0..3 {
        for (name, shape) in [("gate_proj", [24, 16]), ("up_proj", [24, 16]), ("down_proj", [16, 24])] {
            folder.tensor(&format!("model.layers.0.mlp.experts.{expert}.{name}.weight"), &shape);
        }
    }
    let folder = folder.with("num_experts", 3).with("num_experts_per_tok", 2);
    folder.with("moe_intermediate_size", 24).with("intermediate_size", 99)
}

fn config_of(folder: &Folder) -> ModelConfig {
    folder.open().expect("a valid folder").config().clone()
}

fn window_of(folder: &Folder) -> Option<usize> {
    config_of(folder).window_of(0)
}

#[test]
fn llama_has_no_window() {
    assert_names(
        &unsupported(llama().with("sliding_window", 32).open()),
        &["sliding window", "32", "this family"],
    );
    assert_eq!(window_of(&llama().with("sliding_window", Value::Null)), None);
    assert_eq!(window_of(&llama().with("sliding_window", 4096)), None);
    assert_eq!(window_of(&llama().with("layer_types", json!(["full_attention"]))), None);
}

#[test]
fn mistral_and_phi3_have_windows_in_all_layers_if_stated() {
    let mistral = || llama().with("architectures", json!(["MistralForCausalLM"]));
    assert_eq!(window_of(&mistral().with("sliding_window", 32)), Some(32));
    assert_eq!(window_of(&mistral().with("sliding_window", Value::Null)), None);
    // transformers' default where the key is absent.
    assert_eq!(window_of(&mistral()), None);
    assert_eq!(window_of(&mistral().with("max_position_embeddings", 8192)), Some(4096));
    assert_eq!(window_of(&phi3().with("sliding_window", 32)), Some(32));
    assert_eq!(window_of(&phi3().with("max_position_embeddings", 8192)), None);
    for window in [64, 65] {
        assert_eq!(
            window_of(&mistral().with("sliding_window", window)),
            None,
            "a window as long as the context"
        );
    }
    let error = format_error(mistral().with("sliding_window", 0).open());
    assert!(matches!(error, FormatError::Bounds { what: "the sliding window", .. }));
}

#[test]
fn qwen_switches_windows_on_from_a_layer() {
    for architecture in ["Qwen2ForCausalLM", "Qwen3ForCausalLM"] {
        let qwen = || Folder::small(architecture).with("sliding_window", 32);
        let on = || qwen().with("use_sliding_window", true);
        assert_eq!(window_of(&qwen()), None);
        assert_eq!(window_of(&qwen().with("use_sliding_window", false)), None);
        // The default first layer is the 28th.
        assert_eq!(window_of(&on()), None);
        assert_eq!(window_of(&on().with("max_window_layers", 0)), Some(32));
        assert_eq!(window_of(&on().with("max_window_layers", 1)), None);
        assert_eq!(window_of(&on().with("layer_types", json!(["sliding_attention"]))), Some(32));
        // A list of windowed layers without a window is contradictory.
        let error = unsupported(qwen().with("layer_types", json!(["sliding_attention"])).open());
        assert_names(&error, &["layer type", "sliding_attention", "full_attention"]);
    }
    let error = unsupported(llama().with("layer_types", json!(["linear_attention"])).open());
    assert_names(&error, &["layer type", "linear_attention"]);
    let error = format_error(llama().with("layer_types", json!(["full_attention", "full_attention"])).open());
    assert!(matches!(error, FormatError::Disagree { got: 2, want: 1, .. }));
}

#[test]
fn gemma_alternates_windows_and_rotates_local_layers_by_another_base() {
    let config = config_of(&gemma3().with("sliding_window", 32));
    assert_eq!((config.window_of(0), config.windowed.as_slice()), (Some(32), [true].as_slice()));
    assert_eq!((config.rope, config.local_rope), (RopeConfig::plain(1e6), Some(RopeConfig::plain(1e4))));
    let full = gemma3().with("sliding_window", 32).with("sliding_window_pattern", 1);
    assert_eq!(window_of(&full), None);
    let old = gemma3().with("rope_theta", 5e5).with("rope_local_base_freq", 2e4);
    let old = old.with("rope_scaling", json!({"rope_type": "linear", "factor": 8.0}));
    let sets = json!({
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    });
    for folder in [old, gemma3().with("rope_parameters", sets)] {
        let config = config_of(&folder);
        let scaling = RopeScaling::Linear { factor: 8.0 };
        assert_eq!(config.rope, RopeConfig { theta: 5e5, scaling });
        assert_eq!(config.local_rope, Some(RopeConfig::plain(2e4)));
    }
    let zero = format_error(gemma3().with("sliding_window_pattern", 0).open());
    assert!(matches!(zero, FormatError::Bounds { what: "sliding_window_pattern", .. }));
}

#[test]
fn gemma_scales_and_caps_are_read() {
    let config = config_of(&gemma2().without("tie_word_embeddings"));
    assert_eq!((config.embed_scale, config.score_scale), (4.0, 1.0 / 16.0));
    assert_eq!((config.attn_soft_cap, config.logit_soft_cap), (Some(50.0), Some(30.0)));
    assert!(config.tied_head);
    let uncapped = gemma2().with("attn_logit_softcapping", Value::Null).with("query_pre_attn_scalar", 64);
    let config = config_of(&uncapped);
    assert_eq!((config.attn_soft_cap, config.score_scale), (None, 0.125));
    assert_eq!(config_of(&gemma3()).logit_soft_cap, None);
    assert_eq!(config_of(&gemma3().with("final_logit_softcapping", 20)).logit_soft_cap, Some(20.0));
    let error = unsupported(gemma3().with("attn_logit_softcapping", 50).open());
    assert_names(&error, &["attn_logit_softcapping", "50"]);
    let error = unsupported(gemma3().with("hidden_activation", "gelu").open());
    assert_names(&error, &["hidden_activation", "gelu", "gelu_pytorch_tanh"]);
    let error = unsupported(gemma3().with("use_bidirectional_attention", true).open());
    assert_names(&error, &["use_bidirectional_attention"]);
    let negative = format_error(gemma2().with("final_logit_softcapping", -1).open());
    assert!(matches!(negative, FormatError::Bounds { what: "the soft cap of logits", .. }));
}

#[test]
fn base_and_epsilon_have_the_defaults_of_the_architecture() {
    let defaults = |folder: Folder| {
        let config = config_of(&folder.without("rms_norm_eps"));
        (config.rope.theta, config.rms_eps)
    };
    assert_eq!(defaults(llama()), (1e4, 1e-6));
    assert_eq!(defaults(phi3()), (1e4, 1e-5));
    assert_eq!(defaults(gemma3()), (1e6, 1e-6));
}

#[test]
fn rope_scalings_are_read_in_both_spellings() {
    let llama3 = json!({
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    });
    let want_llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 16.0 };
    let linear = json!({"factor": 3});
    let yarn =
        json!({"factor": 4, "original_max_position_embeddings": 16, "beta_slow": 2, "truncate": false});
    let amplitude = 0.1 * 4_f64.ln() + 1.0;
    let want_yarn = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 2.0,
        original: 16.0,
        truncate: false,
        amplitude,
    };
    for (kind, set, want) in [
        ("llama3", llama3, want_llama3),
        ("linear", linear, RopeScaling::Linear { factor: 3.0 }),
        ("yarn", yarn, want_yarn),
    ] {
        for (key, type_key) in
            [("rope_parameters", "rope_type"), ("rope_scaling", "rope_type"), ("rope_scaling", "type")]
        {
            let mut set = set.clone();
            set[type_key] = kind.into();
            assert_eq!(config_of(&llama().with(key, set)).rope.scaling, want, "{key} {type_key}");
        }
    }
}

#[test]
fn yarn_amplitude_follows_attention_factor_or_mscale() {
    let amplitude = |set: Value| {
        let mut whole = json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16});
        whole.as_object_mut().unwrap().extend(set.as_object().unwrap().clone());
        match config_of(&llama().with("rope_parameters", whole)).rope.scaling {
            RopeScaling::Yarn { amplitude, .. } => amplitude,
            other => panic!("{other:?}"),
        }
    };
    let one = |m: f64| 0.1 * m * 4_f64.ln() + 1.0;
    assert_eq!(amplitude(json!({"attention_factor": 1.25})), 1.25);
    assert_eq!(amplitude(json!({"mscale": 2, "mscale_all_dim": 0.5})), one(2.0) / one(0.5));
    assert_eq!(amplitude(json!({"mscale": 2, "mscale_all_dim": 0})), one(1.0));
    assert_eq!(amplitude(json!({"factor": 1})), 1.0);
}

#[test]
fn wrong_rope_scalings_are_rejected() {
    let rejected = |set: Value| format_error(llama().with("rope_parameters", set).open());
    let missing = |set: Value, key: &str| {
        let error = rejected(set);
        assert!(matches!(&error, FormatError::KeyMissing { key: k, .. } if *k == key), "{error}");
    };
    missing(json!({"rope_type": "linear"}), "factor");
    missing(json!({"rope_type": "llama3", "factor": 8}), "low_freq_factor");
    let turns = json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4});
    missing(turns.clone(), "original_max_position_embeddings");
    let with = |key: &str, value: Value| {
        let mut set = turns.clone();
        set["original_max_position_embeddings"] = 16.into();
        set[key] = value;
        set
    };
    for (key, value) in [
        ("factor", json!(0)),
        ("factor", json!(-8)),
        ("factor", json!(1e300)),
        ("low_freq_factor", json!(0)),
        ("high_freq_factor", json!(1)),
        ("original_max_position_embeddings", json!(0)),
    ] {
        let error = rejected(with(key, value));
        assert!(matches!(error, FormatError::Bounds { .. }), "{key}: {error}");
    }
    let yarn = json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0});
    assert!(matches!(rejected(yarn), FormatError::Bounds { .. }));
    let flat = json!({"rope_type": "yarn", "factor": 4, "rope_theta": 1});
    assert!(matches!(rejected(flat), FormatError::Bounds { what: "the rope base", .. }));
}

#[test]
fn multipliers_are_read_for_granite_and_rejected_elsewhere() {
    let granite = llama().with("architectures", json!(["GraniteForCausalLM"]));
    let granite = granite.with("embedding_multiplier", 12).with("logits_scaling", 8);
    let granite = granite.with("residual_multiplier", 0.25).with("attention_multiplier", 0.5);
    let config = config_of(&granite);
    assert_eq!((config.embed_scale, config.logit_scale), (12.0, 0.125));
    assert_eq!((config.residual_scale, config.score_scale), (0.25, 0.5));
    let zero = format_error(granite.with("logits_scaling", 0).open());
    assert!(matches!(zero, FormatError::Bounds { what: "the scale of logits", .. }));
    for key in ["embedding_multiplier", "residual_multiplier", "logits_scaling"] {
        assert_names(&unsupported(llama().with(key, 2).open()), &[key, "2"]);
        llama().with(key, 1.0).open().unwrap();
    }
}

#[test]
fn fused_projections_are_one_weight_each() {
    let checkpoint = phi3().open().unwrap();
    let ids: Vec<WeightId> = checkpoint.weight_ids().collect();
    let layer = |part| WeightId::Layer(0, part);
    assert_eq!(ids.len(), 3 + 6);
    assert!(ids.contains(&layer(LayerWeight::Qkv)) && !ids.contains(&layer(LayerWeight::Q)));
    let config = checkpoint.config();
    assert_eq!(config.stored_in(LayerWeight::K), (LayerWeight::Qkv, RowMap::from_row(16)));
    assert_eq!(config.stored_in(LayerWeight::V), (LayerWeight::Qkv, RowMap::from_row(24)));
    assert_eq!(config.stored_in(LayerWeight::Up), (LayerWeight::GateUp, RowMap::from_row(24)));
    assert_eq!(config.stored_in(LayerWeight::Down), (LayerWeight::Down, RowMap::from_row(0)));
}

#[test]
fn each_expert_matrix_is_one_weight() {
    let checkpoint = qwen3_moe().open().unwrap();
    let config = checkpoint.config();
    let experts = Experts {
        n: 3,
        n_used: 2,
        normalize: false,
        sigmoid: false,
        projection_biases: false,
        has_bias: false,
        scale: 1.0,
        n_dense: 0,
        d_dense: 24,
    };
    assert_eq!(config.experts, Some(experts));
    assert_eq!(config.d_ff, 24);
    let id = WeightId::Layer(0, LayerWeight::Expert(2, ExpertPart::Down));
    assert_eq!(checkpoint.weight_id("model.layers.0.mlp.experts.2.down_proj.weight"), Some(id));
    assert_eq!(checkpoint.tensor(id).unwrap().shape, [16, 24]);
    let normalized = config_of(&qwen3_moe().with("norm_topk_prob", true)).experts.unwrap();
    assert!(normalized.normalize);
    let error = format_error(qwen3_moe().with("num_experts", 4).open());
    assert!(matches!(error, FormatError::MissingTensors { n_missing: 3, .. }));
}

/// transformers 5 writes `num_local_experts` for every architecture; published files have the architecture's own key.
#[test]
fn both_spellings_of_the_number_of_experts_are_read() {
    let both = ["num_experts", "num_local_experts"];
    let stated = |keys: &[(&str, usize)]| {
        let folder = qwen3_moe().without("num_experts");
        keys.iter().fold(folder, |folder, &(key, n)| folder.with(key, n))
    };
    for keys in [&[(both[0], 3)][..], &[(both[1], 3)], &[(both[0], 3), (both[1], 3)]] {
        assert_eq!(config_of(&stated(keys)).experts.unwrap().n, 3, "{keys:?}");
    }
    let error = format_error(stated(&[(both[0], 3), (both[1], 4)]).open());
    assert_names(&error, &["num_experts is 3", "expected 4 (from num_local_experts)"]);
    assert_names(&format_error(stated(&[]).open()), &["no \"num_experts\""]);
    let mut mixtral = qwen3_moe().without("num_experts").with("num_local_experts", 4);
    mixtral = mixtral.with("architectures", json!(["MixtralForCausalLM"])).with("intermediate_size", 24);
    // The number of experts is read; the tensors of Mixtral are missing.
    for folder in [mixtral.clone(), mixtral.without("num_local_experts").with("num_experts", 4)] {
        assert!(matches!(format_error(folder.open()), FormatError::MissingTensors { .. }));
    }
}

#[test]
fn invalid_numbers_of_experts_are_rejected() {
    for (key, value) in [("num_experts", 0), ("num_experts", 1 << 20), ("num_experts_per_tok", 4)] {
        let error = format_error(qwen3_moe().with(key, value).open());
        assert!(matches!(error, FormatError::Bounds { .. }), "{key}: {error}");
    }
    let error = unsupported(qwen3_moe().with("decoder_sparse_step", 2).open());
    assert_names(&error, &["decoder_sparse_step", "2"]);
    let error = unsupported(qwen3_moe().with("mlp_only_layers", json!([0])).open());
    assert_names(&error, &["mlp_only_layers"]);
    let error = unsupported(qwen3_moe().with("n_routed_experts", 2).open());
    assert_names(&error, &["mixture of experts", "n_routed_experts"]);
    assert_eq!(window_of(&qwen3_moe().with("use_sliding_window", true).with("sliding_window", 9)), Some(9));
}
