//! A LoRA adapter: a folder in PEFT's format with `adapter_config.json` and `adapter_model.safetensors`, or a GGUF file.
//!
//! Both are as untrusted as a model. Every tensor must belong to a projection that adapters may change, with the
//! shape that rank and model require; every adapted projection has both of its matrices.

mod config;
mod gguf;

use super::folder::ModelFolder;
use super::safetensors;
use super::tensor_files::{StoredTensor, TensorFiles, buffer_of};
use crate::arch::config::ModelConfig;
use crate::arch::spec::RopeRows;
use crate::arch::weight_id::{LayerWeight, WeightId};
use crate::dtype::DType;
use crate::error::{DeviceError, FormatError, LoraError, Result, Unsupported};
use crate::quant::dequantize_row;
use crate::tensor::RowView;
use crate::threads::Pool;
use config::{LoraConfig, is_end_of};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

const TENSORS_FILE: &str = "adapter_model.safetensors";
/// Increased when the same files produce other keys or values.
const FORMAT: u32 = 1;

/// The projections that adapters may change.
const PARTS: [LayerWeight; 7] = [
    LayerWeight::Q,
    LayerWeight::K,
    LayerWeight::V,
    LayerWeight::O,
    LayerWeight::Gate,
    LayerWeight::Up,
    LayerWeight::Down,
];

/// A projection of a layer, as the adapter's container stores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ModuleId {
    layer: usize,
    part: LayerWeight,
}

/// The matrices of one projection, as the adapter's container stores it.
#[derive(Debug, Clone, Copy)]
pub struct LoraModule {
    /// The tensor of A, `[rank, n_in]`.
    a: usize,
    /// The tensor of B, `[n_out, rank]`.
    b: usize,
    /// Rows of A.
    pub rank: usize,
    /// alpha / rank, or with rslora alpha / sqrt(rank).
    pub scale: f32,
}

/// An open adapter.
#[derive(Debug)]
pub struct LoraCheckpoint {
    /// The configuration of the model, with the names of the adapter's container.
    model: ModelConfig,
    rope_rows: RopeRows,
    files: TensorFiles,
    modules: BTreeMap<ModuleId, LoraModule>,
}

impl LoraCheckpoint {
    /// Opens the adapter at `path`, a folder or a GGUF file, for `model`, with ranks up to `max_rank`.
    ///
    /// Errors: [`FormatError`] for damage; [`LoraError`] for matrices that do not belong to this model, or a rank above
    /// the limit; [`Unsupported`] for what is valid but not implemented.
    pub fn open(path: &Path, model: &ModelConfig, max_rank: usize) -> Result<Self> {
        if let Some(folder) = ModelFolder::find(path)? {
            let config = LoraConfig::read(&folder)?;
            let files = safetensors::open_file(&folder, TENSORS_FILE)?;
            Self::assemble(Names::of_folder(model), config, files, max_rank)
        } else {
            let (config, files) = gguf::open(path, model.arch)?;
            Self::assemble(Names::of_gguf(model), config, files, max_rank)
        }
    }

    /// Finds the matrices of each module. Errors: as [`Self::open`].
    fn assemble(names: Names, config: LoraConfig, files: TensorFiles, max_rank: usize) -> Result<Self> {
        let mut pairs: BTreeMap<ModuleId, [Option<usize>; 2]> = BTreeMap::new();
        for (index, tensor) in files.tensors().iter().enumerate() {
            let (at, is_b) = names.module(&tensor.name)?;
            if !config.has_layer(at.layer) {
                let name = tensor.name.clone();
                return Err(LoraError::ExtraLayer { name, layer: at.layer }.into());
            }
            pairs.entry(at).or_default()[usize::from(is_b)] = Some(index);
        }
        let checked = |(at, pair): (ModuleId, [Option<usize>; 2])| -> Result<_> {
            let module = names.path(at);
            let [Some(a), Some(b)] = pair else { return Err(LoraError::OneMatrix { module }.into()) };
            let stored_rank = files.tensors()[a].shape.first().copied().unwrap_or(0);
            let (rank, scale) = config.of(&module, stored_rank)?;
            if rank > max_rank {
                return Err(LoraError::Rank { module, rank, max_rank }.into());
            }
            let (n_out, n_in) = names.shape(at);
            check(&files.tensors()[a], [rank, n_in])?;
            check(&files.tensors()[b], [n_out, rank])?;
            Ok((at, LoraModule { a, b, rank, scale }))
        };
        let modules: BTreeMap<_, _> = pairs.into_iter().map(checked).collect::<Result<_>>()?;
        if modules.is_empty() {
            return Err(LoraError::Empty.into());
        }
        names.check_targets(&config, &modules)?;
        Ok(Self { model: names.model, rope_rows: names.rope_rows, files, modules })
    }

