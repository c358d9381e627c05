//! Quantized matrices of Hugging Face folders, by their origin. Each is stored in several tensors, and its rows are
//! read as blocks of a type that the packer knows.
//!
//! - `gptq_awq`: integers of 4 bits in words that span rows or columns.
//! - `fp8` and `compressed_tensors` read the settings of checkpoints whose rows are contiguous, and `scaled` reads the
//!   rows.
//! - `mxfp4`: stacked matrices in 4 bits with exponents as scales.

mod compressed_tensors;
mod fp8;
mod gptq_awq;
mod mxfp4;
mod scaled;

use crate::dtype::DType;
use crate::error::FormatError;
use crate::error::{Result, Unsupported};
use crate::load::folder::fields::Fields;
use crate::load::tensor_files::TensorFiles;
use crate::threads::Pool;
use gptq_awq::{WordMatrix, Words};
use half::{bf16, f16};
use mxfp4::Mxfp4Matrix;
use scaled::{ScaledMatrix, Scheme};
use std::ops::Range;

/// The types of tensors of scales.
const SCALE_TYPES: [DType; 3] = [DType::F16, DType::BF16, DType::F32];

/// How the matrices of a folder are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quantization {
    /// GPTQ or AWQ.
    Words(Words),
    /// FP8 or compressed-tensors.
    Scaled(Scheme),
    /// MXFP4.
    Mxfp4,
}

/// A quantized matrix, by the indices of its tensors. Their shapes and types were checked.
#[derive(Debug, Clone, Copy)]
pub(crate) enum QuantizedMatrix {
    Words(WordMatrix),
    Scaled(ScaledMatrix),
    Mxfp4(Mxfp4Matrix),
}

impl Quantization {
    /// Reads `quantization_config` (or its old name, `compression_config`) of `config.json`; None if there is none.
    ///
    /// Errors: an unsupported method, number of bits or layout.
    pub(crate) fn read(fields: &Fields<'_>) -> Result<Option<Self>> {
        let (config, unnamed) = match fields.object("compression_config")? {
            Some(config) => (config, "compressed-tensors"),
            None => match fields.object("quantization_config")? {
                Some(config) => (config, "without a name"),
                None => return Ok(None),
            },
        };
        match config.text("quant_method")?.unwrap_or(unnamed) {
            "gptq" => gptq_awq::read_gptq(&config).map(Self::Words),
            "awq" => gptq_awq::read_awq(&config).map(Self::Words),
            "fp8" => fp8::read(&config).map(Self::Scaled),
            "compressed-tensors" => compressed_tensors::read(&config).map(Self::Scaled),
            "mxfp4" => Ok(Self::Mxfp4),
            other => Err(Unsupported::feature(
                "a checkpoint quantized by",
                other,
                "fp8, compressed-tensors, mxfp4, GPTQ and AWQ with 4 bits, BF16, F16 and F32 tensors, and GGUF files",
            )
            .into()),
        }
        .map(Some)
    }

    /// Finds the tensors of the matrix `name` (ending in `.weight` unless it is a stack) of `shape`; None if it is not
    /// quantized.
    ///
    /// Errors: a tensor is missing or has another shape or type than the matrix needs; inputs out of order; scales that
    /// cannot be used.
    pub(crate) fn find(
        &self,
        files: &TensorFiles,
        name: &str,
        shape: &[usize],
    ) -> Result<Option<QuantizedMatrix>> {
        let place = || {
            let (Some(module), &[n_rows, n_columns]) = (name.strip_suffix(".weight"), shape) else {
                return None;
            };
            Some(Place { files, module, n_rows, n_columns })
        };
        Ok(match self {
            Self::Mxfp4 => Mxfp4Matrix::find(files, name, shape)?.map(QuantizedMatrix::Mxfp4),
            Self::Words(words) => match place() {
                Some(place) => words.find(&place)?.map(QuantizedMatrix::Words),
                None => None,
            },
            Self::Scaled(scheme) => match place() {
                Some(place) => scheme.find(&place)?.map(QuantizedMatrix::Scaled),
                None => None,
            },
        })
    }
}

