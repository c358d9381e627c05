//! Small random models that are written as Hugging Face folders, and helpers to decode with them.
#![allow(dead_code, reason = "each test binary uses its own part of this file")]
use half::bf16;
use llaisys_core::batch::{BatchArrays, output};
use llaisys_core::context::{Context, ContextConfig, DecodeRequest, DecodeResult};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::error::Result;
use llaisys_core::seq::SeqId;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// A model to write: sizes, architecture and tensors by name.
pub(crate) struct Tiny {
    pub(crate) architecture: &'static str,
    pub(crate) n_layers: usize,
    pub(crate) d_model: usize,
    pub(crate) n_heads: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) d_head: usize,
    pub(crate) d_ff: usize,
    pub(crate) vocab_size: usize,
    pub(crate) tied_head: bool,
    pub(crate) max_positions: usize,
    /// More keys of `config.json`, each after a comma.
    pub(crate) more_keys: String,
    pub(crate) tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

pub(crate) const ROPE_THETA: f64 = 1e4;
pub(crate) const RMS_EPS: f64 = 1e-5;

impl Tiny {
    pub(crate) fn qkv_bias(&self) -> bool {
        self.architecture == "Qwen2ForCausalLM"
    }

    pub(crate) fn qk_norm(&self) -> bool {
        self.architecture == "Qwen3ForCausalLM"
    }

    /// Heads are normalized after the rotary embedding.
    pub(crate) fn norms_rotated(&self) -> bool {
        self.architecture == "HunYuanDenseV1ForCausalLM"
    }

    /// A model with odd sizes: the last panels are partly filled, and the inner width is not a multiple of 16.
    pub(crate) fn odd(architecture: &'static str, tied_head: bool) -> Self {
        Self::sized(architecture, tied_head, |_| ())
    }

    /// As [`Tiny::odd`] with the sizes that `change` sets.
    pub(crate) fn sized(architecture: &'static str, tied_head: bool, change: impl FnOnce(&mut Self)) -> Self {
        let mut model = Self {
            architecture,
            n_layers: 2,
            d_model: 40,
            n_heads: 3,
            n_kv_heads: 1,
            d_head: 16,
            d_ff: 56,
            vocab_size: 71,
            tied_head,
            max_positions: 512,
            more_keys: String::new(),
            tensors: BTreeMap::new(),
        };
        change(&mut model);
        model.fill();
        model
    }

    /// A model with a head width that the GPU kernels support and odd sizes otherwise. Matrices and biases are exact in
    /// bf16, so that only activations differ from the CPU.
    pub(crate) fn for_gpu(architecture: &'static str, tied_head: bool) -> Self {
        let model = Self::sized(architecture, tied_head, |model| {
            (model.d_model, model.d_ff, model.vocab_size) = (72, 104, 75);
            (model.n_heads, model.n_kv_heads, model.d_head) = (6, 2, 64);
        });
        model.in_bf16()
    }

    /// Rounds its numbers to bf16.
    pub(crate) fn in_bf16(mut self) -> Self {
        for (_, values) in self.tensors.values_mut() {
            values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
        }
        self
    }

    /// Adds a bias to every projection, as in Llama.
    pub(crate) fn with_biases(mut self) -> Self {
        let (d, q, kv, d_ff) =
            (self.d_model, self.n_heads * self.d_head, self.n_kv_heads * self.d_head, self.d_ff);
        let attention = [("q", q), ("k", kv), ("v", kv), ("o", d)].map(|(name, n)| ("self_attn", name, n));
        let mlp = [("gate", d_ff), ("up", d_ff), ("down", d)].map(|(name, n)| ("mlp", name, n));
        let mut random = Random(0xb1a5);
        for layer in 0..self.n_layers {
            for (part, name, n) in attention.into_iter().chain(mlp) {
                let values = (0..n).map(|_| 0.5 * random.unit()).collect();
                let name = format!("model.layers.{layer}.{part}.{name}_proj.bias");
                self.tensors.insert(name, (vec![n], values));
            }
        }
        self.more_keys += r#", "attention_bias": true, "mlp_bias": true"#;
        self
    }

    /// Stores projections of the same input in one tensor, as in Phi-3.
    pub(crate) fn joined(mut self) -> Self {
        let joined = [("self_attn", "qkv", &["q", "k", "v"][..]), ("mlp", "gate_up", &["gate", "up"])];
        for layer in 0..self.n_layers {
            for (part, name, of) in joined {
                let at = |name: &str| format!("model.layers.{layer}.{part}.{name}_proj.weight");
                let parts: Vec<_> = of.iter().map(|name| self.tensors.remove(&at(name)).unwrap()).collect();
                let n_rows = parts.iter().map(|(shape, _)| shape[0]).sum();
                let values = parts.into_iter().flat_map(|(_, values)| values).collect();
                self.tensors.insert(at(name), (vec![n_rows, self.d_model], values));
            }
        }
        self
    }

