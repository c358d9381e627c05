//! Damaged and hostile model folders: each is rejected by name.

use crate::model_files::folder::{Folder, safetensors, shard_name, with_header, write_index};
use crate::model_files::{TempFolder, assert_names, bytes_of, check, format_error, golden, unsupported};
use llaisys_core::error::FormatError;
use llaisys_core::error::Result;
use llaisys_core::load::checkpoint::Checkpoint;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

fn small() -> Folder {
    Folder::small("LlamaForCausalLM")
}

fn open(scratch: &TempFolder) -> Result<Checkpoint> {
    Checkpoint::open(scratch.path())
}

/// `small` with these bytes as `model.safetensors`.
fn open_tensors(bytes: &[u8]) -> Result<Checkpoint> {
    let scratch = TempFolder::new();
    small().write_configs(&scratch);
    scratch.write("model.safetensors", bytes);
    open(&scratch)
}

#[test]
fn golden_models_open() {
    for name in
        ["llama-untied-bf16", "qwen2-f16", "qwen2-odd-f32-sharded", "qwen2-tied-bf16", "qwen3-tied-bf16"]
    {
        check(&Checkpoint::open(&golden(name)).unwrap());
    }
}

#[test]
fn single_and_sharded_files_have_the_same_tensors() {
    for n_shards in [1, 3, 12] {
        let scratch = TempFolder::new();
        let mut folder = small();
        for (i, tensor) in folder.tensors.iter_mut().enumerate() {
            tensor.data.fill(i as u8);
        }
        folder.write_sharded(&scratch, n_shards);
        let sharded = open(&scratch).unwrap();
        check(&sharded);
        let single = folder.open().unwrap();
        for id in single.weight_ids() {
            assert_eq!(bytes_of(&sharded, id).unwrap(), bytes_of(&single, id).unwrap());
        }
    }
}

#[test]
fn missing_files_are_named() {
    let scratch = TempFolder::new();
    assert!(matches!(format_error(Checkpoint::open(&scratch.file("none"))), FormatError::Io { .. }));
    assert!(matches!(format_error(open(&scratch)), FormatError::FileMissing { name: "config.json", .. }));
    small().write_configs(&scratch);
    assert!(matches!(
        format_error(open(&scratch)),
        FormatError::FileMissing { name: "model.safetensors", .. }
    ));
}

#[test]
fn truncation_at_every_byte_is_rejected() {
    let whole = safetensors(&small().tensors);
    check(&open_tensors(&whole).unwrap());
    let header_end = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let scratch = TempFolder::new();
    small().write_configs(&scratch);
    for end in (0..header_end + 4).chain([whole.len() - 1]) {
        scratch.write("model.safetensors", &whole[..end]);
        format_error(open(&scratch));
    }
}

#[test]
fn bytes_outside_of_all_tensors_are_rejected() {
    let mut longer = safetensors(&small().tensors);
    longer.push(0);
    assert!(matches!(format_error(open_tensors(&longer)), FormatError::Safetensors { .. }));
}

#[test]
fn huge_headers_are_rejected_before_allocating() {
    for length in [(8 << 20) + 1, u64::from(u32::MAX), u64::MAX] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend([b'{'; 64]);
        assert!(matches!(format_error(open_tensors(&bytes)), FormatError::TooLarge { .. }));
    }
    let mut bytes = 4096_u64.to_le_bytes().to_vec();
    bytes.extend([b'{'; 64]);
    assert!(matches!(format_error(open_tensors(&bytes)), FormatError::Safetensors { .. }));
}

