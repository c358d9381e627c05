//! The element types of arrays on a device.

/// An element type that products and kernels read or write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// bfloat16
    Bf16,
    /// IEEE binary16
    F16,
    /// IEEE binary32; for results only
    F32,
}

impl Element {
    /// Returns the bytes of `n` elements.
    pub fn n_bytes(self, n: usize) -> usize {
        n * match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}
