//! Matrices by GPTQ and AWQ with 4 bits.
//!
//! A matrix `[N outputs, K inputs]` is stored as three or four tensors instead of its `.weight`. A word has 32 bits and
//! eight integers, the first in the lowest bits. There are `G = ceil(K / group_size)` groups of inputs.
//!
//! ```text
//!           GPTQ                                  AWQ (version "gemm")
//! .qweight  I32 [K/8, N], 8 inputs per word       I32 [K, N/8], 8 outputs per word in the order 0 2 4 6 1 3 5 7
//! .qzeros   I32 [G, N/8], 8 outputs per word      I32 [G, N/8], as above
//! .scales   [G, N]                                [G, N]
//! .g_idx    I32 [K]: the group of each input      -
//! ```
//! `value = scale * (q - zero)`. A GPTQ checkpoint of the format "gptq" stores each word of zero points minus
//! 0x11111111, "gptq_v2" unchanged. Source: the packing of AutoGPTQ and GPTQModel (`qlinear`), and of AutoAWQ (`gemm`).

use super::{Place, SCALE_TYPES, check_tensor, scale};
use crate::dtype::DType;
use crate::error::FormatError;
use crate::error::{Result, Unsupported};
use crate::load::folder::fields::Fields;
use crate::load::tensor_files::{TensorFiles, buffer_of};
use crate::quant::{BLOCK_LEN, int4};
use crate::threads::Pool;
use std::ops::Range;

/// Integers in a word.
const PER_WORD: usize = 8;
/// The index of output `n % 8` in its word, in AWQ.
const AWQ_ORDER: [usize; PER_WORD] = [0, 4, 1, 5, 2, 6, 3, 7];
/// A word of zero points that are all 8.
const SYMMETRIC: u32 = 0x8888_8888;
/// Rows that are converted together: their words share cache lines.
const ROWS_AT_ONCE: usize = 16;

/// How the matrices of a folder are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Words {
    layout: Layout,
    /// Inputs that share a scale; None: all inputs of a row.
    group_size: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    Gptq {
        /// The number that is added to a stored word of zero points.
        zeros_offset: u32,
    },
    Awq,
}

/// Reads the settings of GPTQ. Errors: an unsupported number of bits or layout.
pub(super) fn read_gptq(config: &Fields<'_>) -> Result<Words> {
    Words::read(gptq_layout(config)?, config)
}

/// Reads the settings of AWQ. Errors: as [`read_gptq`].
pub(super) fn read_awq(config: &Fields<'_>) -> Result<Words> {
    Words::read(awq_layout(config)?, config)
}

impl Words {
    fn read(layout: Layout, config: &Fields<'_>) -> Result<Self> {
        if let Some(bits) = config.number("bits")?.or(config.number("w_bit")?)
            && bits != 4.0
        {
            return Err(Unsupported::feature("GPTQ or AWQ with bits", bits, "4").into());
        }
        let missing = FormatError::KeyMissing { file: config.file, key: "group_size" };
        let group_size = config.integer("group_size")?.or(config.integer("q_group_size")?).ok_or(missing)?;
        let group_size = match usize::try_from(group_size) {
            Err(_) if group_size == -1 => None,
            Ok(size) if size > 0 && size.is_multiple_of(BLOCK_LEN) => Some(size),
            _ => return Err(Unsupported::feature("group_size", group_size, "-1 and multiples of 32").into()),
        };
        Ok(Self { layout, group_size })
    }

    /// As [`Quantization::find`](super::Quantization::find).
    pub(super) fn find(&self, place: &Place<'_>) -> Result<Option<WordMatrix>> {
        let &Place { files, module, n_rows, n_columns } = place;
        let find = |part: &str| place.find(part);
        let Some(qweight) = find("qweight") else { return Ok(None) };
        let required = |part: &str| place.required(part);
        if !n_columns.is_multiple_of(BLOCK_LEN) || !n_rows.is_multiple_of(PER_WORD) {
            let what = format!("{module} of {n_rows} x {n_columns}");
            return Err(
                Unsupported::feature("a quantized matrix", what, "multiples of 8 x multiples of 32").into()
            );
        }
        let mut matrix = WordMatrix {
            words: *self,
            dtype: DType::Int4,
            n_rows,
            n_columns,
            qweight,
            qzeros: required("qzeros")?,
            scales: required("scales")?,
            g_idx: find("g_idx").filter(|_| self.layout != Layout::Awq),
            zero_bias: None,
        };
        matrix.check(files)?;
        // Packers write a bias for every module; a bias of zeros has no effect.
        if let Some(bias) = find("bias").filter(|&index| files.tensors()[index].shape == [n_rows]) {
            let mut is_zero = true;
            files.visit(bias, 0, &mut |bytes| is_zero &= bytes.iter().all(|&byte| byte == 0))?;
            matrix.zero_bias = is_zero.then_some(bias);
        }
        if matrix.is_symmetric(files)? {
            matrix.dtype = DType::Q4_0;
        }
        Ok(Some(matrix))
    }
}

