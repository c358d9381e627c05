//! Reads the keys of an architecture, `<architecture>.…`, from the metadata of a GGUF file.

use super::Header;
use super::metadata::{Metadata, Value};
use crate::arch::spec::{ArchSpec, SoftCap};
use crate::error::{FormatError, GgufError, Result, Unsupported};

/// The keys below `<architecture>.`.
pub(in crate::load) struct Keys<'a> {
    pub(in crate::load) metadata: &'a Metadata<'a>,
    pub(in crate::load) architecture: &'a str,
}

impl<'a> Keys<'a> {
    /// The keys of the file's architecture. Errors: the file names none.
    pub(in crate::load) fn of(header: &'a Header<'a>) -> Result<Self> {
        let metadata = &header.metadata;
        let architecture = required(metadata.str("general.architecture")?, "general.architecture")?;
        Ok(Self { metadata, architecture })
    }

    /// Rejects files that are not models, such as adapters.
    pub(in crate::load) fn expect_model(&self) -> Result<()> {
        match self.metadata.str("general.type")? {
            None | Some("model") => Ok(()),
            Some(other) => Err(Unsupported::feature("a GGUF file of the type", other, "model").into()),
        }
    }

    /// Reads llama.cpp's number for how hidden states become an embedding.
    pub(in crate::load) fn pooling_type(&self) -> Result<Option<u64>> {
        Ok(self.metadata.uint(&self.full("pooling_type"))?)
    }

    pub(in crate::load) fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// Reads a whole number. Errors: another type; an array (a size for each layer).
    pub(in crate::load) fn size(&self, key: &str) -> Result<Option<usize>> {
        let key = self.full(key);
        if let Some(Value::Array(_)) = self.metadata.get(&key) {
            return Err(Unsupported::feature("a size for each layer", key, "one size for all layers").into());
        }
        Ok(self.metadata.uint(&key)?.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
    }

    /// As [`Self::size`]; an array must have the same size for every layer. Errors also: another number of layers.
    pub(in crate::load) fn size_of_layers(&self, key: &str, n_layers: usize) -> Result<Option<usize>> {
        let full = self.full(key);
        let Some(sizes) = self.metadata.uints(&full)? else { return self.size(key) };
        if let [first, ref rest @ ..] = sizes[..]
            && rest.len() + 1 == n_layers
            && rest.iter().all(|&size| size == first)
        {
            return Ok(Some(usize::try_from(first).unwrap_or(usize::MAX)));
        }
        Err(Unsupported::feature("a size for each layer", full, "one size for all layers").into())
    }

    /// Reads the size of each layer: an array, or one number for all. Errors: none, or an array of another length.
    pub(in crate::load) fn sizes(&self, key: &'static str, n_layers: usize) -> Result<Vec<usize>> {
        let Some(listed) = self.metadata.uints(&self.full(key))? else {
            return Ok(vec![self.required_size(key)?; n_layers]);
        };
        expect_length(key, listed.len(), n_layers)?;
        Ok(listed.into_iter().map(|n| usize::try_from(n).unwrap_or(usize::MAX)).collect())
    }

    pub(in crate::load) fn required_size(&self, key: &str) -> Result<usize> {
        required(self.size(key)?, &self.full(key))
    }

    pub(in crate::load) fn float(&self, key: &str) -> Result<Option<f64>> {
        Ok(self.metadata.float(&self.full(key))?)
    }

    pub(in crate::load) fn required_float(&self, key: &str) -> Result<f64> {
        required(self.float(key)?, &self.full(key))
    }

    /// Rejects a float key with a value other than its neutral ones.
    pub(in crate::load) fn expect_neutral(&self, key: &str, neutral: &[f64]) -> Result<()> {
        match self.float(key)? {
            Some(value) if !neutral.contains(&value) => Err(Unsupported::feature(
                "the key",
                format!("{} = {value}", self.full(key)),
                "files without it",
            )
            .into()),
            _ => Ok(()),
        }
    }

    pub(in crate::load) fn expect_whole_head_rotated(&self, arch: &ArchSpec, d_head: usize) -> Result<()> {
        match self.size("rope.dimension_count")? {
            Some(rotated) if rotated != d_head && arch.rope.partial_default.is_none() => {
                let value = format!("{rotated} of {d_head} elements of a head");
                Err(Unsupported::feature("rotating", value, "rotating the whole head").into())
            }
            _ => Ok(()),
        }
    }

    /// Reads a multiplier; 0 means unset.
    pub(in crate::load) fn multiplier(&self, key: &str) -> Result<f32> {
        Ok(self.float(key)?.filter(|&scale| scale != 0.0).unwrap_or(1.0) as f32)
    }

    /// Reads the soft cap, or returns the architecture's default; 0 means none.
    pub(in crate::load) fn soft_cap(&self, key: &str, rule: SoftCap) -> Result<Option<f32>> {
        let stated = self.float(key)?;
        match rule {
            SoftCap::Unsupported => self.expect_neutral(key, &[0.0]).map(|()| None),
            SoftCap::Stated(default) => {
                Ok(stated.or(default).filter(|&cap| cap != 0.0).map(|cap| cap as f32))
            }
        }
    }
}

/// Rejects a list `what` that has not one value for each layer.
pub(in crate::load) fn expect_length(
    what: &'static str,
    length: usize,
    n_layers: usize,
) -> Result<(), FormatError> {
    let (got, want) = (length as u64, n_layers as u64);
    if got == want { Ok(()) } else { Err(FormatError::Disagree { what, got, other: "block_count", want }) }
}

pub(in crate::load) fn required<T>(value: Option<T>, key: &str) -> Result<T> {
    Ok(value.ok_or_else(|| GgufError::KeyMissing { key: key.to_owned() })?)
}
