//! Reads the properties of a model without its weights.

use super::checkpoint::Checkpoint;
use super::encoder::{EncoderCheckpoint, gguf as encoder_gguf};
use super::folder::ModelFolder;
use super::gguf::{GgufFile, config as gguf_config};
use super::model_info::ModelInfo;
use super::tokenizer_json;
use crate::error::Result;
use std::path::Path;

/// Files of a folder that the Python code reads.
const PYTHON_FILES: [&str; 5] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",
    "1_Pooling/config.json",
];

impl Checkpoint {
    /// Reads the [`ModelInfo`] of a checkpoint, also of an encoder's. The files of a folder that the Python code reads are
    /// checked too: they must be in the folder, and `tokenizer.json` must be within the bounds that protect the library
    /// that reads it.
    ///
    /// Errors: as [`Self::open`], `ModelFolder::regular_file` and `tokenizer_json::check`.
    pub fn inspect(path: &Path) -> Result<ModelInfo> {
        let Some(folder) = ModelFolder::find(path)? else { return Self::inspect_gguf(path) };
        let info = match EncoderCheckpoint::open_folder(&folder, path)? {
            Some(encoder) => encoder.info().clone(),
            None => Self::open_folder(&folder, path)?.info().clone(),
        };
        PYTHON_FILES.into_iter().try_for_each(|name| folder.regular_file(name).map(drop))?;
        tokenizer_json::check_folder(&folder)?;
        Ok(info)
    }

    fn inspect_gguf(path: &Path) -> Result<ModelInfo> {
        let file = GgufFile::open(path)?;
        let header = file.with_header(|header| match encoder_gguf::read(header)? {
            Some(encoder) => Ok(Err(encoder)),
            None => gguf_config::read(header).map(Ok),
        })?;
        match header {
            Ok(decoder) => Ok(Self::of_gguf(file, decoder, path)?.info().clone()),
            Err(encoder) => Ok(EncoderCheckpoint::of_gguf(file, encoder, path)?.info().clone()),
        }
    }
}
