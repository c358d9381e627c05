//! gpt-oss: its keys, its experts in MXFP4 and in floats, what is rejected by name, and the files of both goldens, which
//! give the outputs of their folders.

use super::hybrid_files::logits;
use super::hybrids::{config, with};
use crate::common::settings;
use crate::model_files::gguf::{F32, Gguf, Meta, Tensor};
use crate::model_files::gpt_oss::{EXPERTS, MXFP4, folder, gguf};
use crate::model_files::{TempFolder, assert_names, check, format_error, golden, unsupported};
use llaisys_core::arch::config::ModelConfig;
use llaisys_core::arch::rope::RopeScaling;
use llaisys_core::arch::row_map::RowMap;
use llaisys_core::arch::spec::{ExpertPart, LayerWeight};
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::dtype::{ComputeMode, DType};
use llaisys_core::forward::shard::Shard;
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::ops::{ClampedSilu, Gate};
use llaisys_core::quant::dequantize_row;
use llaisys_core::tensor::RowView;
use safetensors::SafeTensors;
use serde_json::{Value, json};

const GOLDENS: [&str; 2] = ["gpt_oss_bf16", "gpt_oss_mxfp4"];

#[test]
fn keys_of_a_folder() {
    let plain = config("gpt_oss_bf16");
    assert_eq!((plain.window, &plain.windowed[..]), (Some(24), &[true, false, true, false][..]));
    assert_eq!(plain.gate, Gate::ClampedSilu(ClampedSilu { limit: 7.0, alpha: 1.702 }));
    let experts = plain.experts.unwrap();
    assert!(experts.projection_biases && experts.normalize && !experts.has_bias && !experts.sigmoid);
    assert!(plain.qkv_bias && plain.o_bias && !plain.mlp_bias);
    for name in GOLDENS {
        let RopeScaling::Yarn { factor, truncate, amplitude, .. } = config(name).rope.scaling else {
            panic!("{name} has YaRN")
        };
        assert_eq!((factor, truncate), (32.0, false));
        assert!((amplitude - (0.1 * 32_f64.ln() + 1.0)).abs() < 1e-12);
    }
    // What transformers defines where a key is absent; and another bound and factor.
    let absent: Vec<(&str, Value)> = ["swiglu_limit", "swiglu_alpha", "layer_types", "attention_bias"]
        .map(|key| (key, Value::Null))
        .into();
    let absent = with("gpt_oss_bf16", &absent).unwrap();
    assert_eq!((absent.config().gate, &absent.config().windowed), (plain.gate, &plain.windowed));
    let stated = [("swiglu_limit", json!(2)), ("swiglu_alpha", json!(1.5))];
    let stated = with("gpt_oss_bf16", &stated).unwrap();
    assert_eq!(stated.config().gate, Gate::ClampedSilu(ClampedSilu { limit: 2.0, alpha: 1.5 }));
    let wrong = |key: &str, value: Value| with("gpt_oss_bf16", &[(key, value)]);
    assert_names(&format_error(wrong("swiglu_limit", json!(0))), &["bound of gates is 0"]);
    assert_names(&format_error(wrong("swiglu_alpha", json!("1"))), &["swiglu_alpha", "not a number"]);
}

#[test]
fn rows_of_gate_and_up_alternate_in_a_folder() {
    let plain = config("gpt_oss_bf16");
    let at = |expert, part| plain.stored_in(LayerWeight::Expert(expert, part));
    let stored = LayerWeight::ExpertsGateUp;
    assert_eq!(at(0, ExpertPart::Gate), (stored, RowMap::groups(0, 1, 2)));
    assert_eq!(at(3, ExpertPart::Up), (stored, RowMap::groups(3 * 64 + 1, 1, 2)));
    let bias = |part| plain.stored_expert_bias(part);
    assert_eq!(bias(ExpertPart::Up), (LayerWeight::ExpertsGateUpBias, RowMap::groups(1, 1, 2)));
    let down = LayerWeight::ExpertsBias(ExpertPart::Down);
    assert_eq!(bias(ExpertPart::Down), (down, RowMap::from_row(0)));
}

