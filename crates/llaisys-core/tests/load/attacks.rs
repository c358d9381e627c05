//! The corpus of named attacks: how to make each one, and the words that its error must contain. Attacks on one rule of
//! a format are next to that rule's test in `folder.rs`, `gguf.rs` and `config.rs`. This file has the larger ones, all
//! those on `tokenizer.json`, and those that fuzzing found. `attacks_on_families.rs` has those on keys of some families.

mod rotation;

use crate::model_files::folder::{Folder, Tensor, safetensors, shard_name, with_header};
use crate::model_files::gguf::{F32, Gguf, Meta};
use crate::model_files::{TempFolder, check};
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::load::tokenizer_json;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

/// Makes the attack in the scratch folder. Returns the path to open.
pub(crate) type Maker = fn(&TempFolder) -> PathBuf;

pub(crate) fn rejected(name: &str, make: Maker, words: &[&str]) {
    let scratch = TempFolder::new();
    let path = make(&scratch);
    let text = match Checkpoint::inspect(&path) {
        Ok(_) => panic!("{name}: it was accepted"),
        Err(error) => error.to_string(),
    };
    for word in words {
        assert!(text.contains(word), "{name}: {text:?} does not name {word:?}");
    }
    assert!(text.len() < 2000, "{name}: {} bytes of error", text.len());
    assert!(!text.contains(|c: char| c.is_control()), "{name}: {text:?} has control characters");
}

pub(crate) fn llama() -> Folder {
    Folder::small("LlamaForCausalLM")
}

pub(crate) fn folder(scratch: &TempFolder, change: impl FnOnce(&mut Folder)) -> PathBuf {
    let mut made = llama();
    change(&mut made);
    made.write(scratch);
    scratch.path().to_owned()
}

fn file(scratch: &TempFolder, change: impl FnOnce(&mut Gguf)) -> PathBuf {
    let mut made = Gguf::small("llama");
    change(&mut made);
    scratch.write("x.gguf", made.bytes())
}