    /// The configuration of the model, with the names of the adapter's container: [`ModelConfig::stored_in`] tells which
    /// rows of a module belong to a projection.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// The row order of B of queries and keys.
    pub fn rope_rows(&self) -> RopeRows {
        self.rope_rows
    }

    /// The matrices of a stored projection of layer `layer`; None if the adapter does not change it.
    pub fn module(&self, layer: usize, stored: LayerWeight) -> Option<LoraModule> {
        self.modules.get(&ModuleId { layer, part: stored }).copied()
    }

    /// The largest rank of a module.
    pub fn rank(&self) -> usize {
        self.modules.values().map(|module| module.rank).max().unwrap_or(0)
    }

    /// Reads A, `[rank, n_in]`. Errors: a truncated file, a number that is not finite, no memory.
    pub fn a(&self, module: LoraModule, pool: &Pool) -> Result<Vec<f32>> {
        self.read(module.a, pool)
    }

    /// Reads B, `[n_out, rank]`. Errors: as [`Self::a`].
    pub fn b(&self, module: LoraModule, pool: &Pool) -> Result<Vec<f32>> {
        self.read(module.b, pool)
    }

    /// True if both matrices are in bf16.
    pub fn is_bf16(&self, module: LoraModule) -> bool {
        [module.a, module.b].into_iter().all(|index| self.files.tensors()[index].dtype == DType::BF16)
    }

    fn read(&self, index: usize, pool: &Pool) -> Result<Vec<f32>> {
        let tensor = &self.files.tensors()[index];
        let mut buffer = Vec::new();
        let bytes = buffer_of(&mut buffer, tensor.range.len())?;
        self.files.read(index, 0, bytes, pool)?;
        let n: usize = tensor.shape.iter().product();
        let mut values = Vec::new();
        let bytes_of_values = n.saturating_mul(size_of::<f32>());
        let refused = |_| DeviceError::Allocation { what: "a LoRA adapter", bytes: bytes_of_values };
        values.try_reserve_exact(n).map_err(refused)?;
        values.resize(n, 0.0);
        dequantize_row(RowView { dtype: tensor.dtype, bytes }, &mut values);
        if values.iter().all(|value| value.is_finite()) {
            return Ok(values);
        }
        Err(LoraError::NotFinite { name: tensor.name.clone() }.into())
    }

    /// A 128-bit XXH3 over everything that the adapter adds to keys and values: names, scales and numbers. It
    /// distinguishes adapters; it does not protect against forgery. Errors: as [`Self::a`].
    pub fn hash(&self) -> Result<u128> {
        let mut hasher = Xxh3::new();
        hasher.update(&FORMAT.to_le_bytes());
        for module in self.modules.values() {
            hasher.update(&module.scale.to_le_bytes());
            for index in [module.a, module.b] {
                let StoredTensor { name, dtype, shape, .. } = &self.files.tensors()[index];
                hasher.update(format!("{name} {} {shape:?}", dtype.name()).as_bytes());
                hasher.update(&self.files.hash(index)?.to_le_bytes());
            }
        }
        Ok(hasher.digest128())
    }
}

/// The modules of a model that adapters may change, by their names in the adapter's container.
struct Names {
    model: ModelConfig,
    rope_rows: RopeRows,
    by_path: BTreeMap<String, ModuleId>,
    /// What the names of tensors have before the module's name.
    prefix: &'static str,
    /// What they have after it, for A and B.
    endings: [&'static str; 2],
}

impl Names {
    /// Names of PEFT.
    fn of_folder(model: &ModelConfig) -> Self {
        let (wrapper, arch) = (model.wrapper, model.arch);
        let model = ModelConfig { names: arch.folder_names, wrapper: None, ..model.clone() };
        let mut by_path = modules(&model);
        // A multimodal model names its modules otherwise than its text model alone does.
        if let Some(wrapper) = wrapper {
            let wrapped: Vec<_> = by_path.iter().map(|(path, &at)| (wrapper.name(path), at)).collect();
            by_path.extend(wrapped);
        }
        let endings = [".lora_A.weight", ".lora_B.weight"];
        Self { model, rope_rows: arch.folder_rope_rows, by_path, prefix: "base_model.model.", endings }
    }

