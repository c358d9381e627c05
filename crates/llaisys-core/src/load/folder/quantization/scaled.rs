//! Matrices whose rows are contiguous, with tensors of scales: FP8 checkpoints and compressed-tensors.
//!
//! A matrix `[N outputs, K inputs]` is stored as these tensors. `value = scale * number` or `scale * (q - zero)`.
//!
//! ```text
//! .weight              [N, K] F8_E4M3 or I8
//! .weight_packed       I32 [N, K*B/32] instead: B bits, q + 2^(B-1), the first input in the lowest bits
//! .weight_shape        I64 [2]: N, K                                                (with .weight_packed)
//! .weight_scale        [] or [1]; [N] or [N, 1]; [N, K/group]; [N/rows, K/columns] of blocks
//! .weight_scale_inv    the same, in FP8 checkpoints. Despite the name, it is multiplied with the numbers.
//! .weight_zero_point   I32 [N*B/32, K/group]: zero + 2^(B-1), the first output in the lowest bits
//! ```
//! Sizes are rounded up. `.input_scale` and `.activation_scale` are ignored: they are for activations that a kernel
//! rounds with a fixed scale, and ours round them with the scale of each 32.
//!
//! | numbers | read as | exact |
//! | --- | --- | --- |
//! | E4M3 | Fp8 | yes |
//! | integers of 8 bits | Int8 | yes |
//! | integers of 4 bits without zero points, scales that f16 represents | Q4_0 | yes |
//! | other integers of 4 bits | Int4 | yes |
//!
//! Source: compressed-tensors (`compressors`, `pack_to_int32`), and in transformers and vLLM the `fp8` quantizers.

use super::{Place, SCALE_TYPES, check_tensor, check_type, scale};
use crate::dtype::DType;
use crate::error::{FormatError, Result, Unsupported};
use crate::load::tensor_files::{TensorFiles, buffer_of};
use crate::quant::{BLOCK_LEN, fp8, int4, int8};
use crate::threads::Pool;
use half::f16;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bound on the magnitude of a scale. With it, every scale and minimum of a block is within f16's range: up to 15 times
/// the scale in Int4, and 4 times in Fp8.
const SCALE_MAX: f32 = 4096.0;
/// Integers of 4 bits in a word.
const PER_WORD: usize = 8;
/// Rows that a thread converts at a time.
const ROWS_AT_ONCE: usize = 16;
/// Tensors of activations, which have no effect here.
const OF_ACTIVATIONS: [&str; 3] = ["input_scale", "input_zero_point", "activation_scale"];

/// How the matrices of a folder are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scheme {
    pub(super) numbers: Numbers,
    pub(super) strategy: Strategy,
    /// True if there are zero points.
    pub(super) has_zeros: bool,
}

/// The numbers of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Numbers {
    Fp8,
    /// A tensor of signed bytes.
    Bytes,
    /// Words of integers of 8 bits.
    Packed8,
    /// Words of integers of 4 bits.
    Packed4,
}

/// Which numbers share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strategy {
    /// Those of a matrix or of a row, by the shape of the tensor of scales.
    MatrixOrRow,
    /// Those of a block, with this number of rows and columns; the columns are a multiple of 32.
    Block { n_rows: usize, n_columns: usize },
}

/// The place of a matrix's scales in their tensor.
#[derive(Debug, Clone, Copy)]
struct Scales {
    index: usize,
    /// Rows of the matrix that share one.
    n_rows: usize,
    /// Columns that share one.
    n_columns: usize,
    /// Scales in a row of their tensor.
    n_per_row: usize,
}

/// A matrix, by the indices of its tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScaledMatrix {
    numbers: Numbers,
    dtype: DType,
    n_columns: usize,
    weight: usize,
    scales: Scales,
    zeros: Option<usize>,
    /// Tensors that were checked or have no effect.
    others: [Option<usize>; OF_ACTIVATIONS.len() + 2],
}

impl Scheme {
    /// As [`Quantization::find`](super::Quantization::find).
    pub(super) fn find(&self, place: &Place<'_>) -> Result<Option<ScaledMatrix>> {
        let files = place.files;
        let part = if self.is_packed() { "weight_packed" } else { "weight" };
        let Some(weight) = place.find(part) else { return Ok(None) };
        if !self.is_packed() && files.tensors()[weight].dtype.is_weight() {
            return Ok(None);
        }
        let &Place { module, n_rows, n_columns, .. } = place;
        if !n_columns.is_multiple_of(BLOCK_LEN) {
            let what = format!("{module} of {n_rows} x {n_columns}");
            return Err(Unsupported::feature("a quantized matrix", what, "multiples of 32 columns").into());
        }
        let (stored, width) = match self.numbers {
            Numbers::Fp8 => (DType::F8E4M3, n_columns),
            Numbers::Bytes => (DType::I8, n_columns),
            Numbers::Packed8 => (DType::I32, n_columns / 4),
            Numbers::Packed4 => (DType::I32, n_columns / PER_WORD),
        };
        check_tensor(files, weight, &[n_rows, width], &[stored])?;
        let shape = if self.is_packed() { Some(check_shape(place)?) } else { None };
        let scales = self.find_scales(place)?;
        let is_f16 = check_scales(files, scales.index)?;
        let (zeros, no_zeros) = self.find_zeros(place, &scales)?;
        let dtype = match self.numbers {
            Numbers::Fp8 => DType::Fp8,
            Numbers::Bytes | Numbers::Packed8 => DType::Int8,
            Numbers::Packed4 if is_f16 && zeros.is_none() => DType::Q4_0,
            Numbers::Packed4 => DType::Int4,
        };
        let [input, input_zero, activation] = OF_ACTIVATIONS.map(|part| place.find(part));
        let others = [shape, no_zeros, input, input_zero, activation];
        Ok(Some(ScaledMatrix { numbers: self.numbers, dtype, n_columns, weight, scales, zeros, others }))
    }