fn gptq_layout(config: &Fields<'_>) -> Result<Layout> {
    if config.flag("is_marlin_format")? == Some(true) {
        return Err(Unsupported::feature("the GPTQ format", "marlin", "gptq, gptq_v2").into());
    }
    // With these rules, some modules have other bits or groups.
    if let Some(rules) = config.object("dynamic")?
        && let Some(module) = rules.map.keys().next()
    {
        return Err(Unsupported::feature(
            "GPTQ's dynamic rule",
            module,
            "the same bits and groups everywhere",
        )
        .into());
    }
    match config.text("checkpoint_format")?.or(config.text("format")?).unwrap_or("gptq") {
        "gptq" => Ok(Layout::Gptq { zeros_offset: 0x1111_1111 }),
        "gptq_v2" => Ok(Layout::Gptq { zeros_offset: 0 }),
        other => Err(Unsupported::feature("the GPTQ format", other, "gptq, gptq_v2").into()),
    }
}

fn awq_layout(config: &Fields<'_>) -> Result<Layout> {
    let version = config.text("version")?.unwrap_or("gemm");
    if !version.eq_ignore_ascii_case("gemm") {
        return Err(Unsupported::feature("the AWQ version", version, "gemm").into());
    }
    if config.flag("zero_point")? == Some(false) {
        return Err(Unsupported::feature("AWQ's zero_point", false, "true").into());
    }
    Ok(Layout::Awq)
}

/// A quantized matrix, by the indices of its tensors. Their shapes and types were checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WordMatrix {
    words: Words,
    /// Determined once, because this reads every zero point.
    dtype: DType,
    n_rows: usize,
    n_columns: usize,
    qweight: usize,
    qzeros: usize,
    scales: usize,
    g_idx: Option<usize>,
    zero_bias: Option<usize>,
}

impl WordMatrix {
    /// The indices of its tensors.
    pub(super) fn indices(&self) -> impl Iterator<Item = usize> {
        [self.qweight, self.qzeros, self.scales].into_iter().chain(self.g_idx).chain(self.zero_bias)
    }

    fn check(&self, files: &TensorFiles) -> Result<()> {
        let (n, k) = (self.n_rows, self.n_columns);
        let n_groups = self.words.group_size.map_or(1, |size| k.div_ceil(size));
        let shape = match self.words.layout {
            Layout::Gptq { .. } => [k / PER_WORD, n],
            Layout::Awq => [k, n / PER_WORD],
        };
        check_tensor(files, self.qweight, &shape, &[DType::I32])?;
        check_tensor(files, self.qzeros, &[n_groups, n / PER_WORD], &[DType::I32])?;
        check_tensor(files, self.scales, &[n_groups, n], &SCALE_TYPES)?;
        let Some(g_idx) = self.g_idx else { return Ok(()) };
        check_tensor(files, g_idx, &[k], &[DType::I32])?;
        let size = self.words.group_size.unwrap_or(k);
        let (mut is_in_order, mut inputs) = (true, 0..);
        files.visit(g_idx, 0, &mut |bytes| {
            for (word, k) in bytes.as_chunks().0.iter().zip(&mut inputs) {
                is_in_order &= u32::from_le_bytes(*word) as usize == k / size;
            }
        })?;
        if !is_in_order {
            let name = files.tensors()[g_idx].name.clone();
            return Err(Unsupported::feature(
                "GPTQ with inputs out of order (desc_act)",
                name,
                "desc_act false",
            )
            .into());
        }
        Ok(())
    }

    /// The type in which its rows are read: Q4_0 if every zero point is 8, else Int4. Both are lossless.
    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// True if Q4_0 represents it exactly: scales are f16 and every zero point is 8.
    fn is_symmetric(&self, files: &TensorFiles) -> Result<bool, FormatError> {
        if files.tensors()[self.scales].dtype != DType::F16 {
            return Ok(false);
        }
        let mut is_symmetric = true;
        files.visit(self.qzeros, 0, &mut |bytes| {
            let mut words = bytes.as_chunks().0.iter().map(|&word| self.zeros(u32::from_le_bytes(word)));
            is_symmetric &= words.all(|word| word == SYMMETRIC);
        })?;
        Ok(is_symmetric)
    }

