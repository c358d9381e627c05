//! A GGUF writer that can also write invalid files.

use super::TempFolder;
use llaisys_core::error::Result;
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::load::gguf::Header;

pub const F32: u32 = 0;
pub const Q8_0: u32 = 8;

/// A metadata value.
#[derive(Clone)]
pub enum Meta {
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
    Bool(bool),
    Str(String),
    Strs(Vec<String>),
    I32s(Vec<i32>),
    Bools(Vec<bool>),
    /// A raw type number and bytes.
    Raw(u32, Vec<u8>),
}

impl From<&str> for Meta {
    fn from(text: &str) -> Self {
        Meta::Str(text.to_owned())
    }
}

#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    /// Fastest first.
    pub sizes: Vec<u64>,
    pub type_id: u32,
    pub data: Vec<u8>,
    /// The offset, if it is not the next free one.
    pub offset: Option<u64>,
}

impl Tensor {
    /// A tensor in F32. `shape` is slowest first.
    pub fn f32(name: String, shape: &[usize], values: &[f32]) -> Self {
        let sizes = shape.iter().rev().map(|&n| n as u64).collect();
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { name, sizes, type_id: F32, data, offset: None }
    }
}

#[derive(Clone)]
pub struct Gguf {
    pub version: u32,
    pub keys: Vec<(String, Meta)>,
    pub tensors: Vec<Tensor>,
    pub alignment: usize,
    pub n_keys: Option<u64>,
    pub n_tensors: Option<u64>,
}

/// Sizes of the small models below.
pub const D_MODEL: u64 = 32;
pub const D_HEAD: u64 = 16;
pub const N_HEADS: u64 = 2;
pub const VOCAB: u64 = 8;

impl Gguf {
    /// A file without keys and tensors.
    pub fn empty() -> Self {
        Self { version: 3, keys: vec![], tensors: vec![], alignment: 32, n_keys: None, n_tensors: None }
    }

    /// A model of one layer: 2 heads and 1 key-value head of 16, width 32, 8 tokens, tied.
    pub fn small(architecture: &str) -> Self {
        let mut file = Self::empty();
        file.keys.push(("general.architecture".into(), architecture.into()));
        let sizes: [(&str, u32); 7] = [
            ("block_count", 1),
            ("context_length", 64),
            ("embedding_length", D_MODEL as u32),
            ("feed_forward_length", 32),
            ("attention.head_count", N_HEADS as u32),
            ("attention.head_count_kv", 1),
            ("vocab_size", VOCAB as u32),
        ];
        for (key, size) in sizes {
            file.keys.push((format!("{architecture}.{key}"), Meta::U32(size)));
        }
        let eps = format!("{architecture}.attention.layer_norm_rms_epsilon");
        file.keys.push((eps, Meta::F32(1e-5)));
        file.keys.push((format!("{architecture}.rope.freq_base"), Meta::F32(1e5)));
        file.add_tokenizer();
        file.add_tensors(architecture);
        file
    }

    fn add_tokenizer(&mut self) {
        let tokens: Vec<String> = ["a", "b", "c", "ab", "bc", "<s>", "</s>", "<u>"].map(String::from).into();
        let types = vec![1, 1, 1, 1, 1, 3, 3, 2];
        let mut put = |key: &str, value: Meta| self.keys.push((format!("tokenizer.{key}"), value));
        put("ggml.model", "gpt2".into());
        put("ggml.pre", "smollm".into());
        put("ggml.tokens", Meta::Strs(tokens));
        put("ggml.token_type", Meta::I32s(types));
        put("ggml.merges", Meta::Strs(vec!["a b".into(), "b c".into()]));
        put("ggml.bos_token_id", Meta::U32(5));
        put("ggml.eos_token_id", Meta::U32(6));
        put("ggml.unknown_token_id", Meta::U32(7));
        put("ggml.add_bos_token", Meta::Bool(false));
        put("chat_template", "{{ messages }}".into());
    }

    fn add_tensors(&mut self, architecture: &str) {
        let (q, kv) = (N_HEADS * D_HEAD, D_HEAD);
        self.matrix("token_embd.weight", VOCAB, D_MODEL, Q8_0);
        self.vector("output_norm.weight", D_MODEL);
        self.vector("blk.0.attn_norm.weight", D_MODEL);
        self.matrix("blk.0.attn_q.weight", q, D_MODEL, F32);
        self.matrix("blk.0.attn_k.weight", kv, D_MODEL, F32);
        self.matrix("blk.0.attn_v.weight", kv, D_MODEL, F32);
        self.matrix("blk.0.attn_output.weight", D_MODEL, q, Q8_0);
        self.vector("blk.0.ffn_norm.weight", D_MODEL);
        for name in ["gate", "up", "down"] {
            self.matrix(&format!("blk.0.ffn_{name}.weight"), 32, 32, Q8_0);
        }
        if architecture == "qwen2" {
            for (name, n) in [("q", q), ("k", kv), ("v", kv)] {
                self.vector(&format!("blk.0.attn_{name}.bias"), n);
            }
        }
        if architecture == "qwen3" {
            self.vector("blk.0.attn_q_norm.weight", D_HEAD);
            self.vector("blk.0.attn_k_norm.weight", D_HEAD);
        }
    }

