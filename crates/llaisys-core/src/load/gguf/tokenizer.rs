//! The tokenizer in a GGUF file: the data from which the Python code builds the tokenizer.

use crate::arch::bounds::check_id;
use crate::error::{FormatError, GgufError};
use crate::error::{Result, Unsupported};
use crate::load::gguf::metadata::Metadata;
use serde::Serialize;

/// Supported values of `tokenizer.ggml.model`: byte-level BPE, SentencePiece's BPE with scores for merges, and BPE of
/// characters with bytes for those that are no token.
const MODELS: [&str; 3] = ["gpt2", SCORED, GEMMA4];
const SCORED: &str = "llama";
const GEMMA4: &str = "gemma4";
/// Supported values of `tokenizer.ggml.pre`, which selects how text is split into words before the merges.
const PRES: [&str; 7] = ["smollm", "qwen2", "qwen35", "llama-bpe", "lfm2", "gpt-4o", "default"];
/// With these values, llama.cpp adds the begin token where the file has no key for it.
const PRES_THAT_ADD_BOS: [&str; 2] = ["llama-bpe", "lfm2"];
/// The type of an ordinary token; the default where the file has no types.
const NORMAL: i32 = 1;

/// The same fields as `llaisys.model_info.GgufTokenizer`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GgufTokenizer {
    /// `tokenizer.ggml.model`: `gpt2`, `llama` or `gemma4`.
    pub model: String,
    /// `tokenizer.ggml.pre`: one of the seven supported; `default` for the models `llama` and `gemma4`, which do not split
    /// text.
    pub pre: String,
    /// Tokens by id, with bytes as GPT-2's letters for them, or with spaces as U+2581.
    pub tokens: Vec<String>,
    /// Kind of each token (1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte).
    pub token_types: Vec<i32>,
    /// Merges, best first: two tokens separated by a space. Empty for the model `llama`.
    pub merges: Vec<String>,
    /// Scores by id, of the model `llama`: the possible merge with the highest score is applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scores: Option<Vec<f32>>,
    /// Of the model `llama`: a space is inserted before the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub add_space_prefix: Option<bool>,
    /// A prompt begins with `bos`.
    pub add_bos: bool,
    /// Begin token.
    pub bos: Option<u32>,
    /// End token.
    pub eos: Option<u32>,
    /// Unknown token.
    pub unk: Option<u32>,
    /// Jinja2 source.
    pub chat_template: Option<String>,
}

impl GgufTokenizer {
    /// Reads `tokenizer.*`. Errors: an unsupported `model` or `pre`; a missing list, lists of unequal length, an id
    /// outside the vocabulary.
    pub(super) fn read(metadata: &Metadata<'_>) -> Result<Self> {
        let model = known(metadata, "tokenizer.ggml.model", &MODELS, "gpt2, llama, gemma4")?;
        let is_scored = model == SCORED;
        let is_gemma4 = model == GEMMA4;
        let pre = if is_gemma4 || is_scored && metadata.get("tokenizer.ggml.pre").is_none() {
            "default"
        } else if is_scored {
            known(metadata, "tokenizer.ggml.pre", &["default"], "default (for the model llama)")?
        } else {
            known(
                metadata,
                "tokenizer.ggml.pre",
                &PRES,
                "smollm, qwen2, qwen35, llama-bpe, lfm2, gpt-4o, default",
            )?
        };
        let tokens = strings(metadata, "tokenizer.ggml.tokens")?;
        let merges = if is_scored { Vec::new() } else { strings(metadata, "tokenizer.ggml.merges")? };
        let scores = is_scored.then(|| scores(metadata, tokens.len())).transpose()?;
        let add_space_prefix = match metadata.bool("tokenizer.ggml.add_space_prefix")? {
            stated if is_scored => Some(stated.unwrap_or(true)),
            _ => None,
        };
        let what = "tokenizer.ggml.remove_extra_whitespaces";
        if metadata.bool(what)? == Some(true) {
            let value = "true".to_owned();
            return Err(Unsupported::Feature { what, value, supported: "false" }.into());
        }
        let token_types =
            metadata.ints("tokenizer.ggml.token_type")?.unwrap_or_else(|| vec![NORMAL; tokens.len()]);
        if token_types.len() != tokens.len() {
            let (got, want) = (token_types.len() as u64, tokens.len() as u64);
            let what = "the number of tokenizer.ggml.token_type";
            return Err(FormatError::Disagree { what, got, other: "tokenizer.ggml.tokens", want }.into());
        }
        let id = |key: &str, what| id(metadata, key, what, tokens.len());
        let (bos, eos) = (id("bos_token_id", "the begin token")?, id("eos_token_id", "the end token")?);
        let unk = id("unknown_token_id", "the unknown token")?;
        let stated = metadata.bool("tokenizer.ggml.add_bos_token")?;
        // llama.cpp adds the begin token of Gemma 4 whatever the file says.
        let add_bos = is_gemma4 || stated.unwrap_or(is_scored || PRES_THAT_ADD_BOS.contains(&pre));
        if add_bos && bos.is_none() {
            return Err(GgufError::KeyMissing { key: "tokenizer.ggml.bos_token_id".to_owned() }.into());
        }
        let chat_template = metadata.str("tokenizer.chat_template")?.map(str::to_owned);
        let (model, pre) = (model.to_owned(), pre.to_owned());
        Ok(Self {
            model,
            pre,
            tokens,
            token_types,
            merges,
            scores,
            add_space_prefix,
            add_bos,
            bos,
            eos,
            unk,
            chat_template,
        })
    }
}

/// Returns the string `key`, which must be one of `known`. Errors: [`Unsupported::Feature`], also if it is absent.
fn known<'a>(
    metadata: &Metadata<'a>,
    key: &'static str,
    known: &[&str],
    supported: &'static str,
) -> Result<&'a str> {
    let value = metadata.str(key)?.unwrap_or("(absent)");
    if known.contains(&value) {
        return Ok(value);
    }
    Err(Unsupported::Feature { what: key, value: value.to_owned(), supported }.into())
}

fn strings(metadata: &Metadata<'_>, key: &str) -> Result<Vec<String>, GgufError> {
    metadata.strings(key)?.ok_or_else(|| GgufError::KeyMissing { key: key.to_owned() })
}

/// Reads the scores: one for each token, all finite.
fn scores(metadata: &Metadata<'_>, n_tokens: usize) -> Result<Vec<f32>> {
    const KEY: &str = "tokenizer.ggml.scores";
    let scores = metadata.floats(KEY)?.ok_or_else(|| GgufError::KeyMissing { key: KEY.to_owned() })?;
    if scores.len() != n_tokens {
        let (got, want) = (scores.len() as u64, n_tokens as u64);
        return Err(FormatError::Disagree { what: KEY, got, other: "tokenizer.ggml.tokens", want }.into());
    }
    match scores.iter().find(|score| !score.is_finite()) {
        None => Ok(scores),
        Some(&got) => {
            let (min, max) = (f64::from(f32::MIN), f64::from(f32::MAX));
            Err(FormatError::Bounds { what: "a token's score", got: got.into(), min, max }.into())
        }
    }
}

fn id(metadata: &Metadata<'_>, key: &str, what: &'static str, vocab_size: usize) -> Result<Option<u32>> {
    let Some(stated) = metadata.uint(&format!("tokenizer.ggml.{key}"))? else { return Ok(None) };
    let id = u32::try_from(stated).unwrap_or(u32::MAX);
    check_id(what, id, vocab_size)?;
    Ok(Some(id))
}
