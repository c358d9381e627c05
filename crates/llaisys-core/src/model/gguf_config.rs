//! Metadata of a GGUF file -> [`ModelConfig`].
//!
//! Keys are those of the GGUF specification, `<architecture>.…`; what would change the output and is not
//! implemented is refused by name.

use crate::error::{Result, Unsupported};
use crate::formats::gguf::Header;
use crate::formats::gguf::metadata::{Metadata, Value};
use crate::formats::{FormatError, GgufError};
use crate::model::config::{ModelConfig, add_ids};
use crate::model::family;
use crate::model::tokenizer::GgufTokenizer;

/// llama.cpp's default where a file names no base.
const ROPE_THETA_DEFAULT: f64 = 10_000.0;
const EOS_KEYS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// The facts of a GGUF file, with those of its tokenizer.
///
/// Errors: damage, a missing or wrong key; [`Unsupported`] for what the forward pass or the tokenizer lacks.
pub(super) fn read(header: &Header<'_>) -> Result<(ModelConfig, GgufTokenizer)> {
    let metadata = &header.metadata;
    let architecture = required(metadata.str("general.architecture")?, "general.architecture")?;
    let family = family::find(architecture, |family| family.gguf_architecture)?;
    let keys = Keys { metadata, architecture };
    refuse_unsupported(&keys, header)?;
    let tokenizer = GgufTokenizer::read(metadata)?;

    let n_heads = keys.required_size("attention.head_count")?;
    let d_model = keys.required_size("embedding_length")?;
    let vocab_size = keys.size("vocab_size")?.unwrap_or(tokenizer.tokens.len());
    let mut eos = Vec::new();
    for key in EOS_KEYS {
        let id = metadata.uint(key)?.map(|id| u32::try_from(id).unwrap_or(u32::MAX));
        add_ids(&mut eos, id.as_slice());
    }
    let config = ModelConfig {
        family,
        n_layers: keys.required_size("block_count")?,
        d_model,
        n_heads,
        n_kv_heads: keys.size("attention.head_count_kv")?.unwrap_or(n_heads),
        d_head: d_head(&keys, d_model, n_heads)?,
        d_ff: keys.required_size("feed_forward_length")?,
        vocab_size,
        max_positions: keys.required_size("context_length")?,
        rms_eps: keys.required_float("attention.layer_norm_rms_epsilon")? as f32,
        rope_theta: keys.float("rope.freq_base")?.unwrap_or(ROPE_THETA_DEFAULT),
        tied_head: !header.tensor_names().any(|name| name == family.gguf_names.lm_head),
        qkv_bias: family.qkv_bias,
        qk_norm: family.qk_norm,
        bos: tokenizer.bos,
        eos,
    };
    config.check()?;
    keys.expect_whole_head_rotated(config.d_head)?;
    keys.refuse_window(config.max_positions)?;
    if tokenizer.tokens.len() != vocab_size {
        let (got, want) = (tokenizer.tokens.len() as u64, vocab_size as u64);
        let disagree = FormatError::Disagree { what: "the number of tokens", got, other: "vocab_size", want };
        return Err(disagree.into());
    }
    Ok((config, tokenizer))
}

fn d_head(keys: &Keys<'_>, d_model: usize, n_heads: usize) -> Result<usize> {
    let (key, value) = (keys.size("attention.key_length")?, keys.size("attention.value_length")?);
    if let (Some(key), Some(value)) = (key, value)
        && key != value
    {
        return Err(unsupported(
            "heads of unequal width",
            format!("{key} and {value}"),
            "keys as wide as values",
        )
        .into());
    }
    if let Some(d_head) = key.or(value) {
        return Ok(d_head);
    }
    let (what, of) = ("embedding_length", "attention.head_count");
    let uneven = FormatError::NotAMultiple { what, got: d_model, of, divisor: n_heads };
    Ok(d_model.checked_div(n_heads).filter(|_| d_model.is_multiple_of(n_heads)).ok_or(uneven)?)
}

