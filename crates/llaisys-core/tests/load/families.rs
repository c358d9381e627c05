//! Families of 2025: their keys of `config.json` and of GGUF files, the names of their tensors, and what is rejected by
//! name. Their outputs are compared with transformers in `tests/parity`.

use crate::model_files::folder::Folder;
use crate::model_files::gguf::{Gguf, Meta};
use crate::model_files::{TempFolder, assert_names, format_error, golden, unsupported};
use llaisys_core::arch::config::ModelConfig;
use llaisys_core::arch::rope::RopeConfig;
use llaisys_core::arch::row_map::RowMap;
use llaisys_core::arch::spec::{LayerWeight, WeightId};
use llaisys_core::error::FormatError;
use llaisys_core::load::checkpoint::Checkpoint;
use serde_json::json;

const QKV: [(&str, usize); 3] = [("self_attn.q_proj", 16), ("self_attn.k_proj", 8), ("self_attn.v_proj", 8)];
const O: [(&str, usize); 1] = [("self_attn.o_proj", 16)];
const MLP: [(&str, usize); 3] = [("mlp.gate_proj", 24), ("mlp.up_proj", 24), ("mlp.down_proj", 16)];

fn config_of(folder: &Folder) -> ModelConfig {
    folder.open().expect("a valid folder").config().clone()
}

fn with_biases(mut folder: Folder, biases: &[(&str, usize)]) -> Folder {
    for (name, n) in biases {
        folder.tensor(&format!("model.layers.0.{name}.bias"), &[*n]);
    }
    folder
}

/// Which projections have a bias: q, k and v; o; the feed-forward block.
fn biases(config: &ModelConfig) -> (bool, bool, bool) {
    (config.qkv_bias, config.o_bias, config.mlp_bias)
}

#[test]
fn llama_states_the_biases_of_attention_and_of_the_feed_forward_block() {
    let llama = || Folder::small("LlamaForCausalLM");
    assert_eq!(biases(&config_of(&llama())), (false, false, false));
    let attention = with_biases(llama().with("attention_bias", true), &[&QKV[..], &O].concat());
    assert_eq!(biases(&config_of(&attention)), (true, true, false));
    let mlp = with_biases(llama().with("mlp_bias", true), &MLP);
    assert_eq!(biases(&config_of(&mlp)), (false, false, true));
    let error = format_error(with_biases(llama().with("attention_bias", true), &QKV).open());
    assert_names(&error, &["1 tensors are missing", "model.layers.0.self_attn.o_proj.bias"]);
    // A bias that the configuration does not state is not ignored.
    let error = format_error(with_biases(llama(), &O).open());
    assert!(matches!(error, FormatError::ExtraTensors { n_extra: 1, .. }));
}

#[test]
fn families_without_a_bias_reject_its_key() {
    for (architecture, keys) in [
        ("MistralForCausalLM", &["attention_bias", "mlp_bias"][..]),
        ("Qwen2ForCausalLM", &["mlp_bias"]),
        ("Qwen3ForCausalLM", &["mlp_bias", "use_bias"]),
    ] {
        for key in keys {
            let error = unsupported(Folder::small(architecture).with(key, true).open());
            assert_names(&error, &[key, "true", "false in this family"]);
            Folder::small(architecture).with(key, false).open().unwrap();
        }
    }
}

#[test]
fn seed_oss_states_each_bias_by_itself() {
    let seed = || Folder::small("SeedOssForCausalLM");
    assert_eq!(biases(&config_of(&with_biases(seed(), &QKV))), (true, false, false));
    assert_eq!(biases(&config_of(&seed().with("attention_bias", false))), (false, false, false));
    let out = seed().with("attention_bias", false).with("attention_out_bias", true);
    assert_eq!(biases(&config_of(&with_biases(out, &O))), (false, true, false));
    let all = seed().with("attention_out_bias", true).with("mlp_bias", true);
    let all = with_biases(all, &[&QKV[..], &O, &MLP].concat());
    assert_eq!(biases(&config_of(&all)), (true, true, true));
}

fn hunyuan() -> Folder {
    let mut folder = Folder::small("HunYuanDenseV1ForCausalLM");
    for name in ["query_layernorm", "key_layernorm"] {
        folder.tensor(&format!("model.layers.0.self_attn.{name}.weight"), &[8]);
    }
    folder
}

