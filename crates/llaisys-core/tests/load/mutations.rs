//! Random damage: every file opens as a valid checkpoint or is rejected; nothing panics.

use crate::model_files::folder::{Folder, safetensors};
use crate::model_files::gguf::{Gguf, parse};
use crate::model_files::{TempFolder, adapter, check, encoder, gemma4, gpt_oss};
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::load::encoder::EncoderCheckpoint;
use llaisys_core::load::lora::LoraCheckpoint;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};
use std::fmt::Debug;
use std::path::Path;

/// One change of a byte string.
#[derive(Debug, Clone)]
enum Damage {
    Set(Index, u8),
    Flip(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    /// Eight bytes of a number that is likely to overflow.
    Number(Index, u64),
    Copy(Index, Index, usize),
    Cut(Index),
}

fn numbers() -> impl Strategy<Value = u64> {
    let near = [0, 1, 31, 32, u64::from(u32::MAX), 1 << 32, 1 << 62, 1 << 63, u64::MAX - 31, u64::MAX];
    prop_oneof![proptest::sample::select(near.to_vec()), any::<u64>()]
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<Index>;
    prop_oneof![
        (at(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        (at(), 0..8_u8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        (at(), vec(any::<u8>(), 1..9)).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        (at(), 1..64_usize).prop_map(|(at, n)| Damage::Remove(at, n)),
        (at(), numbers()).prop_map(|(at, number)| Damage::Number(at, number)),
        (at(), at(), 1..64_usize).prop_map(|(from, to, n)| Damage::Copy(from, to, n)),
        at().prop_map(Damage::Cut),
    ]
}

/// Applies `changes` within the first `front` bytes, which the parsers read.
fn damaged(mut bytes: Vec<u8>, front: usize, changes: &[Damage]) -> Vec<u8> {
    for change in changes {
        let front = front.min(bytes.len());
        if front == 0 {
            break;
        }
        match change {
            Damage::Set(at, byte) => bytes[at.index(front)] = *byte,
            Damage::Flip(at, bit) => bytes[at.index(front)] ^= 1 << bit,
            Damage::Insert(at, more) => {
                let at = at.index(front);
                bytes.splice(at..at, more.iter().copied());
            }
            Damage::Remove(at, n) => {
                let at = at.index(front);
                bytes.drain(at..(at + n).min(front));
            }
            Damage::Number(at, number) => {
                let at = at.index(front);
                let end = (at + 8).min(front);
                bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            }
            Damage::Copy(from, to, n) => {
                let from = from.index(front);
                let piece = bytes[from..(from + n).min(front)].to_vec();
                let to = to.index(front);
                bytes.splice(to..to, piece);
            }
            Damage::Cut(at) => bytes.truncate(at.index(front)),
        }
    }
    bytes
}

/// Runs `test` on `n_cases` values of `strategy`. A failing one is minimized and printed.
fn for_each<T: Debug>(n_cases: u32, strategy: impl Strategy<Value = T>, test: impl Fn(T)) {
    let config = Config { cases: n_cases, failure_persistence: None, ..Config::default() };
    let run = |value| {
        test(value);
        Ok(())
    };
    if let Err(failure) = TestRunner::new(config).run(&strategy, run) {
        panic!("{failure}");
    }
}

fn check_if_it_opens(path: &Path) {
    if let Ok(checkpoint) = Checkpoint::open(path) {
        check(&checkpoint);
    }
}

#[test]
fn damaged_gguf_files_are_valid_or_rejected() {
    let scratch = TempFolder::new();
    let plain = ["llama", "qwen2", "qwen3"].map(Gguf::small).into_iter();
    for file in plain.chain([gpt_oss::gguf(), gemma4::gguf()]) {
        let (bytes, front) = (file.bytes(), file.header().0.len());
        for_each(4000, vec(damage(), 1..5), |changes| {
            // Both a rejection and a valid table are right; only a panic fails.
            parse(&damaged(bytes.clone(), front, &changes)).ok();
        });
        for_each(600, vec(damage(), 1..5), |changes| {
            check_if_it_opens(&scratch.write("x.gguf", damaged(bytes.clone(), front, &changes)));
        });
    }
}

#[test]
fn damaged_encoders_and_adapters_in_gguf_files_are_valid_or_rejected() {
    let scratch = TempFolder::new();
    let model = Folder::small("LlamaForCausalLM").open().unwrap();
    for file in [encoder::gguf(), adapter::gguf()] {
        let (bytes, front) = (file.bytes(), file.header().0.len());
        for_each(600, vec(damage(), 1..5), |changes| {
            let path = scratch.write("x.gguf", damaged(bytes.clone(), front, &changes));
            if let Ok(Some(opened)) = EncoderCheckpoint::open(&path) {
                encoder::check(&opened);
            }
            if let Ok(opened) = LoraCheckpoint::open(&path, model.config(), 8) {
                adapter::check(&opened);
            }
        });
    }
}

#[test]
fn damaged_safetensors_headers_are_valid_or_rejected() {
    for folder in [Folder::small("Qwen2ForCausalLM"), gpt_oss::folder(true), gpt_oss::folder(false)] {
        let scratch = TempFolder::new();
        folder.write_configs(&scratch);
        let bytes = safetensors(&folder.tensors);
        let front = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for_each(1000, vec(damage(), 1..5), |changes| {
            scratch.write("model.safetensors", damaged(bytes.clone(), front, &changes));
            check_if_it_opens(scratch.path());
        });
    }
}

#[test]
fn damaged_configurations_are_valid_or_rejected() {
    let mut folder = Folder::small("Qwen3ForCausalLM");
    folder.generation = Some(serde_json::json!({"eos_token_id": [2, 3], "temperature": 0.7, "top_k": 20}));
    let scratch = TempFolder::new();
    folder.write_sharded(&scratch, 2);
    for name in ["config.json", "generation_config.json", "model.safetensors.index.json"] {
        let bytes = std::fs::read(scratch.file(name)).unwrap();
        for_each(600, vec(damage(), 1..5), |changes| {
            scratch.write(name, damaged(bytes.clone(), bytes.len(), &changes));
            check_if_it_opens(scratch.path());
        });
        scratch.write(name, &bytes);
        check(&Checkpoint::open(scratch.path()).unwrap());
    }
}

#[test]
fn random_bytes_after_a_magic_number_are_rejected() {
    for_each(4000, vec(any::<u8>(), 0..256), |noise| {
        let bytes = [b"GGUF\x03\0\0\0".to_vec(), noise].concat();
        parse(&bytes).expect_err("random counts are larger than so few bytes");
    });
}