impl QuantizedMatrix {
    /// The indices of its tensors.
    pub(crate) fn indices(&self) -> Vec<usize> {
        match self {
            Self::Words(matrix) => matrix.indices().collect(),
            Self::Scaled(matrix) => matrix.indices().collect(),
            Self::Mxfp4(matrix) => matrix.indices().to_vec(),
        }
    }

    /// The type in which its rows are read.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Words(matrix) => matrix.dtype(),
            Self::Scaled(matrix) => matrix.dtype(),
            Self::Mxfp4(_) => DType::MXFP4,
        }
    }

    /// The type that is reported for it: [`Self::dtype`], except that Q4_0 is a detail of how integers are read.
    pub(crate) fn reported_dtype(&self) -> DType {
        match self.dtype() {
            DType::Q4_0 => DType::Int4,
            other => other,
        }
    }

    /// True if reading any row reads the whole matrix.
    pub(crate) fn is_read_whole(&self) -> bool {
        matches!(self, Self::Words(_))
    }

    /// Reads rows as blocks of [`Self::dtype`] into `buffer`.
    ///
    /// Errors: no memory; a file that was truncated, errors of the system; a NaN.
    pub(crate) fn read<'b>(
        &self,
        files: &TensorFiles,
        rows: Range<usize>,
        buffer: &'b mut Vec<u8>,
        pool: &Pool,
    ) -> Result<&'b [u8]> {
        match self {
            Self::Words(matrix) => matrix.read(files, rows, buffer, pool),
            Self::Scaled(matrix) => matrix.read(files, rows, buffer, pool),
            Self::Mxfp4(matrix) => matrix.read(files, rows, buffer, pool),
        }
    }
}

/// A matrix to find.
struct Place<'a> {
    files: &'a TensorFiles,
    /// Its name without `.weight`.
    module: &'a str,
    n_rows: usize,
    n_columns: usize,
}

impl Place<'_> {
    /// The index of a tensor of the module.
    fn find(&self, part: &str) -> Option<usize> {
        self.files.find(&format!("{}.{part}", self.module))
    }

    /// As [`Self::find`]. Errors: there is no such tensor.
    fn required(&self, part: &str) -> Result<usize, FormatError> {
        let first = format!("{}.{part}", self.module);
        self.files.find(&first).ok_or(FormatError::MissingTensors { n_missing: 1, first })
    }
}

/// Checks a tensor's type. Errors: it is not one of `types`.
fn check_type(files: &TensorFiles, index: usize, types: &[DType]) -> Result<()> {
    let stored = &files.tensors()[index];
    if types.contains(&stored.dtype) {
        return Ok(());
    }
    let (tensor, dtype) = (stored.name.clone(), stored.dtype.name().to_uppercase());
    let supported = match types {
        [DType::I8] => "I8",
        [DType::U8] => "U8",
        [DType::F8E4M3] => "F8_E4M3",
        [DType::I32] => "I32",
        [DType::I32, DType::I64] => "I32, I64",
        _ => "F16, BF16, F32",
    };
    Err(Unsupported::TensorType { tensor, dtype, supported }.into())
}

/// Checks a tensor's shape and type. Errors: another shape or type.
fn check_tensor(files: &TensorFiles, index: usize, shape: &[usize], types: &[DType]) -> Result<()> {
    check_type(files, index, types)?;
    let stored = &files.tensors()[index];
    if stored.shape != shape {
        let (name, got) = (stored.name.clone(), stored.shape.clone());
        return Err(FormatError::TensorShape { name, got, want: shape.to_vec() }.into());
    }
    Ok(())
}

/// Element `at` of a tensor of scales.
fn scale(dtype: DType, scales: &[u8], at: usize) -> f32 {
    let bytes = &scales[at * dtype.block_bytes()..];
    match dtype {
        DType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        DType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        _ => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
    }
}
