//! GGUF files of Gemma 4: the names and keys that llama.cpp's converter writes, made from the goldens. A file gives the
//! outputs of its folder.

use super::hybrid_files::{Tensors, logits, logits_of, tensors_of};
use super::hybrids::config;
use crate::common::settings;
use crate::model_files::gguf::{D_MODEL, F32, Gguf, Meta, Q8_0, Tensor, VOCAB};
use crate::model_files::{TempFolder, assert_names, check, format_error, gemma4, golden, unsupported};
use llaisys_core::arch::config::ModelConfig;
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::dtype::ComputeMode;

const GOLDENS: [&str; 2] = ["gemma4_bf16", "gemma4_moe_bf16"];
/// Of the goldens: shared layers and blocks, whose lists some tests change.
const DENSE: &str = GOLDENS[0];
const EXPERTS: &str = GOLDENS[1];

const NAMES: [(&str, &str); 26] = [
    ("model.embed_tokens.", "token_embd."),
    ("model.embed_tokens_per_layer.", "per_layer_token_embd."),
    ("model.per_layer_model_projection.", "per_layer_model_proj."),
    ("model.per_layer_projection_norm.", "per_layer_proj_norm."),
    ("model.norm.", "output_norm."),
    ("model.layers.", "blk."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".post_attention_norm."),
    (".pre_feedforward_layernorm.", ".ffn_norm."),
    (".post_feedforward_layernorm.", ".post_ffw_norm."),
    (".post_feedforward_layernorm_1.", ".post_ffw_norm_1."),
    (".pre_feedforward_layernorm_2.", ".pre_ffw_norm_2."),
    (".post_feedforward_layernorm_2.", ".post_ffw_norm_2."),
    (".self_attn.q_proj.", ".attn_q."),
    (".self_attn.k_proj.", ".attn_k."),
    (".self_attn.v_proj.", ".attn_v."),
    (".self_attn.o_proj.", ".attn_output."),
    (".self_attn.q_norm.", ".attn_q_norm."),
    (".self_attn.k_norm.", ".attn_k_norm."),
    (".mlp.gate_proj.", ".ffn_gate."),
    (".mlp.up_proj.", ".ffn_up."),
    (".mlp.down_proj.", ".ffn_down."),
    (".router.proj.", ".ffn_gate_inp."),
    (".per_layer_input_gate.", ".inp_gate."),
    (".per_layer_projection.", ".proj."),
    (".post_per_layer_input_norm.", ".post_norm."),
];
const WHOLE_NAMES: [(&str, &str); 5] = [
    (".layer_scalar", ".layer_output_scale.weight"),
    (".router.scale", ".ffn_gate_inp.scale"),
    (".router.per_expert_scale", ".ffn_down_exps.scale"),
    (".experts.gate_up_proj", ".ffn_gate_up_exps.weight"),
    (".experts.down_proj", ".ffn_down_exps.weight"),
];

fn renamed(name: &str) -> String {
    let name = NAMES.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to));
    match WHOLE_NAMES.iter().find_map(|(from, to)| Some((name.strip_suffix(from)?, to))) {
        Some((layer, to)) => format!("{layer}{to}"),
        None => name,
    }
}

/// The file of a golden, as a converter writes it.
fn convert(name: &str) -> Gguf {
    let config = config(name);
    let mut file = Gguf::empty();
    let mut put = |name: String, shape: &[usize], values: &[f32]| {
        file.tensors.push(Tensor::f32(name, shape, values));
    };
    let tensors: Tensors = tensors_of(name);
    for (name, (shape, values)) in tensors.iter().filter(|(name, _)| is_of_text(name)) {
        put(renamed(name), shape, values);
    }
    // Pairs that are not rotated have this factor.
    let n_pairs = config.d_rope_full() / 2;
    let factors: Vec<f32> = (0..n_pairs).map(|pair| if pair < n_pairs / 4 { 1.0 } else { 1e30 }).collect();
    put("rope_freqs.weight".into(), &[n_pairs], &factors);
    with_keys(file, &config)
}

