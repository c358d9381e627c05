//! The tokenizer in a GGUF file: the data from which the Python code builds the tokenizer.

use crate::arch::bounds::check_id;
use crate::error::{FormatError, GgufError};
use crate::error::{Result, Unsupported};
use crate::load::gguf::metadata::Metadata;
use serde::Serialize;

/// Supported tokenizers: names, separated by a comma and a space.
#[derive(Debug, Clone, Copy)]
pub struct Supported {
    /// `tokenizer.ggml.model`.
    models: &'static str,
    /// `tokenizer.ggml.pre`, which selects how text is split into words before the merges of `gpt2`.
    pres: &'static str,
    /// Every text has a begin and an end token.
    is_encoder: bool,
}

/// Tokenizers of decoders: byte-level BPE, SentencePiece's BPE with scores for merges, and BPE of characters with bytes
/// for those that are no token.
pub const DECODERS: Supported = Supported {
    models: "gpt2, llama, gemma4",
    pres: "smollm, qwen2, qwen35, llama-bpe, lfm2, gpt-4o, default",
    is_encoder: false,
};

/// Tokenizers of encoders: WordPiece, SentencePiece's unigrams, byte-level BPE.
pub const ENCODERS: Supported =
    Supported { models: "bert, t5, gpt2", pres: "modern-bert, qwen2", is_encoder: true };

const SCORED: &str = "llama";
const GEMMA4: &str = "gemma4";
const WORD_PIECE: &str = "bert";
const UNIGRAM: &str = "t5";
/// With these values, llama.cpp adds the begin token where the file has no key for it.
const PRES_THAT_ADD_BOS: [&str; 2] = ["llama-bpe", "lfm2"];
/// The type of an ordinary token; the default where the file has no types.
const NORMAL: i32 = 1;

/// The same fields as `llaisys.model_info.GgufTokenizer`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GgufTokenizer {
    /// `tokenizer.ggml.model`: one of [`DECODERS`] or [`ENCODERS`].
    pub model: String,
    /// `tokenizer.ggml.pre` of the model `gpt2`; `default` for the others.
    pub pre: String,
    /// Tokens by id, with bytes as GPT-2's letters for them, or with spaces as U+2581.
    pub tokens: Vec<String>,
    /// Kind of each token (1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte).
    pub token_types: Vec<i32>,
    /// Merges of the models `gpt2` and `gemma4`, best first: two tokens separated by a space.
    pub merges: Vec<String>,
    /// Scores by id. Of the model `llama`: the possible merge with the highest score is applied; of `t5`: the tokens with
    /// the highest sum are chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scores: Option<Vec<f32>>,
    /// Of the models `llama` and `t5`: a space is inserted before the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub add_space_prefix: Option<bool>,
    /// Of the model `t5`: SentencePiece's table of replaced characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precompiled_charsmap: Option<Vec<u8>>,
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
    /// Reads `tokenizer.*`. Errors: a `model` or a `pre` that is not `supported`; a missing list, lists of unequal length,
    /// an id outside the vocabulary.
    pub(in crate::load) fn read(metadata: &Metadata<'_>, supported: Supported) -> Result<Self> {
        let model = known(metadata, "tokenizer.ggml.model", supported.models)?;
        let is_gemma4 = model == GEMMA4;
        let pre = match model {
            GEMMA4 | WORD_PIECE | UNIGRAM => "default",
            SCORED if metadata.get("tokenizer.ggml.pre").is_none() => "default",
            SCORED => known(metadata, "tokenizer.ggml.pre", "default")?,
            _ => known(metadata, "tokenizer.ggml.pre", supported.pres)?,
        };
        let tokens = strings(metadata, "tokenizer.ggml.tokens")?;
        let has_merges = !matches!(model, SCORED | WORD_PIECE | UNIGRAM);
        let merges = if has_merges { strings(metadata, "tokenizer.ggml.merges")? } else { Vec::new() };
        let is_scored = matches!(model, SCORED | UNIGRAM);
        let scores = is_scored.then(|| scores(metadata, tokens.len())).transpose()?;
        let add_space_prefix = match metadata.bool("tokenizer.ggml.add_space_prefix")? {
            stated if is_scored => Some(stated.unwrap_or(true)),
            _ => None,
        };
        let what = "tokenizer.ggml.remove_extra_whitespaces";
        if model != UNIGRAM && metadata.bool(what)? == Some(true) {
            let value = "true".to_owned();
            return Err(Unsupported::Feature { what, value, supported: "false" }.into());
        }
        let charsmap = || metadata.bytes("tokenizer.ggml.precompiled_charsmap");
        let precompiled_charsmap = if model == UNIGRAM { charsmap()? } else { None };
        let token_types =
            metadata.ints("tokenizer.ggml.token_type")?.unwrap_or_else(|| vec![NORMAL; tokens.len()]);
        if token_types.len() != tokens.len() {
            let (got, want) = (token_types.len() as u64, tokens.len() as u64);
            let what = "the number of tokenizer.ggml.token_type";
            return Err(FormatError::Disagree { what, got, other: "tokenizer.ggml.tokens", want }.into());
        }
        let id = |key: &str, what| id(metadata, key, what, tokens.len());
        let (mut bos, mut eos) =
            (id("bos_token_id", "the begin token")?, id("eos_token_id", "the end token")?);
        let unk = id("unknown_token_id", "the unknown token")?;
        let stated = metadata.bool("tokenizer.ggml.add_bos_token")?;
        if supported.is_encoder {
            // Older files name them so; the spelling is GGUF's.
            bos = id("cls_token_id", "the begin token")?.or(bos);
            eos = id("seperator_token_id", "the end token")?.or(eos);
            if eos.is_none() {
                return Err(GgufError::KeyMissing { key: "tokenizer.ggml.eos_token_id".to_owned() }.into());
            }
            if stated == Some(false) || metadata.bool("tokenizer.ggml.add_eos_token")? == Some(false) {
                let what = "an encoder's text without begin and end token";
                return Err(
                    Unsupported::feature(what, "add_bos_token or add_eos_token = false", "true").into()
                );
            }
        }
        // llama.cpp adds the begin token of Gemma 4 whatever the file says.
        let add_bos = is_gemma4
            || supported.is_encoder
            || stated.unwrap_or(model == SCORED || PRES_THAT_ADD_BOS.contains(&pre));
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
            precompiled_charsmap,
            add_bos,
            bos,
            eos,
            unk,
            chat_template,
        })
    }
}

/// Returns the string `key`, which must be one of `supported`. Errors: [`Unsupported::Feature`], also if it is absent.
fn known<'a>(metadata: &Metadata<'a>, key: &'static str, supported: &'static str) -> Result<&'a str> {
    let value = metadata.str(key)?.unwrap_or("(absent)");
    if supported.split(", ").any(|known| known == value) {
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
