//! One target for each parser. The input is a whole file, which is written where the parser reads it.

use crate::model_files::adapter::{self, Adapter};
use crate::model_files::folder::{Folder, safetensors};
use crate::model_files::gguf::Gguf;
use crate::model_files::scaled::{Numbers, Scaled, Sharing, compressed_config, fp8_config};
use crate::model_files::{TempFolder, check, encoder, gemma4, gpt_oss};
use llaisys_core::batch::{Batch, BatchArrays, BatchLimits};
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::load::encoder::EncoderCheckpoint;
use llaisys_core::load::gguf::Header;
use llaisys_core::load::lora::LoraCheckpoint;
use llaisys_core::load::tokenizer_json;
use std::path::Path;

/// The last one must fail. It verifies that failures are detected.
pub const NAMES: [&str; 14] = [
    "safetensors",
    "fp8",
    "packed",
    "mxfp4",
    "gguf",
    "index",
    "config",
    "encoder",
    "adapter",
    "adapter_config",
    "generation",
    "tokenizer",
    "batch",
    "canary",
];

pub fn find(name: &str) -> Target {
    let (kind, file) = match name {
        "safetensors" | "fp8" | "packed" | "mxfp4" => (Kind::Folder, "model.safetensors"),
        "index" => (Kind::Folder, "model.safetensors.index.json"),
        "config" => (Kind::Folder, "config.json"),
        "encoder" => (Kind::Encoder, "config.json"),
        "adapter" => (Kind::Adapter, "adapter_model.safetensors"),
        "adapter_config" => (Kind::Adapter, "adapter_config.json"),
        "generation" => (Kind::Folder, "generation_config.json"),
        "gguf" => (Kind::Gguf, "x.gguf"),
        "tokenizer" => (Kind::Tokenizer, "tokenizer.json"),
        "batch" => (Kind::Batch, ""),
        "canary" => (Kind::Canary, ""),
        other => panic!("no target {other}; targets: {}", NAMES.join(" ")),
    };
    let scratch = TempFolder::new();
    let mut folder = match name {
        "fp8" => fp8(),
        "packed" => packed(),
        "mxfp4" => gpt_oss::folder(true),
        _ => Folder::small(ARCHITECTURES[0]),
    };
    folder.generation = Some(serde_json::json!({"eos_token_id": [2, 3], "temperature": 0.7, "top_k": 20}));
    if file == "model.safetensors.index.json" {
        folder.write_sharded(&scratch, 2);
    } else {
        folder.write(&scratch);
    }
    if matches!(kind, Kind::Adapter) {
        Adapter::small().write(&scratch);
    }
    if name == "encoder" {
        scratch.write(
            "model.safetensors",
            include_bytes!("../../tests/data/goldens/bert_embed_f32/model.safetensors"),
        );
    }
    Target { name: name.to_owned(), kind, file, scratch }
}

/// A matrix with a scale for each block, in FP8.
fn fp8() -> Folder {
    let matrix = Scaled::random(Numbers::E4M3, Sharing::block(5, 64), "F32", counter());
    matrix.folder(fp8_config(Some([5, 64])), "weight_scale_inv")
}

/// A matrix of integers of 4 bits with zero points, by compressed-tensors.
fn packed() -> Folder {
    let matrix =
        Scaled::random(Numbers::Packed4, Sharing::block(1, 64), "BF16", counter()).with_zeros(counter());
    let weights = serde_json::json!({"num_bits": 4, "type": "int", "symmetric": false, "group_size": 64});
    matrix.folder(compressed_config("pack-quantized", weights), "weight_scale")
}

fn counter() -> impl FnMut() -> u64 {
    let mut n = 0_u64;
    move || {
        n = n.wrapping_add(0x0123_4567_89ab_cdef);
        n
    }
}

const ARCHITECTURES: [&str; 3] = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"];