#[test]
fn small_models_open_and_report_their_type() {
    for (is_mxfp4, dtype) in [(false, DType::BF16), (true, DType::MXFP4)] {
        let checkpoint = folder(is_mxfp4).open().unwrap();
        check(&checkpoint);
        let id = checkpoint.weight_id(&format!("{EXPERTS}.down_proj")).unwrap();
        assert_eq!((checkpoint.dtype(id), checkpoint.is_read_whole(id)), (dtype, !is_mxfp4));
    }
    check(&gguf().open().unwrap());
    let file = gguf();
    let window = file.open().unwrap().config().window;
    assert_eq!(window, Some(8));
}

#[test]
fn wrong_tensors_are_rejected_by_name() {
    let blocks = format!("{EXPERTS}.gate_up_proj_blocks");
    let scales = format!("{EXPERTS}.gate_up_proj_scales");
    let changed = |name: &str, change: &dyn Fn(&mut crate::model_files::folder::Tensor)| {
        let mut folder = folder(true);
        change(folder.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap());
        folder.open()
    };
    let missing = |name: &str| format_error(folder(true).without_tensor(name).open());
    assert_names(&missing(&scales), &["1 tensors are missing", &scales]);
    assert_names(&missing(&blocks), &["gate_up_proj"]);
    assert_names(&missing("model.layers.0.self_attn.sinks"), &["self_attn.sinks"]);
    assert_names(&missing(&format!("{EXPERTS}.down_proj_bias")), &["down_proj_bias"]);
    let shape = |shape: &'static [usize]| {
        move |tensor: &mut crate::model_files::folder::Tensor| tensor.shape = shape.to_vec()
    };
    let error = format_error(changed(&blocks, &shape(&[2, 64, 16, 1])));
    assert_names(&error, &[&blocks, "[2, 64, 16, 1]", "[2, 64, 1, 16]"]);
    assert_names(&format_error(changed(&scales, &shape(&[2, 64]))), &[&scales, "[2, 64]"]);
    let sinks = "model.layers.0.self_attn.sinks";
    let error = format_error(changed(sinks, &|tensor| (tensor.shape, tensor.data) = (vec![3], vec![0; 6])));
    assert_names(&error, &[sinks, "[3]", "[2]"]);
    let other = unsupported(changed(&scales, &|tensor| tensor.dtype = "I8"));
    assert_names(&other, &[&scales, "I8", "U8"]);
    // Not transposed: the folder of another family.
    let turned = format!("{EXPERTS}.gate_up_proj");
    let mut plain = folder(false);
    plain.tensors.iter_mut().find(|tensor| tensor.name == turned).unwrap().shape = vec![2, 64, 32];
    assert_names(&format_error(plain.open()), &[&turned, "[2, 64, 32]", "[2, 32, 64]"]);
    // Bytes as a weight by itself.
    let mut bytes = folder(false);
    let tensor = bytes.tensors.iter_mut().find(|tensor| tensor.name == turned).unwrap();
    (tensor.dtype, tensor.data) = ("U8", vec![0; 2 * 64 * 32]);
    assert_names(&unsupported(bytes.open()), &[&turned, "U8"]);
    let narrow = folder(true).with("hidden_size", 48);
    assert_names(&unsupported(narrow.open()), &["gate_up_proj", "[2, 64, 48]", "multiples of 32 columns"]);
}

#[test]
fn a_nan_among_the_exponents_is_an_error_that_names_the_tensor() {
    let mut damaged = folder(true);
    let name = format!("{EXPERTS}.down_proj_scales");
    let scales = damaged.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
    scales.data[33] = 255;
    let scratch = TempFolder::new();
    damaged.write(&scratch);
    let config = ContextConfig { max_model_len: 64, ..settings() };
    let error = Context::load(scratch.path(), config).unwrap_err();
    assert_names(&error, &[&name, "NaN", "row 33"]);
}