#[test]
fn hunyuan_stretches_the_base_of_a_dynamic_rotation_once() {
    let alpha = json!({"alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0});
    let stretched = RopeConfig::plain(1e4 * 1000_f64.powf(8.0 / 6.0));
    for (key, kind) in
        [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")]
    {
        let mut set = alpha.clone();
        set[kind] = "dynamic".into();
        assert_eq!(config_of(&hunyuan().with(key, set.clone())).rope, stretched);
        // Elsewhere this is another rotary embedding, which changes with the length of the sequence.
        let error = unsupported(Folder::small("LlamaForCausalLM").with(key, set).open());
        assert_names(&error, &["rope type", "dynamic"]);
    }
    let without = hunyuan().with("rope_scaling", json!({"type": "dynamic", "factor": 2.0}));
    assert_names(&unsupported(without.open()), &["rope type", "dynamic"]);
    let shared = hunyuan().with("use_cla", true);
    assert_names(&unsupported(shared.open()), &["use_cla", "true"]);
    assert_eq!(config_of(&hunyuan()).rope, RopeConfig::plain(1e4));
}

/// A dense Granite 4.0 of one layer.
fn granite4() -> Folder {
    let mut folder = Folder::small("GraniteMoeHybridForCausalLM");
    folder.tensors.retain(|tensor| !tensor.name.contains("mlp"));
    folder.tensor("model.layers.0.shared_mlp.input_linear.weight", &[48, 16]);
    folder.tensor("model.layers.0.shared_mlp.output_linear.weight", &[16, 24]);
    let folder = folder.with("intermediate_size", 99).with("shared_intermediate_size", 24);
    let folder = folder.with("num_local_experts", 0).with("layer_types", json!(["attention"]));
    folder.with("position_embedding_type", "rope").with("embedding_multiplier", 12)
}

#[test]
fn dense_granite_4_is_read_and_its_hybrids_are_rejected_by_name() {
    let checkpoint = granite4().open().unwrap();
    let config = checkpoint.config();
    assert_eq!((config.d_ff, config.embed_scale), (24, 12.0));
    assert_eq!(config.stored_in(LayerWeight::Up), (LayerWeight::GateUp, RowMap::from_row(24)));
    let id = checkpoint.weight_id("model.layers.0.shared_mlp.output_linear.weight");
    assert_eq!(id, Some(WeightId::Layer(0, LayerWeight::Down)));
    let rejected = |folder: Folder, words: &[&str]| assert_names(&unsupported(folder.open()), words);
    rejected(granite4().with("num_local_experts", 5), &["mixture of experts", "num_local_experts = 5"]);
    rejected(granite4().with("layer_types", json!(["mamba"])), &["layer type", "mamba", "full_attention"]);
    rejected(
        granite4().with("position_embedding_type", "nope"),
        &["position_embedding_type", "nope", "rope"],
    );
    rejected(granite4().without("position_embedding_type"), &["position_embedding_type", "null", "rope"]);
    let granite = Checkpoint::open(&golden("granite4_bf16")).unwrap();
    assert_eq!((granite.config().embed_scale, granite.config().logit_scale), (12.0, 0.1));
}

#[test]
fn granite_4_files_state_key_value_heads_by_layer() {
    const KEY: &str = "granite.attention.head_count_kv";
    let file = || Gguf::small("granite").with("granite.expert_count", Meta::U32(0));
    let idle =
        file().with("granite.ssm.conv_kernel", Meta::U32(4)).with("granite.ssm.state_size", Meta::U32(128));
    let idle = idle.with("granite.rope.scaling.finetuned", Meta::Bool(true));
    assert_eq!(idle.with(KEY, Meta::I32s(vec![1])).open().unwrap().config().n_kv_heads, 1);
    for wrong in [&[][..], &[1, 1], &[0, 1]] {
        let error = unsupported(file().with(KEY, Meta::I32s(wrong.to_vec())).open());
        assert_names(&error, &["a size for each layer", KEY, "one size for all layers"]);
    }
    let error = format_error(file().with(KEY, Meta::I32s(vec![-1])).open());
    assert_names(&error, &[KEY, "an array of whole numbers from 0"]);
    let error = format_error(file().with(KEY, Meta::I32s(vec![0])).open());
    assert_names(&error, &["number of key-value heads is 0"]);
    let error = unsupported(file().with("granite.rope.scaling.finetuned", Meta::Bool(false)).open());
    assert_names(&error, &["rope.scaling.finetuned", "false"]);
}

#[test]
fn files_have_the_biases_that_their_first_layer_has() {
    let with = |architecture: &str, names: &[(&str, u64)]| {
        let mut file = Gguf::small(architecture);
        names.iter().for_each(|(name, n)| file.vector(&format!("blk.0.{name}.bias"), *n));
        file
    };
    let qkv = [("attn_q", 32), ("attn_k", 16), ("attn_v", 16)];
    let rest = [("attn_output", 32), ("ffn_gate", 32), ("ffn_up", 32), ("ffn_down", 32)];
    let of = |file: Gguf| biases(file.open().unwrap().config());
    assert_eq!(of(with("llama", &[])), (false, false, false));
    assert_eq!(of(with("llama", &qkv)), (true, false, false));
    assert_eq!(of(with("llama", &[&qkv[..], &rest].concat())), (true, true, true));
    let error = format_error(with("llama", &qkv[1..]).open());
    assert_names(&error, &["1 tensors are missing", "blk.0.attn_q.bias"]);
    let error = format_error(with("llama", &rest[3..]).open());
    assert_names(&error, &["2 tensors are missing", "blk.0.ffn_gate.bias"]);
    // Qwen2 has exactly those of q, k and v.
    let error = format_error(with("qwen2", &rest[..1]).open());
    assert!(matches!(error, FormatError::ExtraTensors { first, .. } if first == "blk.0.attn_output.bias"));
}

#[test]
fn seed_oss_files_have_another_name_for_the_norm_before_the_feed_forward_block() {
    let mut file = Gguf::small("seed_oss");
    file.tensor("blk.0.ffn_norm.weight").name = "blk.0.post_attention_norm.weight".into();
    let scratch = TempFolder::new();
    let checkpoint = Checkpoint::open(&scratch.write("x.gguf", file.bytes())).unwrap();
    let id = checkpoint.weight_id("blk.0.post_attention_norm.weight");
    assert_eq!(id, Some(WeightId::Layer(0, LayerWeight::FfnNorm)));
    assert_eq!(checkpoint.stored_row(WeightId::Layer(0, LayerWeight::Q), 1), 1, "rows are not permuted");
    let error = format_error(Gguf::small("seed_oss").open());
    assert_names(&error, &["blk.0.post_attention_norm.weight"]);
}
