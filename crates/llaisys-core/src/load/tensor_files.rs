//! The tensors of a checkpoint: the range of each in its file, and its hash.

use super::file::{ModelFile, PIECE_BYTES};
use super::read_ahead::ReadAhead;
use crate::dtype::DType;
use crate::error::DeviceError;
use crate::error::FormatError;
use crate::threads::{Pool, Turn};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// One tensor in a file. Its parser has checked that `range` is within the file and is exactly `shape` elements of
/// `dtype`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// The name in the file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Sizes, slowest first.
    pub shape: Vec<usize>,
    /// Index of its file.
    pub file: usize,
    /// Its bytes in that file.
    pub range: Range<usize>,
}

/// All tensors of a checkpoint, in order of their names, and their files.
///
/// Every read also hashes its bytes, so that [`TensorFiles::hash`] does not have to read a tensor again.
pub struct TensorFiles {
    files: Vec<ModelFile>,
    tensors: Vec<StoredTensor>,
    hashes: Vec<Mutex<TensorHash>>,
    ahead: ReadAhead,
}

/// The XXH3 state of the bytes of a tensor that were read in order from the first.
#[derive(Default)]
struct TensorHash {
    /// None before the first byte and after the last.
    hasher: Option<Box<Xxh3>>,
    n_hashed: usize,
    digest: Option<u128>,
}

impl std::fmt::Debug for TensorFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TensorFiles").field("files", &self.files).finish_non_exhaustive()
    }
}

impl TensorHash {
    /// Hashes the part of `bytes` that continues the bytes hashed so far, if there is one. `bytes` begin at `start`.
    fn update(&mut self, start: usize, bytes: &[u8], n_bytes: usize) {
        let new = self.n_hashed.checked_sub(start).and_then(|n_known| bytes.get(n_known..));
        let Some(new) = new.filter(|new| !new.is_empty()) else { return };
        let hasher = self.hasher.get_or_insert_default();
        hasher.update(new);
        self.n_hashed = self.n_hashed.saturating_add(new.len());
        if self.n_hashed >= n_bytes {
            self.digest = Some(hasher.digest128());
            self.hasher = None;
        }
    }
}

/// Returns the first `n_bytes` bytes of `buffer`, which grows if it has fewer. Errors: no memory.
pub fn buffer_of(buffer: &mut Vec<u8>, n_bytes: usize) -> Result<&mut [u8], DeviceError> {
    if let Some(more) = n_bytes.checked_sub(buffer.len()) {
        let rejected = |_| DeviceError::Allocation { what: "tensors of a file", bytes: n_bytes };
        buffer.try_reserve_exact(more).map_err(rejected)?;
        buffer.resize(n_bytes, 0);
    }
    Ok(&mut buffer[..n_bytes])
}

impl TensorFiles {
    /// Collects checked tensors with unique names.
    pub(super) fn new(files: Vec<ModelFile>, mut tensors: Vec<StoredTensor>) -> Self {
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let hashes = tensors.iter().map(|_| Mutex::default()).collect();
        Self { files, tensors, hashes, ahead: ReadAhead::default() }
    }