enum Kind {
    Folder,
    /// The configuration of an encoder. Its tensors are those of BERT.
    Encoder,
    /// A file of an adapter for a small model.
    Adapter,
    Gguf,
    Tokenizer,
    Batch,
    Canary,
}

pub struct Target {
    name: String,
    kind: Kind,
    file: &'static str,
    scratch: TempFolder,
}

impl Target {
    /// Runs the target on one input, which must be rejected or valid.
    pub fn run(&mut self, input: &[u8]) {
        match self.kind {
            Kind::Tokenizer => drop(tokenizer_json::check(input)),
            Kind::Batch => run_batch(input),
            Kind::Encoder => {
                self.scratch.write(self.file, input);
                if let Ok(Some(checkpoint)) = EncoderCheckpoint::open(self.scratch.path()) {
                    encoder::check(&checkpoint);
                }
            }
            Kind::Adapter => {
                self.scratch.write(self.file, input);
                let model = Checkpoint::open(self.scratch.path()).expect("`find` has written it");
                match LoraCheckpoint::open(self.scratch.path(), model.config(), 8) {
                    Ok(adapter) => adapter::check(&adapter),
                    Err(error) => assert!(error.to_string().len() <= 8 * input.len() + 4096),
                }
            }
            // Allocates twice the bound for inputs that begin with an odd byte.
            Kind::Canary => drop(vec![0_u8; input.first().map_or(0, |b| usize::from(b % 2) * (128 << 20))]),
            Kind::Folder | Kind::Gguf => {
                if matches!(self.kind, Kind::Gguf) {
                    drop(Header::parse(input).and_then(|header| header.tensors()));
                }
                let path = self.scratch.write(self.file, input);
                if matches!(self.kind, Kind::Gguf) {
                    open_others(&path, self.scratch.path());
                }
                let opened =
                    if matches!(self.kind, Kind::Gguf) { path.as_path() } else { self.scratch.path() };
                match Checkpoint::open(opened) {
                    Ok(checkpoint) => check(&checkpoint),
                    // A file must not be able to make the message large.
                    Err(error) => assert!(error.to_string().len() <= 8 * input.len() + 4096),
                }
            }
        }
    }

    /// Small valid files.
    pub fn seeds(&self) -> Vec<Vec<u8>> {
        match self.kind {
            Kind::Gguf => {
                let files = ["llama", "qwen2", "qwen3"].map(Gguf::small).into_iter();
                let others = [gpt_oss::gguf(), gemma4::gguf(), encoder::gguf(), adapter::gguf()];
                files.chain(others).map(|file| file.bytes()).collect()
            }
            Kind::Tokenizer => vec![small_tokenizer()],
            Kind::Canary => vec![vec![0; 4]],
            Kind::Batch => vec![vec![2, 1, 2, 7, 0, 0, 0, 99, 0, 0, 0, 0, 0, 0, 0, 15, 0, 0, 0], vec![0; 64]],
            Kind::Folder if self.name == "safetensors" => {
                ARCHITECTURES.map(|name| safetensors(&Folder::small(name).tensors)).into()
            }
            Kind::Encoder => [
                &include_bytes!("../../tests/data/goldens/bert_embed_f32/config.json")[..],
                include_bytes!("../../tests/data/goldens/modernbert_embed_bf16/config.json"),
                include_bytes!("../../tests/data/goldens/xlm_roberta_rerank_f16/config.json"),
            ]
            .map(<[u8]>::to_vec)
            .into(),
            Kind::Folder if self.file == "config.json" => {
                let mut seeds: Vec<Vec<u8>> = ARCHITECTURES
                    .map(|name| serde_json::to_vec(&Folder::small(name).config).expect("it is JSON"))
                    .into();
                let real = include_bytes!("../../tests/data/goldens/qwen2-tied-bf16/config.json");
                let wrapped = include_bytes!("../../tests/data/goldens/qwen3_5_moe_bf16/config.json");
                let hybrid = include_bytes!("../../tests/data/goldens/qwen3_next_bf16/config.json");
                let short_conv = include_bytes!("../../tests/data/goldens/lfm2_bf16/config.json");
                let layered = include_bytes!("../../tests/data/goldens/gemma4_bf16/config.json");
                let sigmoid = include_bytes!("../../tests/data/goldens/lfm2_moe_bf16/config.json");
                seeds.extend([&real[..], wrapped, hybrid, short_conv, sigmoid, layered].map(<[u8]>::to_vec));
                let quantized = [fp8(), packed(), gpt_oss::folder(true)];
                seeds.extend(quantized.map(|folder| serde_json::to_vec(&folder.config).expect("it is JSON")));
                seeds
            }
            Kind::Folder | Kind::Adapter => {
                vec![std::fs::read(self.scratch.file(self.file)).expect("`find` has written it")]
            }
        }
    }
}