    /// Fills the tensors with random numbers. The scales keep activations near one, so that tokens differ and sums stay
    /// small.
    fn fill(&mut self) {
        let mut random = Random(0x5eed ^ self.d_model as u64);
        let (d, q, kv) = (self.d_model, self.n_heads * self.d_head, self.n_kv_heads * self.d_head);
        let norms_rotated = self.norms_rotated();
        let mut put = |name: String, shape: Vec<usize>, center: f32, scale: f32| {
            let n = shape.iter().product();
            let values = (0..n).map(|_| center + scale * random.unit()).collect();
            self.tensors.insert(name, (shape, values));
        };
        put("model.embed_tokens.weight".into(), vec![self.vocab_size, d], 0.0, 1.0);
        put("model.norm.weight".into(), vec![d], 1.0, 0.5);
        if !self.tied_head {
            put("lm_head.weight".into(), vec![self.vocab_size, d], 0.0, 0.6);
        }
        for layer in 0..self.n_layers {
            let at = |name: &str| format!("model.layers.{layer}.{name}.weight");
            put(at("input_layernorm"), vec![d], 1.0, 0.5);
            put(at("post_attention_layernorm"), vec![d], 1.0, 0.5);
            put(at("self_attn.q_proj"), vec![q, d], 0.0, 0.5);
            put(at("self_attn.k_proj"), vec![kv, d], 0.0, 0.5);
            put(at("self_attn.v_proj"), vec![kv, d], 0.0, 0.5);
            put(at("self_attn.o_proj"), vec![d, q], 0.0, 0.3);
            put(at("mlp.gate_proj"), vec![self.d_ff, d], 0.0, 0.4);
            put(at("mlp.up_proj"), vec![self.d_ff, d], 0.0, 0.4);
            put(at("mlp.down_proj"), vec![d, self.d_ff], 0.0, 0.3);
            if self.architecture == "Qwen2ForCausalLM" {
                for (name, n) in [("q", q), ("k", kv), ("v", kv)] {
                    put(format!("model.layers.{layer}.self_attn.{name}_proj.bias"), vec![n], 0.0, 0.5);
                }
            }
            if self.architecture == "Qwen3ForCausalLM" {
                put(at("self_attn.q_norm"), vec![self.d_head], 1.0, 0.5);
                put(at("self_attn.k_norm"), vec![self.d_head], 1.0, 0.5);
            }
            if norms_rotated {
                put(at("self_attn.query_layernorm"), vec![self.d_head], 1.0, 0.5);
                put(at("self_attn.key_layernorm"), vec![self.d_head], 1.0, 0.5);
            }
        }
    }

    /// Writes `config.json` and `model.safetensors` (f32) into a new folder.
    pub(crate) fn write(&self) -> PathBuf {
        self.write_as(Dtype::F32)
    }

    /// As [`Tiny::write`], in f32 or bf16.
    pub(crate) fn write_as(&self, dtype: Dtype) -> PathBuf {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("tiny-{}-{number}", std::process::id());
        // A binary may run on another machine than the one that built it.
        let built = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let folder = if built.is_dir() { built } else { std::env::temp_dir() }.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("config.json"), self.config_json()).unwrap();
        let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = self
            .tensors
            .iter()
            .map(|(name, (shape, values))| {
                let bytes = match dtype {
                    Dtype::BF16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
                    _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                };
                (name.clone(), shape.clone(), bytes)
            })
            .collect();
        let views = bytes
            .iter()
            .map(|(name, shape, data)| (name.as_str(), TensorView::new(dtype, shape.clone(), data).unwrap()));
        safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
        folder
    }

    fn config_json(&self) -> String {
        let model_type = self.architecture.trim_end_matches("ForCausalLM").to_lowercase();
        format!(
            r#"{{"architectures": ["{}"], "model_type": "{model_type}", "hidden_size": {}, "num_hidden_layers": {},
            "num_attention_heads": {}, "num_key_value_heads": {}, "head_dim": {}, "intermediate_size": {},
            "vocab_size": {}, "tie_word_embeddings": {}, "max_position_embeddings": {}, "rope_theta": {ROPE_THETA},
            "rms_norm_eps": {RMS_EPS}, "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": 1{}}}"#,
            self.architecture,
            self.d_model,
            self.n_layers,
            self.n_heads,
            self.n_kv_heads,
            self.d_head,
            self.d_ff,
            self.vocab_size,
            self.tied_head,
            self.max_positions,
            self.more_keys,
        )
    }

    /// A Mixtral with `n` experts, two of them per token. The experts are the feed-forward blocks of the layers of a
    /// Llama.
    pub(crate) fn experts(n: usize) -> Self {
        Self::experts_sized(n, |_| ())
    }

    /// As [`Tiny::experts`] with the sizes that `change` sets.
    pub(crate) fn experts_sized(n: usize, change: impl FnOnce(&mut Self)) -> Self {
        let mut model = Self::sized("MixtralForCausalLM", true, |model| {
            change(model);
            model.n_layers = n;
        });
        let take = |model: &mut Self, name: String| model.tensors.remove(&name).unwrap();
        let taken: Vec<_> = (0..n)
            .map(|e| {
                ["gate", "down", "up"]
                    .map(|part| take(&mut model, format!("model.layers.{e}.mlp.{part}_proj.weight")))
            })
            .collect();
        model.n_layers = 2;
        model.tensors.retain(|name, _| !(2..n).any(|i| name.starts_with(&format!("model.layers.{i}."))));
        let mut random = Random(3);
        for layer in 0..model.n_layers {
            let moe = format!("model.layers.{layer}.block_sparse_moe");
            let router = (0..n * model.d_model).map(|_| random.unit()).collect();
            model.tensors.insert(format!("{moe}.gate.weight"), (vec![n, model.d_model], router));
            for (e, matrices) in taken.iter().enumerate() {
                for (i, matrix) in matrices.iter().enumerate() {
                    let name = format!("{moe}.experts.{e}.w{}.weight", i + 1);
                    model.tensors.insert(name, matrix.clone());
                }
            }
        }
        model.more_keys = format!(r#", "num_local_experts": {n}, "num_experts_per_tok": 2"#);
        model
    }

    /// Deterministic token ids.
    pub(crate) fn tokens(&self, seed: u64, n: usize) -> Vec<i32> {
        let mut random = Random(seed.wrapping_add(99));
        (0..n).map(|_| (random.next_u64() % self.vocab_size as u64) as i32).collect()
    }
}

