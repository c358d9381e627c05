//! Small models of gpt-oss: experts in MXFP4 or in floats, in a folder or a GGUF file.

use super::folder::{Folder, Tensor as FolderTensor};
use super::gguf::{F32, Gguf, Meta, Tensor};
use serde_json::json;

/// The number of MXFP4 in a GGUF file.
pub const MXFP4: u32 = 39;
pub const EXPERTS: &str = "model.layers.0.mlp.experts";

/// A folder of one layer with two experts of 32, of width 32, with 2 heads and 1 key-value head of 8.
pub fn folder(is_mxfp4: bool) -> Folder {
    let mut folder = Folder::small("GptOssForCausalLM")
        .with("hidden_size", 32)
        .with("intermediate_size", 32)
        .with("num_local_experts", 2)
        .with("num_experts_per_tok", 1)
        .with("sliding_window", 8)
        .with("layer_types", json!(["sliding_attention"]));
    folder.tensors.clear();
    for name in ["model.embed_tokens", "lm_head"] {
        folder.tensor(&format!("{name}.weight"), &[12, 32]);
    }
    folder.tensor("model.norm.weight", &[32]);
    let mut put = |name: &str, shape: &[usize]| folder.tensor(&format!("model.layers.0.{name}"), shape);
    for name in ["input_layernorm", "post_attention_layernorm"] {
        put(&format!("{name}.weight"), &[32]);
    }
    for (name, n, k) in [("q", 16, 32), ("k", 8, 32), ("v", 8, 32), ("o", 32, 16)] {
        put(&format!("self_attn.{name}_proj.weight"), &[n, k]);
        put(&format!("self_attn.{name}_proj.bias"), &[n]);
    }
    put("self_attn.sinks", &[2]);
    put("mlp.router.weight", &[2, 32]);
    put("mlp.router.bias", &[2]);
    for (name, n) in [("gate_up", 64), ("down", 32)] {
        put(&format!("mlp.experts.{name}_proj_bias"), &[2, n]);
    }
    if !is_mxfp4 {
        put("mlp.experts.gate_up_proj", &[2, 32, 64]);
        put("mlp.experts.down_proj", &[2, 32, 32]);
        return folder;
    }
    for (name, n) in [("gate_up", 64), ("down", 32)] {
        for (part, shape) in [("blocks", vec![2, n, 1, 16]), ("scales", vec![2, n, 1])] {
            let data = vec![120; shape.iter().product()];
            let name = format!("{EXPERTS}.{name}_proj_{part}");
            folder.tensors.push(FolderTensor { name, dtype: "U8", shape, data });
        }
    }
    folder.with("quantization_config", json!({"quant_method": "mxfp4"}))
}

/// A file with the sizes of [`folder`], as a converter writes them, and the matrices of experts in MXFP4.
pub fn gguf() -> Gguf {
    let mut file = Gguf::small("gpt-oss");
    file.tensors.retain(|tensor| !tensor.name.contains("ffn_"));
    let q = file.tensor("blk.0.attn_q.weight").sizes[1];
    for (name, n) in [("attn_q", q), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32)] {
        file.vector(&format!("blk.0.{name}.bias"), n);
    }
    file.vector("blk.0.attn_sinks.weight", 2);
    file.vector("blk.0.post_attention_norm.weight", 32);
    file.vector("blk.0.ffn_gate_inp.bias", 2);
    file.matrix("blk.0.ffn_gate_inp.weight", 2, 32, F32);
    for name in ["gate", "up", "down"] {
        file.matrix(&format!("blk.0.ffn_{name}_exps.bias"), 2, 32, F32);
        let (name, data) = (format!("blk.0.ffn_{name}_exps.weight"), vec![120; 2 * 32 * 17]);
        file.tensors.push(Tensor { name, sizes: vec![32, 32, 2], type_id: MXFP4, data, offset: None });
    }
    for (key, size) in [("expert_count", 2), ("expert_used_count", 1), ("expert_feed_forward_length", 32)] {
        file = file.with(&format!("gpt-oss.{key}"), Meta::U32(size));
    }
    file.with("gpt-oss.attention.sliding_window", Meta::U32(8))
}
