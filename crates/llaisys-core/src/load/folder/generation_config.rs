//! `generation_config.json`: the ids that end a completion, and the sampling defaults of the model.

use crate::error::FormatError;
use crate::load::folder::ModelFolder;
use crate::load::folder::fields::Fields;
use serde::Serialize;

const FILE: &str = "generation_config.json";

/// Sampling defaults; None where the file has none. As in vLLM, `do_sample` does not affect them.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct SamplingDefaults {
    /// 0 or more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    /// 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// -1 or 0: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<i64>,
    /// 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
    /// Above 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f64>,
}

/// The contents of the file; empty if there is none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationConfig {
    /// Ids that end a completion.
    pub eos: Vec<u32>,
    /// Sampling defaults.
    pub defaults: SamplingDefaults,
}

impl GenerationConfig {
    /// Reads the file of a folder. Bounds are checked where the values are used, because a caller may ignore them.
    /// Errors: damaged JSON, a key of the wrong type.
    pub fn read(folder: &ModelFolder) -> Result<Self, FormatError> {
        let Some(map) = folder.object(FILE)? else { return Ok(Self::default()) };
        let fields = Fields { file: FILE, map: &map };
        let defaults = SamplingDefaults {
            temperature: fields.number("temperature")?,
            top_p: fields.number("top_p")?,
            top_k: fields.integer("top_k")?,
            min_p: fields.number("min_p")?,
            repetition_penalty: fields.number("repetition_penalty")?,
        };
        Ok(Self { eos: fields.token_ids("eos_token_id")?, defaults })
    }
}
