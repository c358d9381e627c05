//! Multimodal checkpoints: the text model is read from `text_config` and from names with a prefix; tensors of the other
//! parts are skipped by prefix and counted.

use crate::model_files::folder::Folder;
use crate::model_files::{TempFolder, assert_names, bytes_of, format_error, unsupported};
use llaisys_core::arch::spec::{LayerWeight, WeightId};
use llaisys_core::arch::wrapper::{WRAPPERS, Wrapper};
use llaisys_core::error::FormatError;
use llaisys_core::load::checkpoint::Checkpoint;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A small model inside a wrapper, with a tensor for each prefix that is skipped.
fn wrapped(wrapper: &Wrapper, text: Folder, model_type: &str) -> Folder {
    let mut config = text.config;
    config.remove("architectures");
    config.insert("model_type".into(), model_type.into());
    let Value::Object(outer) = json!({
        "architectures": [wrapper.architecture], "text_config": config, "vision_config": {"hidden_size": 7},
        "torch_dtype": "bfloat16", "eos_token_id": [2, 5],
    }) else {
        unreachable!("the literal is an object")
    };
    let mut folder = Folder { config: outer, generation: None, tensors: text.tensors };
    for tensor in &mut folder.tensors {
        tensor.name = wrapper.name(&tensor.name);
    }
    for prefix in wrapper.skipped {
        folder.tensor(&format!("{prefix}layers.0.weight"), &[3, 5]);
    }
    folder
}

fn mistral3() -> Folder {
    wrapped(wrapper("Mistral3ForConditionalGeneration"), Folder::small("MistralForCausalLM"), "mistral")
}

fn wrapper(architecture: &str) -> &'static Wrapper {
    WRAPPERS.iter().find(|wrapper| wrapper.architecture == architecture).unwrap()
}

#[test]
fn every_wrapper_gives_the_text_model() {
    for wrapper in &WRAPPERS {
        let plain = Folder::small("Qwen3ForCausalLM");
        let (want, got) = (plain.open().unwrap(), wrapped(wrapper, plain, "qwen3").open().unwrap());
        let ids: Vec<WeightId> = want.weight_ids().collect();
        assert_eq!(got.weight_ids().collect::<Vec<_>>(), ids);
        for &id in &ids {
            assert_eq!(bytes_of(&got, id).unwrap(), bytes_of(&want, id).unwrap());
            let name = want.config().name(id).unwrap();
            assert_eq!(got.config().name(id).unwrap(), wrapper.name(&name));
            assert_eq!(got.weight_id(&wrapper.name(&name)), Some(id));
            assert_eq!(got.weight_id(&name).is_some(), wrapper.name(&name) == name, "{name}");
        }
        assert_eq!(got.info().n_parameters, want.info().n_parameters);
        assert_eq!(got.info().architecture, "Qwen3ForCausalLM");
        let skipped: BTreeMap<&str, usize> = wrapper.skipped.iter().map(|&prefix| (prefix, 1)).collect();
        assert_eq!(got.info().skipped_tensors, skipped);
        assert!(want.info().skipped_tensors.is_empty());
    }
}

#[test]
fn names_have_the_prefixes_of_published_checkpoints() {
    let name = |architecture: &str, name: &str| wrapper(architecture).name(name);
    let mistral3 = "Mistral3ForConditionalGeneration";
    assert_eq!(name(mistral3, "model.norm.weight"), "language_model.model.norm.weight");
    assert_eq!(name(mistral3, "lm_head.weight"), "language_model.lm_head.weight");
    let qwen = "Qwen3_5ForConditionalGeneration";
    assert_eq!(
        name(qwen, "model.layers.3.mlp.up_proj.weight"),
        "model.language_model.layers.3.mlp.up_proj.weight"
    );
    assert_eq!(name(qwen, "lm_head.weight"), "lm_head.weight");
    let id = mistral3_checkpoint().weight_id("language_model.model.layers.0.mlp.up_proj.weight");
    assert_eq!(id, Some(WeightId::Layer(0, LayerWeight::Up)));
}

fn mistral3_checkpoint() -> Checkpoint {
    mistral3().open().unwrap()
}