#[test]
fn what_is_not_supported_is_rejected_by_name() {
    let whole = ModelConfig { n_heads: 4, n_kv_heads: 2, ..config("gpt_oss_bf16") };
    let error = Shard { rank: 0, world: 2 }.config(&whole).unwrap_err();
    assert_names(&error, &["tensor parallelism", "GptOssForCausalLM", "without attention sinks"]);
    let int4 = ContextConfig { mode: ComputeMode::Int4, ..settings() };
    let error = unsupported(Context::load(&golden("gpt_oss_mxfp4"), int4));
    assert_names(&error, &["mlp.experts.", "MXFP4"]);
    let mut context = Context::load(&golden("gpt_oss_bf16"), settings()).unwrap();
    let name = "model.layers.0.self_attn.sinks";
    let error = unsupported(context.replace_weight(name, &[4], &[0.0; 4]));
    assert_names(&error, &[name, "attention sinks"]);
    let gating = gguf().with("gpt-oss.expert_gating_func", Meta::U32(2));
    assert_names(&unsupported(gating.open()), &["expert_gating_func", "2", "3 (softmax of the chosen"]);
    gguf().with("gpt-oss.expert_gating_func", Meta::U32(3)).open().unwrap();
    let dense = Gguf::small("gpt-oss");
    assert_names(&unsupported(dense.open()), &["a mixture of experts", "gpt-oss.expert_count = 0"]);
}

/// `<|end|>`, which ends a message only, is an end token in the keys of some files.
#[test]
fn a_file_ends_completions_at_return_and_call() {
    let mut file = gguf();
    assert_eq!(file.open().unwrap().config().eos, [6]);
    let tokens = ["a", "<|call|>", "c", "<|end|>", "bc", "<|return|>", "</s>", "<u>"].map(String::from);
    file = file.with("tokenizer.ggml.tokens", Meta::Strs(tokens.into()));
    file = file.with("tokenizer.ggml.merges", Meta::Strs(vec![]));
    file = file.with("tokenizer.ggml.eot_token_id", Meta::U32(3));
    assert_eq!(file.open().unwrap().config().eos, [5, 1]);
}

/// A stack of matrices of a golden: values, or blocks of GGUF's layout.
struct Stack {
    n_rows: usize,
    n_columns: usize,
    type_id: u32,
    /// By row of all matrices.
    rows: Vec<Vec<u8>>,
}

impl Stack {
    /// Rows `first`, `first + step`, ... of each matrix.
    fn tensor(&self, name: String, first: usize, step: usize) -> Tensor {
        let matrices = self.rows.chunks_exact(self.n_rows);
        let n_matrices = matrices.len();
        let data = matrices.flat_map(|rows| rows.iter().skip(first).step_by(step).flatten().copied());
        let sizes = [self.n_columns, self.n_rows / step, n_matrices].map(|n| n as u64).to_vec();
        Tensor { name, sizes, type_id: self.type_id, data: data.collect(), offset: None }
    }
}

/// The values of a golden's tensor, and its shape.
fn values(file: &SafeTensors<'_>, name: &str) -> (Vec<usize>, Vec<f32>) {
    let view = file.tensor(name).unwrap();
    let mut values = vec![0.0; view.shape().iter().product()];
    dequantize_row(RowView { dtype: DType::BF16, bytes: view.data() }, &mut values);
    (view.shape().to_vec(), values)
}

fn stack(file: &SafeTensors<'_>, name: &str) -> Stack {
    let Ok(blocks) = file.tensor(&format!("{name}_blocks")) else {
        // Floats are transposed.
        let (shape, values) = values(file, name);
        let &[_, n_columns, n_rows] = &shape[..] else { panic!("{name} is no stack") };
        let row = |n: usize| {
            let matrix = &values[n / n_rows * n_rows * n_columns..];
            (0..n_columns).flat_map(|k| matrix[k * n_rows + n % n_rows].to_le_bytes()).collect()
        };
        let rows = (0..shape[0] * n_rows).map(row).collect();
        return Stack { n_rows, n_columns, type_id: F32, rows };
    };
    let scales = file.tensor(&format!("{name}_scales")).unwrap();
    let &[_, n_rows, n_blocks] = scales.shape() else { panic!("{name} is no stack") };
    let block = |(scale, numbers): (&u8, &[u8])| {
        let nibble = |i: usize| numbers[i / 2] >> (4 * (i % 2)) & 15;
        let numbers = (0..16).map(|j| nibble(j) | nibble(j + 16) << 4);
        std::iter::once(*scale).chain(numbers).collect::<Vec<u8>>()
    };
    let blocks: Vec<Vec<u8>> = scales.data().iter().zip(blocks.data().chunks_exact(16)).map(block).collect();
    let rows = blocks.chunks_exact(n_blocks).map(<[Vec<u8>]>::concat).collect();
    Stack { n_rows, n_columns: 32 * n_blocks, type_id: MXFP4, rows }
}

