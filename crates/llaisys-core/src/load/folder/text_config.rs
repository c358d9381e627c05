//! The configuration of a text model: `config.json`, or its `text_config` if the checkpoint is multimodal.

use crate::arch::wrapper::{self, Wrapper};
use crate::error::{FormatError, Result, Unsupported};
use crate::load::folder::fields::Fields;
use serde_json::{Map, Value};

/// Keys that apply to the text model and are often only outside of `text_config`.
const OUTER_KEYS: [&str; 6] = [
    "bos_token_id",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
];
const TIED: &str = "tie_word_embeddings";

/// The keys of a text model, and the multimodal architecture around it.
pub(super) struct TextConfig {
    pub(super) map: Map<String, Value>,
    pub(super) wrapper: Option<&'static Wrapper>,
}

/// Returns the keys of the text model of `config.json`.
///
/// Errors: a multimodal architecture without `text_config`; both state whether the head is tied, and disagree.
pub(super) fn read(whole: &Fields<'_>) -> Result<TextConfig> {
    let first = whole.list("architectures")?.and_then(<[Value]>::first).and_then(Value::as_str);
    let Some(wrapper) = first.and_then(wrapper::find) else {
        return Ok(TextConfig { map: whole.map.clone(), wrapper: None });
    };
    const KEY: &str = "text_config";
    let text = whole.object(KEY)?.ok_or(FormatError::KeyMissing { file: whole.file, key: KEY })?;
    if let (Some(inner), Some(outer)) = (text.flag(TIED)?, whole.flag(TIED)?)
        && inner != outer
    {
        let value = format!("{inner} in text_config, {outer} outside");
        return Err(Unsupported::feature(TIED, value, "the same in both places").into());
    }
    let mut map = text.map.clone();
    for key in OUTER_KEYS {
        if let (None, Some(outer)) = (text.get(key), whole.get(key)) {
            map.insert(key.to_owned(), outer.clone());
        }
    }
    for &(key, size) in wrapper.size_defaults {
        map.entry(key).or_insert_with(|| size.into());
    }
    Ok(TextConfig { map, wrapper: Some(wrapper) })
}
