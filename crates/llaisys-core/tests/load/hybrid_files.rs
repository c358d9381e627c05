//! GGUF files of models with recurrent layers: the names, order and numbers that llama.cpp's converter writes, made from
//! the goldens. A file gives the outputs of its folder.

use crate::common::{Rows, settings};
use crate::model_files::gguf::{Gguf, Meta, Tensor};
use crate::model_files::{TempFolder, assert_names, format_error, golden, unsupported};
use llaisys_core::context::Context;
use llaisys_core::context::ContextConfig;
use llaisys_core::dtype::{ComputeMode, DType};
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::quant::dequantize_row;
use llaisys_core::tensor::RowView;
use safetensors::SafeTensors;
use std::collections::BTreeMap;

/// Two key heads, of which each serves two value heads, all of 16.
const N_KEYS: usize = 2;
const N_VALUES: usize = 4;
const D: usize = 16;
const VOCAB: usize = 600;

pub(super) type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// The tensors of a golden's text model, named as in a plain folder.
pub(super) fn tensors_of(name: &str) -> Tensors {
    let bytes = std::fs::read(golden(name).join("model.safetensors")).unwrap();
    let mut tensors = Tensors::new();
    for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
        let name = name.replace("model.language_model.", "model.");
        if name.starts_with("mtp.") || name.starts_with("model.visual.") {
            continue;
        }
        let dtype = if view.dtype() == safetensors::Dtype::F32 { DType::F32 } else { DType::BF16 };
        let mut values = vec![0.0; view.shape().iter().product()];
        dequantize_row(RowView { dtype, bytes: view.data() }, &mut values);
        tensors.insert(name, (view.shape().to_vec(), values));
    }
    tensors
}

/// The rows of a matrix in another order.
fn reordered(values: &[f32], width: usize, order: &[usize]) -> Vec<f32> {
    order.iter().flat_map(|&row| &values[row * width..(row + 1) * width]).copied().collect()
}

/// Rows of heads of `d` rows each.
fn rows_of(heads: &[usize], d: usize) -> Vec<usize> {
    heads.iter().flat_map(|head| head * d..(head + 1) * d).collect()
}

