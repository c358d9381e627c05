//! A file mapped into memory, read-only.

use super::FormatError;
use memmap2::{Mmap, UncheckedAdvice};
use std::fs::{self, File};
use std::path::Path;

/// A regular file's bytes. They stay in the page cache, so a checkpoint costs no memory of its own.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// Maps `path`. Errors: the system's refusals, [`FormatError::NotAFile`] for a pipe, device or folder.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let io = |source| FormatError::Io { path: path.to_owned(), source };
        // Before opening: to open a pipe would wait for a writer.
        if !fs::metadata(path).map_err(io)?.is_file() {
            return Err(FormatError::NotAFile { path: path.to_owned() });
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: `metadata` above said that this is a regular file, and the map is read-only. A map is sound as
        // long as nobody writes into the file or truncates it; no check can make that true, so it is what the
        // module documentation asks of the operator: a model file is replaced by renaming a new one over it.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self { map })
    }

    /// Lets go of the pages that were read: they stay in the system's cache, but no longer count as this
    /// process's memory, and come back when they are looked at. Whether the system obeys changes nothing else.
    pub fn release_pages(&self) {
        // SAFETY: the map is of a file, read-only and never written, so a page that is dropped has nothing in it
        // that the file has not: every view reads the same bytes before and after.
        drop(unsafe { self.map.unchecked_advise(UncheckedAdvice::DontNeed) });
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}
