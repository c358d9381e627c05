//! Checks `tokenizer.json` before the `tokenizers` package reads it.
//!
//! The package trusts the file: it allocates what the file requests and runs its regular expressions. The normalizers
//! and templates of a file can multiply a text. This module checks size, nesting, counts, patterns and growth, but not
//! the meaning of fields.

mod growth;
mod pattern;

use super::folder::ModelFolder;
use super::json::{DEPTH_MAX, Strict};
use crate::error::FormatError;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;

/// Bytes of the file that are read.
pub const BYTES_MAX: u64 = 64 << 20;
/// Entries of the vocabulary.
pub const VOCAB_MAX: u32 = 1 << 20;
/// Merges.
pub const MERGES_MAX: u32 = 1 << 21;
/// Added tokens, which are matched before all others.
pub const ADDED_MAX: u32 = 1 << 17;
/// Total bytes of the added tokens. The package builds an automaton with a state for each byte.
pub const ADDED_BYTES_MAX: usize = 2 << 20;
/// Values in the rest of the file.
pub const VALUES_MAX: u32 = 1 << 16;
/// Values of one added token or one merge.
const ENTRY_VALUES_MAX: u32 = 32;

const FILE: &str = "tokenizer.json";

/// Checks the folder's `tokenizer.json`, if there is one. Errors: as [`check`] and [`ModelFolder::read`].
pub fn check_folder(folder: &ModelFolder) -> Result<(), FormatError> {
    folder.read(FILE, BYTES_MAX)?.map_or(Ok(()), |bytes| check(&bytes))
}

/// Checks the bytes of a `tokenizer.json`. Allocates less memory than the file has bytes.
///
/// Errors: [`FormatError::Json`] (no JSON, too deep, too many values, a repeated key), [`FormatError::Pattern`],
/// [`FormatError::Growth`].
pub fn check(bytes: &[u8]) -> Result<(), FormatError> {
    let rejected = |source| FormatError::Json { file: FILE.to_owned(), source };
    let mut input = serde_json::Deserializer::from_slice(bytes);
    let values_left = Cell::new(VALUES_MAX);
    let parts = input.deserialize_map(Root { values_left: &values_left }).map_err(rejected)?;
    input.end().map_err(rejected)?;
    parts.values().try_for_each(pattern::check_all)?;
    growth::check_normalizer(parts.get("normalizer").unwrap_or(&Value::Null))?;
    growth::check_post_processor(parts.get("post_processor").unwrap_or(&Value::Null))
}

/// The whole file. The model and the added tokens are only counted; the rest is returned.
struct Root<'a> {
    values_left: &'a Cell<u32>,
}

impl<'de> Visitor<'de> for Root<'_> {
    type Value = BTreeMap<String, Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut parts = BTreeMap::new();
        while let Some(key) = entries.next_key::<String>()? {
            let value = match key.as_str() {
                "model" => {
                    entries.next_value_seed(Model { values_left: self.values_left })?;
                    Value::Null
                }
                "added_tokens" => {
                    entries.next_value_seed(Entries { what: "added tokens", max: ADDED_MAX, n_bytes: 0 })?;
                    Value::Null
                }
                _ => entries.next_value_seed(Strict::new(self.values_left, DEPTH_MAX))?,
            };
            if parts.insert(key, value).is_some() {
                return Err(A::Error::custom("a key of the file occurs twice"));
            }
            if parts.len() > 64 {
                return Err(A::Error::custom("more than 64 keys in the file"));
            }
        }
        Ok(parts)
    }
}

/// `model`: its vocabulary and merges are counted.
struct Model<'a> {
    values_left: &'a Cell<u32>,
}

impl<'de> DeserializeSeed<'de> for Model<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<(), D::Error> {
        input.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Model<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let (mut has_vocab, mut has_merges) = (false, false);
        while let Some(key) = entries.next_key::<String>()? {
            let seen = match key.as_str() {
                "vocab" => {
                    entries.next_value_seed(Entries {
                        what: "entries of vocab",
                        max: VOCAB_MAX,
                        n_bytes: 0,
                    })?;
                    &mut has_vocab
                }
                "merges" => {
                    entries.next_value_seed(Entries { what: "merges", max: MERGES_MAX, n_bytes: 0 })?;
                    &mut has_merges
                }
                _ => {
                    entries.next_value_seed(Strict::new(self.values_left, DEPTH_MAX))?;
                    continue;
                }
            };
            if std::mem::replace(seen, true) {
                return Err(A::Error::custom(format_args!("the key {key:?} of the model occurs twice")));
            }
        }
        Ok(())
    }
}

/// A long list or map of small entries, which are counted and dropped. `n_bytes` counts the texts of added tokens.
struct Entries {
    what: &'static str,
    max: u32,
    n_bytes: usize,
}

impl Entries {
    fn check_count<E: Error>(&self, n: u32) -> Result<(), E> {
        if n > self.max {
            return Err(E::custom(format_args!("more than {} {}", self.max, self.what)));
        }
        Ok(())
    }

    fn check_text<E: Error>(&mut self, entry: &Value) -> Result<(), E> {
        let n_bytes = entry.get("content").and_then(Value::as_str).map_or(0, str::len);
        self.n_bytes = self.n_bytes.saturating_add(n_bytes);
        if self.n_bytes > ADDED_BYTES_MAX {
            return Err(E::custom(format_args!("more than {ADDED_BYTES_MAX} bytes of added tokens")));
        }
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Entries {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<(), D::Error> {
        input.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Entries {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list or map of {}", self.what)
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let mut n = 0_u32;
        while entries.next_key::<IgnoredAny>()?.is_some() {
            n = n.saturating_add(1);
            self.check_count(n)?;
            entries.next_value::<f64>()?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        let mut n = 0_u32;
        loop {
            let values_left = Cell::new(ENTRY_VALUES_MAX);
            let Some(entry) = items.next_element_seed(Strict::new(&values_left, 2))? else { return Ok(()) };
            n = n.saturating_add(1);
            self.check_count(n)?;
            self.check_text(&entry)?;
        }
    }
}