/// The file of a golden, as a converter writes it.
fn convert(name: &str, architecture: &str) -> Gguf {
    let mut file = Gguf::empty().with("general.architecture", architecture);
    let is_next = architecture == "qwen3next";
    // The first value head of each key head, then the second ones.
    let heads = if is_next { [0, 1, 2, 3] } else { [0, 2, 1, 3] };
    let columns = rows_of(&heads, D);
    let qkv_rows: Vec<usize> =
        (0..2 * N_KEYS * D).chain(columns.iter().map(|row| 2 * N_KEYS * D + row)).collect();
    let tensors = tensors_of(name);
    let mut put = |name: String, shape: &[usize], values: Vec<f32>| {
        file.tensors.push(Tensor::f32(name, shape, &values));
    };
    for (name, (shape, values)) in &tensors {
        let (d, values) = (shape[shape.len() - 1], values.clone());
        let Some(rest) = name.strip_prefix("model.layers.") else {
            match name.as_str() {
                "model.embed_tokens.weight" => put("token_embd.weight".into(), shape, values),
                "lm_head.weight" => put("output.weight".into(), shape, values),
                "model.norm.weight" => {
                    put("output_norm.weight".into(), shape, values.iter().map(|w| w + 1.0).collect());
                }
                other => panic!("an unknown tensor {other}"),
            }
            continue;
        };
        let (layer, part) = rest.split_once('.').unwrap();
        let mut put =
            |name: &str, shape: &[usize], values: Vec<f32>| put(format!("blk.{layer}.{name}"), shape, values);
        let whole = |values: Vec<f32>| values.iter().map(|w| w + 1.0).collect::<Vec<f32>>();
        match part {
            "input_layernorm.weight" => put("attn_norm.weight", shape, whole(values)),
            "post_attention_layernorm.weight" => put("post_attention_norm.weight", shape, whole(values)),
            "self_attn.q_norm.weight" => put("attn_q_norm.weight", shape, whole(values)),
            "self_attn.k_norm.weight" => put("attn_k_norm.weight", shape, whole(values)),
            "self_attn.q_proj.weight" => put("attn_q.weight", shape, values),
            "self_attn.k_proj.weight" => put("attn_k.weight", shape, values),
            "self_attn.v_proj.weight" => put("attn_v.weight", shape, values),
            "self_attn.o_proj.weight" => put("attn_output.weight", shape, values),
            "linear_attn.in_proj_qkv.weight" => {
                put("attn_qkv.weight", shape, reordered(&values, d, &qkv_rows))
            }
            "linear_attn.in_proj_z.weight" => put("attn_gate.weight", shape, reordered(&values, d, &columns)),
            "linear_attn.in_proj_b.weight" => put("ssm_beta.weight", shape, reordered(&values, d, &heads)),
            "linear_attn.in_proj_a.weight" => put("ssm_alpha.weight", shape, reordered(&values, d, &heads)),
            "linear_attn.in_proj_qkvz.weight" => {
                // By key head: queries, keys, two value heads, their gates.
                let of = |first: usize, n: usize| -> Vec<usize> {
                    (0..N_KEYS).flat_map(|key| key * 6 * D + first..key * 6 * D + first + n).collect()
                };
                let qkv = [of(0, D), of(D, D), of(2 * D, 2 * D)].concat();
                put("attn_qkv.weight", &[qkv.len(), d], reordered(&values, d, &qkv));
                put("attn_gate.weight", &[N_VALUES * D, d], reordered(&values, d, &of(4 * D, 2 * D)));
            }
            "linear_attn.in_proj_ba.weight" => put("ssm_ba.weight", shape, values),
            "linear_attn.conv1d.weight" => {
                put("ssm_conv1d.weight", &[shape[0], d], reordered(&values, d, &qkv_rows));
            }
            "linear_attn.A_log" => {
                put("ssm_a", shape, reordered(&values, 1, &heads).iter().map(|a| -a.exp()).collect());
            }
            "linear_attn.dt_bias" => put("ssm_dt.bias", shape, reordered(&values, 1, &heads)),
            "linear_attn.norm.weight" => put("ssm_norm.weight", shape, values),
            "linear_attn.out_proj.weight" => {
                let rows = values.chunks_exact(d).flat_map(|row| reordered(row, 1, &columns)).collect();
                put("ssm_out.weight", shape, rows);
            }
            "mlp.gate.weight" => put("ffn_gate_inp.weight", shape, values),
            "mlp.shared_expert_gate.weight" => put("ffn_gate_inp_shexp.weight", &[d], values),
            "mlp.experts.down_proj" => put("ffn_down_exps.weight", shape, values),
            "mlp.experts.gate_up_proj" => {
                // Each expert's gate rows over its up rows.
                let half = shape[1] / 2;
                let expert = |e: usize, up: usize| (2 * e + up) * half..(2 * e + up + 1) * half;
                for (up, name) in ["gate", "up"].into_iter().enumerate() {
                    let rows: Vec<usize> = (0..shape[0]).flat_map(|e| expert(e, up)).collect();
                    put(
                        &format!("ffn_{name}_exps.weight"),
                        &[shape[0], half, d],
                        reordered(&values, d, &rows),
                    );
                }
            }
            other => match other.split('.').collect::<Vec<_>>()[..] {
                ["mlp", "experts", "0", matrix, _] => {
                    let at = |e: usize| format!("model.layers.{layer}.mlp.experts.{e}.{matrix}.weight");
                    let all: Vec<f32> = (0..6).flat_map(|e| tensors[&at(e)].1.clone()).collect();
                    let name = format!("ffn_{}_exps.weight", matrix.trim_end_matches("_proj"));
                    put(&name, &[6, shape[0], d], all);
                }
                ["mlp", "experts", ..] => {}
                ["mlp", "shared_expert", matrix, _] => {
                    put(&format!("ffn_{}_shexp.weight", matrix.trim_end_matches("_proj")), shape, values);
                }
                ["mlp", matrix, _] => {
                    put(&format!("ffn_{}.weight", matrix.trim_end_matches("_proj")), shape, values);
                }
                _ => panic!("an unknown tensor {other}"),
            },
        }
    }
    with_keys(file, name, architecture)
}