    /// Removes the tensors whose names begin with one of `prefixes`; nothing was read yet. Returns the number of removed
    /// tensors for each prefix that has any.
    pub(super) fn skip(&mut self, prefixes: &[&'static str]) -> BTreeMap<&'static str, usize> {
        let mut n_skipped = BTreeMap::new();
        self.tensors.retain(|tensor| {
            let Some(&prefix) = prefixes.iter().find(|&&prefix| tensor.name.starts_with(prefix)) else {
                return true;
            };
            let n: &mut usize = n_skipped.entry(prefix).or_default();
            *n = n.saturating_add(1);
            false
        });
        self.hashes.truncate(self.tensors.len());
        n_skipped
    }

    /// The tensors, in order of their names.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// The index in [`Self::tensors`] of the tensor called `name`.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.tensors.binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()
    }

    /// Runs `load` while a thread reads the tensors `order`, those that [`Self::read`] will read, into the page cache.
    pub fn read_ahead<T>(&self, order: &[usize], load: impl FnOnce() -> T) -> T {
        let range = |&index: &usize| {
            let tensor = &self.tensors[index];
            (&self.files[tensor.file], tensor.range.clone())
        };
        self.ahead.during(order.iter().map(range), load)
    }

    /// Fills `out` with the bytes of tensor `index` from its byte `start`; the threads of `pool` share the work.
    ///
    /// Errors: [`FormatError::Truncated`], errors of the system. Panics if the tensor has no such bytes.
    pub fn read(&self, index: usize, start: usize, out: &mut [u8], pool: &Pool) -> Result<(), FormatError> {
        let (file, at) = self.locate(index, start, out.len());
        let failed = Mutex::new(None);
        pool.run_chunks_dynamic(out, PIECE_BYTES, &|i, piece| {
            let offset = at.saturating_add(i.saturating_mul(PIECE_BYTES));
            if let Err(error) = file.read_at(offset, piece) {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => {
                self.ahead.add_loaded(out.len());
                self.update_hash(index, start, out);
                Ok(())
            }
        }
    }

    /// As [`Self::read`], on this thread alone. The bytes are hashed when `turn` has come.
    pub fn read_in_turn(
        &self,
        index: usize,
        start: usize,
        out: &mut [u8],
        turn: &Turn<'_>,
    ) -> Result<(), FormatError> {
        let (file, at) = self.locate(index, start, out.len());
        file.read_at(at, out)?;
        self.ahead.add_loaded(out.len());
        turn.wait();
        self.update_hash(index, start, out);
        Ok(())
    }

    /// Calls `visit` with the bytes of tensor `index` from its byte `start`, in order and in pieces of [`PIECE_BYTES`].
    /// Errors: as [`Self::read`].
    pub fn visit(&self, index: usize, start: usize, visit: &mut dyn FnMut(&[u8])) -> Result<(), FormatError> {
        let n_bytes = self.tensors[index].range.len();
        let mut buffer = vec![0; PIECE_BYTES.min(n_bytes.saturating_sub(start))];
        for begin in (start..n_bytes).step_by(PIECE_BYTES) {
            let piece = &mut buffer[..PIECE_BYTES.min(n_bytes.saturating_sub(begin))];
            let (file, offset) = self.locate(index, begin, piece.len());
            file.read_at(offset, piece)?;
            self.update_hash(index, begin, piece);
            visit(piece);
        }
        Ok(())
    }

    /// Returns the 128-bit XXH3 of tensor `index`. Reads the bytes that were not yet read in order. Errors: as
    /// [`Self::read`].
    pub fn hash(&self, index: usize) -> Result<u128, FormatError> {
        let n_hashed = self.hash_state(index).n_hashed;
        self.visit(index, n_hashed, &mut |_| ())?;
        // A tensor without bytes is never read.
        Ok(self.hash_state(index).digest.unwrap_or_else(|| xxh3_128(&[])))
    }

    /// Returns the file of tensor `index`, and the offset in it of the tensor's bytes `start..start + n_bytes`.
    fn locate(&self, index: usize, start: usize, n_bytes: usize) -> (&ModelFile, usize) {
        let tensor = &self.tensors[index];
        let is_within = start.checked_add(n_bytes).is_some_and(|end| end <= tensor.range.len());
        assert!(is_within, "{n_bytes} bytes from {start} on, of {}", tensor.range.len());
        (&self.files[tensor.file], tensor.range.start.saturating_add(start))
    }

    fn update_hash(&self, index: usize, start: usize, bytes: &[u8]) {
        self.hash_state(index).update(start, bytes, self.tensors[index].range.len());
    }

    fn hash_state(&self, index: usize) -> MutexGuard<'_, TensorHash> {
        self.hashes[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
