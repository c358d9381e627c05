//! Element types of stored tensors, and the compute modes that select how they are used.

use serde::Serialize;

/// Element type of a tensor in a file. Block types store `block_len` elements in `block_bytes` bytes.
///
/// Block layouts are those of GGUF; each is described in its file of `quant/`. [`DType::Int4`] and its neighbors are our own.
#[allow(non_camel_case_types, reason = "GGUF's names")]
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
    /// 32 elements of 5 bits offset by 16: one f16 scale.
    #[serde(rename = "q5_0")]
    Q5_0,
    /// 32 elements of 5 bits: f16 scale, f16 minimum.
    #[serde(rename = "q5_1")]
    Q5_1,
    /// 32 elements of 4 bits that index a table of 16 numbers: one f16 scale.
    #[serde(rename = "iq4_nl")]
    IQ4_NL,
    /// 32 elements of 4 bits in E2M1: one exponent of 8 bits.
    #[serde(rename = "mxfp4")]
    MXFP4,
    /// 256 elements of 2 bits: 4-bit scale and minimum for each 16, f16 units of both.
    #[serde(rename = "q2_k")]
    Q2_K,
    /// 256 elements of 3 bits offset by 4: signed 6-bit scale for each 16, f16 unit.
    #[serde(rename = "q3_k")]
    Q3_K,
    /// 256 elements of 4 bits: 6-bit scale and minimum for each 32, f16 units of both.
    #[serde(rename = "q4_k")]
    Q4_K,
    /// 256 elements of 5 bits: 6-bit scale and minimum for each 32, f16 units of both.
    #[serde(rename = "q5_k")]
    Q5_K,
    /// 256 elements of 6 bits offset by 32: signed 8-bit scale for each 16, f16 unit.
    #[serde(rename = "q6_k")]
    Q6_K,
    /// 32 elements of 4 bits: f32 scale, zero point of one byte. Quantized matrices of folders are converted to it
    /// while they are loaded; no file contains it.
    #[serde(rename = "int4")]
    Int4,
    /// 32 signed bytes with an f32 scale, converted as [`DType::Int4`].
    #[serde(rename = "int8")]
    Int8,
    /// 32 numbers in E4M3 with an f32 scale, converted as [`DType::Int4`].
    #[serde(rename = "fp8")]
    Fp8,
    /// Signed bytes of a quantized matrix; not weights by themselves, and so are the types after it.
    #[serde(rename = "i8")]
    I8,
    /// Unsigned bytes of a quantized matrix.
    #[serde(rename = "u8")]
    U8,
    /// Packed words of a quantized matrix.
    #[serde(rename = "i32")]
    I32,
    /// The shape of a quantized matrix.
    #[serde(rename = "i64")]
    I64,
    /// Numbers of 8 bits: sign, 4 bits of exponent, 3 of mantissa; NaN, but no infinities.
    #[serde(rename = "f8_e4m3")]
    F8E4M3,
}

impl DType {
    /// Every type.
    pub const ALL: [DType; 23] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::IQ4_NL,
        DType::MXFP4,
        DType::Q2_K,
        DType::Q3_K,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
        DType::Int4,
        DType::Int8,
        DType::Fp8,
        DType::I8,
        DType::U8,
        DType::I32,
        DType::I64,
        DType::F8E4M3,
    ];

    /// Elements in one block (1 for plain types).
    pub const fn block_len(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            DType::I8 | DType::U8 | DType::I32 | DType::I64 | DType::F8E4M3 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 => 32,
            DType::IQ4_NL | DType::MXFP4 | DType::Int4 | DType::Int8 | DType::Fp8 => 32,
            DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::Q6_K => 256,
        }
    }

    /// Bytes of one block (of one element for plain types).
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::I8 | DType::U8 | DType::F8E4M3 => 1,
            DType::Q8_0 => 34,
            DType::MXFP4 => 17,
            DType::Q4_0 | DType::IQ4_NL => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q2_K => 84,
            DType::Q3_K => 110,
            DType::Q4_K => 144,
            DType::Q5_K => 176,
            DType::Q6_K => 210,
            DType::Int4 => 21,
            DType::Int8 | DType::Fp8 => 36,
        }
    }

    /// Bytes of `n` consecutive elements; `None` if `n` is not a whole number of blocks or overflows.
    pub const fn bytes_of(self, n: usize) -> Option<usize> {
        if !n.is_multiple_of(self.block_len()) {
            return None;
        }
        (n / self.block_len()).checked_mul(self.block_bytes())
    }

    /// True for block-quantized types.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// False for the types of tensors that are only parts of a quantized matrix.
    pub const fn is_weight(self) -> bool {
        !matches!(self, DType::I8 | DType::U8 | DType::I32 | DType::I64 | DType::F8E4M3)
    }

    /// The name in logs and errors: GGUF's, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::Q8_0 => "q8_0",
            DType::Q4_0 => "q4_0",
            DType::Q4_1 => "q4_1",
            DType::Q5_0 => "q5_0",
            DType::Q5_1 => "q5_1",
            DType::IQ4_NL => "iq4_nl",
            DType::MXFP4 => "mxfp4",
            DType::Q2_K => "q2_k",
            DType::Q3_K => "q3_k",
            DType::Q4_K => "q4_k",
            DType::Q5_K => "q5_k",
            DType::Q6_K => "q6_k",
            DType::Int4 => "int4",
            DType::Int8 => "int8",
            DType::Fp8 => "fp8",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::F8E4M3 => "f8_e4m3",
        }
    }
}

/// How weights are stored in memory and multiplied (`--dtype`, `--quantization`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeMode {
    /// The checkpoint's own precision: block types and bf16 are kept, f16 and f32 become f32.
    Auto,
    /// Everything in f32.
    Float32,
    /// Weights and activations of every product rounded to bf16, sums in f32.
    Bfloat16,
    /// Matrices quantized to 8 bits while they are loaded.
    Int8,
    /// Matrices quantized to 4 bits while they are loaded, the output head and the embeddings to 6.
    Int4,
}

/// Element type of the K and V tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDType {
    /// IEEE binary32.
    Float32,
    /// IEEE binary16. Magnitudes above 65504 become infinite.
    Float16,
    /// The upper half of a binary32.
    Bfloat16,
    /// Signed bytes, -127..=127, with an f32 scale for each cell, head and tensor after the head's bytes. The scale is
    /// the head's largest magnitude / 127, so the error is at most half a scale. A head with a number that is not
    /// finite has a NaN scale.
    Int8,
}

impl KvDType {
    /// Every type.
    pub const ALL: [KvDType; 4] = [KvDType::Float32, KvDType::Float16, KvDType::Bfloat16, KvDType::Int8];

    /// Bytes of one head of `d_head` elements in a cell's K, or in its V.
    pub const fn head_bytes(self, d_head: usize) -> usize {
        match self {
            KvDType::Float32 => 4 * d_head,
            KvDType::Float16 | KvDType::Bfloat16 => 2 * d_head,
            KvDType::Int8 => d_head + size_of::<f32>(),
        }
    }
}
