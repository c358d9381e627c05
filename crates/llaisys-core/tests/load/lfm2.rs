//! LFM2: its keys of `config.json` and of a GGUF file, and the file of a golden, which gives the outputs of its folder.

use super::hybrid_files::{logits, tensors_of};
use super::hybrids::{config, with};
use crate::common::settings;
use crate::model_files::gguf::{Gguf, Meta, Tensor};
use crate::model_files::{TempFolder, assert_names, format_error, golden, unsupported};
use llaisys_core::arch::config::ModelConfig;
use llaisys_core::arch::experts::Experts;
use llaisys_core::arch::recurrent::RecurrentLayer;
use llaisys_core::arch::row_map::RowMap;
use llaisys_core::arch::short_conv::ShortConv;
use llaisys_core::arch::spec::{LayerWeight, ShortConvWeight};
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::forward::shard::Shard;
use llaisys_core::forward::weights::{PackSettings, Weights};
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::progress::Progress;
use llaisys_core::threads::Pool;
use serde_json::{Value, json};

const VOCAB: usize = 600;

/// The endings of names of a folder, and those of a GGUF file, as llama.cpp's converter maps them.
const NAMES: [(&str, &str); 15] = [
    ("operator_norm", "attn_norm"),
    ("ffn_norm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.conv", "shortconv.conv"),
    ("conv.out_proj", "shortconv.out_proj"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w3", "ffn_up"),
    ("feed_forward.w2", "ffn_down"),
    ("feed_forward.gate", "ffn_gate_inp"),
];

const N_EXPERTS: usize = 5;
const STACKED: [(&str, &str); 3] = [("w1", "ffn_gate_exps"), ("w3", "ffn_up_exps"), ("w2", "ffn_down_exps")];

/// The file of a golden, as a converter writes it.
fn convert(name: &str, architecture: &str) -> Gguf {
    let mut file = Gguf::empty().with("general.architecture", architecture);
    let tensors = tensors_of(name);
    let mut put = |name: String, shape: &[usize], values: &[f32]| {
        file.tensors.push(Tensor::f32(name, shape, values));
    };
    for (name, (shape, values)) in &tensors {
        let Some(rest) = name.strip_prefix("model.layers.") else {
            match name.as_str() {
                "model.embed_tokens.weight" => put("token_embd.weight".into(), shape, values),
                "model.embedding_norm.weight" => put("token_embd_norm.weight".into(), shape, values),
                other => panic!("an unknown tensor {other}"),
            }
            continue;
        };
        let (layer, part) = rest.split_once('.').unwrap();
        if part == "feed_forward.expert_bias" {
            put(format!("blk.{layer}.exp_probs_b.bias"), shape, values);
            continue;
        }
        let part = part.strip_suffix(".weight").unwrap();
        if let Some(expert) = part.strip_prefix("feed_forward.experts.") {
            // The converter stacks the matrices of all experts.
            let Some(matrix) = expert.strip_prefix("0.") else { continue };
            let at = |e: usize| format!("model.layers.{layer}.feed_forward.experts.{e}.{matrix}.weight");
            let all: Vec<f32> = (0..N_EXPERTS).flat_map(|e| tensors[&at(e)].1.clone()).collect();
            let ending = STACKED.iter().find(|(ours, _)| *ours == matrix).unwrap().1;
            put(format!("blk.{layer}.{ending}.weight"), &[&[N_EXPERTS], &shape[..]].concat(), &all);
            continue;
        }
        let (_, ending) = NAMES.iter().find(|(ours, _)| *ours == part).expect(part);
        // The converter removes the dimension of 1 of a convolution.
        let shape: Vec<usize> = shape.iter().copied().filter(|&n| n != 1).collect();
        put(format!("blk.{layer}.{ending}.weight"), &shape, values);
    }
    with_keys(file, name, architecture)
}

/// Adds the metadata.
fn with_keys(mut file: Gguf, name: &str, architecture: &str) -> Gguf {
    let config = config(name);
    let key = |key: &str| format!("{architecture}.{key}");
    for (name, size) in [
        ("block_count", config.n_layers),
        ("context_length", config.max_positions),
        ("embedding_length", config.d_model),
        ("attention.head_count", config.n_heads),
        ("feed_forward_length", config.d_dense()),
        ("vocab_size", VOCAB),
        ("shortconv.l_cache", 3),
    ] {
        file = file.with(&key(name), Meta::U32(size as u32));
    }
    if let Some(experts) = config.experts {
        for (name, size) in [
            ("expert_count", experts.n),
            ("expert_used_count", experts.n_used),
            ("expert_feed_forward_length", config.d_ff),
            ("leading_dense_block_count", experts.n_dense),
            ("expert_gating_func", 2),
        ] {
            file = file.with(&key(name), Meta::U32(size as u32));
        }
    }
    let heads = |&recurrent: &bool| if recurrent { 0 } else { config.n_kv_heads as i32 };
    file =
        file.with(&key("attention.head_count_kv"), Meta::I32s(config.recurrent.iter().map(heads).collect()));
    file = file.with(&key("attention.layer_norm_rms_epsilon"), Meta::F32(config.rms_eps));
    file = file.with(&key("rope.freq_base"), Meta::F32(config.rope.theta as f32));
    file.with("tokenizer.ggml.model", "gpt2")
        .with("tokenizer.ggml.pre", "lfm2")
        .with("tokenizer.ggml.tokens", Meta::Strs((0..VOCAB).map(|i| format!("t{i}")).collect()))
        .with("tokenizer.ggml.token_type", Meta::I32s(vec![1; VOCAB]))
        .with("tokenizer.ggml.merges", Meta::Strs(vec![]))
        .with("tokenizer.ggml.bos_token_id", Meta::U32(1))
        .with("tokenizer.ggml.eos_token_id", Meta::U32(599))
}

#[test]
fn a_folder_states_layers_widths_and_names() {
    let config = config("lfm2_bf16");
    assert_eq!(config.recurrent, [true, true, false, true, false, true]);
    let short_conv = ShortConv { channels: 48, n_taps: 3 };
    assert_eq!(config.recurrent_layer, Some(RecurrentLayer::ShortConv(short_conv)));
    // Four layers: a window of 2 inputs.
    assert_eq!(config.state_len(), 4 * 2 * 48);
    // Both gates and the input; attention has no gate.
    assert_eq!((config.recurrent_width(), config.has_attn_gate()), (3 * 48, false));
    assert!(config.tied_head && config.rms_eps == 1e-5 && config.rope.theta == 1e6);
    let stored = |part| config.stored_in(LayerWeight::ShortConv(part));
    let at = |first| (LayerWeight::ShortConv(ShortConvWeight::In), RowMap::from_row(first));
    assert_eq!(stored(ShortConvWeight::InputGate), at(0));
    assert_eq!(stored(ShortConvWeight::OutputGate), at(48));
    assert_eq!(stored(ShortConvWeight::Input), at(96));
}

#[test]
fn the_width_of_the_feed_forward_block_is_adjusted() {
    // Another width than the golden's 80: its tensors have another shape, and the error states the expected one.
    let width = |keys: &[(&str, Value)]| {
        let error = format_error(with("lfm2_bf16", keys)).to_string();
        assert!(error.contains("feed_forward.w1.weight"), "{error}");
        error
    };
    for (keys, want) in [
        (&[("block_ff_dim", json!(130))][..], "[96, 48]"),
        (&[("block_auto_adjust_ff_dim", json!(false))], "[110, 48]"),
        (&[("block_ffn_dim_multiplier", json!(1.5))], "[112, 48]"),
        (&[("block_ffn_dim_multiplier", Value::Null)], "[73, 48]"),
        (&[("block_multiple_of", json!(7))], "[77, 48]"),
        (&[("block_multiple_of", Value::Null)], "[256, 48]"),
        (&[("block_ff_dim", Value::Null), ("intermediate_size", json!(48))], "[32, 48]"),
    ] {
        let error = width(keys);
        assert!(error.contains(want), "{keys:?}: {error}");
    }
    // The 1.2B model.
    let keys = [("block_ff_dim", json!(12288)), ("block_multiple_of", json!(256))];
    assert!(width(&keys).contains("[8192, 48]"));
    for (key, value, words) in [
        ("block_ff_dim", json!(0), &["block_ff_dim is 0"][..]),
        ("block_ff_dim", json!(u64::MAX), &["block_ff_dim is"]),
        ("block_ff_dim", json!(4_000_000_000_u64), &["the feed-forward width is"]),
        ("block_ffn_dim_multiplier", json!(0), &["block_ffn_dim_multiplier is 0"]),
        ("block_ffn_dim_multiplier", json!(1e9), &["block_ffn_dim_multiplier is"]),
        ("block_multiple_of", json!(0), &["block_multiple_of is 0"]),
        ("block_multiple_of", json!(u64::MAX), &["block_multiple_of is"]),
        ("block_ff_dim", Value::Null, &["intermediate_size"]),
    ] {
        assert_names(&format_error(with("lfm2_bf16", &[(key, value)])), words);
    }
}

#[test]
fn both_spellings_of_a_folder_mean_the_same() {
    let kinds = json!(["conv", "conv", "full_attention", "conv", "full_attention", "conv"]);
    let keys = [
        ("full_attn_idxs", Value::Null),
        ("layer_types", kinds),
        ("tie_embedding", Value::Null),
        ("tie_word_embeddings", json!(true)),
        ("rope_theta", Value::Null),
        ("rope_parameters", json!({"rope_theta": 1e6, "rope_type": "default"})),
    ];
    let (old, new) = (config("lfm2_bf16"), with("lfm2_bf16", &keys).unwrap().config().clone());
    let same =
        |config: &ModelConfig| (config.recurrent.clone(), config.tied_head, config.rope.clone(), config.d_ff);
    assert!(same(&old) == same(&new));
    // The old key takes precedence; without a head in the file the model is not tied.
    let untied = with("lfm2_bf16", &[("tie_embedding", json!(false)), ("tie_word_embeddings", json!(true))]);
    assert_names(&format_error(untied), &["missing", "lm_head.weight"]);
}

#[test]
fn hostile_values_are_rejected_by_name() {
    for (key, value, words) in [
        ("conv_L_cache", json!(1), &["kernel size of the short convolution is 1"][..]),
        ("conv_L_cache", json!(u64::MAX), &["kernel size of the short convolution is"]),
        ("conv_L_cache", Value::Null, &["conv_L_cache"]),
        ("conv_L_cache", json!(4), &["conv.conv.weight", "[48, 1, 4]"]),
        ("full_attn_idxs", json!([2, 6]), &["a layer in full_attn_idxs is 6"]),
        ("full_attn_idxs", json!([2, -1]), &["full_attn_idxs", "a list of layer numbers"]),
        ("full_attn_idxs", json!([]), &["number of layers with attention is 0"]),
        ("full_attn_idxs", Value::Null, &["full_attn_idxs"]),
        ("layer_types", json!(["conv"]), &["layer_types is 1", "expected 6"]),
        ("layer_types", json!(vec!["conv"; 6]), &["number of layers with attention is 0"]),
    ] {
        assert_names(&format_error(with("lfm2_bf16", &[(key, value)])), words);
    }
    let mamba = json!(["mamba", "full_attention", "mamba", "mamba", "mamba", "mamba"]);
    for (key, value, words) in [
        ("conv_bias", json!(true), &["conv_bias", "false in this family"][..]),
        ("layer_types", mamba, &["the layer type", "mamba"]),
        ("num_experts", json!(4), &["a mixture of experts", "num_experts = 4"]),
    ] {
        assert_names(&unsupported(with("lfm2_bf16", &[(key, value)])), words);
    }
    let whole = ModelConfig { n_heads: 4, n_kv_heads: 2, ..config("lfm2_bf16") };
    let error = Shard { rank: 0, world: 2 }.config(&whole).unwrap_err();
    assert_names(&error, &["tensor parallelism", "Lfm2ForCausalLM", "without recurrent layers"]);
}

const FILES: [(&str, &str); 2] = [("lfm2_bf16", "lfm2"), ("lfm2_moe_bf16", "lfm2moe")];

#[test]
fn a_file_gives_the_outputs_of_its_folder() {
    let config = ContextConfig { mode: ComputeMode::Float32, n_threads: 1, ..settings() };
    for (name, architecture) in FILES {
        let scratch = TempFolder::new();
        let path = scratch.write("model.gguf", convert(name, architecture).bytes());
        let [want, got] = [golden(name), path].map(|path| logits(&mut Context::load(&path, config).unwrap()));
        assert!(want == got, "{architecture}");
    }
}

#[test]
fn wrong_keys_of_a_file_are_rejected_by_name() {
    let file =
        |key: &str, value: Meta| convert("lfm2_bf16", "lfm2").with(&format!("lfm2.{key}"), value).open();
    for (key, value, words) in [
        ("shortconv.l_cache", Meta::U32(0), &["kernel size of the short convolution is 0"][..]),
        ("shortconv.l_cache", Meta::U32(4), &["blk.0.shortconv.conv.weight"]),
        ("attention.head_count_kv", Meta::I32s(vec![0; 6]), &["number of layers with attention is 0"]),
        ("attention.head_count_kv", Meta::I32s(vec![0, 1]), &["head_count_kv is 2", "expected 6"]),
        ("attention.head_count_kv", Meta::I32s(vec![0, 0, 1, 0, -1, 0]), &["head_count_kv", "from 0"]),
        ("attention.head_count_kv", Meta::I32s(vec![0, 0, 0, 0, 1, 0]), &["blk.2.shortconv"]),
        ("attention.head_count_kv", Meta::U32(1), &["head_count_kv"]),
    ] {
        assert_names(&file(key, value).unwrap_err(), words);
    }
    let uneven = Meta::I32s(vec![0, 0, 1, 0, 3, 0]);
    assert_names(&unsupported(file("attention.head_count_kv", uneven)), &["a size for each layer"]);
    let window = unsupported(file("attention.sliding_window", Meta::U32(8)));
    assert_names(&window, &["a sliding window of attention"]);
    let without = convert("lfm2_bf16", "lfm2").without("lfm2.shortconv.l_cache");
    assert_names(&without.open().unwrap_err(), &["lfm2.shortconv.l_cache"]);
}

#[test]
fn the_first_layers_are_dense_and_the_others_have_experts() {
    let moe = config("lfm2_moe_bf16");
    let experts = Experts {
        n: 5,
        n_used: 2,
        normalize: true,
        sigmoid: true,
        projection_biases: false,
        has_bias: true,
        scale: 1.0,
        n_dense: 2,
        d_dense: 80,
    };
    assert_eq!(moe.experts, Some(experts));
    assert_eq!((moe.d_ff, moe.d_dense(), moe.d_ff_max()), (24, 80, 80));
    assert_eq!((moe.experts_of(1), moe.experts_of(2)), (None, Some(experts)));
    // What transformers defines where a key is absent.
    let keys = ["norm_topk_prob", "use_expert_bias", "routed_scaling_factor", "num_dense_layers"];
    let absent = with("lfm2_moe_bf16", &keys.map(|key| (key, Value::Null))).unwrap();
    assert_eq!(absent.config().experts, Some(experts));
    let stated =
        with("lfm2_moe_bf16", &[("routed_scaling_factor", json!(2.5)), ("norm_topk_prob", json!(false))]);
    let stated = stated.unwrap().config().experts.unwrap();
    assert!(stated.scale == 2.5 && !stated.normalize);
    for (key, value, words) in [
        ("num_dense_layers", json!(7), &["number of dense layers is 7"][..]),
        ("num_dense_layers", json!(1), &["missing", "layers.1.feed_forward.gate.weight"]),
        ("intermediate_size", json!(0), &["feed-forward width of dense layers is 0"]),
        ("intermediate_size", json!(u64::MAX), &["feed-forward width of dense layers is"]),
        ("intermediate_size", Value::Null, &["intermediate_size"]),
        ("routed_scaling_factor", json!(0), &["the scale of experts is 0"]),
        ("use_expert_bias", json!(false), &["not part of this model", "expert_bias"]),
        ("num_experts_per_tok", json!(6), &["number of experts used is 6"]),
    ] {
        assert_names(&format_error(with("lfm2_moe_bf16", &[(key, value)])), words);
    }
}

#[test]
fn the_router_of_a_file_has_sigmoids() {
    let file = |key: &str, value: Meta| {
        convert("lfm2_moe_bf16", "lfm2moe").with(&format!("lfm2moe.{key}"), value).open()
    };
    let of_file = |key: &str, value: Meta| file(key, value).unwrap().config().experts.unwrap();
    let experts = config("lfm2_moe_bf16").experts.unwrap();
    assert_eq!(of_file("expert_gating_func", Meta::U32(2)), experts);
    assert_eq!(of_file("expert_weights_scale", Meta::F32(0.0)), experts, "0 is unset");
    assert_eq!(of_file("expert_weights_scale", Meta::F32(2.5)), Experts { scale: 2.5, ..experts });
    let softmax = unsupported(file("expert_gating_func", Meta::U32(1)));
    assert_names(&softmax, &["expert_gating_func", "1", "2 (sigmoid)"]);
    assert_names(
        &file("leading_dense_block_count", Meta::U32(9)).unwrap_err(),
        &["number of dense layers is 9"],
    );
    // In a family without dense layers.
    let qwen3 = Gguf::small("llama")
        .with("llama.expert_count", Meta::U32(4))
        .with("llama.expert_used_count", Meta::U32(2))
        .with("llama.leading_dense_block_count", Meta::U32(1));
    assert_names(&unsupported(qwen3.open()), &["leading_dense_block_count", "experts in every layer"]);
}

#[test]
fn packed_bytes_are_predicted() {
    for name in ["lfm2_bf16", "lfm2_moe_bf16", "qwen3_5_bf16", "qwen3_next_bf16"] {
        let checkpoint = Checkpoint::open(&golden(name)).unwrap();
        for mode in [ComputeMode::Auto, ComputeMode::Float32, ComputeMode::Int8, ComputeMode::Int4] {
            let settings = PackSettings::new(mode, Shard { rank: 0, world: 1 });
            let pool = Pool::new(1).unwrap();
            let weights = Weights::pack(&checkpoint, settings, &pool, &Progress::default()).unwrap();
            assert_eq!(weights.n_bytes(), checkpoint.info().packed_bytes.of(mode), "{name} {mode:?}");
        }
    }
}
