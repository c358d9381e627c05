//! A small model of Gemma 4 in a GGUF file.

use super::gguf::{D_HEAD, D_MODEL, F32, Gguf, Meta, VOCAB};

/// Width of the input of each layer.
const D_INPUT: u64 = 8;

/// One layer without a window, of the sizes of [`Gguf::small`], as a converter writes it.
pub fn gguf() -> Gguf {
    let mut file = Gguf::small("gemma4");
    for (name, n) in [
        ("blk.0.attn_q_norm.weight", D_HEAD),
        ("blk.0.attn_k_norm.weight", D_HEAD),
        ("blk.0.post_attention_norm.weight", D_MODEL),
        ("blk.0.post_ffw_norm.weight", D_MODEL),
        ("blk.0.post_norm.weight", D_MODEL),
        ("blk.0.layer_output_scale.weight", 1),
        ("per_layer_proj_norm.weight", D_INPUT),
    ] {
        file.vector(name, n);
    }
    file.matrix("blk.0.inp_gate.weight", D_INPUT, D_MODEL, F32);
    file.matrix("blk.0.proj.weight", D_MODEL, D_INPUT, F32);
    file.matrix("per_layer_token_embd.weight", VOCAB, D_INPUT, F32);
    file.matrix("per_layer_model_proj.weight", D_INPUT, D_MODEL, F32);
    for key in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
        for suffix in ["", "_swa"] {
            file = file.with(&format!("gemma4.{key}{suffix}"), Meta::U32(D_HEAD as u32));
        }
    }
    file.with("gemma4.attention.sliding_window_pattern", Meta::Bools(vec![false]))
        .with("gemma4.attention.sliding_window", Meta::U32(8))
        .with("gemma4.attention.shared_kv_layers", Meta::U32(0))
        .with("gemma4.embedding_length_per_layer_input", Meta::U32(D_INPUT as u32))
        .with("gemma4.final_logit_softcapping", Meta::F32(30.0))
        .with("tokenizer.ggml.model", "gemma4")
}
