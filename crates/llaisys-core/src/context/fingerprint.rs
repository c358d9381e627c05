//! What keys and values are a function of, besides tokens and positions: two contexts of one fingerprint may read
//! each other's.

use super::ContextConfig;
use crate::model::checkpoint::Checkpoint;
use crate::threads::Pool;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Goes up when the same inputs come to give other keys or values, or a cell another layout.
const KV_FORMAT: u32 = 1;

/// Tensors of so many bytes together are hashed at a time.
const HELD_BYTES: usize = 16 << 20;

/// A 128-bit XXH3 (xxhash.com) over the model's configuration and all its tensors, as the checkpoint has them, the
/// way they are computed with, and the layout of a cell. It tells files apart, it does not protect against forgery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fingerprint(u128);

impl Fingerprint {
    /// Reads every tensor once, over all threads of `pool`; of the files, at most [`HELD_BYTES`] and one tensor are
    /// in memory at a time. `how`: what computes, and the type of a cell.
    pub(super) fn new(checkpoint: &Checkpoint, config: &ContextConfig, pool: &Pool, how: &str) -> Self {
        let mut hasher = Xxh3::new();
        hasher.update(&KV_FORMAT.to_le_bytes());
        hasher.update(format!("{:?} {:?} {how}", checkpoint.config(), config.mode).as_bytes());
        // A cell's bytes lie rank by rank.
        if config.n_ranks > 1 {
            hasher.update(format!("{} ranks", config.n_ranks).as_bytes());
        }
        let (mut held, mut n_bytes) = (Vec::new(), 0);
        for (name, tensor) in checkpoint.stored() {
            hasher.update(format!("{name} {:?} {:?}", tensor.dtype, tensor.shape).as_bytes());
            n_bytes += tensor.bytes.len();
            held.push((tensor.bytes, 0_u128));
            if n_bytes >= HELD_BYTES {
                hash(&mut held, pool, &mut hasher);
                checkpoint.release_pages();
                n_bytes = 0;
            }
        }
        hash(&mut held, pool, &mut hasher);
        checkpoint.release_pages();
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

/// Takes the hash of each tensor's bytes into `hasher`, in order.
fn hash(held: &mut Vec<(&[u8], u128)>, pool: &Pool, hasher: &mut Xxh3) {
    pool.run_chunks(held, 1, &|_, chunk| {
        for (bytes, hash) in chunk {
            *hash = xxh3_128(bytes);
        }
    });
    for (_, hash) in held.drain(..) {
        hasher.update(&hash.to_le_bytes());
    }
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