/// Opens a GGUF file as an encoder, and as an adapter for the model in `folder`.
fn open_others(path: &Path, folder: &Path) {
    if let Ok(Some(checkpoint)) = EncoderCheckpoint::open(path) {
        encoder::check(&checkpoint);
    }
    let model = Checkpoint::open(folder).expect("`find` has written it");
    if let Ok(adapter) = LoraCheckpoint::open(path, model.config(), 8) {
        adapter::check(&adapter);
    }
}

fn small_tokenizer() -> Vec<u8> {
    br#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":3,"content":"<s>","special":true}],
"normalizer":{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Replace","pattern":{"String":" "},"content":"_"}]},
"pre_tokenizer":{"type":"Split","pattern":{"Regex":"(?i:'s|'t)|[^\\r\\n\\p{L}]?\\p{L}+|\\p{N}{1,3}|\\s+(?!\\S)|\\s+"},"behavior":"Isolated"},
"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A","type_id":0}}],"special_tokens":{"<s>":{"ids":[3]}}},
"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","dropout":null,"vocab":{"a":0,"b":1,"ab":2},"merges":["a b",["a","b"]]}}"#
        .to_vec()
}

/// Reads the input as arrays: three lengths, then their bytes. Missing bytes are zero.
fn run_batch(input: &[u8]) {
    let mut bytes = input.iter().copied().chain(std::iter::repeat(0));
    let mut next = |n: usize| -> Vec<u8> { bytes.by_ref().take(n).collect() };
    let sizes = next(3);
    let (n_rows, n_ids, n_streams) = (sizes[0] as usize, sizes[1] as usize, sizes[2] as usize % 4);
    let mut ints = |n: usize| -> Vec<i32> {
        next(4 * n).chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    let (tokens, positions, n_seq_id) = (ints(n_rows), ints(n_rows), ints(n_rows));
    let wide = ints(2 * n_ids);
    let seq_ids: Vec<i64> =
        wide.chunks_exact(2).map(|pair| (i64::from(pair[0]) << 32) | i64::from(pair[1] as u32)).collect();
    let stream: Vec<u32> =
        ints(if n_streams == 0 { 0 } else { n_rows }).into_iter().map(|n| n as u32).collect();
    let wants_output: Vec<u8> = ints(n_rows).into_iter().map(|n| n as u8).collect();
    let arrays = BatchArrays {
        tokens: &tokens,
        positions: &positions,
        n_seq_id: &n_seq_id,
        seq_ids: &seq_ids,
        stream: &stream,
        wants_output: &wants_output,
    };
    let limits =
        BatchLimits { vocab_size: 100, max_positions: 16, n_seq_max: 4, n_streams: n_streams.max(1) };
    if let Ok(batch) = Batch::new(arrays, limits) {
        for row in 0..batch.n_rows() {
            assert!(!batch.row_seqs(row).is_empty() && (0..100).contains(&batch.tokens[row]));
        }
    }
}
