//! A checkpoint: configuration and tensors of a folder or a file, each tensor in its place.

use crate::dtype::DType;
use crate::error::{Result, Unsupported};
use crate::formats::FormatError;
use crate::formats::folder::ModelFolder;
use crate::formats::gguf::GgufFile;
use crate::formats::safetensors;
use crate::formats::tensors::{StoredTensor, TensorFiles, buffer_of};
use crate::formats::tokenizer_json;
use crate::model::config::ModelConfig;
use crate::model::family::RopeRows;
use crate::model::generation::GenerationConfig;
use crate::model::info::{FileFormat, ModelInfo, Source, TensorSize};
use crate::model::packed_size::PackedBytes;
use crate::model::quantized::{Quantization, QuantizedMatrix};
use crate::model::rope::RopeScaling;
use crate::model::slot::{LayerSlot, Slot};
use crate::model::{folder_config, gguf_config};
use crate::quant::dequantize_row;
use crate::tensor::{RowView, TensorRows};
use crate::threads::Pool;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

/// Files of a folder that Python reads.
const READ_ELSEWHERE: [&str; 5] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",
    "1_Pooling/config.json",
];

/// An open checkpoint. Every slot of its configuration has a tensor of the right shape, and no tensor is left
/// over. The files stay open as long as it lives.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    info: ModelInfo,
    files: TensorFiles,
    by_slot: HashMap<Slot, Place>,
    names: WeightNames,
}

/// Where a slot's tensor is.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// The tensor of this index.
    Stored(usize),
    /// Several tensors that stand for a matrix.
    Quantized(QuantizedMatrix),
}

impl Place {
    /// The type of the rows that are read.
    fn dtype(&self, files: &TensorFiles) -> DType {
        match self {
            Place::Stored(index) => files.tensors()[*index].dtype,
            Place::Quantized(matrix) => matrix.dtype(),
        }
    }
}

/// Names, shapes and row order of a checkpoint's tensors, for weights that outlive the files.
#[derive(Debug, Clone)]
pub struct WeightNames {
    by_name: HashMap<String, Slot>,
    config: ModelConfig,
    rope_rows: RopeRows,
}