/// The keys below `<architecture>.`.
struct Keys<'a> {
    metadata: &'a Metadata<'a>,
    architecture: &'a str,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// A whole number. Errors: another type; an array (a size for each layer) by name.
    fn size(&self, key: &str) -> Result<Option<usize>> {
        let key = self.full(key);
        if let Some(Value::Array(_)) = self.metadata.get(&key) {
            return Err(unsupported("a size for each layer", key, "one size for all layers").into());
        }
        Ok(self.metadata.uint(&key)?.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
    }

    fn required_size(&self, key: &str) -> Result<usize> {
        required(self.size(key)?, &self.full(key))
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        Ok(self.metadata.float(&self.full(key))?)
    }

    fn required_float(&self, key: &str) -> Result<f64> {
        required(self.float(key)?, &self.full(key))
    }

    /// Refuses a float key that is there with another value than its neutral ones.
    fn expect_neutral(&self, key: &str, neutral: &[f64]) -> Result<()> {
        match self.float(key)? {
            Some(value) if !neutral.contains(&value) => {
                Err(unsupported("the key", format!("{} = {value}", self.full(key)), "files without it")
                    .into())
            }
            _ => Ok(()),
        }
    }

    fn expect_whole_head_rotated(&self, d_head: usize) -> Result<()> {
        match self.size("rope.dimension_count")? {
            Some(rotated) if rotated != d_head => {
                let value = format!("{rotated} of {d_head} elements of a head");
                Err(unsupported("rotating", value, "rotating the whole head").into())
            }
            _ => Ok(()),
        }
    }

    fn refuse_window(&self, max_positions: usize) -> Result<()> {
        match self.size("attention.sliding_window")? {
            Some(window) if window > 0 && window < max_positions => Err(unsupported(
                "a sliding window of attention",
                format!("{window} of {max_positions} positions"),
                "attention over the whole context",
            )
            .into()),
            _ => Ok(()),
        }
    }
}

fn refuse_unsupported(keys: &Keys<'_>, header: &Header<'_>) -> Result<()> {
    match keys.metadata.str("general.type")? {
        None | Some("model") => {}
        Some(other) => return Err(unsupported("a GGUF file of the type", other, "model").into()),
    }
    if let Some(n_experts) = keys.size("expert_count")?
        && n_experts > 0
    {
        return Err(unsupported("a mixture of experts", n_experts, "dense models").into());
    }
    if keys.metadata.bool(&keys.full("attention.causal"))? == Some(false) {
        return Err(unsupported("attention.causal", false, "causal attention").into());
    }
    match keys.metadata.str(&keys.full("rope.scaling.type"))? {
        None | Some("none") => {
            keys.expect_neutral("rope.scaling.factor", &[0.0, 1.0])?;
            keys.expect_neutral("rope.scale_linear", &[0.0, 1.0])?;
        }
        Some(kind) => return Err(unsupported("the rope type", kind, "none").into()),
    }
    // The frequency factors of the llama3 rope come as a tensor, and no key tells.
    if let Some(factors) = header.tensor_names().find(|name| name.starts_with("rope_f")) {
        return Err(unsupported("the rope type", format!("llama3 ({factors})"), "none").into());
    }
    for key in ["logit_scale", "embedding_scale", "residual_scale"] {
        keys.expect_neutral(key, &[0.0, 1.0])?;
    }
    keys.expect_neutral("attention.scale", &[0.0])
}

fn required<T>(value: Option<T>, key: &str) -> Result<T> {
    Ok(value.ok_or_else(|| GgufError::KeyMissing { key: key.to_owned() })?)
}

fn unsupported(what: &'static str, value: impl ToString, supported: &'static str) -> Unsupported {
    Unsupported::Feature { what, value: value.to_string(), supported }
}
