//! Typed access to the keys of a JSON object. A key that is `null` counts as absent, as in transformers.

use crate::error::FormatError;
use serde_json::{Map, Value};

/// An object of a configuration file.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a> {
    /// The file's name, for error messages.
    pub file: &'static str,
    /// The object.
    pub map: &'a Map<String, Value>,
}

/// Upper bound on the ids that one key lists.
const IDS_MAX: usize = 1 << 10;

impl<'a> Fields<'a> {
    /// The value of `key` unless it is absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        key: &'static str,
        expected: &'static str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, FormatError> {
        let wrong = || FormatError::KeyType { file: self.file, key, expected };
        self.get(key).map(|value| convert(value).ok_or_else(wrong)).transpose()
    }

    /// A whole number from 0. Errors: another type.
    pub fn size(&self, key: &'static str) -> Result<Option<usize>, FormatError> {
        self.typed(key, "a whole number from 0", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// As [`Self::size`]. Errors also: absent.
    pub fn required_size(&self, key: &'static str) -> Result<usize, FormatError> {
        self.size(key)?.ok_or(FormatError::KeyMissing { file: self.file, key })
    }

    /// A number. Errors: another type.
    pub fn number(&self, key: &'static str) -> Result<Option<f64>, FormatError> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// A whole number of either sign. Errors: another type.
    pub fn integer(&self, key: &'static str) -> Result<Option<i64>, FormatError> {
        self.typed(key, "a whole number", Value::as_i64)
    }

    /// A truth value. Errors: another type.
    pub fn flag(&self, key: &'static str) -> Result<Option<bool>, FormatError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// Text. Errors: another type.
    pub fn text(&self, key: &'static str) -> Result<Option<&'a str>, FormatError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A list. Errors: another type.
    pub fn list(&self, key: &'static str) -> Result<Option<&'a [Value]>, FormatError> {
        self.typed(key, "a list", |v| v.as_array().map(Vec::as_slice))
    }

    /// An object. Errors: another type.
    pub fn object(&self, key: &'static str) -> Result<Option<Fields<'a>>, FormatError> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields { file: self.file, map }))
    }

    /// One token id or a list of them; empty if absent. Errors: another type, too many ids.
    pub fn token_ids(&self, key: &'static str) -> Result<Vec<u32>, FormatError> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = self.typed(key, "a token id or a list of token ids", |value| match value {
            Value::Array(ids) if ids.len() <= IDS_MAX => ids.iter().map(id).collect(),
            single => id(single).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}
