//! Checkpoints of encoders: a Hugging Face folder or a GGUF file with one of the architectures of
//! [`crate::arch::encoder`].

mod folder;
pub(super) mod gguf;

use crate::arch::encoder::{self, EncoderConfig, EncoderNames, EncoderTask, HeadRule, PositionRule};
use crate::dtype::{ComputeMode, DType};
use crate::error::{FormatError, Result, Unsupported};
use crate::load::folder::fields::Fields;
use crate::load::folder::{CONFIG_FILE as FILE, ModelFolder};
use crate::load::gguf::GgufFile;
use crate::load::model_info::{FileFormat, KvBytesPerCell, ModelInfo};
use crate::load::packed_size::PackedBytes;
use crate::load::safetensors;
use crate::load::tensor_files::{TensorFiles, buffer_of};
use crate::ops::gate_up_rows;
use crate::ops::packed::{PackedFormat, PackedMatrix};
use crate::quant::dequantize_row;
use crate::tensor::{RowView, TensorRows};
use crate::threads::Pool;
use gguf::EncoderHeader;
use serde_json::Value;
use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

/// One tensor that the forward pass needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A matrix in the format of the mode, `[n_rows, n_columns]`.
    Matrix(usize, usize),
    /// Gate over up, packed in one interleaved matrix: `[2 n_inner, n_columns]`.
    Gated(usize, usize),
    /// A table that is added to the token embeddings, always float32.
    Table(usize, usize),
    /// A norm or a bias.
    Vector(usize),
}

/// An open checkpoint of an encoder. Every tensor of its configuration exists and has the right shape, and there are no
/// others except those that the family skips.
#[derive(Debug)]
pub struct EncoderCheckpoint {
    config: EncoderConfig,
    files: TensorFiles,
    names: &'static EncoderNames,
    /// The encoder's names begin with this.
    prefix: &'static str,
    info: ModelInfo,
}

impl EncoderCheckpoint {
    /// Opens a folder or a GGUF file; None if its architecture is no encoder.
    ///
    /// Errors: [`FormatError`] for damage and contradictions; [`Unsupported`] for what is valid but not implemented.
    pub fn open(path: &Path) -> Result<Option<Self>> {
        if let Some(folder) = ModelFolder::find(path)? {
            return Self::open_folder(&folder, path);
        }
        let file = GgufFile::open(path)?;
        let header = file.with_header(gguf::read)?;
        header.map(|header| Self::of_gguf(file, header, path)).transpose()
    }

    /// As [`Self::open`], for the folder at `path`.
    pub(super) fn open_folder(folder: &ModelFolder, path: &Path) -> Result<Option<Self>> {
        let fields = Fields { file: FILE, map: folder.config()? };
        let first = fields.list("architectures")?.and_then(<[Value]>::first).and_then(Value::as_str);
        let Some((spec, task)) = first.and_then(encoder::find) else { return Ok(None) };
        let named = [spec.base, spec.masked, spec.classifier].into_iter().find(|&name| Some(name) == first);
        let config = folder::read_config(&fields, spec, task, named.expect("the row has this name"))?;
        let files = safetensors::open(folder)?;
        let words = format!("{}{}.weight", spec.prefix, spec.names.words);
        let prefix = if files.find(&words).is_some() { spec.prefix } else { "" };
        let names = &spec.names;
        let checkpoint = Self { info: ModelInfo::empty(), config, files, names, prefix };
        checkpoint.described(path).map(Some)
    }

    /// Combines a file with its header.
    pub(super) fn of_gguf(file: GgufFile, header: EncoderHeader, path: &Path) -> Result<Self> {
        let EncoderHeader { config, tokenizer, pooling_type, tensors } = header;
        let (names, files) = (&config.spec.gguf_names, file.into_files(tensors));
        let checkpoint = Self { info: ModelInfo::empty(), config, files, names, prefix: "" };
        let mut checkpoint = checkpoint.described(path)?;
        let info = &mut checkpoint.info;
        (info.file_format, info.tokenizer) = (FileFormat::Gguf, Some(tokenizer));
        info.pooling_type = pooling_type;
        Ok(checkpoint)
    }

    /// Checks the tensors and fills in the properties of the model.
    fn described(mut self, path: &Path) -> Result<Self> {
        self.check_tensors()?;
        self.info = self.describe(path);
        Ok(self)
    }

    /// Hyper-parameters.
    pub fn config(&self) -> &EncoderConfig {
        &self.config
    }

