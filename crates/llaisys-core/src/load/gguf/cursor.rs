//! Reads numbers and strings from the beginning of a file, never past its end.

use crate::error::GgufError;
use crate::load::NAME_BYTES_MAX;

/// Upper bound on the bytes of one string (a chat template or one token).
pub(super) const STRING_BYTES_MAX: u64 = 16 << 20;

/// A position in a file during parsing.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    /// The beginning of the file: the part that was read.
    bytes: &'a [u8],
    /// Bytes of the whole file.
    file_bytes: usize,
    at: usize,
}

impl<'a> Cursor<'a> {
    /// A cursor at the start of `bytes`, which are the first bytes of a file of `file_bytes`.
    pub(super) fn new(bytes: &'a [u8], file_bytes: usize) -> Self {
        Self { bytes, file_bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Bytes of the file after the cursor.
    fn left(&self) -> usize {
        self.file_bytes.saturating_sub(self.at)
    }

    /// Returns the next `n` bytes; `what` names them in errors. Errors: the file is too short, or
    /// [`GgufError::HeaderBytes`] if only the part that was read is too short.
    pub(super) fn bytes(&mut self, n: u64, what: &'static str) -> Result<&'a [u8], GgufError> {
        let truncated = GgufError::Truncated { what, at: self.at, needed: n, left: self.left() };
        let end = usize::try_from(n).ok().and_then(|n| self.at.checked_add(n));
        let end = end.filter(|&end| end <= self.file_bytes).ok_or(truncated)?;
        let read = self.bytes.len();
        let bytes = self.bytes.get(self.at..end).ok_or(GgufError::HeaderBytes { needed: end, read })?;
        self.at = self.at.saturating_add(bytes.len());
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let bytes = self.bytes(N as u64, what)?;
        Ok(bytes.try_into().expect("the slice has N bytes"))
    }

    /// One byte.
    pub(super) fn u8(&mut self, what: &'static str) -> Result<u8, GgufError> {
        Ok(u8::from_le_bytes(self.array(what)?))
    }

    /// Two bytes.
    pub(super) fn u16(&mut self, what: &'static str) -> Result<u16, GgufError> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    /// Four bytes.
    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    /// Eight bytes.
    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Reads a count of items of at least `bytes_min` bytes each. The count is bounded by `max` and by the rest of the
    /// file, so the size of the file bounds what is allocated for the items.
    pub(super) fn count(&mut self, what: &'static str, bytes_min: u64, max: u64) -> Result<u64, GgufError> {
        let count = self.u64(what)?;
        let possible = (self.left() as u64).checked_div(bytes_min).unwrap_or(0).min(max);
        if count > possible { Err(GgufError::Count { what, count, max: possible }) } else { Ok(count) }
    }

    /// Reads a string: its length and its bytes.
    pub(super) fn string(&mut self, what: &'static str) -> Result<&'a str, GgufError> {
        let n_bytes = self.count(what, 1, STRING_BYTES_MAX)?;
        let at = self.at;
        let bytes = self.bytes(n_bytes, what)?;
        std::str::from_utf8(bytes).map_err(|_| GgufError::Utf8 { what, at })
    }

    /// Reads a name: a string that is short enough for an error message.
    pub(super) fn name(&mut self, what: &'static str) -> Result<&'a str, GgufError> {
        let at = self.at;
        match self.string(what)? {
            "" => Err(GgufError::EmptyName { what, at }),
            name if name.len() > NAME_BYTES_MAX => {
                Err(GgufError::LongName { what, at, bytes: name.len(), max: NAME_BYTES_MAX })
            }
            name => Ok(name),
        }
    }
}
