//! A checkpoint: the configuration of a folder or a file, and the tensor of each weight.

use crate::arch::config::ModelConfig;
use crate::arch::rope::{RopeConfig, RopeScaling};
use crate::arch::spec::RopeRows;
use crate::arch::weight_id::{DeltaWeight, LayerWeight, ShortConvWeight, WeightId};
use crate::arch::wrapper::BARE;
use crate::dtype::{ComputeMode, DType};
use crate::error::FormatError;
use crate::error::{Result, Unsupported};
use crate::load::folder::ModelFolder;
use crate::load::folder::config as folder_config;
use crate::load::folder::generation_config::GenerationConfig;
use crate::load::folder::quantization::{Quantization, QuantizedMatrix};
use crate::load::gguf::GgufFile;
use crate::load::gguf::config::{self as gguf_config, ModelHeader};
use crate::load::model_info::{FileFormat, MemoryBytes, ModelInfo, Source, TensorSize};
use crate::load::packed_size::PackedBytes;
use crate::load::safetensors;
use crate::load::tensor_files::{StoredTensor, TensorFiles, buffer_of};
use crate::load::transposed::Transposed;
use crate::load::weight_format::quantizes;
use crate::quant::dequantize_row;
use crate::tensor::{RowView, TensorRows};
use crate::threads::{Pool, Turn};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

const NAMED: &str = "weight_ids returns only weights that the name table has";

/// An open checkpoint. Every weight of its configuration has a tensor of the right shape, and there are no other
/// tensors. The files stay open until it is dropped.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    info: ModelInfo,
    files: TensorFiles,
    by_id: HashMap<WeightId, Location>,
    names: WeightNames,
}

/// Where a weight is stored.
#[derive(Debug, Clone, Copy)]
enum Location {
    /// In the tensor of this index.
    Stored(usize),
    /// In a tensor that has rows as columns.
    Transposed(Transposed),
    /// In several tensors, which make up a quantized matrix.
    Quantized(QuantizedMatrix),
}

impl Location {
    /// The indices of its tensors.
    fn indices(&self) -> Vec<usize> {
        match self {
            Location::Stored(index) | Location::Transposed(Transposed { index, .. }) => vec![*index],
            Location::Quantized(matrix) => matrix.indices(),
        }
    }

    /// The type of the rows that are read.
    fn dtype(&self, files: &TensorFiles) -> DType {
        match self {
            Location::Stored(index) | Location::Transposed(Transposed { index, .. }) => {
                files.tensors()[*index].dtype
            }
            Location::Quantized(matrix) => matrix.dtype(),
        }
    }
}

/// Names, shapes and row order of the tensors of a checkpoint. Usable after its files are closed.
#[derive(Debug, Clone)]
pub struct WeightNames {
    by_name: HashMap<String, WeightId>,
    config: ModelConfig,
    rope_rows: RopeRows,
}

impl Checkpoint {
    /// Opens a Hugging Face folder or a GGUF file.
    ///
    /// Errors: [`FormatError`] for damage and contradictions; [`crate::error::Unsupported`] for what is valid but not
    /// implemented.
    pub fn open(path: &Path) -> Result<Self> {
        if let Some(folder) = ModelFolder::find(path)? {
            return Self::open_folder(&folder, path);
        }
        let file = GgufFile::open(path)?;
        let header = file.with_header(gguf_config::read)?;
        Self::of_gguf(file, header, path)
    }

    pub(super) fn open_folder(folder: &ModelFolder, path: &Path) -> Result<Self> {
        let generation = GenerationConfig::read(folder)?;
        let (mut config, quantization) = folder_config::read(folder, &generation)?;
        let mut files = safetensors::open(folder)?;
        let generates = choose_names(&mut config, &files);
        let prefixes = config.wrapper.map_or(config.names.skipped, |wrapper| wrapper.skipped);
        let skipped_tensors = files.skip(prefixes);
        let source = Source {
            path: path.to_string_lossy().into_owned(),
            file_format: FileFormat::Safetensors,
            generation: generation.defaults,
            tokenizer: None,
            pooling_type: None,
            skipped_tensors,
            generates,
        };
        Self::assemble(config, files, quantization, source)
    }