#[test]
fn inconsistent_headers_are_rejected() {
    let entry = |shape: &str, start: u64, end: u64| {
        format!(r#"{{"dtype":"BF16","shape":{shape},"data_offsets":[{start},{end}]}}"#)
    };
    let (a, b) = (entry("[2]", 0, 4), entry("[2]", 4, 8));
    let gap = entry("[1]", 6, 8);
    let headers = [
        format!(r#"{{"a":{a},"a":{a}}}"#),                    // a repeated name
        format!(r#"{{"a":{a},"b":{gap}}}"#),                  // unused bytes
        format!(r#"{{"a":{a},"b":{a}}}"#),                    // the same bytes
        format!(r#"{{"a":{},"b":{b}}}"#, entry("[3]", 0, 4)), // shape and bytes disagree
        format!(r#"{{"a":{},"b":{b}}}"#, entry("[4294967296,4294967296]", 0, 4)), // a product of 2^64
        format!(r#"{{"a":{},"b":{b}}}"#, entry("[9223372036854775808]", 0, 4)), // 2^64 bytes
        format!(r#"{{"a":{},"b":{b}}}"#, entry("[-1]", 0, 4)),
        format!(r#"{{"a":{},"b":{b}}}"#, entry("[2]", 4, 0)),
        format!(r#"{{"a":{a},"b":{}}}"#, entry("[2]", 4, u64::MAX)),
        format!(r#"{{"a":{}}}"#, "[".repeat(100_000)), // depth
        format!(r#"{{"a":{}"#, r#"{"a":"#.repeat(100_000)),
        "[]".into(),
        "null".into(),
        "\u{0}".into(),
    ];
    for header in headers {
        let error = format_error(open_tensors(&with_header(&header, &[0; 8])));
        assert!(
            matches!(error, FormatError::Json { .. } | FormatError::Safetensors { .. }),
            "{header}: {error}"
        );
    }
}

#[test]
fn other_element_types_are_rejected_by_name() {
    for (dtype, n_bytes) in [("I8", 1), ("F8_E4M3", 1), ("F8_E5M2", 1), ("I32", 4), ("I64", 8), ("F64", 8)] {
        let mut folder = small();
        let norm = folder.tensors.iter_mut().find(|t| t.name == "model.norm.weight").unwrap();
        (norm.dtype, norm.data) = (dtype, vec![0; 16 * n_bytes]);
        assert_names(&unsupported(folder.open()), &["model.norm.weight", dtype, "F32, F16, BF16"]);
    }
}

#[test]
fn missing_extra_and_wrongly_shaped_tensors_are_rejected() {
    let error = format_error(small().without_tensor("lm_head.weight").open());
    assert!(
        matches!(&error, FormatError::MissingTensors { n_missing: 1, first } if first == "lm_head.weight")
    );
    let mut extra = small();
    extra.tensor("model.layers.0.self_attn.q_proj.bias", &[16]);
    extra.tensor("model.layers.1.input_layernorm.weight", &[16]);
    assert!(matches!(format_error(extra.open()), FormatError::ExtraTensors { n_extra: 2, .. }));
    let shape = small().with("intermediate_size", 32);
    assert!(matches!(format_error(shape.open()), FormatError::TensorShape { .. }));
}

#[test]
fn known_harmless_tensors_are_ignored() {
    let mut folder = small().with("tie_word_embeddings", true);
    folder.tensor("model.layers.0.self_attn.rotary_emb.inv_freq", &[4]);
    let checkpoint = folder.open().unwrap();
    assert!(checkpoint.config().tied_head);
    assert_eq!(checkpoint.weight_id("lm_head.weight"), None);
    assert_eq!(checkpoint.info().n_parameters, 12 * 16 + 3 * 16 + 2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16);
}

#[test]
fn shard_names_outside_the_folder_are_rejected() {
    let outside = TempFolder::new();
    outside.write("model.safetensors", safetensors(&small().tensors));
    let absolute = outside.file("model.safetensors").to_string_lossy().into_owned();
    let up = format!("../{}/model.safetensors", outside.path().file_name().unwrap().to_string_lossy());
    for shard in [
        absolute.as_str(),
        &up,
        "..",
        ".",
        "",
        "a/b.safetensors",
        "a\\b.safetensors",
        "./model.safetensors",
        "model.safetensors.index.json",
        "config.json",
        ".safetensors",
        "a\0.safetensors",
        "model.safetensors/",
    ] {
        let scratch = TempFolder::new();
        let mut weight_map = small().write_sharded(&scratch, 1);
        weight_map["lm_head.weight"] = shard.into();
        write_index(&scratch, &weight_map);
        assert!(matches!(format_error(open(&scratch)), FormatError::ShardName { .. }), "{shard:?}");
    }
}

#[test]
fn links_out_of_the_folder_are_rejected() {
    let outside = TempFolder::new();
    small().write(&outside);
    for name in ["model.safetensors", "config.json"] {
        let scratch = TempFolder::new();
        small().write(&scratch);
        fs::remove_file(scratch.file(name)).unwrap();
        symlink(outside.file(name), scratch.file(name)).unwrap();
        assert!(matches!(format_error(open(&scratch)), FormatError::OutsideFolder { .. }), "{name}");
    }
    let scratch = TempFolder::new();
    small().write_sharded(&scratch, 2);
    fs::rename(scratch.file(&shard_name(1)), outside.file("x.safetensors")).unwrap();
    symlink(outside.file("x.safetensors"), scratch.file(&shard_name(1))).unwrap();
    assert!(matches!(format_error(open(&scratch)), FormatError::OutsideFolder { .. }));
}

#[test]
fn links_inside_the_folder_and_to_the_folder_are_followed() {
    let scratch = TempFolder::new();
    let real = scratch.file("real");
    fs::create_dir(&real).unwrap();
    let folder = TempFolder::new();
    small().write(&folder);
    for name in ["config.json", "model.safetensors"] {
        fs::copy(folder.file(name), real.join(format!("blob-{name}"))).unwrap();
        symlink(format!("blob-{name}"), real.join(name)).unwrap();
    }
    symlink(&real, scratch.file("link")).unwrap();
    check(&Checkpoint::open(&scratch.file("link")).unwrap());
}

#[test]
fn links_within_the_hub_cache_are_followed() {
    let scratch = TempFolder::new();
    let folder = TempFolder::new();
    small().write(&folder);
    let lay_out = |repository: &str| {
        let root = scratch.file(repository);
        let snapshot = root.join("snapshots/0123abcd");
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(root.join("blobs")).unwrap();
        for name in ["config.json", "model.safetensors"] {
            fs::copy(folder.file(name), root.join("blobs").join(name)).unwrap();
            symlink(format!("../../blobs/{name}"), snapshot.join(name)).unwrap();
        }
        snapshot
    };
    check(&Checkpoint::open(&lay_out("models--owner--name")).unwrap());
    let other = Checkpoint::open(&lay_out("somewhere"));
    assert!(matches!(format_error(other), FormatError::OutsideFolder { .. }));
    let snapshot = lay_out("models--owner--shared");
    fs::create_dir_all(scratch.file("blobs/ab")).unwrap();
    let blob = scratch.file("models--owner--shared/blobs/model.safetensors");
    fs::rename(&blob, scratch.file("blobs/ab/abcd")).unwrap();
    symlink("../../blobs/ab/abcd", &blob).unwrap();
    check(&Checkpoint::open(&snapshot).unwrap());
    let snapshot = lay_out("models--owner--other");
    fs::remove_file(snapshot.join("config.json")).unwrap();
    symlink(folder.file("config.json"), snapshot.join("config.json")).unwrap();
    assert!(matches!(format_error(Checkpoint::open(&snapshot)), FormatError::OutsideFolder { .. }));
}

#[test]
fn cyclic_links_between_shards_are_rejected() {
    let scratch = TempFolder::new();
    small().write_sharded(&scratch, 2);
    fs::remove_file(scratch.file(&shard_name(0))).unwrap();
    fs::remove_file(scratch.file(&shard_name(1))).unwrap();
    symlink(shard_name(1), scratch.file(&shard_name(0))).unwrap();
    symlink(shard_name(0), scratch.file(&shard_name(1))).unwrap();
    assert!(matches!(format_error(open(&scratch)), FormatError::Io { .. }));
}

#[test]
fn pipes_and_devices_are_rejected_without_waiting() {
    let scratch = TempFolder::new();
    small().write_configs(&scratch);
    // A socket is used like a pipe: opening either would fail or wait.
    let _socket = UnixListener::bind(scratch.file("model.safetensors")).unwrap();
    assert!(matches!(format_error(open(&scratch)), FormatError::NotAFile { .. }));
    let scratch = TempFolder::new();
    fs::create_dir(scratch.file("config.json")).unwrap();
    assert!(matches!(format_error(open(&scratch)), FormatError::NotAFile { .. }));
}

#[test]
fn index_and_shards_must_agree() {
    let scratch = TempFolder::new();
    let weight_map = small().write_sharded(&scratch, 3);
    let rejected = |change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let mut changed = weight_map.clone();
        change(&mut changed);
        write_index(&scratch, &changed);
        format_error(open(&scratch))
    };
    let moved = rejected(&|map| map["model.norm.weight"] = shard_name(2).into());
    assert!(matches!(moved, FormatError::NotInIndex { .. }));
    let unplaced = rejected(&|map| drop(map.remove("model.norm.weight")));
    assert!(matches!(unplaced, FormatError::NotInIndex { .. }));
    let invented = rejected(&|map| drop(map.insert("invented".into(), shard_name(0).into())));
    assert!(matches!(invented, FormatError::NotInShard { tensor, .. } if tensor == "invented"));
    let lost = rejected(&|map| drop(map.insert("invented".into(), "lost.safetensors".into())));
    assert!(matches!(lost, FormatError::NotInShard { shard, .. } if shard == "lost.safetensors"));
}

#[test]
fn tensor_in_two_shards_is_rejected() {
    let scratch = TempFolder::new();
    let folder = small();
    folder.write_sharded(&scratch, 2);
    let mut second = folder.tensors[6..].to_vec();
    second.push(folder.tensors[0].clone());
    scratch.write(&shard_name(1), safetensors(&second));
    assert!(matches!(format_error(open(&scratch)), FormatError::NotInIndex { .. }));
}

#[test]
fn damaged_indexes_are_rejected() {
    let name = shard_name(0);
    let texts = [
        String::new(),
        "[]".into(),
        "{}".into(),
        json!({"weight_map": [name]}).to_string(),
        json!({"weight_map": {"a": 1}}).to_string(),
        format!(r#"{{"weight_map": {{"a": "{name}", "a": "{name}"}}}}"#),
        format!(r#"{{"weight_map": {{}}, "weight_map": {{"a": "{name}"}}}}"#),
        format!(r#"{{"weight_map": {{"a": "{name}"}}, "metadata": {}"#, "[".repeat(1_000_000)),
    ];
    for text in texts {
        let scratch = TempFolder::new();
        small().write_sharded(&scratch, 1);
        scratch.write("model.safetensors.index.json", &text);
        assert!(matches!(format_error(open(&scratch)), FormatError::Json { .. }), "{text:.80}");
    }
    let scratch = TempFolder::new();
    small().write_sharded(&scratch, 1);
    scratch.write("model.safetensors.index.json", vec![b' '; (8 << 20) + 1]);
    assert!(matches!(format_error(open(&scratch)), FormatError::TooLarge { .. }));
    scratch.write("model.safetensors.index.json", r#"{"weight_map": {}}"#);
    assert!(matches!(format_error(open(&scratch)), FormatError::MissingTensors { .. }));
}