    fn is_packed(&self) -> bool {
        matches!(self.numbers, Numbers::Packed4 | Numbers::Packed8)
    }

    fn find_scales(&self, place: &Place<'_>) -> Result<Scales> {
        let index = place.find("weight_scale_inv").map_or_else(|| place.required("weight_scale"), Ok)?;
        let &Place { files, n_rows: n, n_columns: k, .. } = place;
        check_type(files, index, &SCALE_TYPES)?;
        let stored = &files.tensors()[index];
        let (n_rows, n_columns, want) = match self.strategy {
            Strategy::MatrixOrRow if matches!(stored.shape[..], [] | [1] | [1, 1]) => {
                return Ok(Scales { index, n_rows: n, n_columns: k, n_per_row: 1 });
            }
            Strategy::MatrixOrRow if stored.shape == [n] => (1, k, vec![n]),
            Strategy::MatrixOrRow => (1, k, vec![n, 1]),
            Strategy::Block { n_rows, n_columns } => {
                (n_rows, n_columns, vec![n.div_ceil(n_rows), k.div_ceil(n_columns)])
            }
        };
        check_tensor(files, index, &want, &SCALE_TYPES)?;
        Ok(Scales { index, n_rows, n_columns, n_per_row: want.get(1).copied().unwrap_or(1) })
    }

    /// Returns the tensor of zero points, or one that contains only zeros and therefore has no effect.
    fn find_zeros(&self, place: &Place<'_>, scales: &Scales) -> Result<(Option<usize>, Option<usize>)> {
        const PART: &str = "weight_zero_point";
        if self.has_zeros {
            let index = place.required(PART)?;
            let shape = [place.n_rows.div_ceil(PER_WORD), scales.n_per_row];
            check_tensor(place.files, index, &shape, &[DType::I32])?;
            return Ok((Some(index), None));
        }
        let Some(index) = place.find(PART) else { return Ok((None, None)) };
        let mut is_zero = true;
        place.files.visit(index, 0, &mut |bytes| is_zero &= bytes.iter().all(|&byte| byte == 0))?;
        if !is_zero {
            let name = place.files.tensors()[index].name.clone();
            return Err(Unsupported::feature("zero points of a symmetric matrix", name, "zeros only").into());
        }
        Ok((None, Some(index)))
    }
}

/// Checks `.weight_shape` and returns its index. Errors: it is missing, or contradicts the configuration.
fn check_shape(place: &Place<'_>) -> Result<usize> {
    let index = place.required("weight_shape")?;
    let files = place.files;
    check_tensor(files, index, &[2], &[DType::I32, DType::I64])?;
    let mut bytes = Vec::new();
    files.visit(index, 0, &mut |piece| bytes.extend_from_slice(piece))?;
    let (name, want) = (files.tensors()[index].name.clone(), vec![place.n_rows, place.n_columns]);
    let size = |number: i64| usize::try_from(number).unwrap_or(usize::MAX);
    let got: Vec<usize> = match files.tensors()[index].dtype {
        DType::I64 => bytes.as_chunks().0.iter().map(|&b| size(i64::from_le_bytes(b))).collect(),
        _ => bytes.as_chunks().0.iter().map(|&b| size(i32::from_le_bytes(b).into())).collect(),
    };
    if got == want { Ok(index) } else { Err(FormatError::TensorShape { name, got, want }.into()) }
}

/// Returns true if f16 represents every scale. Errors: a scale that is not finite, zero or too large.
fn check_scales(files: &TensorFiles, index: usize) -> Result<bool> {
    let tensor = &files.tensors()[index];
    let (mut is_f16, mut bad) = (true, None);
    files.visit(index, 0, &mut |bytes| {
        for at in 0..bytes.len() / tensor.dtype.block_bytes() {
            let value = scale(tensor.dtype, bytes, at);
            is_f16 &= f16::from_f32(value).to_f32() == value;
            // False for NaN.
            let is_valid = value.abs() <= SCALE_MAX && value != 0.0;
            bad = bad.or((!is_valid).then_some(value));
        }
    })?;
    match bad {
        Some(value) => Err(FormatError::Scale { name: tensor.name.clone(), value, max: SCALE_MAX }.into()),
        None => Ok(is_f16),
    }
}