    /// Combines a file with its header.
    pub(super) fn of_gguf(file: GgufFile, header: ModelHeader, path: &Path) -> Result<Self> {
        let ModelHeader { config, tokenizer, pooling_type, tensors } = header;
        let source = Source {
            path: path.to_string_lossy().into_owned(),
            file_format: FileFormat::Gguf,
            generation: Default::default(),
            tokenizer: Some(tokenizer),
            pooling_type,
            skipped_tensors: Default::default(),
            generates: true,
        };
        Self::assemble(config, file.into_files(tensors), None, source)
    }

    /// Finds the tensor of each weight. Errors: a tensor is missing, unexpected, or of another shape or type.
    fn assemble(
        mut config: ModelConfig,
        files: TensorFiles,
        quantization: Option<Quantization>,
        source: Source,
    ) -> Result<Self> {
        read_rope_factors(&mut config, &files)?;
        let (by_id, by_name) = find_weights(&config, &files, quantization)?;
        let mut sizes = Vec::new();
        for id in config.weight_ids() {
            let n_elements = config.shape(id).iter().product();
            sizes.push(match by_id[&id] {
                location @ (Location::Stored(index) | Location::Transposed(Transposed { index, .. })) => {
                    let stored = &files.tensors()[index];
                    let mut shape = config.shape(id);
                    if let (Location::Transposed(_), [.., n, k]) = (location, &mut shape[..]) {
                        std::mem::swap(n, k);
                    }
                    check_stored(stored, id, shape)?;
                    TensorSize { dtype: stored.dtype, n_elements, n_bytes: stored.range.len() }
                }
                Location::Quantized(matrix) => {
                    let bytes = matrix.indices().into_iter().map(|index| files.tensors()[index].range.len());
                    TensorSize { dtype: matrix.reported_dtype(), n_elements, n_bytes: bytes.sum() }
                }
            });
        }
        // Last, because the scales of a matrix in a type without a reader are extra too: the type is the better reason.
        reject_extra(&config, &files, &by_id)?;
        let rope_rows = match source.file_format {
            FileFormat::Safetensors => config.arch.folder_rope_rows,
            FileFormat::Gguf => config.arch.gguf_rope_rows,
        };
        let stored = |id| by_id[&id].dtype(&files);
        let memory = MemoryBytes {
            weights: PackedBytes::new(&config, &stored),
            argmax_bounds: PackedBytes::of_argmax_bounds(&config, &stored),
        };
        let info = ModelInfo::new(&config, &sizes, memory, source);
        let names = WeightNames { by_name, config: config.clone(), rope_rows };
        Ok(Self { config, info, files, by_id, names })
    }

    /// As [`ModelConfig::choose_rope`].
    pub fn choose_rope(&mut self, max_model_len: usize) {
        self.config.choose_rope(max_model_len);
    }

    /// Hyper-parameters.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The properties that are reported about the model.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// The tensor of a weight, in the shape of the configuration; None if the model has no such weight, or it is stored
    /// transposed or in several tensors.
    pub fn tensor(&self, id: WeightId) -> Option<&StoredTensor> {
        match self.by_id.get(&id)? {
            Location::Stored(index) => Some(&self.files.tensors()[*index]),
            Location::Transposed(_) | Location::Quantized(_) => None,
        }
    }

    /// True if [`Checkpoint::read`] reads a whole matrix for any of its rows. Panics if the model has no such weight.
    pub fn is_read_whole(&self, id: WeightId) -> bool {
        match self.by_id[&id] {
            Location::Stored(_) => false,
            Location::Transposed(_) => true,
            Location::Quantized(matrix) => matrix.is_read_whole(),
        }
    }

    /// The element type of what [`Checkpoint::read`] returns for `id`. Panics if the model has no such weight.
    pub fn dtype(&self, id: WeightId) -> DType {
        self.by_id[&id].dtype(&self.files)
    }

