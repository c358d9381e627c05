//! Attacks with the keys and tensors that describe how queries and keys are rotated.

use super::{Maker, folder, rejected};
use crate::model_files::TempFolder;
use crate::model_files::gguf::{Gguf, Meta};
use serde_json::{Value, json};
use std::path::PathBuf;

/// A folder with keys that rotate queries and keys.
fn rotated(scratch: &TempFolder, architecture: &str, keys: Value) -> PathBuf {
    folder(scratch, |f| {
        f.config.insert("architectures".into(), json!([architecture]));
        f.config.extend(keys.as_object().unwrap().clone());
    })
}

fn longrope(short: Value, long: Value) -> Value {
    let set = json!({"type": "longrope", "short_factor": short, "long_factor": long});
    json!({"original_max_position_embeddings": 32, "rope_scaling": set})
}

/// A GGUF file with factors of rotation.
fn with_factors(scratch: &TempFolder, name: &str, factor: f32) -> PathBuf {
    let mut made = Gguf::small("phi3").with("phi3.rope.scaling.original_context_length", Meta::U32(32));
    made.vector("rope_factors_short.weight", 8);
    made.vector("rope_factors_long.weight", 8);
    made.tensor(name).data = factor.to_le_bytes().repeat(8);
    scratch.write("x.gguf", made.bytes())
}

fn gguf_key(scratch: &TempFolder, architecture: &str, key: &str, value: Meta) -> PathBuf {
    let made = Gguf::small(architecture).with(&format!("{architecture}.{key}"), value);
    scratch.write("x.gguf", made.bytes())
}

#[test]
fn attacks_on_keys_of_the_rotation() {
    const PHI3: &str = "Phi3ForCausalLM";
    const SMOLLM3: &str = "SmolLM3ForCausalLM";
    const SHARE: &str = "partial_rotary_factor";
    let table: [(&str, Maker, &[&str]); 21] = [
        ("a share of zero", |s| rotated(s, PHI3, json!({SHARE: 0})), &[SHARE, "0"]),
        ("a negative share", |s| rotated(s, PHI3, json!({SHARE: -0.5})), &[SHARE, "-0.5"]),
        ("a share of more than a head", |s| rotated(s, PHI3, json!({SHARE: 1e300})), &[SHARE]),
        ("a share that is text", |s| rotated(s, PHI3, json!({SHARE: "half"})), &[SHARE, "a number"]),
        ("a share of a pair", |s| rotated(s, PHI3, json!({SHARE: 0.2})), &["rotated width of a head is 1"]),
        ("a share that splits a pair", |s| rotated(s, PHI3, json!({SHARE: 0.4})), &["rotated width", "3"]),
        ("no factors", |s| rotated(s, PHI3, longrope(json!([]), json!([]))), &["_factor is 0"]),
        (
            "a quarter of a million factors",
            |s| rotated(s, PHI3, longrope(json!(vec![1; 1 << 18]), json!([1, 1, 1, 1]))),
            &["the number of rope factors is 262144", "4"],
        ),
        (
            "a long factor of zero",
            |s| rotated(s, PHI3, longrope(json!([1, 1, 1, 1]), json!([1, 1, 0, 1]))),
            &["a rope factor is 0"],
        ),
        (
            "factors that are text",
            |s| rotated(s, PHI3, longrope(json!(["1"]), json!([1]))),
            &["short_factor", "a list of numbers"],
        ),
        (
            "layers that are neither rotated nor not",
            |s| rotated(s, SMOLLM3, json!({"no_rope_layers": [2]})),
            &["no_rope_layers", "a list of 0 and 1"],
        ),
        (
            "no list of layers",
            |s| rotated(s, SMOLLM3, json!({"no_rope_layers": []})),
            &["the number of no_rope_layers is 0"],
        ),
        (
            "an interval of zero layers",
            |s| rotated(s, SMOLLM3, json!({"no_rope_layer_interval": 0})),
            &["no_rope_layer_interval is 0"],
        ),
        (
            "queries that shrink",
            |s| {
                let set = json!({"llama_4_scaling_beta": -1, "original_max_position_embeddings": 16});
                rotated(s, "Ministral3ForCausalLM", json!({"rope_parameters": set}))
            },
            &["the scaling of queries is -1"],
        ),
        (
            "queries that are scaled from no context",
            |s| {
                let set = json!({"llama_4_scaling_beta": 1, "original_max_position_embeddings": 0});
                rotated(s, "Ministral3ForCausalLM", json!({"rope_parameters": set}))
            },
            &["original context is 0"],
        ),
        (
            "queries that are not numbers",
            |s| gguf_key(s, "mistral3", "attention.temperature_scale", Meta::F32(f32::NAN)),
            &["the scaling of queries is NaN"],
        ),
        (
            "no rotated elements",
            |s| gguf_key(s, "glm4", "rope.dimension_count", Meta::U32(0)),
            &["the rotated width of a head is 0"],
        ),
        (
            "more rotated elements than a head has",
            |s| gguf_key(s, "glm4", "rope.dimension_count", Meta::U64(u64::MAX)),
            &["the rotated width of a head"],
        ),
        (
            "a pattern of windows for four million layers",
            |s| {
                let pattern = Meta::Bools(vec![true; 1 << 22]);
                let made = Gguf::small("olmo2").with("olmo2.attention.sliding_window", Meta::U32(8));
                let made = made.with("olmo2.attention.sliding_window_pattern", pattern);
                s.write("x.gguf", made.bytes())
            },
            &["sliding_window_pattern is 4194304", "block_count"],
        ),
        (
            "long factors that are not numbers",
            |s| with_factors(s, "rope_factors_long.weight", f32::NAN),
            &["a rope factor is NaN"],
        ),
        (
            "short factors without bounds",
            |s| with_factors(s, "rope_factors_short.weight", f32::INFINITY),
            &["a rope factor is inf"],
        ),
    ];
    for (name, make, words) in table {
        rejected(name, make, words);
    }
}
