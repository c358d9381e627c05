//! The properties that are reported about a checkpoint, with the fields of `llaisys.model_info.ModelInfo`.

use crate::arch::config::ModelConfig;
use crate::dtype::{DType, KvDType};
use crate::load::folder::generation_config::SamplingDefaults;
use crate::load::gguf::tokenizer::GgufTokenizer;
use crate::load::packed_size::PackedBytes;
use crate::ops::KvHeads;
use serde::Serialize;
use std::collections::BTreeMap;

/// The container of a checkpoint.
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

/// Properties of a checkpoint, read from its headers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelInfo {
    /// The path that was opened.
    pub path: String,
    /// Container.
    pub file_format: FileFormat,
    /// The name of the architecture in transformers, for both containers.
    pub architecture: &'static str,
    /// The element type of most bytes of the weights.
    pub dtype: DType,
    /// Layers.
    pub n_layers: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Elements of a head, the widest one of all layers.
    pub d_head: usize,
    /// Inner width of the feed-forward block, the widest one of all layers and experts.
    pub d_ff: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Context length of the model, in positions.
    pub max_position_embeddings: usize,
    /// Elements of all tensors of the model; a tied head counts once.
    pub n_parameters: usize,
    /// Bytes of these tensors in the files.
    pub weight_bytes: usize,
    /// Bytes of the weights in memory.
    pub packed_bytes: PackedBytes,
    /// Bytes of the bounds for the pruned argmax of the head in memory.
    pub screen_bytes: PackedBytes,
    /// Bytes of one KV cell.
    pub kv_bytes_per_cell: KvBytesPerCell,
    /// Bytes of the recurrent state of one sequence; 0 for a model without recurrent layers.
    pub state_bytes: usize,
    /// Activations (f32) of one row that only recurrent layers and inputs of layers need.
    pub recurrent_width: usize,
    /// Numbers (f32) that recurrent layers record of one row of a sequence with drafts.
    pub journal_width: usize,
    /// Token at the beginning of a text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// Sampling defaults of `generation_config.json`.
    pub generation: SamplingDefaults,
    /// The tokenizer of a GGUF file.
    pub tokenizer: Option<GgufTokenizer>,
    /// The pooling type of a GGUF file, as llama.cpp's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pooling_type: Option<u64>,
    /// The number of tensors of a multimodal checkpoint that are skipped, by the prefix of their names.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped_tensors: BTreeMap<&'static str, usize>,
    /// False for a model without a head, which has no logits.
    pub generates: bool,
    /// True for an encoder, which [`EncoderContext`](crate::context::encoder::EncoderContext) runs.
    pub is_encoder: bool,
    /// True for an encoder with a classifier.
    pub has_score_head: bool,
}

/// The type, elements and bytes of one weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct TensorSize {
    pub(super) dtype: DType,
    pub(super) n_elements: usize,
    pub(super) n_bytes: usize,
}

/// Bytes of the model in memory, in each mode.
pub(super) struct MemoryBytes {
    pub(super) weights: PackedBytes,
    /// The bounds for the pruned argmax.
    pub(super) argmax_bounds: PackedBytes,
}

/// Properties that do not follow from the configuration.
pub(super) struct Source {
    pub(super) path: String,
    pub(super) file_format: FileFormat,
    pub(super) generation: SamplingDefaults,
    pub(super) tokenizer: Option<GgufTokenizer>,
    pub(super) pooling_type: Option<u64>,
    pub(super) skipped_tensors: BTreeMap<&'static str, usize>,
    pub(super) generates: bool,
}

impl ModelInfo {
    pub(super) fn new(
        config: &ModelConfig,
        sizes: &[TensorSize],
        memory: MemoryBytes,
        source: Source,
    ) -> Self {
        Self {
            path: source.path,
            file_format: source.file_format,
            architecture: config.arch.architecture,
            dtype: main_dtype(sizes),
            n_layers: config.n_layers,
            d_model: config.d_model,
            n_heads: config.n_heads,
            n_kv_heads: config.n_kv_heads,
            d_head: config.d_head_max(),
            d_ff: config.d_ff_max(),
            vocab_size: config.vocab_size,
            max_position_embeddings: config.max_positions,
            n_parameters: sizes.iter().map(|size| size.n_elements).sum(),
            weight_bytes: sizes.iter().map(|size| size.n_bytes).sum(),
            packed_bytes: memory.weights,
            screen_bytes: memory.argmax_bounds,
            kv_bytes_per_cell: KvBytesPerCell {
                float32: kv_bytes_per_cell(config, KvDType::Float32),
                float16: kv_bytes_per_cell(config, KvDType::Float16),
                bfloat16: kv_bytes_per_cell(config, KvDType::Bfloat16),
                int8: kv_bytes_per_cell(config, KvDType::Int8),
            },
            state_bytes: config.state_len() * size_of::<f32>(),
            recurrent_width: config.recurrent_width(),
            journal_width: config.journal_width(),
            bos_token_id: config.bos,
            eos_token_ids: config.eos.clone(),
            generation: source.generation,
            tokenizer: source.tokenizer,
            pooling_type: source.pooling_type,
            skipped_tensors: source.skipped_tensors,
            generates: source.generates,
            is_encoder: false,
            has_score_head: false,
        }
    }

    /// Of no model: every number is 0.
    pub(super) fn empty() -> Self {
        let bytes = PackedBytes::each(|_| 0);
        Self {
            path: String::new(),
            file_format: FileFormat::Safetensors,
            architecture: "",
            dtype: DType::F32,
            n_layers: 0,
            d_model: 0,
            n_heads: 0,
            n_kv_heads: 0,
            d_head: 0,
            d_ff: 0,
            vocab_size: 0,
            max_position_embeddings: 0,
            n_parameters: 0,
            weight_bytes: 0,
            packed_bytes: bytes,
            screen_bytes: bytes,
            kv_bytes_per_cell: KvBytesPerCell { float32: 0, float16: 0, bfloat16: 0, int8: 0 },
            state_bytes: 0,
            recurrent_width: 0,
            journal_width: 0,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
            generation: SamplingDefaults::default(),
            tokenizer: None,
            pooling_type: None,
            skipped_tensors: BTreeMap::new(),
            generates: false,
            is_encoder: false,
            has_score_head: false,
        }
    }
}

/// Returns the bytes of K and V of one token in all layers with attention. The bounds of the configuration keep it below 2^35.
pub fn kv_bytes_per_cell(config: &ModelConfig, dtype: KvDType) -> usize {
    let of_layer = |index| {
        let KvHeads { n_kv_heads, d_head } = config.kv_heads(index);
        2 * n_kv_heads * dtype.head_bytes(d_head)
    };
    config.kv_layers().map(of_layer).sum()
}

fn main_dtype(sizes: &[TensorSize]) -> DType {
    let bytes_of = |dtype: DType| sizes.iter().filter(|s| s.dtype == dtype).map(|s| s.n_bytes).sum::<usize>();
    DType::ALL.into_iter().max_by_key(|&dtype| bytes_of(dtype)).expect("the list of types is not empty")
}
