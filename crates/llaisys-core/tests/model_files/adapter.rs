//! A small LoRA adapter in PEFT's format, and in a GGUF file.

use super::TempFolder;
use super::folder::{Folder, Tensor, safetensors};
use super::gguf::{F32, Gguf, Meta};
use llaisys_core::arch::spec::LayerWeight;
use llaisys_core::error::{Error, Result};
use llaisys_core::load::lora::LoraCheckpoint;
use llaisys_core::threads::Pool;
use serde_json::{Map, Value, json};

const PREFIX: &str = "base_model.model.model.layers.0.";

/// An adapter of rank 2 for the query and down projections of [`Folder::small`].
#[derive(Clone)]
pub struct Adapter {
    pub config: Map<String, Value>,
    pub tensors: Vec<Tensor>,
}

impl Adapter {
    pub fn small() -> Self {
        let config = json!({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 6, "bias": "none",
            "target_modules": ["q_proj", "down_proj"], "use_dora": false, "modules_to_save": null,
            "rank_pattern": {}, "layers_to_transform": null, "init_lora_weights": true, "lora_dropout": 0.1,
        });
        let Value::Object(config) = config else { unreachable!("the literal is an object") };
        let mut adapter = Self { config, tensors: vec![] };
        adapter.module("self_attn.q_proj", 2, [16, 16]);
        adapter.module("mlp.down_proj", 2, [16, 24]);
        adapter
    }

    pub fn module(&mut self, name: &str, rank: usize, [n_out, n_in]: [usize; 2]) {
        self.tensor(&format!("{PREFIX}{name}.lora_A.weight"), &[rank, n_in]);
        self.tensor(&format!("{PREFIX}{name}.lora_B.weight"), &[n_out, rank]);
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) {
        let data = vec![0x3c; shape.iter().product::<usize>() * 2];
        self.tensors.push(Tensor { name: name.into(), dtype: "BF16", shape: shape.to_vec(), data });
    }

    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.config.insert(key.into(), value.into());
        self
    }

    pub fn with_tensor(mut self, name: &str, shape: &[usize]) -> Self {
        self.tensor(name, shape);
        self
    }

    /// Changes the tensor whose name ends like this.
    pub fn changed(mut self, end: &str, change: impl FnOnce(&mut Tensor)) -> Self {
        change(self.tensors.iter_mut().find(|tensor| tensor.name.ends_with(end)).unwrap());
        self
    }

    pub fn without_tensor(mut self, end: &str) -> Self {
        self.tensors.retain(|tensor| !tensor.name.ends_with(end));
        self
    }

    pub fn write(&self, scratch: &TempFolder) {
        scratch.write("adapter_config.json", serde_json::to_vec(&self.config).unwrap());
        scratch.write("adapter_model.safetensors", safetensors(&self.tensors));
    }

    pub fn open_for(&self, model: &Folder) -> Result<LoraCheckpoint> {
        let scratch = TempFolder::new();
        self.write(&scratch);
        LoraCheckpoint::open(scratch.path(), model.open().unwrap().config(), 8)
    }

    pub fn open(&self) -> Result<LoraCheckpoint> {
        self.open_for(&Folder::small("LlamaForCausalLM"))
    }

    pub fn error(&self) -> Error {
        self.open().unwrap_err()
    }
}

/// An adapter of ranks 2 and 4 for the query and down projections of [`Folder::small`], in a GGUF file.
pub fn gguf() -> Gguf {
    let mut file = Gguf::empty();
    for (key, value) in [
        ("general.architecture", Meta::from("llama")),
        ("general.type", "adapter".into()),
        ("adapter.type", "lora".into()),
        ("adapter.lora.alpha", Meta::F32(6.0)),
    ] {
        file.keys.push((key.into(), value));
    }
    file.matrix("blk.0.attn_q.weight.lora_a", 2, 16, F32);
    file.matrix("blk.0.attn_q.weight.lora_b", 16, 2, F32);
    file.matrix("blk.0.ffn_down.weight.lora_a", 4, 24, F32);
    file.matrix("blk.0.ffn_down.weight.lora_b", 16, 4, F32);
    file
}

/// Reads every matrix of an opened adapter. Numbers that are not finite are an error.
pub fn check(adapter: &LoraCheckpoint) {
    let pool = Pool::new(1).expect("one thread starts");
    let (q, k, v, o) = (LayerWeight::Q, LayerWeight::K, LayerWeight::V, LayerWeight::O);
    let parts = [q, k, v, o, LayerWeight::Gate, LayerWeight::Up, LayerWeight::Down];
    let modules: Vec<_> = parts.iter().filter_map(|&part| adapter.module(0, part)).collect();
    assert!(!modules.is_empty(), "an adapter has a module of this model");
    for module in modules {
        assert!((1..=8).contains(&module.rank) && adapter.rank() >= module.rank);
        for matrix in [adapter.a(module, &pool), adapter.b(module, &pool)].into_iter().flatten() {
            assert!(matrix.len() >= module.rank && matrix.iter().all(|value| value.is_finite()));
        }
    }
    adapter.hash().expect("the file is not changed");
}
