//! A hash of what keys and values depend on other than tokens and positions. Contexts with equal fingerprints may
//! exchange cells.

use super::ContextConfig;
use crate::error::Result;
use crate::load::checkpoint::Checkpoint;
use xxhash_rust::xxh3::Xxh3;

/// Increased when the same inputs produce different keys or values, or when the layout of a cell changes.
const KV_FORMAT: u32 = 1;

/// The hashes of tensors follow the names of each group of this many bytes. Session files contain fingerprints, so this
/// must not change.
const GROUP_BYTES: usize = 16 << 20;

/// A 128-bit XXH3 (xxhash.com) over the model's configuration and all its tensors, as the checkpoint has them,
/// their number formats, and the layout of a cell. It distinguishes files; it does not protect against forgery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint(u128);

impl Fingerprint {
    /// Uses the hashes that were computed while the weights were loaded, and reads only the tensors that the model
    /// ignores. `backend_format` names what computes and the type of a cell. Errors: as [`Checkpoint::hashes`].
    pub(crate) fn new(checkpoint: &Checkpoint, config: &ContextConfig, backend_format: &str) -> Result<Self> {
        let mut hasher = Xxh3::new();
        hasher.update(&KV_FORMAT.to_le_bytes());
        hasher.update(format!("{:?} {:?} {backend_format}", checkpoint.config(), config.mode).as_bytes());
        // The bytes of a cell are ordered by rank.
        if config.n_ranks > 1 {
            hasher.update(format!("{} ranks", config.n_ranks).as_bytes());
        }
        let (mut hashes, mut n_bytes) = (Vec::new(), 0);
        for tensor in checkpoint.hashes() {
            let (tensor, hash) = tensor?;
            hasher.update(format!("{} {:?} {:?}", tensor.name, tensor.dtype, tensor.shape).as_bytes());
            hashes.extend(hash.to_le_bytes());
            n_bytes += tensor.range.len();
            if n_bytes >= GROUP_BYTES {
                hasher.update(&hashes);
                hashes.clear();
                n_bytes = 0;
            }
        }
        hasher.update(&hashes);
        Ok(Self(hasher.digest128()))
    }

    /// Returns the fingerprint after one of the weights was replaced.
    pub(crate) fn with_replaced(self, name: &str, values: &[f32]) -> Self {
        let mut hasher = Xxh3::new();
        hasher.update(&self.0.to_le_bytes());
        hasher.update(name.as_bytes());
        values.iter().for_each(|value| hasher.update(&value.to_le_bytes()));
        Self(hasher.digest128())
    }
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
