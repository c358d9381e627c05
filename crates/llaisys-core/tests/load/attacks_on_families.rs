//! Named attacks on the keys of families of 2025: how to make each one, and the words that its error must contain.

use crate::attacks::{Maker, folder, llama, rejected};
use crate::model_files::TempFolder;
use crate::model_files::gguf::{Gguf, Meta, array_head};
use serde_json::{Value, json};
use std::path::PathBuf;

#[test]
fn attacks_on_keys_of_families() {
    fn of(scratch: &TempFolder, architecture: &str, keys: &[(&str, Value)]) -> PathBuf {
        let folder = llama().with("architectures", json!([architecture]));
        keys.iter().fold(folder, |folder, (key, value)| folder.with(key, value.clone())).write(scratch);
        scratch.path().to_owned()
    }
    fn hunyuan(scratch: &TempFolder, alpha: Value) -> PathBuf {
        let set = json!({"type": "dynamic", "alpha": alpha});
        of(scratch, "HunYuanDenseV1ForCausalLM", &[("rope_scaling", set)])
    }
    fn wrapped(scratch: &TempFolder, text: Value) -> PathBuf {
        of(scratch, "Mistral3ForConditionalGeneration", &[("text_config", text)])
    }
    fn granite_file(scratch: &TempFolder, sizes: Meta) -> PathBuf {
        let file = Gguf::small("granite").with("granite.attention.head_count_kv", sizes);
        scratch.write("x.gguf", file.bytes())
    }
    let table: [(&str, Maker, &[&str]); 17] = [
        ("an alpha of text", |s| hunyuan(s, json!("1000")), &["alpha", "not a number"]),
        ("a negative alpha", |s| hunyuan(s, json!(-1)), &["the rope's alpha is -1"]),
        ("an alpha beyond numbers", |s| hunyuan(s, json!(1e300)), &["the rope's alpha is 1000"]),
        (
            "a head of two with an alpha: a division by zero",
            |s| {
                let set = json!({"type": "dynamic", "alpha": 2});
                let keys = [("rope_scaling", set), ("head_dim", json!(2))];
                of(s, "HunYuanDenseV1ForCausalLM", &keys)
            },
            &["the rope base is inf"],
        ),
        (
            "a bias that is a word",
            |s| of(s, "SeedOssForCausalLM", &[("attention_out_bias", json!("yes"))]),
            &["attention_out_bias", "not true or false"],
        ),
        (
            "a bias of another length",
            |s| {
                folder(s, |f| {
                    for (name, n) in [("q", 16), ("k", 8), ("v", 8), ("o", 1 << 20)] {
                        f.tensor(&format!("model.layers.0.self_attn.{name}_proj.bias"), &[n]);
                    }
                    f.config.insert("attention_bias".into(), true.into());
                })
            },
            &["o_proj.bias", "[1048576]", "[16]"],
        ),
        (
            "a width of the shared block that overflows",
            |s| of(s, "GraniteMoeHybridForCausalLM", &[("shared_intermediate_size", json!(u64::MAX))]),
            &["feed-forward width is 18446744073709552000"],
        ),
        (
            "a kind of positions that is a list",
            |s| {
                let keys =
                    [("shared_intermediate_size", json!(24)), ("position_embedding_type", json!(["rope"]))];
                of(s, "GraniteMoeHybridForCausalLM", &keys)
            },
            &["position_embedding_type", "not a string"],
        ),
        (
            "more experts than there is memory for",
            |s| {
                let keys = [("num_local_experts", json!(u64::MAX)), ("num_experts_per_tok", json!(4))];
                of(s, "GptOssForCausalLM", &keys)
            },
            &["the number of experts is 18446744073709552000"],
        ),
        (
            "a bound of gates beyond numbers",
            |s| {
                let keys = [("num_local_experts", json!(2)), ("num_experts_per_tok", json!(1))];
                let keys = [&keys[..], &[("swiglu_limit", json!(1e300))]].concat();
                of(s, "GptOssForCausalLM", &keys)
            },
            &["the bound of gates is inf"],
        ),
        ("no text model", |s| wrapped(s, Value::Null), &["config.json has no \"text_config\""]),
        ("a text model that is a list", |s| wrapped(s, json!([])), &["text_config", "not an object"]),
        (
            "a text model without a type",
            |s| wrapped(s, json!({"hidden_size": 16})),
            &["no \"architectures\""],
        ),
        (
            "a wrapper in a wrapper",
            |s| wrapped(s, json!({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {}})),
            &["Mistral3ForConditionalGeneration", "not supported"],
        ),
        (
            "tensors of the text model without their prefix",
            |s| {
                let mut text = llama().config;
                text.insert("architectures".into(), json!(["LlamaForCausalLM"]));
                wrapped(s, text.into())
            },
            &["12 tensors are missing", "language_model.model.embed_tokens.weight"],
        ),
        (
            "a million key-value heads, one for each layer that does not exist",
            |s| {
                let mut bytes = array_head(4, 1 << 20);
                bytes.extend(1_u32.to_le_bytes().repeat(1 << 20));
                granite_file(s, Meta::Raw(9, bytes))
            },
            &["a size for each layer", "granite.attention.head_count_kv"],
        ),
        (
            "key-value heads by layer that are words",
            |s| granite_file(s, Meta::Strs(vec!["1".into()])),
            &["granite.attention.head_count_kv", "an array of whole numbers from 0"],
        ),
    ];
    for (name, make, words) in table {
        rejected(name, make, words);
    }
}