fn is_of_text(name: &str) -> bool {
    ["model.layers.", "model.embed_tokens", "model.norm.", "model.per_layer_"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

fn with_keys(mut file: Gguf, config: &ModelConfig) -> Gguf {
    let gemma4 = config.gemma4.unwrap();
    let of_layers = |size: &dyn Fn(usize) -> usize| {
        Meta::I32s((0..config.n_layers).map(|layer| size(layer) as i32).collect())
    };
    let mut keys = vec![
        ("block_count", config.n_layers),
        ("context_length", config.max_positions),
        ("embedding_length", config.d_model),
        ("embedding_length_per_layer_input", gemma4.d_input),
        ("attention.head_count", config.n_heads),
        ("attention.key_length", gemma4.full_heads.d_head),
        ("attention.value_length", gemma4.full_heads.d_head),
        ("attention.key_length_swa", config.d_head),
        ("attention.value_length_swa", config.d_head),
        ("attention.sliding_window", config.window.unwrap()),
        ("attention.shared_kv_layers", gemma4.n_shared),
        ("rope.dimension_count", gemma4.full_heads.d_head),
        ("rope.dimension_count_swa", config.d_head),
    ];
    if let Some(experts) = config.experts {
        keys.extend([
            ("expert_count", experts.n),
            ("expert_used_count", experts.n_used),
            ("expert_feed_forward_length", config.d_ff),
        ]);
    }
    file = file.with("general.architecture", "gemma4");
    for (key, size) in keys {
        file = file.with(&format!("gemma4.{key}"), Meta::U32(size as u32));
    }
    let tokens = (0..config.vocab_size).map(|i| format!("t{i}")).collect();
    let pattern = Meta::Bools(config.windowed.clone());
    file.with("gemma4.attention.head_count_kv", of_layers(&|layer| config.kv_heads(layer).n_kv_heads))
        .with("gemma4.feed_forward_length", of_layers(&|layer| config.d_dense_of(layer)))
        .with("gemma4.attention.sliding_window_pattern", pattern)
        .with("gemma4.attention.layer_norm_rms_epsilon", Meta::F32(config.rms_eps))
        .with("gemma4.rope.freq_base", Meta::F32(config.rope.theta as f32))
        .with("gemma4.rope.freq_base_swa", Meta::F32(1e4))
        .with("gemma4.final_logit_softcapping", Meta::F32(config.logit_soft_cap.unwrap()))
        .with("tokenizer.ggml.model", "gemma4")
        .with("tokenizer.ggml.tokens", Meta::Strs(tokens))
        .with("tokenizer.ggml.merges", Meta::Strs(vec!["t0 t1".into()]))
        .with("tokenizer.ggml.bos_token_id", Meta::U32(2))
        .with("tokenizer.ggml.eos_token_id", Meta::U32(599))
        .with("tokenizer.ggml.add_bos_token", Meta::Bool(false))
}

#[test]
fn a_file_gives_the_outputs_of_its_folder() {
    for name in GOLDENS {
        let scratch = TempFolder::new();
        let path = scratch.write("model.gguf", convert(name).bytes());
        let config = ContextConfig { mode: ComputeMode::Float32, n_threads: 1, ..settings() };
        let [want, got] = [golden(name), path].map(|path| logits(&mut Context::load(&path, config).unwrap()));
        assert!(want == got, "{name}");
    }
}

/// A small file with two experts next to the dense block, whose matrices are of the type.
fn small_with_experts(type_id: u32) -> Gguf {
    let mut file = gemma4::gguf();
    file.tensors.retain(|tensor| tensor.name != "token_embd.weight");
    file.matrix("token_embd.weight", VOCAB, D_MODEL, F32);
    for (name, n) in [
        ("post_ffw_norm_1.weight", D_MODEL),
        ("pre_ffw_norm_2.weight", D_MODEL),
        ("post_ffw_norm_2.weight", D_MODEL),
        ("ffn_gate_inp.scale", D_MODEL),
        ("ffn_down_exps.scale", 2),
    ] {
        file.vector(&format!("blk.0.{name}"), n);
    }
    file.matrix("blk.0.ffn_gate_inp.weight", 2, D_MODEL, F32);
    for (name, n_rows) in [("ffn_gate_up_exps", 2 * 32), ("ffn_down_exps", D_MODEL)] {
        let sizes = vec![D_MODEL, n_rows, 2];
        let codes = (0..sizes.iter().product::<u64>()).map(|i| (i * 37 % 41) as i8 - 20);
        let data = if type_id == F32 {
            codes.flat_map(|code| f32::from(code).to_le_bytes()).collect()
        } else {
            let codes: Vec<u8> = codes.map(|code| code as u8).collect();
            // Blocks of Q8_0 with a scale of 1 in f16.
            codes.chunks_exact(32).flat_map(|block| [&[0x00, 0x3c], block].concat()).collect()
        };
        file.tensors.push(Tensor {
            name: format!("blk.0.{name}.weight"),
            sizes,
            type_id,
            data,
            offset: None,
        });
    }
    file.with("gemma4.expert_count", Meta::U32(2))
        .with("gemma4.expert_used_count", Meta::U32(1))
        .with("gemma4.expert_feed_forward_length", Meta::U32(32))
}

#[test]
fn quantized_experts_have_the_outputs_of_their_values() {
    let scratch = TempFolder::new();
    let config = ContextConfig { mode: ComputeMode::Float32, n_threads: 1, ..settings() };
    let logits = |file: Gguf| {
        let path = scratch.write("model.gguf", file.bytes());
        logits_of(
            &mut Context::load(&path, ContextConfig { max_model_len: 64, ..config }).unwrap(),
            &[0, 3, 1],
        )
    };
    let want = logits(small_with_experts(F32));
    assert!(want == logits(small_with_experts(Q8_0)));
    let mut without = small_with_experts(F32);
    without.tensor("blk.0.ffn_down_exps.weight").data.fill(0);
    assert!(want != logits(without));
}

#[test]
fn keys_of_a_file() {
    for name in GOLDENS {
        let (folder, checkpoint) = (config(name), convert(name).open().unwrap());
        check(&checkpoint);
        let file = checkpoint.config();
        assert_eq!((&file.rope, &file.local_rope), (&folder.rope, &folder.local_rope));
        assert_eq!((file.window, &file.windowed), (folder.window, &folder.windowed));
        assert_eq!((file.score_scale, file.logit_soft_cap), (1.0, folder.logit_soft_cap));
        let mut gemma4 = folder.gemma4.unwrap();
        gemma4.placeholders = Default::default();
        assert_eq!(file.gemma4, Some(gemma4));
        for layer in 0..folder.n_layers {
            assert_eq!(file.kv_heads(layer), folder.kv_heads(layer));
            assert_eq!(file.d_dense_of(layer), folder.d_dense_of(layer));
        }
        assert_eq!(file.eos, [599]);
    }
    // One number for all layers; the model's own end tokens.
    let uniform = convert(EXPERTS).with("gemma4.feed_forward_length", Meta::U32(32)).open().unwrap();
    assert_eq!(uniform.config().d_dense_of(0), 32);
    let tokens = (0..600).map(|i| match i {
        1 => "<eos>".to_owned(),
        106 => "<turn|>".to_owned(),
        i => format!("t{i}"),
    });
    let file = convert(DENSE).with("tokenizer.ggml.tokens", Meta::Strs(tokens.collect()));
    let file = file.with("tokenizer.ggml.merges", Meta::Strs(vec![]));
    assert_eq!(file.open().unwrap().config().eos, [1, 106]);
}

/// llama.cpp adds the begin token whatever the file says.
#[test]
fn prompts_begin_with_the_begin_token() {
    let scratch = TempFolder::new();
    let path = scratch.write("model.gguf", convert(DENSE).bytes());
    let info = llaisys_core::load::checkpoint::Checkpoint::inspect(&path).unwrap();
    let tokenizer = info.tokenizer.unwrap();
    assert_eq!((tokenizer.model.as_str(), tokenizer.pre.as_str()), ("gemma4", "default"));
    assert!(tokenizer.add_bos && tokenizer.bos == Some(2) && tokenizer.scores.is_none());
    assert_eq!(tokenizer.merges, ["t0 t1"]);
}

#[test]
fn hostile_keys_are_rejected_by_name() {
    let key = |name: &str| format!("gemma4.{name}");
    let format = |name: &str, value: Meta, words: &[&str]| {
        assert_names(&format_error(convert(DENSE).with(&key(name), value).open()), words);
    };
    let short = Meta::Bools(vec![true, false]);
    format("attention.sliding_window_pattern", short, &["sliding_window_pattern is 2", "8"]);
    format("attention.head_count_kv", Meta::I32s(vec![1; 7]), &["head_count_kv is 7", "8"]);
    format("attention.head_count_kv", Meta::U32(0), &["key-value heads is 0"]);
    format("feed_forward_length", Meta::I32s(vec![]), &["feed_forward_length is 0", "8"]);
    format("attention.shared_kv_layers", Meta::U32(8), &["attention.shared_kv_layers is 8"]);
    format("attention.shared_kv_layers", Meta::U32(u32::MAX), &["shared_kv_layers is 4294967295"]);
    format("embedding_length_per_layer_input", Meta::U32(16), &["per_layer_token_embd.weight", "[600, 64]"]);
    format("block_count", Meta::U32(u32::MAX), &["sliding_window_pattern is 8", "4294967295"]);
    let missing = |name: &str, words: &[&str]| {
        assert_names(&format_error(convert(DENSE).without(&key(name)).open()), words);
    };
    for name in [
        "attention.sliding_window_pattern",
        "attention.key_length_swa",
        "attention.head_count_kv",
        "embedding_length_per_layer_input",
        "rope.dimension_count",
    ] {
        missing(name, &[&key(name)]);
    }
    let mut file = convert(EXPERTS);
    file.tensors.retain(|tensor| tensor.name != "blk.1.ffn_gate_up_exps.weight");
    assert_names(&format_error(file.open()), &["1 tensors are missing", "blk.1.ffn_gate_up_exps.weight"]);
    let refused = |name: &str, value: Meta, words: &[&str]| {
        assert_names(&unsupported(convert(DENSE).with(&key(name), value).open()), words);
    };
    let uneven = Meta::I32s(vec![32, 32, 48, 32, 64, 64, 64, 64]);
    refused("feed_forward_length", uneven, &["gemma4.feed_forward_length", "all layers of a kind"]);
    refused(
        "feed_forward_length",
        Meta::I32s(vec![32, 32, 32, 32, 96, 96, 96, 96]),
        &["feed_forward_length"],
    );
    let heads = Meta::I32s(vec![1, 1, 1, 2, 1, 1, 1, 1]);
    refused("attention.head_count_kv", heads, &["gemma4.attention.head_count_kv", "all layers of a kind"]);
    refused(
        "attention.value_length_swa",
        Meta::U32(8),
        &["gemma4.attention.value_length_swa = 8", "one width"],
    );
    refused("rope.dimension_count", Meta::U32(8), &["gemma4.rope.dimension_count = 8", "rotated whole"]);
    refused("attention.scale", Meta::F32(0.5), &["gemma4.attention.scale = 0.5"]);
}
