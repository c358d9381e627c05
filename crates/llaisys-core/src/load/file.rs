//! A file that is read at given offsets.
//!
//! Files are never mapped. After a truncation, an access to a mapped page ends the whole process with SIGBUS; a short
//! read is only an error.

use crate::error::FormatError;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of one read of tensors. Larger reads are divided over threads: the matrices of an expert, too.
pub(super) const PIECE_BYTES: usize = 256 << 10;

/// A regular file, open for reading, and its length when it was opened.
#[derive(Debug)]
pub struct ModelFile {
    path: PathBuf,
    file: File,
    n_bytes: usize,
}

impl ModelFile {
    /// Opens `path`. Errors: those of the system, [`FormatError::NotAFile`] for a pipe, device or folder.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let io = |source| FormatError::Io { path: path.to_owned(), source };
        // Checked before opening, because opening a pipe waits for a writer.
        if !fs::metadata(path).map_err(io)?.is_file() {
            return Err(FormatError::NotAFile { path: path.to_owned() });
        }
        let file = File::open(path).map_err(io)?;
        let n_bytes = file.metadata().map_err(io)?.len();
        let n_bytes = usize::try_from(n_bytes).map_err(|_| io(ErrorKind::FileTooLarge.into()))?;
        Ok(Self { path: path.to_owned(), file, n_bytes })
    }

    /// Bytes of the file when it was opened.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Fills `out` with the bytes from `offset`. Any thread may read.
    ///
    /// Errors: [`FormatError::Truncated`] if the file is too short; those of the system.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<(), FormatError> {
        let io = |source| FormatError::Io { path: self.path.clone(), source };
        match self.file.read_exact_at(out, offset as u64) {
            Ok(()) => Ok(()),
            Err(source) if source.kind() == ErrorKind::UnexpectedEof => Err(FormatError::Truncated {
                path: self.path.clone(),
                offset,
                expected: out.len(),
                n_bytes: self.file.metadata().map_err(io)?.len(),
            }),
            Err(source) => Err(io(source)),
        }
    }

    /// Whether the byte at `offset` is in the page cache. None if the system does not tell: only Linux does, and not for
    /// every file system.
    #[cfg(target_os = "linux")]
    pub fn is_cached(&self, offset: usize) -> Option<bool> {
        use rustix::io::{Errno, ReadWriteFlags, preadv2};
        let mut byte = [0];
        let out = &mut [std::io::IoSliceMut::new(&mut byte)];
        // With this flag, a read that would have to wait for the disk is an error.
        match preadv2(&self.file, out, offset as u64, ReadWriteFlags::NOWAIT) {
            Ok(n) => (n > 0).then_some(true),
            Err(error) => (error == Errno::AGAIN).then_some(false),
        }
    }

    /// As on Linux.
    #[cfg(not(target_os = "linux"))]
    pub fn is_cached(&self, _offset: usize) -> Option<bool> {
        None
    }

    /// Reads the first `n` bytes. Errors: as [`Self::read_at`].
    pub fn front(&self, n: usize) -> Result<Vec<u8>, FormatError> {
        let mut bytes = vec![0; n];
        self.read_at(0, &mut bytes)?;
        Ok(bytes)
    }
}
