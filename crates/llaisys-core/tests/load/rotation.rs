//! How each architecture rotates queries and keys, in folders and GGUF files: parts of heads, layers without rotation,
//! scalings of some layers or of long contexts, queries scaled by position. What is not implemented is rejected by name.

use crate::model_files::folder::Folder;
use crate::model_files::gguf::{Gguf, Meta};
use crate::model_files::{assert_names, format_error, unsupported};
use llaisys_core::arch::config::ModelConfig;
use llaisys_core::arch::rope::{LongRope, QueryScaling, RopeConfig, RopeScaling};
use llaisys_core::arch::spec::{LayerWeight, WeightId};
use llaisys_core::error::FormatError;
use serde_json::{Value, json};

/// The small Llama as another architecture, with the tensors of its layer.
fn folder(architecture: &str) -> Folder {
    let mut folder = Folder::small("LlamaForCausalLM").with("architectures", json!([architecture]));
    let (drop, add): (&[&str], &[(&str, &[usize])]) = match architecture {
        "Phi3ForCausalLM" => (
            &["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
            &[("self_attn.qkv_proj.weight", &[32, 16]), ("mlp.gate_up_proj.weight", &[48, 16])],
        ),
        "Olmo3ForCausalLM" => (
            &["input_layernorm"],
            &[
                ("post_feedforward_layernorm.weight", &[16]),
                ("self_attn.q_norm.weight", &[16]),
                ("self_attn.k_norm.weight", &[8]),
            ],
        ),
        "Glm4ForCausalLM" => (
            &["gate_proj", "up_proj"],
            &[
                ("post_self_attn_layernorm.weight", &[16]),
                ("post_mlp_layernorm.weight", &[16]),
                ("mlp.gate_up_proj.weight", &[48, 16]),
                ("self_attn.q_proj.bias", &[16]),
                ("self_attn.k_proj.bias", &[8]),
                ("self_attn.v_proj.bias", &[8]),
            ],
        ),
        _ => (&[], &[]),
    };
    folder.tensors.retain(|tensor| !drop.iter().any(|part| tensor.name.contains(part)));
    for (name, shape) in add {
        folder.tensor(&format!("model.layers.0.{name}"), shape);
    }
    if architecture == "Glm4ForCausalLM" { folder.with("attention_bias", true) } else { folder }
}

fn config_of(folder: &Folder) -> ModelConfig {
    folder.open().expect("a valid folder").config().clone()
}

/// A folder with several layers, all with the tensors of the first.
fn deep(architecture: &str, n_layers: usize) -> Folder {
    let mut folder = folder(architecture).with("num_hidden_layers", n_layers);
    let first: Vec<_> = folder.tensors.iter().filter(|t| t.name.contains(".0.")).cloned().collect();
    for layer in 1..n_layers {
        folder.tensors.extend(first.iter().cloned().map(|mut tensor| {
            tensor.name = tensor.name.replace(".0.", &format!(".{layer}."));
            tensor
        }));
    }
    folder
}

#[test]
fn a_share_of_each_head_is_rotated_where_the_architecture_has_it() {
    let width = |folder: &Folder| config_of(folder).d_rope;
    assert_eq!(width(&folder("LlamaForCausalLM")), 8);
    assert_eq!(width(&folder("LlamaForCausalLM").with("partial_rotary_factor", 1.0)), 8);
    assert_eq!(width(&folder("Phi3ForCausalLM")), 8);
    assert_eq!(width(&folder("Phi3ForCausalLM").with("partial_rotary_factor", 0.75)), 6);
    let set = json!({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75});
    assert_eq!(width(&folder("Phi3ForCausalLM").with("rope_parameters", set.clone())), 6);
    // The default of GLM-4 is half of each head.
    assert_eq!(width(&folder("Glm4ForCausalLM")), 4);
    assert_eq!(width(&folder("Glm4ForCausalLM").with("partial_rotary_factor", 0.25)), 2);
    for other in [
        folder("LlamaForCausalLM").with("partial_rotary_factor", 0.5),
        folder("LlamaForCausalLM").with("rope_parameters", set),
    ] {
        assert_names(&unsupported(other.open()), &["partial_rotary_factor", "whole head"]);
    }
}

#[test]
fn layers_without_rotation_are_listed_or_every_fourth() {
    let rotated = |folder: &Folder| config_of(folder).rotated;
    let smollm3 = || deep("SmolLM3ForCausalLM", 4);
    assert_eq!(rotated(&smollm3()), [true, true, true, false]);
    assert_eq!(rotated(&smollm3().with("no_rope_layer_interval", 2)), [true, false, true, false]);
    let listed = smollm3().with("no_rope_layers", json!([0, 1, 1, 0])).with("no_rope_layer_interval", 2);
    assert_eq!(rotated(&listed), [false, true, true, false]);
    assert_eq!(rotated(&deep("LlamaForCausalLM", 2)), [true, true]);
    assert_eq!(rotated(&deep("LlamaForCausalLM", 2).with("no_rope_layers", json!([1, 1]))), [true, true]);
    let error = unsupported(deep("LlamaForCausalLM", 2).with("no_rope_layers", json!([1, 0])).open());
    assert_names(&error, &["no_rope_layers", "1 layers", "all layers are rotated"]);
    let short = format_error(smollm3().with("no_rope_layers", json!([1, 0])).open());
    assert!(matches!(short, FormatError::Disagree { got: 2, want: 4, .. }));
    let windows = smollm3().with("use_sliding_window", true).with("sliding_window", 8);
    assert_names(&unsupported(windows.open()), &["sliding window"]);
}

#[test]
fn olmo3_scales_the_rotation_of_full_layers_only() {
    let yarn = json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16});
    let olmo3 = || deep("Olmo3ForCausalLM", 4).with("sliding_window", 8);
    let old = olmo3().with("rope_theta", 2e5).with("rope_scaling", yarn.clone());
    let mut full = yarn;
    full["rope_theta"] = json!(2e5);
    let sets =
        json!({"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 2e5}});
    for folder in [old, olmo3().with("rope_theta", 2e5).with("rope_parameters", sets)] {
        let config = config_of(&folder);
        assert_eq!(config.windowed, [true, true, true, false]);
        assert!(matches!(config.rope.scaling, RopeScaling::Yarn { factor: 4.0, .. }));
        assert_eq!((config.rope.theta, config.local_rope), (2e5, Some(RopeConfig::plain(2e5))));
    }
    assert_eq!(config_of(&olmo3()).local_rope, Some(RopeConfig::plain(5e5)));
}

#[test]
fn queries_of_ministral_3_are_scaled_by_position() {
    let set = json!({
        "rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 16, "rope_theta": 1e6,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    });
    let ministral = |set: Value| folder("Ministral3ForCausalLM").with("rope_parameters", set);
    let config = config_of(&ministral(set.clone()));
    let scaling = QueryScaling { beta: 0.1, original: 16.0 };
    assert_eq!(config.query_scaling, Some(scaling));
    assert!(matches!(config.rope.scaling, RopeScaling::Yarn { amplitude: 1.0, .. }));
    let mut factors = [0.0; 4];
    scaling.factors(&[0, 15, 16, 47], &mut factors);
    let want = [1.0, 1.0, 1.0 + 0.1 * 2_f64.ln(), 1.0 + 0.1 * 3_f64.ln()];
    assert_eq!(factors, want.map(|factor| factor as f32));
    let with = |key: &str, value: Value| {
        let mut set = set.clone();
        set[key] = value;
        set
    };
    assert_eq!(config_of(&ministral(with("llama_4_scaling_beta", json!(0)))).query_scaling, None);
    // transformers' default is a scaled rotation, so a file without one is not read as a plain one.
    for (file, key) in [
        (folder("Ministral3ForCausalLM"), "rope_parameters"),
        (ministral(with("llama_4_scaling_beta", Value::Null)), "llama_4_scaling_beta"),
        (
            ministral(with("original_max_position_embeddings", Value::Null)),
            "original_max_position_embeddings",
        ),
    ] {
        let error = format_error(file.open());
        assert!(matches!(error, FormatError::KeyMissing { key: missing, .. } if missing == key), "{error}");
    }
    let error = unsupported(folder("MistralForCausalLM").with("rope_parameters", set).open());
    assert_names(&error, &["llama_4_scaling_beta", "0.1", "none in this family"]);
}

fn longrope(n: usize) -> Value {
    json!({"type": "longrope", "short_factor": vec![1.5; n], "long_factor": vec![9; n]})
}

#[test]
fn the_context_chooses_the_factors_of_longrope_for_all_positions() {
    let phi3 = || folder("Phi3ForCausalLM").with("partial_rotary_factor", 0.75);
    let folder = phi3().with("rope_scaling", longrope(3)).with("original_max_position_embeddings", 32);
    let config = config_of(&folder);
    let amplitude = (1.0 + 2_f64.ln() / 32_f64.ln()).sqrt();
    let factors = |factor: f32| RopeScaling::PerPair { factors: vec![factor; 3], amplitude };
    assert_eq!((config.max_positions, config.rope.scaling.clone()), (64, factors(1.5)));
    let rope = RopeConfig { theta: 1e4, scaling: factors(9.0) };
    assert_eq!(config.long_rope, Some(LongRope { original: 32, rope }));
    for (max_model_len, factor) in [(1, 1.5), (32, 1.5), (33, 9.0), (64, 9.0)] {
        let mut config = config.clone();
        config.choose_rope(max_model_len);
        assert_eq!((config.rope.scaling, config.long_rope), (factors(factor), None), "{max_model_len}");
    }
    // Old names of the type.
    for kind in ["su", "yarn"] {
        let mut set = longrope(3);
        set["type"] = kind.into();
        let old = phi3().with("rope_scaling", set).with("original_max_position_embeddings", 32);
        assert_eq!(config_of(&old).rope.scaling, factors(1.5));
    }
    let wrong = |folder: Folder| format_error(folder.with("original_max_position_embeddings", 32).open());
    let uneven = wrong(phi3().with("rope_scaling", longrope(4)));
    assert!(matches!(uneven, FormatError::Disagree { got: 4, want: 3, .. }));
    let mut set = longrope(3);
    set["long_factor"] = json!([9, 9]);
    let uneven = wrong(phi3().with("rope_scaling", set.clone()));
    assert!(matches!(uneven, FormatError::Disagree { got: 2, want: 3, .. }));
    set["long_factor"] = Value::Null;
    let missing = wrong(phi3().with("rope_scaling", set));
    assert!(matches!(missing, FormatError::KeyMissing { key: "long_factor", .. }));
    let error = format_error(phi3().with("rope_scaling", longrope(3)).open());
    assert!(matches!(error, FormatError::KeyMissing { key: "original_max_position_embeddings", .. }));
}

#[test]
fn folders_of_glm4_and_ernie_store_pairs_as_neighbors() {
    let q = WeightId::Layer(0, LayerWeight::Q);
    let rows = |folder: Folder| {
        let checkpoint = folder.open().unwrap();
        (0..8).map(|n| checkpoint.stored_row(q, n)).collect::<Vec<usize>>()
    };
    assert_eq!(rows(folder("LlamaForCausalLM")), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(rows(folder("Ernie4_5ForCausalLM")), [0, 2, 4, 6, 1, 3, 5, 7]);
    // The half of a head that is not rotated stays in place.
    assert_eq!(rows(folder("Glm4ForCausalLM")), [0, 2, 1, 3, 4, 5, 6, 7]);
    let checkpoint = folder("Glm4ForCausalLM").open().unwrap();
    let name = "model.layers.0.post_attention_layernorm.weight";
    assert_eq!(checkpoint.weight_id(name), Some(WeightId::Layer(0, LayerWeight::FfnNorm)));
    let error = format_error(folder("Ernie4_5ForCausalLM").with("use_bias", true).open());
    assert!(
        matches!(error, FormatError::MissingTensors { n_missing: 7, .. }),
        "the biases of all projections"
    );
}

/// A GGUF file of OLMo with a window of 8 and four layers; `pattern` states which have it.
fn olmo_gguf(pattern: Option<Meta>) -> Gguf {
    let mut file = Gguf::small("olmo2").with("olmo2.block_count", Meta::U32(4));
    file.tensors
        .retain(|tensor| !tensor.name.ends_with("attn_norm.weight") && !tensor.name.contains("ffn_norm"));
    let first: Vec<_> = file.tensors.iter().filter(|t| t.name.starts_with("blk.0.")).cloned().collect();
    for layer in 0..4 {
        if layer > 0 {
            file.tensors.extend(first.iter().cloned().map(|mut tensor| {
                tensor.name = tensor.name.replace("blk.0.", &format!("blk.{layer}."));
                tensor
            }));
        }
        for (name, n) in
            [("post_attention_norm", 32), ("post_ffw_norm", 32), ("attn_q_norm", 32), ("attn_k_norm", 16)]
        {
            file.vector(&format!("blk.{layer}.{name}.weight"), n);
        }
    }
    let file = file.with("olmo2.attention.sliding_window", Meta::U32(8));
    match pattern {
        Some(pattern) => file.with("olmo2.attention.sliding_window_pattern", pattern),
        None => file,
    }
}

#[test]
fn gguf_files_of_olmo2_with_a_window_are_olmo3() {
    let config = |file: Gguf| file.open().unwrap().config().clone();
    let read = config(olmo_gguf(None));
    assert_eq!((read.arch.architecture, read.window), ("Olmo3ForCausalLM", Some(8)));
    assert_eq!(
        (read.windowed, read.local_rope),
        (vec![true, true, true, false], Some(RopeConfig::plain(1e5)))
    );
    assert_eq!(config(olmo_gguf(Some(Meta::U32(2)))).windowed, [true, false, true, false]);
    assert_eq!(
        config(olmo_gguf(Some(Meta::Bools(vec![false, true, true, false])))).windowed,
        [false, true, true, false]
    );
    let none = config(olmo_gguf(Some(Meta::Bools(vec![false; 4]))));
    assert_eq!((none.window, none.windowed), (None, vec![false; 4]));
    for n in [0, 3, 5] {
        let error = format_error(olmo_gguf(Some(Meta::Bools(vec![true; n]))).open());
        assert!(matches!(error, FormatError::Disagree { got, want: 4, .. } if got == n as u64), "{error}");
    }
    let full = olmo_gguf(None).without("olmo2.attention.sliding_window");
    assert_eq!(config(full).arch.architecture, "Olmo2ForCausalLM");
}

#[test]
fn rotation_keys_of_gguf_files_are_read() {
    let mistral = || Gguf::small("mistral3").with("mistral3.rope.scaling.type", "yarn");
    let mistral = || mistral().with("mistral3.rope.scaling.factor", Meta::F32(16.0));
    let mistral = || mistral().with("mistral3.rope.scaling.original_context_length", Meta::U32(16));
    let scaled = mistral().with("mistral3.attention.temperature_scale", Meta::F32(0.5));
    let scaled = scaled.with("mistral3.rope.scaling.yarn_log_multiplier", Meta::F32(1.0));
    let config = scaled.open().unwrap().config().clone();
    assert_eq!(config.query_scaling, Some(QueryScaling { beta: 0.5, original: 16.0 }));
    assert!(matches!(config.rope.scaling, RopeScaling::Yarn { amplitude: 1.0, .. }));
    assert_eq!(mistral().open().unwrap().config().query_scaling, None);
    let error =
        unsupported(Gguf::small("llama").with("llama.attention.temperature_scale", Meta::F32(0.1)).open());
    assert_names(&error, &["llama.attention.temperature_scale = 0.1"]);
    // Every fourth layer of SmolLM3 is not rotated; the file has one layer.
    assert_eq!(Gguf::small("smollm3").open().unwrap().config().rotated, [true]);
}
