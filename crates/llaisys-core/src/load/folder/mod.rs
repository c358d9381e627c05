//! A Hugging Face model folder: finds its files, and rejects links that lead outside of it.

pub(crate) mod config;
mod experts;
pub mod fields;
mod gemma4;
pub mod generation_config;
mod options;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
pub(crate) mod quantization;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
mod recurrent;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
mod rope;
mod text_config;
#[allow(clippy::arithmetic_side_effects, reason = "a checked configuration bounds these sizes")]
mod window;

use super::file::ModelFile;
use crate::error::FormatError;
use crate::load::json;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The file with the hyper-parameters.
pub const CONFIG_FILE: &str = "config.json";
/// Bytes of `config.json` and `generation_config.json` that are read.
pub const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// A folder and its roots. Each file of the folder must resolve to a path below one of the roots.
#[derive(Debug)]
pub struct ModelFolder {
    folder: PathBuf,
    roots: Vec<PathBuf>,
    config: OnceLock<Object>,
}

/// A JSON object.
type Object = serde_json::Map<String, serde_json::Value>;

impl ModelFolder {
    /// Opens the folder at `path`. Errors: it does not exist or cannot be read.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let io = |source| FormatError::Io { path: path.to_owned(), source };
        let folder = fs::canonicalize(path).map_err(io)?;
        let roots = hub_cache_roots(&folder).unwrap_or_else(|| vec![folder.clone()]);
        Ok(Self { folder, roots, config: OnceLock::new() })
    }

    /// As [`Self::open`]; None if `path` is a file. Errors: as [`Self::open`].
    pub(in crate::load) fn find(path: &Path) -> Result<Option<Self>, FormatError> {
        let io = |source| FormatError::Io { path: path.to_owned(), source };
        let is_folder = fs::metadata(path).map_err(io)?.is_dir();
        is_folder.then(|| Self::open(path)).transpose()
    }

    /// The path of the folder, symbolic links resolved.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Returns the path of the file `name` with links resolved; None if there is none. `name` is a path below the
    /// folder.
    ///
    /// Errors: [`FormatError::OutsideFolder`] if it is a link to a path outside the folder.
    pub fn file(&self, name: &str) -> Result<Option<PathBuf>, FormatError> {
        let named = self.folder.join(name);
        let path = match fs::canonicalize(&named) {
            Ok(path) => path,
            Err(source) if source.kind() == ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(FormatError::Io { path: named, source }),
        };
        if self.roots.iter().any(|root| path.starts_with(root)) {
            Ok(Some(path))
        } else {
            Err(FormatError::OutsideFolder { path: named, root: self.folder.clone() })
        }
    }

    /// As [`Self::file`], with its metadata. Errors: also [`FormatError::NotAFile`] for a pipe or a folder.
    pub fn regular_file(&self, name: &str) -> Result<Option<(PathBuf, Metadata)>, FormatError> {
        let Some(path) = self.file(name)? else { return Ok(None) };
        let metadata =
            fs::metadata(&path).map_err(|source| FormatError::Io { path: path.clone(), source })?;
        if metadata.is_file() { Ok(Some((path, metadata))) } else { Err(FormatError::NotAFile { path }) }
    }

    /// Reads file `name`; None if there is none. Errors: as [`Self::file`] and [`ModelFile::read_at`], or the file has
    /// more than `max` bytes.
    pub fn read(&self, name: &str, max: u64) -> Result<Option<Vec<u8>>, FormatError> {
        let Some(path) = self.file(name)? else { return Ok(None) };
        let file = ModelFile::open(&path)?;
        let bytes = file.n_bytes() as u64;
        if bytes > max {
            return Err(FormatError::TooLarge { file: name.to_owned(), bytes, max });
        }
        file.front(file.n_bytes()).map(Some)
    }

    /// Reads the JSON object in file `name`; None if there is no such file. Errors: as [`Self::read`] and
    /// [`json::parse`], or the file is not an object.
    pub fn object(&self, name: &'static str) -> Result<Option<Object>, FormatError> {
        let Some(bytes) = self.read(name, CONFIG_BYTES_MAX)? else { return Ok(None) };
        let rejected = |source| FormatError::Json { file: name.to_owned(), source };
        match json::parse(&bytes).map_err(rejected)? {
            serde_json::Value::Object(map) => Ok(Some(map)),
            _ => Err(FormatError::KeyType { file: name, key: "the whole file", expected: "an object" }),
        }
    }

    /// The object in [`CONFIG_FILE`], which is read once. Errors: as [`Self::object`], or there is no such file.
    pub fn config(&self) -> Result<&Object, FormatError> {
        if let Some(config) = self.config.get() {
            return Ok(config);
        }
        let missing = || FormatError::FileMissing { folder: self.folder.clone(), name: CONFIG_FILE };
        let config = self.object(CONFIG_FILE)?.ok_or_else(missing)?;
        Ok(self.config.get_or_init(|| config))
    }
}

/// Returns the roots of a folder in the Hub's cache; None for other folders.
///
/// The cache has `models--owner--name/snapshots/<revision>/*` as links into `models--owner--name/blobs`. Since
/// huggingface_hub 2, these files may be links into a `blobs` folder that all repositories share. So the roots are the
/// repository's folder and the shared one.
fn hub_cache_roots(folder: &Path) -> Option<Vec<PathBuf>> {
    let snapshots = folder.parent()?;
    let repository = snapshots.parent()?;
    let is_cache =
        snapshots.file_name()? == "snapshots" && repository.file_name()?.to_str()?.starts_with("models--");
    let shared = repository.parent()?.join("blobs");
    is_cache.then(|| vec![repository.to_owned(), shared])
}