/// Settings for small tests.
pub(crate) fn settings() -> ContextConfig {
    ContextConfig {
        mode: ComputeMode::Float32,
        kv_dtype: None,
        isa: None,
        n_cells: 256,
        n_seq_max: 8,
        n_streams: 1,
        n_states_kept: 4,
        lifo: false,
        nan_fill: false,
        n_batch: 16,
        max_model_len: 128,
        n_threads: 2,
        n_ranks: 1,
        pins: true,
        prune_argmax: true,
        max_loras: 0,
        max_lora_rank: 16,
    }
}

/// A context and the folder of its model, which is removed when dropped.
pub(crate) struct Loaded {
    pub(crate) context: Context,
    folder: PathBuf,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

pub(crate) fn load(model: &Tiny, config: ContextConfig) -> Loaded {
    let folder = model.write();
    let context = Context::load(&folder, config).unwrap();
    Loaded { context, folder }
}

/// Rows of one decode, built up row by row.
#[derive(Debug, Default, Clone)]
pub(crate) struct Rows {
    pub(crate) tokens: Vec<i32>,
    pub(crate) positions: Vec<i32>,
    pub(crate) n_seq_id: Vec<i32>,
    pub(crate) seq_ids: Vec<i64>,
    pub(crate) wants_output: Vec<u8>,
}

impl Rows {
    pub(crate) fn row(mut self, token: i32, position: i32, seqs: &[SeqId], wants: u8) -> Self {
        self.tokens.push(token);
        self.positions.push(position);
        self.n_seq_id.push(seqs.len() as i32);
        self.seq_ids.extend(seqs.iter().map(|seq| seq.to_raw()));
        self.wants_output.push(wants);
        self
    }

    /// Adds `tokens` of one sequence from position `start`, all with logits and hidden states.
    pub(crate) fn run(mut self, seq: SeqId, start: usize, tokens: &[i32]) -> Self {
        for (i, &token) in tokens.iter().enumerate() {
            self = self.row(token, (start + i) as i32, &[seq], output::LOGITS | output::HIDDEN);
        }
        self
    }

    pub(crate) fn arrays(&self) -> BatchArrays<'_> {
        BatchArrays {
            tokens: &self.tokens,
            positions: &self.positions,
            n_seq_id: &self.n_seq_id,
            seq_ids: &self.seq_ids,
            stream: &[],
            wants_output: &self.wants_output,
        }
    }

    pub(crate) fn decode(&self, context: &mut Context) -> Result<DecodeResult> {
        let result =
            context.decode(&DecodeRequest { arrays: self.arrays(), masks: None, return_logits: true });
        context.check_integrity();
        result
    }
}

/// Decodes one sequence in chunks. Returns logits and hidden states of every token.
pub(crate) fn feed(context: &mut Context, seq: SeqId, tokens: &[i32], chunk: usize) -> Outputs {
    let mut outputs = Outputs::default();
    for (i, part) in tokens.chunks(chunk).enumerate() {
        outputs.push(&Rows::default().run(seq, i * chunk, part).decode(context).unwrap());
    }
    outputs
}

/// The bits of the rows' outputs, for exact comparisons.
#[derive(Debug, Default, PartialEq, Eq, Clone)]
pub(crate) struct Outputs {
    pub(crate) logits: Vec<u32>,
    pub(crate) hidden: Vec<u32>,
}

impl Outputs {
    pub(crate) fn push(&mut self, result: &DecodeResult) {
        self.logits.extend(result.logits.iter().flatten().map(|v| v.to_bits()));
        self.hidden.extend(result.hidden.iter().flatten().map(|v| v.to_bits()));
    }
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In -1..1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
