//! Element types of stored tensors, and the compute modes chosen from them.

use serde::Serialize;

/// Element type of a tensor in a file. Block types store `block_len` elements in `block_bytes` bytes.
///
/// Block layouts are GGUF's (ggml `block_q8_0`, `block_q4_0`, `block_q4_1`); see `quant/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    #[serde(rename = "bf16")]
    BF16,
    /// 32 elements: one f16 scale, 32 signed bytes.
    #[serde(rename = "q8_0")]
    Q8_0,
    /// 32 elements: one f16 scale, 16 bytes of nibbles offset by 8.
    #[serde(rename = "q4_0")]
    Q4_0,
    /// 32 elements: f16 scale, f16 minimum, 16 bytes of nibbles.
    #[serde(rename = "q4_1")]
    Q4_1,
}

impl DType {
    /// Elements in one block (1 for plain types).
    pub const fn block_len(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 => 32,
        }
    }

    /// Bytes of one block (of one element for plain types).
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Q8_0 => 34,
            DType::Q4_0 => 18,
            DType::Q4_1 => 20,
        }
    }

    /// Bytes of `n` consecutive elements; `None` if `n` is not a whole number of blocks or overflows.
    pub const fn bytes_of(self, n: usize) -> Option<usize> {
        if !n.is_multiple_of(self.block_len()) {
            return None;
        }
        (n / self.block_len()).checked_mul(self.block_bytes())
    }

    /// True for block-quantised types.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// The name used in logs and errors: GGUF's, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::Q8_0 => "q8_0",
            DType::Q4_0 => "q4_0",
            DType::Q4_1 => "q4_1",
        }
    }
}

/// How the weights are held and multiplied (`--dtype`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeMode {
    /// The checkpoint's own precision: blocks stay blocks, bf16 stays bf16, f16 and f32 become f32.
    Auto,
    /// Everything in f32.
    Float32,
    /// Weights and activations of every product rounded to bf16, sums in f32.
    Bfloat16,
}

/// Element type of the K and V tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDType {
    /// IEEE binary32.
    Float32,
    /// The upper half of a binary32.
    Bfloat16,
}

impl KvDType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            KvDType::Float32 => 4,
            KvDType::Bfloat16 => 2,
        }
    }
}