impl Checkpoint {
    /// Opens a Hugging Face folder or a GGUF file.
    ///
    /// Errors: [`FormatError`] for damage and contradictions, [`crate::error::Unsupported`] by name for what
    /// is sound but not implemented.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| FormatError::Io { path: path.to_owned(), source };
        if std::fs::metadata(path).map_err(io)?.is_dir() {
            Self::open_folder(path)
        } else {
            Self::open_gguf(path)
        }
    }

    /// Facts of a checkpoint. Of a folder, the files that are read elsewhere are checked as well: that they are
    /// files of the folder, and `tokenizer.json` for the library that will trust it.
    ///
    /// Errors: as [`Self::open`], [`ModelFolder::regular_file`] and [`tokenizer_json::check`].
    pub fn inspect(path: &Path) -> Result<ModelInfo> {
        let checkpoint = Self::open(path)?;
        if checkpoint.info.file_format == FileFormat::Safetensors {
            let folder = ModelFolder::open(path)?;
            READ_ELSEWHERE.into_iter().try_for_each(|name| folder.regular_file(name).map(drop))?;
            tokenizer_json::check_folder(&folder)?;
        }
        Ok(checkpoint.info)
    }

    fn open_folder(path: &Path) -> Result<Self> {
        let folder = ModelFolder::open(path)?;
        let generation = GenerationConfig::read(&folder)?;
        let (config, quantization) = folder_config::read(&folder, &generation)?;
        let files = safetensors::open(&folder)?;
        let source = Source {
            path: path.to_string_lossy().into_owned(),
            file_format: FileFormat::Safetensors,
            generation: generation.defaults,
            tokenizer: None,
            pooling_type: None,
        };
        Self::assemble(config, files, quantization, source)
    }

    fn open_gguf(path: &Path) -> Result<Self> {
        let file = GgufFile::open(path)?;
        let ((config, tokenizer), pooling_type, tensors) = file.with_header(|header| {
            Ok((gguf_config::read(header)?, gguf_config::pooling_type(header)?, header.place()?))
        })?;
        let source = Source {
            path: path.to_string_lossy().into_owned(),
            file_format: FileFormat::Gguf,
            generation: Default::default(),
            tokenizer: Some(tokenizer),
            pooling_type,
        };
        Self::assemble(config, file.into_files(tensors), None, source)
    }

    /// Finds each slot's tensor. Errors: missing, left over, of another shape or type.
    fn assemble(
        mut config: ModelConfig,
        files: TensorFiles,
        quantization: Option<Quantization>,
        source: Source,
    ) -> Result<Self> {
        read_rope_factors(&mut config, &files)?;
        let (by_slot, by_name) = find_slots(&config, &files, quantization)?;
        refuse_extra(&config, &files, &by_slot)?;
        let mut sizes = Vec::new();
        for slot in config.slots() {
            let n_elements = config.shape(slot).iter().product();
            sizes.push(match by_slot[&slot] {
                Place::Stored(index) => {
                    let stored = &files.tensors()[index];
                    check_stored(stored, config.shape(slot))?;
                    TensorSize { dtype: stored.dtype, n_elements, n_bytes: stored.range.len() }
                }
                Place::Quantized(matrix) => {
                    let n_bytes = matrix.indices().map(|index| files.tensors()[index].range.len()).sum();
                    TensorSize { dtype: DType::Int4, n_elements, n_bytes }
                }
            });
        }
        let rope_rows = match source.file_format {
            FileFormat::Safetensors => RopeRows::HalfSplit,
            FileFormat::Gguf => config.family.gguf_rope_rows,
        };
        let stored = |slot| by_slot[&slot].dtype(&files);
        let bytes = [PackedBytes::new(&config, &stored), PackedBytes::of_screen(&config, &stored)];
        let info = ModelInfo::new(&config, &sizes, bytes, source);
        let names = WeightNames { by_name, config: config.clone(), rope_rows };
        Ok(Self { config, info, files, by_slot, names })
    }

    /// Hyper-parameters.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Facts for the outside.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// The tensor of `slot`, of the shape that the configuration gives it; None if the model has no such slot, or
    /// the file has it in several tensors.
    pub fn tensor(&self, slot: Slot) -> Option<&StoredTensor> {
        match self.by_slot.get(&slot)? {
            Place::Stored(index) => Some(&self.files.tensors()[*index]),
            Place::Quantized(_) => None,
        }
    }

    /// The type in which [`Checkpoint::read`] gives the tensor of `slot`. Panics if the model has no such slot.
    pub fn dtype(&self, slot: Slot) -> DType {
        self.by_slot[&slot].dtype(&self.files)
    }

    /// Reads `rows` of the tensor of `slot` into `buffer`: as the file has them, or made of several tensors. The rows
    /// of a stack of matrices follow each other, a vector is one row.
    ///
    /// Errors: [`FormatError::Truncated`], the system's; no memory. Panics if the model has no such slot, or it no such
    /// rows.
    pub fn read<'b>(
        &self,
        slot: Slot,
        rows: Range<usize>,
        buffer: &'b mut Vec<u8>,
        pool: &Pool,
    ) -> Result<TensorRows<'b>> {
        let n_columns = *self.config.shape(slot).last().expect("a slot's tensor has a size");
        let shape = [rows.len(), n_columns];
        let dtype = self.dtype(slot);
        let bytes = match self.by_slot[&slot] {
            Place::Stored(index) => {
                let row_bytes =
                    dtype.bytes_of(n_columns).expect("opening the checkpoint checked whole blocks");
                let bytes = buffer_of(buffer, rows.len() * row_bytes)?;
                self.files.read(index, rows.start * row_bytes, bytes, pool)?;
                &*bytes
            }
            Place::Quantized(matrix) => matrix.read(&self.files, rows, buffer, pool)?,
        };
        Ok(TensorRows { dtype, shape, bytes })
    }

    /// Every tensor of the files with the 128-bit XXH3 of its bytes, those that make up one matrix included, in the
    /// order of names. What [`Checkpoint::read`] has read in order is not read again. Errors: as there.
    pub fn hashes(&self) -> impl Iterator<Item = Result<(&StoredTensor, u128)>> {
        let tensors = self.files.tensors().iter().enumerate();
        tensors.map(|(index, tensor)| Ok((tensor, self.files.hash(index)?)))
    }

    /// Every slot of this model.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.config.slots()
    }

    /// As [`WeightNames::slot_named`].
    pub fn slot_named(&self, name: &str) -> Option<Slot> {
        self.names.slot_named(name)
    }

    /// As [`WeightNames::stored_row`].
    pub fn stored_row(&self, slot: Slot, n: usize) -> usize {
        self.names.stored_row(slot, n)
    }

    /// As [`WeightNames::offset`].
    pub fn offset(&self, slot: Slot) -> f32 {
        self.names.offset(slot)
    }

    /// Closes the files and keeps the names.
    pub fn into_names(self) -> WeightNames {
        self.names
    }
}

impl WeightNames {
    /// The slot of the tensor that the checkpoint calls `name`.
    pub fn slot_named(&self, name: &str) -> Option<Slot> {
        self.by_name.get(name).copied()
    }

