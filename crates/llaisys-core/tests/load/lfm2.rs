//! LFM2: its keys of `config.json` and of a GGUF file, and the file of a golden, which gives the outputs of its folder.

use super::hybrid_files::{logits, tensors_of};
use super::hybrids::{config, with};
use crate::common::settings;
use crate::model_files::gguf::{F32, Gguf, Meta, Tensor};
use crate::model_files::{TempFolder, assert_names, format_error, golden, unsupported};
use llaisys_core::arch::config::ModelConfig;
use llaisys_core::arch::recurrent::RecurrentLayer;
use llaisys_core::arch::row_map::RowMap;
use llaisys_core::arch::short_conv::ShortConv;
use llaisys_core::arch::spec::{LayerWeight, ShortConvWeight};
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::forward::shard::Shard;
use serde_json::{Value, json};

const VOCAB: usize = 600;

/// The endings of names of a folder, and those of a GGUF file, as llama.cpp's converter maps them.
const NAMES: [(&str, &str); 14] = [
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
];

/// The file of a golden, as a converter writes it.
fn convert(name: &str, architecture: &str) -> Gguf {
    let mut file = Gguf::empty().with("general.architecture", architecture);
    let tensors = tensors_of(name);
    let mut put = |name: String, shape: &[usize], values: &[f32]| {
        let sizes = shape.iter().rev().map(|&n| n as u64).collect();
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        file.tensors.push(Tensor { name, sizes, type_id: F32, data, offset: None });
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
        let part = part.strip_suffix(".weight").unwrap();
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
        ("feed_forward_length", config.d_ff),
        ("vocab_size", VOCAB),
        ("shortconv.l_cache", 3),
    ] {
        file = file.with(&key(name), Meta::U32(size as u32));
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

const FILES: [(&str, &str); 1] = [("lfm2_bf16", "lfm2")];

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
