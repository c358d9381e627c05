//! `generation_config.json`: the ids that end an answer, and what sampling the model's makers suggest.

use crate::formats::FormatError;
use crate::formats::folder::ModelFolder;
use crate::model::fields::Fields;
use serde::Serialize;

const FILE: &str = "generation_config.json";

/// Sampling defaults; None where the file is silent. As in vLLM they count whatever `do_sample` says.
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

/// What the file says; nothing if there is none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationConfig {
    /// Ids that end an answer.
    pub eos: Vec<u32>,
    /// Sampling defaults.
    pub defaults: SamplingDefaults,
}

impl GenerationConfig {
    /// Reads the file of a folder. Errors: damaged JSON, a key of the wrong type. Bounds are checked where the
    /// values are used, as a caller may choose to ignore them.
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