    /// Checks that every matrix has a type that can be quantized, if `mode` quantizes: floats, FP8 included.
    ///
    /// Errors: [`Unsupported::Quantized`] names the first matrix that is stored in integers.
    pub fn check_quantizable(&self, mode: ComputeMode) -> Result<(), Unsupported> {
        if !quantizes(mode) {
            return Ok(());
        }
        for id in self.config.weight_ids().filter(|&id| self.config.shape(id).len() > 1) {
            let dtype = match self.by_id[&id] {
                Location::Quantized(matrix) => matrix.reported_dtype(),
                location => location.dtype(&self.files),
            };
            if dtype.is_quantized() && dtype != DType::Fp8 {
                let tensor = self.config.name(id).expect(NAMED);
                return Err(Unsupported::Quantized { tensor, dtype: dtype.name().to_uppercase() });
            }
        }
        Ok(())
    }

    /// Reads `rows` of a weight into `buffer`: as stored, or assembled from several tensors. The rows of stacked
    /// matrices follow each other; a vector is one row.
    ///
    /// Errors: [`FormatError::Truncated`], errors of the system, no memory. Panics if the model has no such weight, or
    /// the weight no such rows.
    pub fn read<'b>(
        &self,
        id: WeightId,
        rows: Range<usize>,
        buffer: &'b mut Vec<u8>,
        pool: &Pool,
    ) -> Result<TensorRows<'b>> {
        let shape = [rows.len(), self.n_columns(id)];
        let dtype = self.dtype(id);
        let bytes = match self.by_id[&id] {
            Location::Stored(index) => {
                let range = self.bytes_of(id, rows);
                let bytes = buffer_of(buffer, range.len())?;
                self.files.read(index, range.start, bytes, pool)?;
                &*bytes
            }
            Location::Transposed(stack) => stack.read(&self.files, rows, buffer, pool)?,
            Location::Quantized(matrix) => matrix.read(&self.files, rows, buffer, pool)?,
        };
        Ok(TensorRows { dtype, shape, bytes })
    }

    /// As [`Self::read`] on this thread alone, while others read other rows: they are hashed in turn. Panics if the weight
    /// is not stored as it is ([`Self::tensor`]).
    pub fn read_in_turn<'b>(
        &self,
        id: WeightId,
        rows: Range<usize>,
        buffer: &'b mut Vec<u8>,
        turn: &Turn<'_>,
    ) -> Result<TensorRows<'b>> {
        let Location::Stored(index) = self.by_id[&id] else { panic!("{id:?} is not stored as it is") };
        let (shape, range) = ([rows.len(), self.n_columns(id)], self.bytes_of(id, rows));
        let bytes = buffer_of(buffer, range.len())?;
        self.files.read_in_turn(index, range.start, bytes, turn)?;
        Ok(TensorRows { dtype: self.dtype(id), shape, bytes })
    }

    fn n_columns(&self, id: WeightId) -> usize {
        *self.config.shape(id).last().expect("a weight's tensor has a size")
    }

    /// The bytes of `rows` in the tensor of a weight that is stored as it is.
    fn bytes_of(&self, id: WeightId, rows: Range<usize>) -> Range<usize> {
        let n_bytes = self.dtype(id).bytes_of(self.n_columns(id));
        let n_bytes = n_bytes.expect("opening the checkpoint checked whole blocks");
        rows.start * n_bytes..rows.end * n_bytes
    }

    /// Runs `load`, which reads the weights in the order of [`Self::weight_ids`], while a thread reads them ahead of it
    /// from the disk.
    pub fn read_ahead<T>(&self, load: impl FnOnce() -> T) -> T {
        let order: Vec<usize> = self.weight_ids().flat_map(|id| self.by_id[&id].indices()).collect();
        self.files.read_ahead(&order, load)
    }

    /// Returns every tensor of the files, in the order of names, with the 128-bit XXH3 hash of its bytes. Tensors that
    /// [`Checkpoint::read`] has read in order are not read again. Errors: as [`Checkpoint::read`].
    pub fn hashes(&self) -> impl Iterator<Item = Result<(&StoredTensor, u128)>> {
        let tensors = self.files.tensors().iter().enumerate();
        tensors.map(|(index, tensor)| Ok((tensor, self.files.hash(index)?)))
    }

    /// The id of every weight of this model.
    pub fn weight_ids(&self) -> impl Iterator<Item = WeightId> + '_ {
        self.config.weight_ids()
    }

    /// As `WeightNames::weight_id`.
    pub fn weight_id(&self, name: &str) -> Option<WeightId> {
        self.names.weight_id(name)
    }

    /// As `WeightNames::stored_row`.
    pub fn stored_row(&self, id: WeightId, n: usize) -> usize {
        self.names.stored_row(id, n)
    }

    /// As `WeightNames::offset`.
    pub fn offset(&self, id: WeightId) -> f32 {
        self.names.offset(id)
    }

    /// Closes the files and keeps the names.
    pub fn into_names(self) -> WeightNames {
        self.names
    }
}