    /// The zero points of a stored word.
    fn zeros(&self, word: u32) -> u32 {
        match self.words.layout {
            Layout::Gptq { zeros_offset } => word.wrapping_add(zeros_offset),
            Layout::Awq => word,
        }
    }

    /// Reads rows as blocks of [`Self::dtype`] into `buffer`. Words contain integers of many rows, so whole tensors are
    /// read; zero points only if they are not all 8.
    ///
    /// Errors: no memory; a file that was truncated, errors of the system.
    pub(super) fn read<'b>(
        &self,
        files: &TensorFiles,
        rows: Range<usize>,
        buffer: &'b mut Vec<u8>,
        pool: &Pool,
    ) -> Result<&'b [u8]> {
        let read = |index: usize| -> Result<Vec<u8>> {
            let mut bytes = Vec::new();
            let n_bytes = files.tensors()[index].range.len();
            files.read(index, 0, buffer_of(&mut bytes, n_bytes)?, pool)?;
            Ok(bytes)
        };
        let words = |index: usize| -> Result<WordTensor> {
            Ok(WordTensor { bytes: read(index)?, n_columns: files.tensors()[index].shape[1] })
        };
        let dtype = self.dtype;
        let tensors = Tensors {
            matrix: self,
            qweight: words(self.qweight)?,
            qzeros: if dtype == DType::Q4_0 { None } else { Some(words(self.qzeros)?) },
            scales: (files.tensors()[self.scales].dtype, read(self.scales)?),
        };
        let row_bytes = self.n_columns / BLOCK_LEN * dtype.block_bytes();
        let out = buffer_of(buffer, rows.len() * row_bytes)?;
        pool.run_chunks(out, ROWS_AT_ONCE * row_bytes, &|i, out| {
            for b in 0..self.n_columns / BLOCK_LEN {
                for (r, row) in out.chunks_exact_mut(row_bytes).enumerate() {
                    let block = &mut row[b * dtype.block_bytes()..][..dtype.block_bytes()];
                    tensors.write_block(b, rows.start + i * ROWS_AT_ONCE + r, block);
                }
            }
        });
        Ok(out)
    }
}

/// A tensor of words.
struct WordTensor {
    bytes: Vec<u8>,
    n_columns: usize,
}

impl WordTensor {
    fn at(&self, row: usize, column: usize) -> u32 {
        u32::from_le_bytes(self.bytes.as_chunks().0[row * self.n_columns + column])
    }
}

/// Returns integer `index` of a word.
fn integer(word: u32, index: usize) -> u8 {
    (word >> (4 * index) & 15) as u8
}

/// The tensors of a matrix.
struct Tensors<'a> {
    matrix: &'a WordMatrix,
    qweight: WordTensor,
    /// None if every zero point is 8.
    qzeros: Option<WordTensor>,
    /// Type and bytes.
    scales: (DType, Vec<u8>),
}

impl Tensors<'_> {
    /// Writes block `b` of row `n` in the matrix's type.
    fn write_block(&self, b: usize, n: usize, block: &mut [u8]) {
        let group = self.matrix.words.group_size.map_or(0, |size| b * BLOCK_LEN / size);
        let at = group * self.matrix.n_rows + n;
        let (dtype, scales) = &self.scales;
        let nibbles = match &self.qzeros {
            None => {
                block[..2].copy_from_slice(&scales[2 * at..2 * at + 2]);
                &mut block[2..]
            }
            Some(qzeros) => {
                let zeros = self.matrix.zeros(qzeros.at(group, n / PER_WORD));
                block[..4].copy_from_slice(&scale(*dtype, scales, at).to_le_bytes());
                block[4] = integer(zeros, self.index_in_word(n));
                &mut block[int4::BYTES - BLOCK_LEN / 2..]
            }
        };
        for (j, byte) in nibbles.iter_mut().enumerate() {
            let k = b * BLOCK_LEN + j;
            *byte = self.weight(k, n) | self.weight(k + BLOCK_LEN / 2, n) << 4;
        }
    }

    fn weight(&self, k: usize, n: usize) -> u8 {
        match self.matrix.words.layout {
            Layout::Gptq { .. } => integer(self.qweight.at(k / PER_WORD, n), k % PER_WORD),
            Layout::Awq => integer(self.qweight.at(k, n / PER_WORD), self.index_in_word(n)),
        }
    }

    /// Returns the index of output `n` in a word of eight outputs.
    fn index_in_word(&self, n: usize) -> usize {
        match self.matrix.words.layout {
            Layout::Gptq { .. } => n % PER_WORD,
            Layout::Awq => AWQ_ORDER[n % PER_WORD],
        }
    }
}