/// The file of a golden, as a converter writes it.
fn convert(name: &str) -> Gguf {
    let bytes = std::fs::read(golden(name).join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut file = Gguf::empty().with("general.architecture", "gpt-oss");
    let config = Checkpoint::open(&golden(name)).unwrap().config().clone();
    for layer in 0..config.n_layers {
        let of = |part: &str| format!("model.layers.{layer}.mlp.experts.{part}");
        let to = |part: &str| format!("blk.{layer}.ffn_{part}");
        let gate_up = stack(&tensors, &of("gate_up_proj"));
        let down = stack(&tensors, &of("down_proj"));
        file.tensors.push(gate_up.tensor(to("gate_exps.weight"), 0, 2));
        file.tensors.push(gate_up.tensor(to("up_exps.weight"), 1, 2));
        file.tensors.push(down.tensor(to("down_exps.weight"), 0, 1));
        let (shape, bias) = values(&tensors, &of("gate_up_proj_bias"));
        for (first, part) in ["gate", "up"].into_iter().enumerate() {
            let own: Vec<f32> = bias.iter().skip(first).step_by(2).copied().collect();
            let name = to(&format!("{part}_exps.bias"));
            file.tensors.push(Tensor::f32(name, &[shape[0], shape[1] / 2], &own));
        }
    }
    let names = [
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.sinks", "attn_sinks.weight"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "post_attention_norm"),
        ("mlp.router", "ffn_gate_inp"),
        ("mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
    ];
    for name in tensors
        .names()
        .into_iter()
        .filter(|name| !name.contains("experts") || name.ends_with("down_proj_bias"))
    {
        let (shape, values) = values(&tensors, name);
        let to = names.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to));
        file.tensors.push(Tensor::f32(to, &shape, &values));
    }
    with_keys(file, &config)
}

/// Adds the metadata.
fn with_keys(mut file: Gguf, config: &ModelConfig) -> Gguf {
    let experts = config.experts.unwrap();
    let sizes = [
        ("block_count", config.n_layers),
        ("context_length", config.max_positions),
        ("embedding_length", config.d_model),
        ("attention.head_count", config.n_heads),
        ("attention.head_count_kv", config.n_kv_heads),
        ("attention.key_length", config.d_head),
        ("attention.value_length", config.d_head),
        ("attention.sliding_window", config.window.unwrap()),
        ("feed_forward_length", config.d_ff),
        ("expert_feed_forward_length", config.d_ff),
        ("expert_count", experts.n),
        ("expert_used_count", experts.n_used),
        ("rope.scaling.original_context_length", 64),
    ];
    for (key, size) in sizes {
        file = file.with(&format!("gpt-oss.{key}"), Meta::U32(size as u32));
    }
    let tokens = (0..config.vocab_size).map(|i| format!("t{i}")).collect();
    file.with("gpt-oss.attention.layer_norm_rms_epsilon", Meta::F32(config.rms_eps))
        .with("gpt-oss.rope.freq_base", Meta::F32(config.rope.theta as f32))
        .with("gpt-oss.rope.scaling.type", "yarn")
        .with("gpt-oss.rope.scaling.factor", Meta::F32(32.0))
        .with("tokenizer.ggml.model", "gpt2")
        .with("tokenizer.ggml.pre", "gpt-4o")
        .with("tokenizer.ggml.tokens", Meta::Strs(tokens))
        .with("tokenizer.ggml.token_type", Meta::I32s(vec![1; config.vocab_size]))
        .with("tokenizer.ggml.merges", Meta::Strs(vec![]))
        .with("tokenizer.ggml.eos_token_id", Meta::U32(599))
}

/// The file has plain matrices in float32, so modes that keep the stored types differ.
#[test]
fn a_file_gives_the_outputs_of_its_folder() {
    for (name, modes) in [
        ("gpt_oss_bf16", &[ComputeMode::Float32][..]),
        ("gpt_oss_mxfp4", &[ComputeMode::Float32, ComputeMode::Bfloat16]),
    ] {
        let scratch = TempFolder::new();
        let path = scratch.write("model.gguf", convert(name).bytes());
        for &mode in modes {
            let config = ContextConfig { mode, n_threads: 1, ..settings() };
            let [want, got] =
                [golden(name), path.clone()].map(|path| logits(&mut Context::load(&path, config).unwrap()));
            assert!(want == got, "{name} in {mode:?}");
        }
    }
}