impl ScaledMatrix {
    /// The indices of its tensors.
    pub(super) fn indices(&self) -> impl Iterator<Item = usize> {
        [self.weight, self.scales.index]
            .into_iter()
            .chain(self.zeros)
            .chain(self.others.into_iter().flatten())
    }

    /// The type in which its rows are read.
    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// As [`QuantizedMatrix::read`](super::QuantizedMatrix::read).
    pub(super) fn read<'b>(
        &self,
        files: &TensorFiles,
        rows: Range<usize>,
        buffer: &'b mut Vec<u8>,
        pool: &Pool,
    ) -> Result<&'b [u8]> {
        let (mut numbers, mut scales, mut zeros) = (Vec::new(), Vec::new(), Vec::new());
        let stored_bytes = match self.numbers {
            Numbers::Packed4 => self.n_columns / 2,
            _ => self.n_columns,
        };
        let bytes = buffer_of(&mut numbers, rows.len() * stored_bytes)?;
        files.read(self.weight, rows.start * stored_bytes, bytes, pool)?;
        let scale_type = files.tensors()[self.scales.index].dtype;
        let first_scale = rows.start / self.scales.n_rows;
        let scale_bytes = self.scales.n_per_row * scale_type.block_bytes();
        let n_scale_rows = rows.end.div_ceil(self.scales.n_rows).saturating_sub(first_scale);
        let bytes = buffer_of(&mut scales, n_scale_rows * scale_bytes)?;
        files.read(self.scales.index, first_scale * scale_bytes, bytes, pool)?;
        let first_zero = rows.start / PER_WORD;
        if let Some(index) = self.zeros {
            let n_rows = rows.end.div_ceil(PER_WORD).saturating_sub(first_zero);
            let row_bytes = 4 * self.scales.n_per_row;
            files.read(index, first_zero * row_bytes, buffer_of(&mut zeros, n_rows * row_bytes)?, pool)?;
        }
        let row_bytes = self.n_columns / BLOCK_LEN * self.dtype.block_bytes();
        let out = buffer_of(buffer, rows.len() * row_bytes)?;
        let first_nan = AtomicUsize::new(rows.end);
        pool.run_chunks(out, ROWS_AT_ONCE * row_bytes, &|i, out| {
            for (r, out) in out.chunks_exact_mut(row_bytes).enumerate() {
                let r = i * ROWS_AT_ONCE + r;
                let n = rows.start + r;
                let numbers = &numbers[r * stored_bytes..][..stored_bytes];
                if self.numbers == Numbers::Fp8 && numbers.iter().any(|&byte| fp8::is_nan(byte)) {
                    first_nan.fetch_min(n, Ordering::Relaxed);
                }
                let blocks = out.chunks_exact_mut(self.dtype.block_bytes());
                let of_block = numbers.chunks_exact(stored_bytes * BLOCK_LEN / self.n_columns);
                for (b, (block, numbers)) in blocks.zip(of_block).enumerate() {
                    let group = b * BLOCK_LEN / self.scales.n_columns;
                    let at = (n / self.scales.n_rows - first_scale) * self.scales.n_per_row + group;
                    let zero = if zeros.is_empty() {
                        8
                    } else {
                        let word = (n / PER_WORD - first_zero) * self.scales.n_per_row + group;
                        zeros[4 * word + n % PER_WORD / 2] >> (4 * (n % 2)) & 15
                    };
                    self.write_block(block, numbers, scale(scale_type, &scales, at), zero);
                }
            }
        });
        match first_nan.into_inner() {
            row if row == rows.end => Ok(out),
            row => Err(FormatError::Nan { name: files.tensors()[self.weight].name.clone(), row }.into()),
        }
    }

    /// Writes a block of [`Self::dtype`].
    fn write_block(&self, block: &mut [u8], numbers: &[u8], scale: f32, zero: u8) {
        let header = match self.dtype {
            DType::Q4_0 => {
                block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
                2
            }
            DType::Int4 => {
                block[..4].copy_from_slice(&scale.to_le_bytes());
                block[4] = zero;
                int4::BYTES - BLOCK_LEN / 2
            }
            _ => {
                block[..4].copy_from_slice(&scale.to_le_bytes());
                const { assert!(int8::BYTES == fp8::BYTES) };
                int8::BYTES - BLOCK_LEN
            }
        };
        let out = &mut block[header..];
        match self.numbers {
            Numbers::Fp8 | Numbers::Bytes => out.copy_from_slice(numbers),
            Numbers::Packed8 => out.iter_mut().zip(numbers).for_each(|(out, &byte)| *out = byte ^ 0x80),
            // Neighbors share a stored byte; in a block, elements j and j + 16 do.
            Numbers::Packed4 => {
                let at = |i: usize| numbers[i / 2] >> (4 * (i % 2)) & 15;
                for (j, byte) in out.iter_mut().enumerate() {
                    *byte = at(j) | at(j + BLOCK_LEN / 2) << 4;
                }
            }
        }
    }
}