#[test]
fn attacks_on_safetensors_and_their_index() {
    let table: [(&str, Maker, &[&str]); 12] = [
        (
            "a tensor's name of a megabyte",
            |s| folder(s, |f| f.tensor(&"x".repeat(1 << 20), &[2])),
            &["model.safetensors", "name has 1048576 bytes"],
        ),
        (
            "a zero dimension where the model has numbers",
            |s| {
                folder(s, |f| {
                    let norm = f.tensors.iter_mut().find(|t| t.name == "model.norm.weight").unwrap();
                    (norm.shape, norm.data) = (vec![0], vec![]);
                })
            },
            &["model.norm.weight", "[0]", "[16]"],
        ),
        (
            "a shape of a million ones",
            |s| {
                folder(s, |f| {
                    let norm = f.tensors.iter_mut().find(|t| t.name == "model.norm.weight").unwrap();
                    norm.shape = vec![1; 1_000_000];
                    norm.shape.push(16);
                })
            },
            &["model.norm.weight", "1000001 dimensions"],
        ),
        (
            "a NUL and an escape sequence in a tensor's name",
            |s| folder(s, |f| f.tensor("a\0b\u{1b}[2J", &[2])),
            &["a\\0b\\u{1b}[2J"],
        ),
        (
            "a hundred thousand empty tensors",
            |s| {
                folder(s, |f| {
                    let empty =
                        |i| Tensor { name: format!("{i}"), dtype: "F32", shape: vec![0], data: vec![] };
                    f.tensors.extend((0..100_000).map(empty));
                })
            },
            &["100000 tensors are not part of this model"],
        ),
        (
            "a depth bomb in the metadata of the header",
            |s| {
                llama().write_configs(s);
                let header = format!(r#"{{"__metadata__":{}"#, r#"{"a":"#.repeat(500_000));
                s.write("model.safetensors", with_header(&header, &[]));
                s.path().to_owned()
            },
            &["header of model.safetensors"],
        ),
        (
            "a shard that is a link to the index itself",
            |s| {
                llama().write_sharded(s, 2);
                fs::remove_file(s.file(&shard_name(0))).unwrap();
                symlink("model.safetensors.index.json", s.file(&shard_name(0))).unwrap();
                s.path().to_owned()
            },
            &["model-00000.safetensors"],
        ),
        (
            "two shards that are one file",
            |s| {
                llama().write_sharded(s, 2);
                fs::remove_file(s.file(&shard_name(1))).unwrap();
                symlink(shard_name(0), s.file(&shard_name(1))).unwrap();
                s.path().to_owned()
            },
            &["model-00001.safetensors", "does not list for it"],
        ),
        (
            "a shard that is a link to itself",
            |s| {
                llama().write_sharded(s, 2);
                fs::remove_file(s.file(&shard_name(1))).unwrap();
                symlink(shard_name(1), s.file(&shard_name(1))).unwrap();
                s.path().to_owned()
            },
            &["cannot read", "model-00001.safetensors"],
        ),
        (
            "a shard that is a device without end",
            |s| {
                llama().write_sharded(s, 2);
                fs::remove_file(s.file(&shard_name(1))).unwrap();
                symlink("/dev/zero", s.file(&shard_name(1))).unwrap();
                s.path().to_owned()
            },
            &["outside"],
        ),
        (
            "weights behind a link to a folder outside",
            |s| {
                llama().write_configs(s);
                let outside = s.file("outside");
                fs::create_dir_all(&outside).unwrap();
                let inside = s.file("inside");
                fs::create_dir_all(&inside).unwrap();
                fs::rename(s.file("config.json"), inside.join("config.json")).unwrap();
                fs::write(outside.join("model.safetensors"), safetensors(&llama().tensors)).unwrap();
                symlink(outside.join("model.safetensors"), inside.join("model.safetensors")).unwrap();
                inside
            },
            &["outside of the model folder"],
        ),
        (
            "an index of a hundred thousand shards that do not exist",
            |s| {
                llama().write_configs(s);
                let map: serde_json::Map<String, Value> =
                    (0..100_000).map(|i| (format!("t{i}"), format!("{i}.safetensors").into())).collect();
                s.write("model.safetensors.index.json", json!({"weight_map": map}).to_string());
                s.path().to_owned()
            },
            &["does not have it"],
        ),
    ];
    for (name, make, words) in table {
        rejected(name, make, words);
    }
}

#[test]
fn attacks_on_gguf() {
    let table: [(&str, Maker, &[&str]); 7] = [
        (
            "a tensor's name of a megabyte",
            |s| file(s, |f| f.vector(&"x".repeat(1 << 20), 32)),
            &["a tensor's name at offset", "has 1048576 bytes"],
        ),
        (
            "a metadata key of a megabyte",
            |s| file(s, |f| *f = f.clone().with(&"x".repeat(1 << 20), Meta::U32(1))),
            &["a metadata key", "has 1048576 bytes"],
        ),
        (
            "a NUL and an escape sequence in a tensor's name",
            |s| file(s, |f| f.vector("a\0b\u{1b}[2J", 32)),
            &["a\\0b\\u{1b}[2J"],
        ),
        (
            "an escape sequence in the architecture",
            |s| file(s, |f| *f = f.clone().with("general.architecture", "\u{1b}]0;owned\u{7}")),
            &["\\u{1b}]0;owned\\u{7}"],
        ),
        (
            "an escape sequence in the tokenizer's name",
            |s| file(s, |f| *f = f.clone().with("tokenizer.ggml.pre", "\u{1b}[2J")),
            &["\\u{1b}[2J"],
        ),
        (
            "a hundred thousand tensors with the same data",
            |s| {
                file(s, |f| {
                    for i in 0..100_000 {
                        f.tensors.push(crate::model_files::gguf::Tensor {
                            name: format!("{i}"),
                            sizes: vec![8],
                            type_id: F32,
                            data: vec![],
                            offset: Some(0),
                        });
                    }
                })
            },
            &["overlap"],
        ),
        (
            "more layers than the file could hold",
            |s| file(s, |f| *f = f.clone().with("llama.block_count", Meta::U32(u32::MAX))),
            &["number of layers is 4294967295"],
        ),
    ];
    for (name, make, words) in table {
        rejected(name, make, words);
    }
}

// --- tokenizer.json ---

fn tokenizer() -> Value {
    json!({
        "version": "1.0",
        "added_tokens": [{"id": 3, "content": "<s>", "special": true}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\p{L}+|\s+"}, "behavior": "Isolated"},
        "post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    })
}

fn with(part: &str, value: Value) -> Vec<u8> {
    let mut made = tokenizer();
    *made.pointer_mut(part).unwrap() = value;
    made.to_string().into_bytes()
}

fn many(n: usize, entry: impl Fn(usize) -> String) -> String {
    (0..n).map(entry).collect::<Vec<_>>().join(",")
}

fn normalizers(n: usize, one: &Value) -> Value {
    json!({"type": "Sequence", "normalizers": vec![one.clone(); n]})
}

fn regex(pattern: &str) -> Vec<u8> {
    with("/pre_tokenizer/pattern", json!({"Regex": pattern}))
}

#[test]
fn valid_tokenizer_is_accepted() {
    tokenizer_json::check(&with("/version", json!("1.0"))).unwrap();
    tokenizer_json::check(&with("/added_tokens", json!(null))).unwrap();
    tokenizer_json::check(&with("/model/merges", json!([["a", "b"]]))).unwrap();
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    tokenizer_json::check(&with("/normalizer", normalizers(9, &replace))).unwrap();
    for name in ["qwen2-tied-bf16", "llama-untied-bf16", "../qwen2-tokenizer"] {
        let path = crate::model_files::golden(name).join("tokenizer.json");
        tokenizer_json::check(&fs::read(path).unwrap()).unwrap();
    }
}

#[test]
fn attacks_on_tokenizer_json() {
    type Make = fn() -> Vec<u8>;
    let table: [(&str, Make, &str); 25] = [
        ("nothing", Vec::new, "not acceptable JSON"),
        ("cut in the middle", || with("/version", json!(1))[..200].to_vec(), "EOF"),
        ("a list", || b"[]".to_vec(), "expected an object"),
        ("two values", || [with("/version", json!(1)), b"{}".to_vec()].concat(), "trailing"),
        ("depth of lists", || "[".repeat(1 << 20).into_bytes(), "expected an object"),
        ("depth below a key", || format!("{{\"x\":{}", "[".repeat(1 << 20)).into_bytes(), "deeper than 32"),
        (
            "depth in the model",
            || format!("{{\"model\":{{\"x\":{}", "[".repeat(99)).into_bytes(),
            "deeper than",
        ),
        (
            "depth in a merge",
            || format!("{{\"model\":{{\"merges\":[{}", "[".repeat(99)).into_bytes(),
            "deeper than",
        ),
        (
            "depth in the vocabulary",
            || format!("{{\"model\":{{\"vocab\":{{\"a\":{}", "[".repeat(99)).into_bytes(),
            "f64",
        ),
        ("a repeated key", || b"{\"model\":{},\"model\":{}}".to_vec(), "twice"),
        ("two vocabularies", || b"{\"model\":{\"vocab\":{},\"vocab\":{}}}".to_vec(), "twice"),
        ("a repeated nested key", || b"{\"x\":{\"a\":1,\"a\":1}}".to_vec(), "\"a\" occurs twice"),
        (
            "a vocabulary of two million",
            || {
                format!("{{\"model\":{{\"vocab\":{{{}}}}}}}", many(2 << 20, |i| format!("\"{i}\":{i}")))
                    .into()
            },
            "more than 1048576 entries of vocab",
        ),
        (
            "a vocabulary of two million as a list",
            || format!("{{\"model\":{{\"vocab\":[{}]}}}}", many(2 << 20, |_| "[\"\",0]".into())).into(),
            "more than 1048576 entries of vocab",
        ),
        (
            "three million merges",
            || format!("{{\"model\":{{\"merges\":[{}]}}}}", many(3 << 20, |_| "\"a b\"".into())).into(),
            "more than 2097152 merges",
        ),
        (
            "added tokens without end",
            || format!("{{\"added_tokens\":[{}]}}", many(200_000, |_| "{}".into())).into(),
            "more than 131072 added tokens",
        ),
        (
            "one added token of three megabytes",
            || with("/added_tokens/0/content", json!("x".repeat(3 << 20))),
            "bytes of added tokens",
        ),
        (
            "a merge of a thousand parts",
            || with("/model/merges", json!([vec!["a"; 1000]])),
            "too many values",
        ),
        (
            "a hundred thousand numbers where a few belong",
            || with("/decoder", json!(vec![0; 100_000])),
            "too many values",
        ),
        ("a pattern that explodes", || regex("(a+)+$"), "(a+)+$"),
        (
            "the same in a normalizer",
            || {
                let replace = json!({"type": "Replace", "pattern": {"Regex": "(a|a)*b"}, "content": ""});
                with("/normalizer", normalizers(1, &replace))
            },
            "(a|a)*b",
        ),
        ("a pattern of 20 KiB", || regex(&"a".repeat(20 << 10)), "longer than 16 KiB"),
        (
            "normalizers that double again and again",
            || {
                let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
                with("/normalizer", normalizers(40, &double))
            },
            "characters that the normalizers make of one is 1099511627776, at most 64",
        ),
        (
            "a post-processor that repeats the text",
            || {
                let text = json!({"Sequence": {"id": "A", "type_id": 0}});
                with("/post_processor/single", json!(vec![text; 1000]))
            },
            "places for the text in the post-processors is 1000, at most 8",
        ),
        (
            "a thousand special tokens around each text",
            || with("/post_processor", json!({"special_tokens": {"x": {"ids": vec![1; 1000]}}})),
            "special tokens in the post-processors is 1000",
        ),
    ];
    for (name, make, word) in table {
        let bytes = make();
        let error = tokenizer_json::check(&bytes).expect_err(name).to_string();
        assert!(error.contains(word), "{name}: {error:?} does not name {word:?}");
        assert!(error.len() < 1000, "{name}: {error:?} shows too much of the file");
    }
}

#[test]
fn inspecting_a_folder_checks_its_tokenizer() {
    let scratch = TempFolder::new();
    let path = folder(&scratch, |_| {});
    Checkpoint::inspect(&path).unwrap();
    scratch.write("tokenizer.json", with("/version", json!(1)));
    Checkpoint::inspect(&path).unwrap();
    check(&Checkpoint::open(&path).unwrap());
    let make: Maker = |s| {
        s.write("tokenizer.json", regex("(a+)+"));
        folder(s, |_| {})
    };
    rejected("a pattern", make, &["tokenizer.json", "(a+)+"]);
    let make: Maker = |s| {
        symlink("/etc/hostname", s.file("tokenizer.json")).unwrap();
        folder(s, |_| {})
    };
    rejected(
        "a link to a file outside",
        make,
        &["tokenizer.json is a link to a path outside of the model folder"],
    );
    for name in ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "modules.json"] {
        let scratch = TempFolder::new();
        let path = folder(&scratch, |_| {});
        symlink("/etc/hostname", scratch.file(name)).unwrap();
        let error = Checkpoint::inspect(&path).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("outside"), "{error}");
        fs::remove_file(scratch.file(name)).unwrap();
        let _socket = UnixListener::bind(scratch.file(name)).unwrap();
        let error = Checkpoint::inspect(&path).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("not a regular file"), "{error}");
    }
    let make: Maker = |s| {
        fs::File::create(s.file("tokenizer.json")).unwrap().set_len((64 << 20) + 1).unwrap();
        folder(s, |_| {})
    };
    rejected("a file of 64 MiB and a byte", make, &["tokenizer.json has 67108865 bytes"]);
}
