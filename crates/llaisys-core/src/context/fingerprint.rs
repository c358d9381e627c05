//! What keys and values are a function of, besides tokens and positions: two contexts of one fingerprint may read
//! each other's.

use super::ContextConfig;
use crate::dtype::KvDType;
use crate::model::checkpoint::Checkpoint;
use crate::ops::dispatch::IsaName;
use crate::threads::Pool;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Goes up when the same inputs come to give other keys or values, or a cell another layout.
const KV_FORMAT: u32 = 1;

/// A 128-bit XXH3 (xxhash.com) over the model's configuration and all its tensors, as the checkpoint has them, the
/// way they are computed with, and the layout of a cell. It tells files apart, it does not protect against forgery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fingerprint(u128);

impl Fingerprint {
    /// Reads every tensor once, over all threads of `pool`.
    pub(super) fn new(
        checkpoint: &Checkpoint,
        config: &ContextConfig,
        pool: &Pool,
        how: (KvDType, IsaName),
    ) -> Self {
        let mut tensors: Vec<_> = checkpoint.slots().map(|slot| (slot, 0_u128)).collect();
        pool.run_chunks(&mut tensors, 1, &|_, chunk| {
            for (slot, hash) in chunk {
                *hash = checkpoint.tensor(*slot).map_or(0, |tensor| xxh3_128(tensor.bytes));
            }
        });
        let mut hasher = Xxh3::new();
        hasher.update(&KV_FORMAT.to_le_bytes());
        hasher.update(format!("{:?} {:?} {how:?}", checkpoint.config(), config.mode).as_bytes());
        for (slot, hash) in tensors {
            let facts = checkpoint.tensor(slot).map(|tensor| (tensor.dtype, tensor.shape));
            hasher.update(format!("{slot:?} {facts:?}").as_bytes());
            hasher.update(&hash.to_le_bytes());
        }
        Self(hasher.digest128())
    }

    /// That of the context after one of its weights was replaced.
    pub(super) fn with_replaced(self, name: &str, values: &[f32]) -> Self {
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
