//! The old and the new spelling of one `config.json` give the same configuration. transformers 5 writes
//! `rope_parameters`, `dtype` and `num_local_experts`; published files mostly have `rope_theta` next to `rope_scaling`,
//! `torch_dtype` and the architecture's own number of experts.

use crate::model_files::{TempFolder, golden};
use llaisys_core::load::checkpoint::Checkpoint;
use serde_json::{Map, Value, json};
use std::fs;

const FOLDERS: [&str; 8] = [
    "granite4_bf16",
    "hunyuan_dense_bf16",
    "llama3-rope-bf16",
    "llama_bias_bf16",
    "mistral-bf16",
    "qwen3-tied-bf16",
    "qwen3_moe_bf16",
    "seed_oss_bf16",
];

fn rename(config: &mut Map<String, Value>, from: &str, to: &str) {
    if let Some(value) = config.remove(from) {
        config.insert(to.into(), value);
    }
}

/// The spelling of transformers 5.
fn new_spelling(mut config: Map<String, Value>) -> Map<String, Value> {
    rename(&mut config, "torch_dtype", "dtype");
    if config.get("num_experts").is_some_and(|n| !n.is_null()) {
        rename(&mut config, "num_experts", "num_local_experts");
    }
    let (theta, scaling) = (config.remove("rope_theta"), config.remove("rope_scaling"));
    let mut set = match scaling {
        Some(Value::Object(set)) => set,
        _ => Map::new(),
    };
    rename(&mut set, "type", "rope_type");
    set.entry("rope_type").or_insert("default".into());
    if let Some(theta) = theta {
        set.insert("rope_theta".into(), theta);
    }
    config.entry("rope_parameters").or_insert(set.into());
    config
}

/// The spelling of published files, with the names of layers that old hybrids have.
fn old_spelling(mut config: Map<String, Value>) -> Map<String, Value> {
    rename(&mut config, "dtype", "torch_dtype");
    rename(&mut config, "num_local_experts", "num_experts");
    if let Some(Value::Object(mut set)) = config.remove("rope_parameters") {
        rename(&mut set, "rope_type", "type");
        config.insert("rope_theta".into(), set.remove("rope_theta").expect("a base"));
        let is_default = set.get("type").is_none_or(|kind| kind == "default");
        config.insert("rope_scaling".into(), if is_default { Value::Null } else { set.into() });
    }
    let n_layers = config["num_hidden_layers"].as_u64().expect("a number");
    if let Some(kinds) = config.get_mut("layer_types") {
        *kinds = json!(vec!["attention"; n_layers as usize]);
    }
    config
}

#[test]
fn both_spellings_of_a_golden_give_the_same_configuration() {
    let spellings = [new_spelling, old_spelling, |config| old_spelling(new_spelling(config))];
    for name in FOLDERS {
        let want = Checkpoint::open(&golden(name)).unwrap();
        let text = fs::read_to_string(golden(name).join("config.json")).unwrap();
        let config: Map<String, Value> = serde_json::from_str(&text).unwrap();
        for (i, spelling) in spellings.iter().enumerate() {
            let scratch = TempFolder::new();
            fs::copy(golden(name).join("model.safetensors"), scratch.file("model.safetensors")).unwrap();
            scratch.write("config.json", serde_json::to_vec(&spelling(config.clone())).unwrap());
            let got = Checkpoint::open(scratch.path()).unwrap();
            assert_eq!(format!("{:?}", got.config()), format!("{:?}", want.config()), "{name}, spelling {i}");
        }
    }
}