    /// Adds a matrix in which every number is the number of its row.
    pub fn matrix(&mut self, name: &str, n_rows: u64, n_columns: u64, type_id: u32) {
        let data = match type_id {
            F32 => (0..n_rows * n_columns).flat_map(|i| ((i / n_columns) as f32).to_le_bytes()).collect(),
            Q8_0 => vec![0; (n_rows * n_columns / 32 * 34) as usize],
            other => panic!("the writer has no type {other}"),
        };
        self.tensors.push(Tensor {
            name: name.into(),
            sizes: vec![n_columns, n_rows],
            type_id,
            data,
            offset: None,
        });
    }

    /// Adds a vector of ones.
    pub fn vector(&mut self, name: &str, n: u64) {
        let data = (0..n).flat_map(|_| 1_f32.to_le_bytes()).collect();
        self.tensors.push(Tensor { name: name.into(), sizes: vec![n], type_id: F32, data, offset: None });
    }

    /// Replaces or adds a key.
    pub fn with(mut self, key: &str, value: impl Into<Meta>) -> Self {
        self = self.without(key);
        self.keys.push((key.into(), value.into()));
        self
    }

    pub fn without(mut self, key: &str) -> Self {
        self.keys.retain(|(k, _)| k != key);
        self
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    pub fn bytes(&self) -> Vec<u8> {
        let (mut out, offsets) = self.header();
        let data_start = out.len().next_multiple_of(self.alignment.max(1));
        for (tensor, offset) in self.tensors.iter().zip(offsets) {
            if tensor.offset.is_none() {
                out.resize(data_start + offset as usize, 0);
                out.extend(&tensor.data);
            }
        }
        out
    }

    /// The bytes before the padding, and each tensor's offset.
    pub fn header(&self) -> (Vec<u8>, Vec<u64>) {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.n_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.n_keys.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            put_string(&mut out, key.as_bytes());
            put_value(&mut out, value);
        }
        let mut next = 0_u64;
        let mut offsets = vec![];
        for tensor in &self.tensors {
            put_string(&mut out, tensor.name.as_bytes());
            out.extend((tensor.sizes.len() as u32).to_le_bytes());
            tensor.sizes.iter().for_each(|size| out.extend(size.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            let offset = tensor.offset.unwrap_or(next);
            out.extend(offset.to_le_bytes());
            offsets.push(offset);
            if tensor.offset.is_none() {
                next = (next + tensor.data.len() as u64).next_multiple_of(self.alignment.max(1) as u64);
            }
        }
        (out, offsets)
    }

    /// Parses the header and checks the tensors, but not the model.
    pub fn parse(&self) -> Result<()> {
        parse(&self.bytes())
    }

    /// Opens it as a checkpoint.
    pub fn open(&self) -> Result<Checkpoint> {
        Checkpoint::open(&TempFolder::new().write("small.gguf", self.bytes()))
    }
}

pub fn parse(bytes: &[u8]) -> Result<()> {
    Header::parse(bytes)?.tensors().map(drop)
}

pub fn put_string(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

fn put_value(out: &mut Vec<u8>, value: &Meta) {
    let mut put = |type_id: u32, bytes: &[u8]| {
        out.extend(type_id.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Meta::U32(n) => put(4, &n.to_le_bytes()),
        Meta::I32(n) => put(5, &n.to_le_bytes()),
        Meta::F32(x) => put(6, &x.to_le_bytes()),
        Meta::Bool(b) => put(7, &[u8::from(*b)]),
        Meta::U64(n) => put(10, &n.to_le_bytes()),
        Meta::Raw(type_id, bytes) => put(*type_id, bytes),
        Meta::Str(text) => {
            let mut bytes = vec![];
            put_string(&mut bytes, text.as_bytes());
            put(8, &bytes);
        }
        Meta::Strs(texts) => {
            let mut bytes = array_head(8, texts.len() as u64);
            texts.iter().for_each(|text| put_string(&mut bytes, text.as_bytes()));
            put(9, &bytes);
        }
        Meta::I32s(numbers) => {
            let mut bytes = array_head(5, numbers.len() as u64);
            numbers.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
            put(9, &bytes);
        }
        Meta::Bools(values) => {
            let mut bytes = array_head(7, values.len() as u64);
            bytes.extend(values.iter().map(|&value| u8::from(value)));
            put(9, &bytes);
        }
    }
}

/// Element type and count of an array.
pub fn array_head(element: u32, n: u64) -> Vec<u8> {
    let mut bytes = element.to_le_bytes().to_vec();
    bytes.extend(n.to_le_bytes());
    bytes
}
