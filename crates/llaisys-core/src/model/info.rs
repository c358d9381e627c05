//! Facts of a checkpoint for the outside: `llaisys.types.ModelInfo`, field for field.

use crate::dtype::{DType, KvDType};
use crate::model::config::ModelConfig;
use crate::model::generation::SamplingDefaults;
use crate::model::packed_size::PackedBytes;
use crate::model::tokenizer::GgufTokenizer;
use serde::Serialize;

/// Which container a checkpoint is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FileFormat {
    /// A Hugging Face folder.
    Safetensors,
    /// A GGUF file.
    Gguf,
}

/// Bytes of one KV cell over all layers, K and V, for each element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct KvBytesPerCell {
    /// [`KvDType::Float32`].
    pub float32: usize,
    /// [`KvDType::Float16`].
    pub float16: usize,
    /// [`KvDType::Bfloat16`].
    pub bfloat16: usize,
    /// [`KvDType::Int8`].
    pub int8: usize,
}

/// Facts of a checkpoint, read from its headers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelInfo {
    /// The path that was opened.
    pub path: String,
    /// Container.
    pub file_format: FileFormat,
    /// The family's name in transformers, for both containers.
    pub architecture: &'static str,
    /// The element type that most bytes of the weights have.
    pub dtype: DType,
    /// Layers.
    pub n_layers: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub d_head: usize,
    /// Inner width of the feed-forward part.
    pub d_ff: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Positions that the model was made for.
    pub max_position_embeddings: usize,
    /// Numbers in all tensors of the model; a tied head counts once.
    pub n_parameters: usize,
    /// Bytes of these tensors in the files.
    pub weight_bytes: usize,
    /// Bytes of the weights in memory.
    pub packed_bytes: PackedBytes,
    /// Bytes of the head's screen in memory.
    pub screen_bytes: PackedBytes,
    /// Bytes of one KV cell.
    pub kv_bytes_per_cell: KvBytesPerCell,
    /// Token that begins a text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// What `generation_config.json` sets.
    pub generation: SamplingDefaults,
    /// The tokenizer of a GGUF file.
    pub tokenizer: Option<GgufTokenizer>,
    /// What a GGUF file says of pooling, as llama.cpp's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pooling_type: Option<u64>,
}

/// The type, numbers and bytes of one tensor of the model.
#[derive(Debug, Clone, Copy)]
pub(super) struct TensorSize {
    pub(super) dtype: DType,
    pub(super) n_elements: usize,
    pub(super) n_bytes: usize,
}

/// Where the other facts come from.
pub(super) struct Source {
    pub(super) path: String,
    pub(super) file_format: FileFormat,
    pub(super) generation: SamplingDefaults,
    pub(super) tokenizer: Option<GgufTokenizer>,
    pub(super) pooling_type: Option<u64>,
}

impl ModelInfo {
    pub(super) fn new(
        config: &ModelConfig,
        sizes: &[TensorSize],
        [packed_bytes, screen_bytes]: [PackedBytes; 2],
        source: Source,
    ) -> Self {
        Self {
            path: source.path,
            file_format: source.file_format,
            architecture: config.family.architecture,
            dtype: main_dtype(sizes),
            n_layers: config.n_layers,
            d_model: config.d_model,
            n_heads: config.n_heads,
            n_kv_heads: config.n_kv_heads,
            d_head: config.d_head,
            d_ff: config.d_ff,
            vocab_size: config.vocab_size,
            max_position_embeddings: config.max_positions,
            n_parameters: sizes.iter().map(|size| size.n_elements).sum(),
            weight_bytes: sizes.iter().map(|size| size.n_bytes).sum(),
            packed_bytes,
            screen_bytes,
            kv_bytes_per_cell: KvBytesPerCell {
                float32: kv_bytes_per_cell(config, KvDType::Float32),
                float16: kv_bytes_per_cell(config, KvDType::Float16),
                bfloat16: kv_bytes_per_cell(config, KvDType::Bfloat16),
                int8: kv_bytes_per_cell(config, KvDType::Int8),
            },
            bos_token_id: config.bos,
            eos_token_ids: config.eos.clone(),
            generation: source.generation,
            tokenizer: source.tokenizer,
            pooling_type: source.pooling_type,
        }
    }
}

/// Bytes of K and V of one token in all layers. The configuration's bounds keep it below 2^35.
pub fn kv_bytes_per_cell(config: &ModelConfig, dtype: KvDType) -> usize {
    2 * config.n_layers * config.n_kv_heads * dtype.head_bytes(config.d_head)
}

fn main_dtype(sizes: &[TensorSize]) -> DType {
    let bytes_of = |dtype: DType| sizes.iter().filter(|s| s.dtype == dtype).map(|s| s.n_bytes).sum::<usize>();
    DType::ALL.into_iter().max_by_key(|&dtype| bytes_of(dtype)).expect("the list of types is not empty")
}
