//! A checkpoint: configuration and tensors of a folder or a file, each tensor in its place.

use crate::error::Result;
use crate::formats::FormatError;
use crate::formats::folder::ModelFolder;
use crate::formats::gguf::GgufFile;
use crate::formats::safetensors;
use crate::formats::tensors::TensorFiles;
use crate::model::config::ModelConfig;
use crate::model::family::RopeRows;
use crate::model::generation::GenerationConfig;
use crate::model::info::{FileFormat, ModelInfo, Source, TensorSize};
use crate::model::rope::RopeScaling;
use crate::model::slot::{LayerSlot, Slot};
use crate::model::{folder_config, gguf_config};
use crate::quant::dequantize_row;
use crate::tensor::TensorView;
use std::collections::HashMap;
use std::path::Path;

/// An open checkpoint. Every slot of its configuration has a tensor of the right shape, and no tensor is left
/// over. The files stay mapped as long as it lives.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    info: ModelInfo,
    files: TensorFiles,
    by_slot: HashMap<Slot, usize>,
    names: WeightNames,
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

    fn open_folder(path: &Path) -> Result<Self> {
        let folder = ModelFolder::open(path)?;
        let generation = GenerationConfig::read(&folder)?;
        let config = folder_config::read(&folder, &generation)?;
        let files = safetensors::open(&folder)?;
        let source = Source {
            path: path.to_string_lossy().into_owned(),
            file_format: FileFormat::Safetensors,
            generation: generation.defaults,
            tokenizer: None,
        };
        Self::assemble(config, files, source)
    }

    fn open_gguf(path: &Path) -> Result<Self> {
        let file = GgufFile::open(path)?;
        let header = file.header()?;
        let (config, tokenizer) = gguf_config::read(&header)?;
        let tensors = header.place()?;
        let source = Source {
            path: path.to_string_lossy().into_owned(),
            file_format: FileFormat::Gguf,
            generation: Default::default(),
            tokenizer: Some(tokenizer),
        };
        Self::assemble(config, file.into_files(tensors), source)
    }

    /// Finds each slot's tensor. Errors: missing, left over, of another shape.
    fn assemble(mut config: ModelConfig, files: TensorFiles, source: Source) -> Result<Self> {
        read_rope_factors(&mut config, &files)?;
        let (by_slot, by_name) = find_slots(&config, &files)?;
        refuse_extra(&config, &files, &by_name)?;
        let mut sizes = Vec::new();
        for slot in config.slots() {
            let stored = &files.tensors()[by_slot[&slot]];
            let want = config.shape(slot);
            if stored.shape != want {
                let (name, got) = (stored.name.clone(), stored.shape.clone());
                return Err(FormatError::TensorShape { name, got, want }.into());
            }
            let n_elements = want.iter().product();
            sizes.push(TensorSize { dtype: stored.dtype, n_elements, n_bytes: stored.range.len() });
        }
        let rope_rows = match source.file_format {
            FileFormat::Safetensors => RopeRows::HalfSplit,
            FileFormat::Gguf => config.family.gguf_rope_rows,
        };
        let info = ModelInfo::new(&config, &sizes, source);
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

    /// The tensor of `slot`, of the shape that the configuration gives it; None if the model has no such slot.
    pub fn tensor(&self, slot: Slot) -> Option<TensorView<'_>> {
        self.by_slot.get(&slot).map(|&index| self.files.view(index))
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

type Places = (HashMap<Slot, usize>, HashMap<String, Slot>);

/// Takes the rope factors of a configuration that has them as a tensor.
fn read_rope_factors(config: &mut ModelConfig, files: &TensorFiles) -> Result<(), FormatError> {
    let RopeScaling::PerPair { factors, .. } = &mut config.rope.scaling else { return Ok(()) };
    if !factors.is_empty() {
        return Ok(());
    }
    let name = config.names.rope_factors;
    let missing = || FormatError::MissingTensors { n_missing: 1, first: name.to_owned() };
    let tensor = files.view(files.find(name).ok_or_else(missing)?);
    let (got, want) = (tensor.shape.to_vec(), vec![config.d_head / 2]);
    if got != want {
        return Err(FormatError::TensorShape { name: name.to_owned(), got, want });
    }
    *factors = vec![0.0; want[0]];
    dequantize_row(tensor.row(0), factors);
    config.rope.check(config.d_head)
}

fn find_slots(config: &ModelConfig, files: &TensorFiles) -> Result<Places, FormatError> {
    let (mut by_slot, mut by_name) = (HashMap::new(), HashMap::new());
    let (mut n_missing, mut missing) = (0, None);
    for slot in config.slots() {
        let name = config.names.name(slot).expect("slots are those that the table names");
        match files.find(&name) {
            Some(index) => {
                by_slot.insert(slot, index);
                by_name.insert(name, slot);
            }
            None => {
                n_missing += 1;
                missing.get_or_insert(name);
            }
        }
    }
    match missing {
        Some(first) => Err(FormatError::MissingTensors { n_missing, first }),
        None => Ok((by_slot, by_name)),
    }
}

fn refuse_extra(
    config: &ModelConfig,
    files: &TensorFiles,
    by_name: &HashMap<String, Slot>,
) -> Result<(), FormatError> {
    let table = config.names;
    let has_factors = matches!(config.rope.scaling, RopeScaling::PerPair { .. });
    // A tied head saved a second time is the embedding again: transformers ties it whatever the file holds.
    let is_known = |name: &str| {
        by_name.contains_key(name)
            || (config.tied_head && name == table.lm_head)
            || (has_factors && name == table.rope_factors)
    };
    let names = files.tensors().iter().map(|tensor| tensor.name.as_str());
    let mut extra = names.filter(|name| !is_known(name) && !table.ignores(name));
    let Some(first) = extra.next() else { return Ok(()) };
    let n_extra = extra.count().saturating_add(1);
    Err(FormatError::ExtraTensors { n_extra, first: first.to_owned() })
}