impl WeightNames {
    /// The weight that the checkpoint calls `name`.
    pub fn weight_id(&self, name: &str) -> Option<WeightId> {
        self.by_name.get(name).copied()
    }

    /// The shape of a weight, slowest dimension first.
    pub fn shape(&self, id: WeightId) -> Vec<usize> {
        self.config.shape(id)
    }

    /// Returns the stored row of row `n` of the weight in half-split order.
    pub fn stored_row(&self, id: WeightId, n: usize) -> usize {
        match id {
            WeightId::Layer(
                layer,
                LayerWeight::Q | LayerWeight::K | LayerWeight::QBias | LayerWeight::KBias,
            ) => self.rope_rows.stored_row(n, self.config.head_widths(layer)),
            _ => n,
        }
    }

    /// Returns the number that is added to the stored values of a weight.
    pub fn offset(&self, id: WeightId) -> f32 {
        match id {
            WeightId::OutputNorm => self.config.norm_offset,
            WeightId::Layer(_, part) if part.is_norm() => self.config.norm_offset,
            _ => 0.0,
        }
    }
}

/// Expects names without `model.` if the embeddings have such a name. Returns whether the model has a head. If it has
/// none although the head is not tied, no memory is used for one.
fn choose_names(config: &mut ModelConfig, files: &TensorFiles) -> bool {
    let plain = config.names.embed;
    if config.wrapper.is_some() || files.find(plain).is_some() || files.find(&BARE.name(plain)).is_none() {
        return true;
    }
    config.wrapper = Some(&BARE);
    let has_head = config.tied_head || files.find(config.names.lm_head).is_some();
    config.tied_head |= !has_head;
    has_head
}

/// Reads the rope factors of a configuration that stores them as tensors.
fn read_rope_factors(config: &mut ModelConfig, files: &TensorFiles) -> Result<(), FormatError> {
    let (d_rope, names) = (config.d_rope_full(), config.names);
    read_factors(&mut config.rope, d_rope, names.rope_factors, files)?;
    match &mut config.long_rope {
        Some(long) => read_factors(&mut long.rope, d_rope, names.rope_factors_long, files),
        None => Ok(()),
    }
}

fn read_factors(
    rope: &mut RopeConfig,
    d_rope: usize,
    name: &str,
    files: &TensorFiles,
) -> Result<(), FormatError> {
    let RopeScaling::PerPair { factors, .. } = &mut rope.scaling else { return Ok(()) };
    if !factors.is_empty() {
        return Ok(());
    }
    let missing = || FormatError::MissingTensors { n_missing: 1, first: name.to_owned() };
    let index = files.find(name).ok_or_else(missing)?;
    let tensor = &files.tensors()[index];
    let (got, want) = (tensor.shape.clone(), vec![d_rope / 2]);
    if got != want {
        return Err(FormatError::TensorShape { name: name.to_owned(), got, want });
    }
    *factors = vec![0.0; want[0]];
    let mut bytes = Vec::new();
    files.visit(index, 0, &mut |piece| bytes.extend_from_slice(piece))?;
    dequantize_row(RowView { dtype: tensor.dtype, bytes: &bytes }, factors);
    rope.check(d_rope)
}