    /// The properties that are reported about the model.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// The names of tensors in the container.
    pub fn names(&self) -> &'static EncoderNames {
        self.names
    }

    /// The name of one of the encoder's tensors.
    pub fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The index of a tensor. Norms of old checkpoints are called gamma and beta.
    fn find(&self, name: &str) -> Option<usize> {
        self.files.find(name).or_else(|| {
            let old = name
                .replace("LayerNorm.weight", "LayerNorm.gamma")
                .replace("LayerNorm.bias", "LayerNorm.beta");
            self.files.find(&old)
        })
    }

    fn index(&self, name: &str) -> usize {
        self.find(name).expect("opening the checkpoint has found every tensor")
    }

    /// The format in memory of a matrix in `mode`.
    pub fn format(&self, name: &str, mode: ComputeMode) -> PackedFormat {
        let tensor = &self.files.tensors()[self.index(name)];
        let wanted = match mode {
            ComputeMode::Float32 => PackedFormat::F32,
            ComputeMode::Bfloat16 => PackedFormat::BF16,
            _ => PackedFormat::of(tensor.dtype),
        };
        if PackedMatrix::can_pack(wanted, tensor.shape[1]) { wanted } else { PackedFormat::F32 }
    }

    /// The type and the shape of a matrix.
    pub fn shape(&self, name: &str) -> (DType, [usize; 2]) {
        let tensor = &self.files.tensors()[self.index(name)];
        (tensor.dtype, [tensor.shape[0], tensor.shape[1]])
    }

    /// Reads rows of a matrix into `buffer`. Errors: [`FormatError::Truncated`], errors of the system, no memory.
    pub fn read<'b>(
        &self,
        name: &str,
        rows: Range<usize>,
        buffer: &'b mut Vec<u8>,
        pool: &Pool,
    ) -> Result<TensorRows<'b>> {
        let (dtype, [_, n_columns]) = self.shape(name);
        let row_bytes = dtype.bytes_of(n_columns).expect("rows are whole blocks");
        let bytes = buffer_of(buffer, rows.len() * row_bytes)?;
        self.files.read(self.index(name), rows.start * row_bytes, bytes, pool)?;
        Ok(TensorRows { dtype, shape: [rows.len(), n_columns], bytes })
    }

    /// Reads a vector. Errors: as [`Self::read`].
    pub fn vector(&self, name: &str, pool: &Pool) -> Result<Vec<f32>> {
        let index = self.index(name);
        let tensor = &self.files.tensors()[index];
        let (mut buffer, mut values) = (Vec::new(), vec![0.0; tensor.shape.iter().product()]);
        let bytes = buffer_of(&mut buffer, tensor.range.len())?;
        self.files.read(index, 0, bytes, pool)?;
        dequantize_row(RowView { dtype: tensor.dtype, bytes }, &mut values);
        Ok(values)
    }

    /// Every tensor of the model with its full name.
    pub fn parts(&self) -> Vec<(String, Part)> {
        let (config, spec) = (&self.config, self.config.spec);
        let (d, names) = (config.d_model, self.names);
        let mut parts = Vec::new();
        let mut add = |name: String, part: Part, has_bias: bool| {
            let n_rows = match part {
                Part::Matrix(n, _) | Part::Gated(n, _) | Part::Table(n, _) | Part::Vector(n) => n,
            };
            if has_bias {
                parts.push((format!("{name}.bias"), Part::Vector(n_rows)));
            }
            parts.push((format!("{name}.weight"), part));
        };
        let own = |name: &str| self.name(name);
        add(own(names.words), Part::Matrix(config.vocab_size, d), false);
        if spec.positions != PositionRule::Rotated {
            add(own(names.positions), Part::Table(config.n_position_rows(), d), false);
        }
        if spec.has_types {
            add(own(names.types), Part::Table(config.n_types, d), false);
        }
        add(own(names.embed_norm), Part::Vector(d), spec.has_biases);
        for index in 0..config.n_layers {
            let at = |name: &str| own(&name.replace("{}", &index.to_string()));
            for qkv in names.qkv {
                add(at(qkv), Part::Matrix(3 * d / names.qkv.len(), d), spec.has_biases);
            }
            add(at(names.o), Part::Matrix(d, d), spec.has_biases);
            if self.has_attn_norm(index) {
                add(at(names.attn_norm), Part::Vector(d), spec.has_biases);
            }
            let up =
                if spec.is_gated { Part::Gated(2 * config.d_ff, d) } else { Part::Matrix(config.d_ff, d) };
            add(at(names.up), up, spec.has_biases);
            add(at(names.down), Part::Matrix(d, config.d_ff), spec.has_biases);
            add(at(names.ffn_norm), Part::Vector(d), spec.has_biases);
        }
        if spec.pre_norms {
            add(own(names.final_norm), Part::Vector(d), spec.has_biases);
        }
        if config.task == EncoderTask::Score {
            add(self.head_dense(), Part::Matrix(d, d), spec.has_biases);
            if spec.head == HeadRule::Normed {
                add(names.head_norm.to_owned(), Part::Vector(d), spec.has_biases);
            }
            add(names.head_out.to_owned(), Part::Matrix(1, d), true);
        }
        parts
    }

    /// True if attention of layer `index` has a norm. Before the first layer, the norm of the embeddings is enough.
    pub fn has_attn_norm(&self, index: usize) -> bool {
        index > 0 || !self.config.spec.pre_norms
    }

    /// The name of the classifier's dense layer.
    pub fn head_dense(&self) -> String {
        let name = self.names.head_dense;
        if self.config.spec.head == HeadRule::Pooler { self.name(name) } else { name.to_owned() }
    }

    /// Errors: a tensor is missing, unexpected, or of another shape or type; the classifier has several outputs.
    fn check_tensors(&self) -> Result<()> {
        self.check_labels()?;
        let (mut known, mut n_missing, mut missing) = (HashSet::new(), 0_usize, None);
        for (name, part) in self.parts() {
            let Some(index) = self.find(&name) else {
                n_missing = n_missing.saturating_add(1);
                missing.get_or_insert(name);
                continue;
            };
            known.insert(index);
            let tensor = &self.files.tensors()[index];
            if !tensor.dtype.is_weight() {
                let (dtype, supported) = (tensor.dtype.name().to_uppercase(), "F32, F16, BF16");
                return Err(Unsupported::TensorType { tensor: name, dtype, supported }.into());
            }
            let want = match part {
                Part::Matrix(n, d) | Part::Gated(n, d) | Part::Table(n, d) => vec![n, d],
                Part::Vector(n) => vec![n],
            };
            if tensor.shape != want {
                return Err(FormatError::TensorShape { name, got: tensor.shape.clone(), want }.into());
            }
        }
        if let Some(first) = missing {
            return Err(FormatError::MissingTensors { n_missing, first }.into());
        }
        let skipped = self.config.spec.skipped;
        let is_skipped = |name: &str| {
            let bare = name.strip_prefix(self.prefix).unwrap_or(name);
            skipped.iter().any(|prefix| bare.starts_with(prefix))
        };
        let tensors = self.files.tensors().iter().enumerate();
        let mut extra = tensors.filter(|(i, tensor)| !known.contains(i) && !is_skipped(&tensor.name));
        match extra.next() {
            None => Ok(()),
            Some((_, first)) => {
                let n_extra = extra.count().saturating_add(1);
                Err(FormatError::ExtraTensors { n_extra, first: first.name.clone() }.into())
            }
        }
    }

    fn check_labels(&self) -> Result<(), Unsupported> {
        if self.config.task != EncoderTask::Score {
            return Ok(());
        }
        let out = format!("{}.weight", self.names.head_out);
        let n_labels = self.find(&out).and_then(|index| self.files.tensors()[index].shape.first().copied());
        match n_labels {
            None | Some(1) => Ok(()),
            Some(n) => Err(Unsupported::feature("the classifier's number of labels", n, "1 (a score)")),
        }
    }

    fn describe(&self, path: &Path) -> ModelInfo {
        let config = &self.config;
        let tensors = || self.parts().into_iter().map(|(name, _)| self.index(&name));
        let size = |index: usize| {
            let tensor = &self.files.tensors()[index];
            (tensor.shape.iter().product::<usize>(), tensor.range.len())
        };
        let bytes_of = |dtype: DType| -> usize {
            let of_type = tensors().filter(|&index| self.files.tensors()[index].dtype == dtype);
            of_type.map(|index| size(index).1).sum()
        };
        let none = KvBytesPerCell { float32: 0, float16: 0, bfloat16: 0, int8: 0 };
        ModelInfo {
            path: path.to_string_lossy().into_owned(),
            file_format: FileFormat::Safetensors,
            architecture: config.architecture,
            dtype: DType::ALL.into_iter().max_by_key(|&dtype| bytes_of(dtype)).expect("there are types"),
            n_layers: config.n_layers,
            d_model: config.d_model,
            n_heads: config.n_heads,
            n_kv_heads: config.n_heads,
            d_head: config.d_head(),
            d_ff: config.d_ff,
            vocab_size: config.vocab_size,
            max_position_embeddings: config.max_positions,
            n_parameters: tensors().map(|index| size(index).0).sum(),
            weight_bytes: tensors().map(|index| size(index).1).sum(),
            packed_bytes: PackedBytes::each(|mode| self.packed_bytes(mode)),
            screen_bytes: PackedBytes::each(|_| 0),
            kv_bytes_per_cell: none,
            is_encoder: true,
            has_score_head: config.task == EncoderTask::Score,
            ..ModelInfo::empty()
        }
    }

    /// Bytes of the packed weights in `mode`, as the packer makes them. Quantized modes are rejected when loading.
    fn packed_bytes(&self, mode: ComputeMode) -> usize {
        let bytes = |(name, part): &(String, Part)| match *part {
            Part::Matrix(n, d) => self.format(name, mode).matrix_bytes(n, d),
            Part::Gated(n, d) => self.format(name, mode).matrix_bytes(gate_up_rows(n / 2), d),
            Part::Table(n, d) => PackedFormat::F32.matrix_bytes(n, d),
            Part::Vector(n) => n * size_of::<f32>(),
        };
        self.parts().iter().map(bytes).sum()
    }
}