    /// The shape of a slot's tensor, slowest first.
    pub fn shape(&self, slot: Slot) -> Vec<usize> {
        self.config.shape(slot)
    }

    /// The row of the stored tensor that holds row `n` of the slot in half-split order.
    pub fn stored_row(&self, slot: Slot, n: usize) -> usize {
        match slot {
            Slot::Layer(_, LayerSlot::Q | LayerSlot::K | LayerSlot::QBias | LayerSlot::KBias) => {
                self.rope_rows.stored_row(n, self.config.d_head)
            }
            _ => n,
        }
    }

    /// What the values of a slot are above those of its stored tensor.
    pub fn offset(&self, slot: Slot) -> f32 {
        match slot {
            Slot::OutputNorm => self.config.norm_offset,
            Slot::Layer(_, part) if part.is_norm() => self.config.norm_offset,
            _ => 0.0,
        }
    }
}

type Places = (HashMap<Slot, Place>, HashMap<String, Slot>);

/// Takes the rope factors of a configuration that has them as a tensor.
fn read_rope_factors(config: &mut ModelConfig, files: &TensorFiles) -> Result<(), FormatError> {
    let RopeScaling::PerPair { factors, .. } = &mut config.rope.scaling else { return Ok(()) };
    if !factors.is_empty() {
        return Ok(());
    }
    let name = config.names.rope_factors;
    let missing = || FormatError::MissingTensors { n_missing: 1, first: name.to_owned() };
    let index = files.find(name).ok_or_else(missing)?;
    let tensor = &files.tensors()[index];
    let (got, want) = (tensor.shape.clone(), vec![config.d_head / 2]);
    if got != want {
        return Err(FormatError::TensorShape { name: name.to_owned(), got, want });
    }
    *factors = vec![0.0; want[0]];
    let mut bytes = Vec::new();
    files.visit(index, 0, &mut |piece| bytes.extend_from_slice(piece))?;
    dequantize_row(RowView { dtype: tensor.dtype, bytes: &bytes }, factors);
    config.rope.check(config.d_head)
}

fn find_slots(
    config: &ModelConfig,
    files: &TensorFiles,
    quantization: Option<Quantization>,
) -> Result<Places> {
    let (mut by_slot, mut by_name) = (HashMap::new(), HashMap::new());
    let (mut n_missing, mut missing) = (0, None);
    for slot in config.slots() {
        let name = config.names.name(slot).expect("slots are those that the table names");
        let place = match (files.find(&name), quantization) {
            (Some(index), _) => Some(Place::Stored(index)),
            (None, Some(quantization)) => {
                quantization.find(files, &name, &config.shape(slot))?.map(Place::Quantized)
            }
            (None, None) => None,
        };
        match place {
            Some(place) => {
                by_slot.insert(slot, place);
                by_name.insert(name, slot);
            }
            None => {
                n_missing += 1;
                missing.get_or_insert(name);
            }
        }
    }
    match missing {
        Some(first) => Err(FormatError::MissingTensors { n_missing, first }.into()),
        None => Ok((by_slot, by_name)),
    }
}

/// Errors: another shape than the slot's; words in place of numbers.
fn check_stored(stored: &StoredTensor, want: Vec<usize>) -> Result<()> {
    let name = stored.name.clone();
    if stored.dtype == DType::I32 {
        let supported = "F32, F16, BF16";
        return Err(Unsupported::TensorType { tensor: name, dtype: "I32".into(), supported }.into());
    }
    if stored.shape != want {
        return Err(FormatError::TensorShape { name, got: stored.shape.clone(), want }.into());
    }
    Ok(())
}

fn refuse_extra(
    config: &ModelConfig,
    files: &TensorFiles,
    by_slot: &HashMap<Slot, Place>,
) -> Result<(), FormatError> {
    let table = config.names;
    let indices_of = |place: &Place| match place {
        Place::Stored(index) => vec![*index],
        Place::Quantized(matrix) => matrix.indices().collect(),
    };
    let known: HashSet<usize> = by_slot.values().flat_map(indices_of).collect();
    let has_factors = matches!(config.rope.scaling, RopeScaling::PerPair { .. });
    // A tied head saved a second time is the embedding again: transformers ties it whatever the file holds.
    let is_ignored = |name: &str| {
        table.ignores(name)
            || (config.tied_head && name == table.lm_head)
            || (has_factors && name == table.rope_factors)
    };
    let tensors = files.tensors().iter().enumerate();
    let mut extra = tensors.filter(|(i, tensor)| !known.contains(i) && !is_ignored(&tensor.name));
    let Some((_, first)) = extra.next() else { return Ok(()) };
    let n_extra = extra.count().saturating_add(1);
    Err(FormatError::ExtraTensors { n_extra, first: first.name.clone() })
}
