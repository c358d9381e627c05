//! The configuration of an encoder in a GGUF file, with the keys of llama.cpp's converter.

use crate::arch::encoder::{
    BERT, ENCODERS, EncoderConfig, EncoderSpec, EncoderTask, MODERN_BERT, XLM_ROBERTA,
};
use crate::error::{Result, Unsupported};
use crate::load::gguf::Header;
use crate::load::gguf::keys::Keys;
use crate::load::gguf::tokenizer::{self, GgufTokenizer};
use crate::load::tensor_files::StoredTensor;

/// What is read from the header of an encoder's file.
pub(in crate::load) struct EncoderHeader {
    pub(super) config: EncoderConfig,
    pub(super) tokenizer: GgufTokenizer,
    /// As in [`ModelInfo`](crate::load::model_info::ModelInfo).
    pub(super) pooling_type: Option<u64>,
    pub(super) tensors: Vec<StoredTensor>,
}

/// Reads the header of a GGUF file; None if the architecture is no encoder.
///
/// Errors: a missing or wrong key; [`Unsupported`] for what the forward pass or the tokenizer does not implement.
pub(in crate::load) fn read(header: &Header<'_>) -> Result<Option<EncoderHeader>> {
    let keys = Keys::of(header)?;
    if !ENCODERS.iter().any(|spec| spec.gguf_architecture == keys.architecture) {
        return Ok(None);
    }
    let tokenizer = GgufTokenizer::read(keys.metadata, tokenizer::ENCODERS)?;
    keys.expect_model()?;
    if keys.metadata.bool(&keys.full("attention.causal"))? == Some(true) {
        return Err(Unsupported::feature("attention.causal of an encoder", true, "false").into());
    }
    let spec = row(keys.architecture, &tokenizer);
    let task = task(header, spec)?;
    let types_key = "tokenizer.ggml.token_type_count";
    let n_types = keys.metadata.uint(types_key)?.map_or(2, |n| usize::try_from(n).unwrap_or(usize::MAX));
    let config = EncoderConfig {
        spec,
        task,
        architecture: if task == EncoderTask::Score { spec.classifier } else { spec.base },
        n_layers: keys.required_size("block_count")?,
        d_model: keys.required_size("embedding_length")?,
        n_heads: keys.required_size("attention.head_count")?,
        d_ff: keys.required_size("feed_forward_length")?,
        vocab_size: tokenizer.tokens.len(),
        max_positions: keys.required_size("context_length")?,
        // The converter cuts off the rows before the first position of XLM-RoBERTa.
        first_position: 0,
        n_types: if spec.has_types { n_types } else { 0 },
        eps: keys.required_float("attention.layer_norm_epsilon")? as f32,
        theta: [
            keys.float("rope.freq_base_swa")?.unwrap_or(10_000.0),
            keys.float("rope.freq_base")?.unwrap_or(160_000.0),
        ],
        window: keys.size("attention.sliding_window")?.unwrap_or(128) / 2,
        global_every: keys.size("attention.sliding_window_pattern")?.unwrap_or(3),
        pools_mean: false,
    };
    config.check()?;
    let (pooling_type, tensors) = (keys.pooling_type()?, header.tensors()?);
    Ok(Some(EncoderHeader { config, tokenizer, pooling_type, tensors }))
}

/// BERT and XLM-RoBERTa have the same architecture, and different tokenizers.
fn row(architecture: &str, tokenizer: &GgufTokenizer) -> &'static EncoderSpec {
    match (architecture == MODERN_BERT.gguf_architecture, tokenizer.model.as_str()) {
        (true, _) => &MODERN_BERT,
        (false, "bert") => &BERT,
        (false, _) => &XLM_ROBERTA,
    }
}

/// Returns the task: files with a classifier have its output layer.
///
/// Errors: a classifier that cannot be computed as the model was trained, because the converter drops BERT's pooler and
/// does not say which row ModernBERT's classifier reads.
fn task(header: &Header<'_>, spec: &EncoderSpec) -> Result<EncoderTask, Unsupported> {
    let names = &spec.gguf_names;
    let has = |name: &str| header.tensor_names().any(|tensor| tensor.strip_suffix(".weight") == Some(name));
    match (has(names.head_dense), has(names.head_out)) {
        (false, false) => Ok(EncoderTask::Embed),
        (true, true) if spec.gguf_architecture == BERT.gguf_architecture => Ok(EncoderTask::Score),
        _ => Err(Unsupported::feature(
            "in a GGUF file the classifier of",
            spec.classifier,
            "classifiers of XLM-RoBERTa, with cls and cls.output (open others from a folder)",
        )),
    }
}