/// Finds each weight in the files, and returns the weights by name too. Errors: a tensor is missing.
fn find_weights(
    config: &ModelConfig,
    files: &TensorFiles,
    quantization: Option<Quantization>,
) -> Result<(HashMap<WeightId, Location>, HashMap<String, WeightId>)> {
    let (mut by_id, mut by_name) = (HashMap::new(), HashMap::new());
    let (mut n_missing, mut missing) = (0, None);
    for id in config.weight_ids() {
        let name = config.name(id).expect(NAMED);
        let matrix = match quantization {
            Some(quantization) => quantization.find(files, &name, &config.shape(id))?,
            None => None,
        };
        let stored = || files.find(&name).map(|index| single(config, id, &files.tensors()[index], index));
        let location = matrix.map(Location::Quantized).or_else(stored);
        match location {
            Some(location) => {
                by_id.insert(id, location);
                by_name.insert(name, id);
            }
            None => {
                n_missing += 1;
                missing.get_or_insert(name);
            }
        }
    }
    match missing {
        Some(first) => Err(FormatError::MissingTensors { n_missing, first }.into()),
        None => Ok((by_id, by_name)),
    }
}

/// Returns the location of a weight in a single tensor.
fn single(config: &ModelConfig, id: WeightId, stored: &StoredTensor, index: usize) -> Location {
    let WeightId::Layer(_, LayerWeight::ExpertsGateUp | LayerWeight::Experts(_)) = id else {
        return Location::Stored(index);
    };
    match config.shape(id)[..] {
        [_, n_rows, n_columns] if config.names.interleaved_experts && !stored.dtype.is_quantized() => {
            Location::Transposed(Transposed { index, n_rows, n_columns })
        }
        _ => Location::Stored(index),
    }
}

/// Checks the tensor of a weight. Errors: it has another shape than the weight, or a type of parts of quantized matrices.
fn check_stored(stored: &StoredTensor, id: WeightId, want: Vec<usize>) -> Result<()> {
    let name = stored.name.clone();
    if !stored.dtype.is_weight() {
        let (dtype, supported) = (stored.dtype.name().to_uppercase(), "F32, F16, BF16");
        return Err(Unsupported::TensorType { tensor: name, dtype, supported }.into());
    }
    // Folders and GGUF files differ in whether a dimension of 1 is there.
    let squeezes = matches!(
        id,
        WeightId::Layer(
            _,
            LayerWeight::Delta(DeltaWeight::Conv)
                | LayerWeight::ShortConv(ShortConvWeight::Conv)
                | LayerWeight::SharedScale
        )
    );
    let squeezed = |shape: &[usize]| shape.iter().copied().filter(|&n| n != 1).collect::<Vec<_>>();
    let is_equal = stored.shape == want || squeezes && squeezed(&stored.shape) == squeezed(&want);
    if !is_equal {
        return Err(FormatError::TensorShape { name, got: stored.shape.clone(), want }.into());
    }
    Ok(())
}

/// Rejects tensors that the model does not use. Errors: [`FormatError::ExtraTensors`].
fn reject_extra(
    config: &ModelConfig,
    files: &TensorFiles,
    by_id: &HashMap<WeightId, Location>,
) -> Result<(), FormatError> {
    let (table, lm_head) = (config.names, config.name(WeightId::LmHead));
    let known: HashSet<usize> = by_id.values().flat_map(Location::indices).collect();
    let has_factors = matches!(config.rope.scaling, RopeScaling::PerPair { .. });
    // A tied head that is saved too is ignored: transformers ties it to the embeddings whatever the file contains.
    // Layers that read the keys and values of others have no use for their own projections.
    let unused = config.unused_kv().filter_map(|id| config.name(id)).collect::<HashSet<_>>();
    let is_ignored = |name: &str| {
        table.ignores(name)
            || unused.contains(name)
            || (config.tied_head && Some(name) == lm_head.as_deref())
            || (has_factors && [table.rope_factors, table.rope_factors_long].contains(&name))
    };
    let tensors = files.tensors().iter().enumerate();
    let mut extra = tensors.filter(|(i, tensor)| !known.contains(i) && !is_ignored(&tensor.name));
    let Some((_, first)) = extra.next() else { return Ok(()) };
    let n_extra = extra.count().saturating_add(1);
    Err(FormatError::ExtraTensors { n_extra, first: first.name.clone() })
}