    /// Names of llama.cpp: those of a model's tensors.
    fn of_gguf(model: &ModelConfig) -> Self {
        let arch = model.arch;
        let model = ModelConfig { names: arch.gguf_names, wrapper: None, ..model.clone() };
        let by_path = modules(&model);
        let endings = [".weight.lora_a", ".weight.lora_b"];
        Self { model, rope_rows: arch.gguf_rope_rows, by_path, prefix: "", endings }
    }

    /// The name of a module.
    fn path(&self, at: ModuleId) -> String {
        path(&self.model, at).expect("stored weights have names")
    }

    /// Rows and columns of a module's weight.
    fn shape(&self, at: ModuleId) -> (usize, usize) {
        let shape = self.model.shape(WeightId::Layer(at.layer, at.part));
        (shape[0], shape[1])
    }

    /// The module of a tensor, and whether the tensor is B. Errors: a tensor that belongs to no module, or to one that
    /// adapters may not change.
    fn module(&self, tensor: &str) -> Result<(ModuleId, bool)> {
        let parts = tensor.strip_prefix(self.prefix).and_then(|rest| {
            let mut ends = self.endings.into_iter().enumerate();
            ends.find_map(|(i, end)| Some((rest.strip_suffix(end)?, i == 1)))
        });
        let refuse = |what, value: &str| {
            let supported = "adapters of the projections of attention and of dense feed-forward blocks";
            Err(Unsupported::feature(what, value, supported).into())
        };
        match parts {
            Some((module, is_b)) => match self.by_path.get(module) {
                Some(&at) => Ok((at, is_b)),
                None => refuse("the LoRA adapter of module", module),
            },
            None => refuse("the tensor of a LoRA adapter", tensor),
        }
    }

    /// Checks that each listed module has matrices in each layer that has the module. Errors: a module without, a list
    /// with a name that no module has.
    fn check_targets(&self, config: &LoraConfig, modules: &BTreeMap<ModuleId, LoraModule>) -> Result<()> {
        for target in config.targets.iter().flatten() {
            let mut named = self.by_path.iter().filter(|(path, _)| is_end_of(target, path)).peekable();
            if named.peek().is_none() {
                let supported = "projections of attention and of dense feed-forward blocks of this model";
                return Err(Unsupported::feature("the LoRA target module", target, supported).into());
            }
            for (path, at) in named.filter(|(_, at)| config.has_layer(at.layer)) {
                if !modules.contains_key(at) {
                    let (module, target) = (path.clone(), target.clone());
                    return Err(LoraError::Missing { module, target }.into());
                }
            }
        }
        Ok(())
    }
}

/// The modules of a model by their names.
fn modules(model: &ModelConfig) -> BTreeMap<String, ModuleId> {
    let stored: BTreeSet<LayerWeight> = PARTS.into_iter().map(|part| model.stored_in(part).0).collect();
    let mut modules = BTreeMap::new();
    for id in model.weight_ids() {
        if let WeightId::Layer(layer, part) = id
            && stored.contains(&part)
            && let Some(path) = path(model, ModuleId { layer, part })
        {
            modules.insert(path, ModuleId { layer, part });
        }
    }
    modules
}

fn path(model: &ModelConfig, at: ModuleId) -> Option<String> {
    let name = model.names.name(WeightId::Layer(at.layer, at.part))?;
    name.strip_suffix(".weight").map(str::to_owned)
}

/// Checks type and shape of a matrix.
fn check(tensor: &StoredTensor, want: [usize; 2]) -> Result<()> {
    let name = tensor.name.clone();
    if !matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0) {
        let (tensor, dtype) = (name, tensor.dtype.name().to_uppercase());
        return Err(Unsupported::TensorType { tensor, dtype, supported: "F32, F16, BF16, Q8_0" }.into());
    }
    if tensor.shape != want {
        return Err(FormatError::TensorShape { name, got: tensor.shape.clone(), want: want.to_vec() }.into());
    }
    Ok(())
}