/// Adds the metadata.
fn with_keys(mut file: Gguf, name: &str, architecture: &str) -> Gguf {
    let config = Checkpoint::open(&golden(name)).unwrap().config().clone();
    let interval = config.recurrent.iter().take_while(|&&recurrent| recurrent).count() + 1;
    let mut sizes = vec![
        ("block_count", config.n_layers),
        ("context_length", config.max_positions),
        ("embedding_length", config.d_model),
        ("attention.head_count", config.n_heads),
        ("attention.head_count_kv", config.n_kv_heads),
        ("attention.key_length", config.d_head),
        ("attention.value_length", config.d_head),
        ("rope.dimension_count", config.d_rope),
        ("feed_forward_length", config.d_ff),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", D),
        ("ssm.group_count", N_KEYS),
        ("ssm.time_step_rank", N_VALUES),
        ("ssm.inner_size", N_VALUES * D),
        ("full_attention_interval", interval),
    ];
    if let Some(experts) = config.experts {
        sizes.extend([
            ("expert_count", experts.n),
            ("expert_used_count", experts.n_used),
            ("expert_feed_forward_length", config.d_ff),
            ("expert_shared_feed_forward_length", config.d_shared.unwrap()),
        ]);
    }
    for (key, size) in sizes {
        file = file.with(&format!("{architecture}.{key}"), Meta::U32(size as u32));
    }
    file = file.with(&format!("{architecture}.attention.layer_norm_rms_epsilon"), Meta::F32(config.rms_eps));
    file = file.with(&format!("{architecture}.rope.freq_base"), Meta::F32(config.rope.theta as f32));
    file.with("tokenizer.ggml.model", "gpt2")
        .with("tokenizer.ggml.pre", if architecture == "qwen3next" { "qwen2" } else { "qwen35" })
        .with("tokenizer.ggml.tokens", Meta::Strs((0..VOCAB).map(|i| format!("t{i}")).collect()))
        .with("tokenizer.ggml.token_type", Meta::I32s(vec![1; VOCAB]))
        .with("tokenizer.ggml.merges", Meta::Strs(vec![]))
        .with("tokenizer.ggml.eos_token_id", Meta::U32(599))
}

const FILES: [(&str, &str); 3] =
    [("qwen3_5_bf16", "qwen35"), ("qwen3_5_moe_bf16", "qwen35moe"), ("qwen3_next_bf16", "qwen3next")];

pub(super) fn logits(context: &mut Context) -> Vec<f32> {
    let tokens: Vec<i32> = (0..50).map(|i| (i * 41 + 7) % VOCAB as i32).collect();
    logits_of(context, &tokens)
}

pub(super) fn logits_of(context: &mut Context, tokens: &[i32]) -> Vec<f32> {
    let seq = context.seq_acquire(0).unwrap();
    Rows::default().run(seq, 0, tokens).decode(context).unwrap().logits.unwrap()
}

#[test]
fn a_file_gives_the_outputs_of_its_folder() {
    let config = ContextConfig { mode: ComputeMode::Float32, n_threads: 1, ..settings() };
    for (name, architecture) in FILES {
        let scratch = TempFolder::new();
        let path = scratch.write("model.gguf", convert(name, architecture).bytes());
        let [want, got] = [golden(name), path].map(|path| logits(&mut Context::load(&path, config).unwrap()));
        let largest = want.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        let worst = got.iter().zip(&want).fold(0.0_f32, |m, (got, want)| m.max((got - want).abs()));
        // Where value heads are in another order, sums over them are, too; and norms were rounded with their offset.
        assert!(worst <= 2e-5 * largest, "{architecture}: {worst:e} of {largest:e}");
    }
}

#[test]
fn wrong_keys_are_rejected_by_name() {
    let file = |key: &str, value: u32| {
        convert("qwen3_5_moe_bf16", "qwen35moe").with(&format!("qwen35moe.{key}"), Meta::U32(value)).open()
    };
    for (key, value, words) in [
        ("ssm.time_step_rank", 0, &["ssm.inner_size", "64", "0"][..]),
        ("ssm.inner_size", 65, &["ssm.inner_size is 65", "4"]),
        ("ssm.group_count", 3, &["number of linear value heads", "4", "3"]),
        ("ssm.state_size", 512, &["width of linear key heads is 512"]),
        ("ssm.conv_kernel", 0, &["kernel size of the short convolution is 0"]),
        ("full_attention_interval", 5, &["full_attention_interval is 5"]),
        ("full_attention_interval", 0, &["full_attention_interval is 0"]),
        ("ssm.state_size", 8, &["attn_qkv.weight"]),
        ("expert_shared_feed_forward_length", 0, &["width of the shared expert is 0"]),
    ] {
        assert_names(&format_error(file(key, value)), words);
    }
    assert_names(&unsupported(file("nextn_predict_layers", 1)), &["layers that predict several tokens", "1"]);
    assert_names(&unsupported(file("expert_shared_count", 2)), &["shared experts", "2"]);
    file("expert_shared_count", 1).unwrap();
    file("nextn_predict_layers", 0).unwrap();
}
