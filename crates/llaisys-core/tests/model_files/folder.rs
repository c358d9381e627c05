//! A writer of small Hugging Face folders.

use super::TempFolder;
use llaisys_core::error::Result;
use llaisys_core::load::checkpoint::Checkpoint;
use serde_json::{Map, Value, json};

/// A tensor of a safetensors file; `dtype` as in the header.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// The matrix that is quantized in folders of [`Folder::without_down`].
pub const DOWN: &str = "model.layers.0.mlp.down_proj";

#[derive(Clone)]
pub struct Folder {
    pub config: Map<String, Value>,
    pub generation: Option<Value>,
    pub tensors: Vec<Tensor>,
}

impl Folder {
    /// A small Llama that lacks the weight of [`DOWN`], which has `n_inputs`.
    pub fn without_down(n_inputs: usize, quantization: Value) -> Self {
        let mut folder = Self::small("LlamaForCausalLM")
            .with("intermediate_size", n_inputs)
            .with("quantization_config", quantization)
            .without_tensor(&format!("{DOWN}.weight"));
        for part in ["gate", "up"] {
            let name = format!("model.layers.0.mlp.{part}_proj.weight");
            folder = folder.without_tensor(&name);
            folder.tensor(&name, &[n_inputs, 16]);
        }
        folder
    }

    /// A model of one layer: 2 heads and 1 key-value head of 8, width 16, 12 tokens, untied.
    pub fn small(architecture: &str) -> Self {
        let config = json!({
            "architectures": [architecture],
            "hidden_act": "silu",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "intermediate_size": 24,
            "vocab_size": 12,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": false,
            "bos_token_id": 1,
            "eos_token_id": 2,
        });
        let Value::Object(config) = config else { unreachable!("the literal is an object") };
        let mut folder = Self { config, generation: None, tensors: vec![] };
        folder.add_tensors(architecture);
        folder
    }

    fn add_tensors(&mut self, architecture: &str) {
        self.tensor("model.embed_tokens.weight", &[12, 16]);
        self.tensor("lm_head.weight", &[12, 16]);
        self.tensor("model.norm.weight", &[16]);
        let mut put = |name: &str, shape: &[usize]| self.tensor(&format!("model.layers.0.{name}"), shape);
        put("input_layernorm.weight", &[16]);
        put("post_attention_layernorm.weight", &[16]);
        put("self_attn.q_proj.weight", &[16, 16]);
        put("self_attn.k_proj.weight", &[8, 16]);
        put("self_attn.v_proj.weight", &[8, 16]);
        put("self_attn.o_proj.weight", &[16, 16]);
        put("mlp.gate_proj.weight", &[24, 16]);
        put("mlp.up_proj.weight", &[24, 16]);
        put("mlp.down_proj.weight", &[16, 24]);
        if architecture == "Qwen2ForCausalLM" {
            put("self_attn.q_proj.bias", &[16]);
            put("self_attn.k_proj.bias", &[8]);
            put("self_attn.v_proj.bias", &[8]);
        }
        if architecture == "Qwen3ForCausalLM" {
            put("self_attn.q_norm.weight", &[8]);
            put("self_attn.k_norm.weight", &[8]);
        }
    }

    /// Adds a BF16 tensor of zeros.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) {
        let data = vec![0; shape.iter().product::<usize>() * 2];
        self.tensors.push(Tensor { name: name.into(), dtype: "BF16", shape: shape.to_vec(), data });
    }

    /// Sets a key of `config.json`.
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.config.insert(key.into(), value.into());
        self
    }

    pub fn without(mut self, key: &str) -> Self {
        self.config.remove(key);
        self
    }

    pub fn without_tensor(mut self, name: &str) -> Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// Writes everything into `scratch`, the tensors into one file.
    pub fn write(&self, scratch: &TempFolder) {
        self.write_configs(scratch);
        scratch.write("model.safetensors", safetensors(&self.tensors));
    }

    pub fn write_configs(&self, scratch: &TempFolder) {
        scratch.write("config.json", serde_json::to_vec(&self.config).unwrap());
        if let Some(generation) = &self.generation {
            scratch.write("generation_config.json", generation.to_string());
        }
    }

    /// Writes the tensors as `n_shards` files with an index. Returns the index.
    pub fn write_sharded(&self, scratch: &TempFolder, n_shards: usize) -> Map<String, Value> {
        self.write_configs(scratch);
        let mut weight_map = Map::new();
        let n_each = self.tensors.len().div_ceil(n_shards);
        for (i, tensors) in self.tensors.chunks(n_each).enumerate() {
            let name = shard_name(i);
            scratch.write(&name, safetensors(tensors));
            weight_map.extend(tensors.iter().map(|tensor| (tensor.name.clone(), name.clone().into())));
        }
        write_index(scratch, &weight_map);
        weight_map
    }

    pub fn open(&self) -> Result<Checkpoint> {
        let scratch = TempFolder::new();
        self.write(&scratch);
        Checkpoint::open(scratch.path())
    }
}

pub fn shard_name(i: usize) -> String {
    format!("model-{i:05}.safetensors")
}

pub fn write_index(scratch: &TempFolder, weight_map: &Map<String, Value>) {
    let index = json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
    scratch.write("model.safetensors.index.json", index.to_string());
}

/// The bytes of a safetensors file.
pub fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = Map::new();
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.data.len();
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]});
        header.insert(tensor.name.clone(), entry);
        start = end;
    }
    let data: Vec<u8> = tensors.iter().flat_map(|tensor| tensor.data.iter().copied()).collect();
    with_header(&Value::Object(header).to_string(), &data)
}

/// A safetensors file with any header.
pub fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}
