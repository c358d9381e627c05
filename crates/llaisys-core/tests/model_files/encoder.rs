//! A small encoder in a GGUF file.

use super::gguf::{F32, Gguf, Meta, Q8_0};
use llaisys_core::load::encoder::{EncoderCheckpoint, Part};
use llaisys_core::threads::Pool;

/// A BERT of one layer: 2 heads, width 32, 16 positions, 6 tokens.
pub fn gguf() -> Gguf {
    let mut file = Gguf::empty();
    let mut put = |key: &str, value: Meta| file.keys.push((key.into(), value));
    put("general.architecture", "bert".into());
    for (key, size) in [
        ("block_count", 1),
        ("context_length", 16),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("pooling_type", 1),
    ] {
        put(&format!("bert.{key}"), Meta::U32(size));
    }
    put("bert.attention.layer_norm_epsilon", Meta::F32(1e-12));
    put("bert.attention.causal", Meta::Bool(false));
    let tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u{2581}a", "b"].map(String::from);
    put("tokenizer.ggml.model", "bert".into());
    put("tokenizer.ggml.tokens", Meta::Strs(tokens.into()));
    put("tokenizer.ggml.token_type", Meta::I32s(vec![3, 3, 3, 3, 1, 1]));
    for (key, value) in
        [("token_type_count", 2), ("unknown_token_id", 1), ("cls_token_id", 2), ("seperator_token_id", 3)]
    {
        put(&format!("tokenizer.ggml.{key}"), Meta::U32(value));
    }
    file.matrix("token_embd.weight", 6, 32, Q8_0);
    file.matrix("position_embd.weight", 16, 32, F32);
    file.matrix("token_types.weight", 2, 32, F32);
    let projections = [
        ("attn_q", 32, 32),
        ("attn_k", 32, 32),
        ("attn_v", 32, 32),
        ("attn_output", 32, 32),
        ("ffn_up", 64, 32),
        ("ffn_down", 32, 64),
    ];
    for (name, n_rows, n_columns) in projections {
        file.matrix(&format!("blk.0.{name}.weight"), n_rows, n_columns, Q8_0);
        file.vector(&format!("blk.0.{name}.bias"), n_rows);
    }
    for name in ["token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"] {
        file.vector(&format!("{name}.weight"), 32);
        file.vector(&format!("{name}.bias"), 32);
    }
    file
}

/// Reads every tensor of an opened encoder, which fails if its shape is not that of the file.
pub fn check(checkpoint: &EncoderCheckpoint) {
    let pool = Pool::new(1).expect("one thread starts");
    for (name, part) in checkpoint.parts() {
        match part {
            Part::Vector(n) => {
                assert_eq!(checkpoint.vector(&name, &pool).expect("it is in the file").len(), n);
            }
            Part::Matrix(n_rows, n_columns)
            | Part::Gated(n_rows, n_columns)
            | Part::Table(n_rows, n_columns) => {
                assert_eq!(checkpoint.shape(&name).1, [n_rows, n_columns]);
                let mut buffer = Vec::new();
                checkpoint.read(&name, 0..n_rows, &mut buffer, &pool).expect("it is in the file");
            }
        }
    }
}