#[test]
fn skipped_tensors_are_neither_hashed_nor_counted() {
    let checkpoint = mistral3_checkpoint();
    let names: Vec<String> = checkpoint.hashes().map(|hash| hash.unwrap().0.name.clone()).collect();
    assert_eq!(names.len(), 12);
    assert!(names.iter().all(|name| name.starts_with("language_model.")), "{names:?}");
    let text: usize =
        Folder::small("MistralForCausalLM").tensors.iter().map(|tensor| tensor.data.len()).sum();
    assert_eq!(checkpoint.info().weight_bytes, text);
}

#[test]
fn outer_keys_apply_to_the_text_model() {
    let eos = |folder: Folder| folder.open().unwrap().config().eos.clone();
    assert_eq!(eos(mistral3()), [2, 5]);
    let tied = |inner: Value, outer: Value| {
        let mut folder = mistral3().with("tie_word_embeddings", outer);
        folder.config["text_config"]["tie_word_embeddings"] = inner;
        folder
    };
    for (inner, outer, want) in [
        (json!(true), json!(true), true),
        (json!(null), json!(true), true),
        (json!(true), json!(null), true),
        (json!(false), json!(null), false),
        (json!(null), json!(null), false),
    ] {
        assert_eq!(tied(inner, outer).open().unwrap().config().tied_head, want);
    }
    let error = unsupported(tied(json!(true), json!(false)).open());
    assert_names(&error, &["tie_word_embeddings", "true in text_config, false outside", "the same in both"]);
    let quantized = mistral3().with("quantization_config", json!({"quant_method": "hqq"}));
    assert_names(&unsupported(quantized.open()), &["quantized by", "hqq"]);
    let error = unsupported(mistral3().with("torch_dtype", "float8_e4m3fn").open());
    assert_names(&error, &["float8_e4m3fn"]);
}

/// As `google/gemma-3-4b-it`: sizes that are the defaults of transformers are absent.
#[test]
fn gemma_3_omits_its_default_sizes() {
    let wrapper = wrapper("Gemma3ForConditionalGeneration");
    let text = json!({
        "hidden_size": 16, "intermediate_size": 24, "model_type": "gemma3_text", "num_hidden_layers": 1,
        "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    });
    let folder = wrapped(wrapper, Folder::small("LlamaForCausalLM"), "").with("text_config", text);
    let error = format_error(folder.open());
    // Its sizes are those of the real model, so the small tensors do not fit.
    let FormatError::MissingTensors { first, .. } = &error else { panic!("{error}") };
    assert!(first.starts_with("language_model.model.layers.0."), "{error}");
    for (key, size) in wrapper.size_defaults {
        assert!(*size > 0, "{key}");
    }
}

#[test]
fn text_models_that_are_not_supported_are_named() {
    let scratch = TempFolder::new();
    let mut folder = mistral3();
    folder.config["text_config"]["model_type"] = "gemma9_text".into();
    folder.write(&scratch);
    let error = unsupported(Checkpoint::open(scratch.path()));
    assert_names(&error, &["architecture \"gemma9_text\" is not supported", "mistral"]);
}

/// As embedding models are published: no `model.` in names, and no head even if it is not tied.
#[test]
fn a_checkpoint_without_head_has_bare_names() {
    let bare = |mut folder: Folder| {
        for tensor in &mut folder.tensors {
            tensor.name = tensor.name.replacen("model.", "", 1);
        }
        folder
    };
    let plain = Folder::small("Qwen3ForCausalLM");
    assert!(plain.open().unwrap().info().generates);
    let with_head = bare(plain.clone()).open().unwrap();
    assert!(with_head.info().generates);
    let headless = bare(plain.without_tensor("lm_head.weight"));
    let opened = headless.open().unwrap();
    assert!(!opened.info().generates);
    assert_eq!(
        opened.weight_id("layers.0.self_attn.q_proj.weight"),
        with_head.weight_id("layers.0.self_attn.q_proj.weight")
    );
    assert!(headless.clone().with("tie_word_embeddings", true).open().unwrap().info().generates);
    assert_names(&format_error(headless.without_tensor("norm.weight").open()), &["norm.weight"]);
}
