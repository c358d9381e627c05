//! A context whose weights and cells are on a GPU. The host keeps the books, and samples what no decode step does
//! (`cuda_steps.rs`) from downloaded logits.

use super::backend::{Backend, Compute};
use super::cuda_steps::SteppedGpu;
use super::fingerprint::Fingerprint;
use super::sampling::LOGITS_ROWS;
use super::{Context, ContextConfig, check};
use crate::dtype::{ComputeMode, KvDType};
use crate::error::{Result, Unsupported};
use crate::kv::cells::Copies;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::ModelConfig;
use crate::model::decoder::ForwardRows;
use crate::model::device::steps::{StateLimits, StepSettings, Steps};
use crate::model::device::{CellCount, DeviceDecoder, DeviceLimits, load};
use crate::model::slot::Slot;
use crate::model::weights::Replacement;
use crate::ops::cuda::device::{Device, DevicePtr, Element};
use crate::progress::Progress;
use crate::threads::Pool;
use half::{bf16, f16};

/// A GPU that a context is to use alone.
#[derive(Debug)]
pub struct Gpu {
    /// What runs kernels.
    pub device: Box<dyn Device>,
    /// Share of the device's memory, 0 to 1, that cells may fill up; None: [`ContextConfig::n_cells`] is their number.
    pub memory_share: Option<f64>,
    /// Decode steps are captured and replayed; a device that waits after every kernel cannot.
    pub graphs: bool,
    /// A decode step may be launched before the tokens of the one before are known.
    pub overlap: bool,
}

/// Weights, cells and activations on a device.
#[derive(Debug)]
pub(super) struct CudaBackend {
    pub(super) device: Box<dyn Device>,
    pub(super) decoder: DeviceDecoder,
    pool: Pool,
    hidden: Vec<f32>,
    bytes: Vec<u8>,
}

impl Context {
    /// As [`Context::new`], on a GPU: in the checkpoint's 16-bit type (f32 and blocks become bf16), cells likewise. With
    /// [`Gpu::memory_share`], `config.n_cells` is not looked at: [`Context::n_cells`] says how many there are.
    ///
    /// Errors: a setting or a model that the GPU does not compute, by name; no memory; the device's.
    pub fn on_gpu(checkpoint: Checkpoint, mut config: ContextConfig, gpu: Gpu) -> Result<Self> {
        let Gpu { device, memory_share, graphs, overlap } = gpu;
        check_computed(&config, &checkpoint)?;
        if config.n_ranks > 1 {
            let value = format!("{} on one GPU", config.n_ranks);
            return Err(Unsupported::Feature { what: "tensor_parallel_size", value, supported: "1" }.into());
        }
        let state = StateLimits {
            n_slots: config.n_seq_max,
            n_rows: config.n_seq_max.min(config.n_batch),
            max_len: config.max_model_len,
        };
        // Before the decoder, whose cells may take what is left of the memory.
        let settings = StepSettings { overlap, graphs };
        let steps = Steps::new(&*device, checkpoint.config(), state, settings)?;
        let gpu = CudaBackend::load(device, &checkpoint, &config, (memory_share, config.n_threads))?;
        config.n_cells = gpu.n_cells(config.n_streams);
        let fingerprint = gpu.fingerprint(&checkpoint, &config)?;
        Self::assemble(checkpoint, config, (Backend::Cuda(SteppedGpu { gpu, steps }), fingerprint))
    }
}

/// Refuses settings that no context has, or none on a GPU.
pub(super) fn check_computed(config: &ContextConfig, checkpoint: &Checkpoint) -> Result<()> {
    check(config, checkpoint.config())?;
    check_types(config, load::element_of(checkpoint))
}

/// Refuses types that no kernel has.
fn check_types(config: &ContextConfig, element: Element) -> Result<()> {
    let refuse = |what, value: String, supported| {
        Err(Unsupported::Feature { what, value: format!("{value} on a GPU"), supported }.into())
    };
    let own = if element == Element::F16 { "auto (float16)" } else { "auto, bfloat16" };
    match (config.mode, element) {
        (ComputeMode::Auto, _) | (ComputeMode::Bfloat16, Element::Bf16) => (),
        (mode @ (ComputeMode::Int8 | ComputeMode::Int4), _) => {
            return refuse("quantization", format!("{mode:?}").to_lowercase(), "none");
        }
        (mode, _) => return refuse("dtype", format!("{mode:?}").to_lowercase(), own),
    }
    match (config.kv_dtype, element) {
        (None, _) | (Some(KvDType::Bfloat16), Element::Bf16) | (Some(KvDType::Float16), Element::F16) => (),
        (Some(kv_dtype), _) => {
            let own = if element == Element::F16 { "auto, float16" } else { own };
            return refuse("kv_cache_dtype", format!("{kv_dtype:?}").to_lowercase(), own);
        }
    }
    Ok(())
}

fn limits(config: &ContextConfig, memory_share: Option<f64>) -> DeviceLimits {
    DeviceLimits {
        n_rows: config.n_batch,
        n_outputs: LOGITS_ROWS.max(config.n_seq_max).min(config.n_batch),
        max_len: config.max_model_len,
        // A pass lists each of its sequences once.
        n_listed: config.n_batch.min(config.n_seq_max) * config.max_model_len,
        cells: memory_share.map_or(CellCount::Exactly(config.n_cells), CellCount::Share),
    }
}

impl CudaBackend {
    /// Weights and cells of the device's rank: see [`Gpu::memory_share`]. `n_threads`: of the host.
    pub(super) fn load(
        device: Box<dyn Device>,
        checkpoint: &Checkpoint,
        config: &ContextConfig,
        (memory_share, n_threads): (Option<f64>, usize),
    ) -> Result<Self> {
        let pool = Pool::new(n_threads)?;
        let decoder = DeviceDecoder::new(&*device, checkpoint, limits(config, memory_share), &pool)?;
        Ok(Self { device, decoder, pool, hidden: Vec::new(), bytes: Vec::new() })
    }

    /// Cells of so many streams, as many in each.
    pub(super) fn n_cells(&self, n_streams: usize) -> usize {
        self.decoder.n_cells() / n_streams * n_streams
    }

    /// What keys and values in the cells depend on. Errors: as [`Fingerprint::new`].
    pub(super) fn fingerprint(&self, checkpoint: &Checkpoint, config: &ContextConfig) -> Result<Fingerprint> {
        let how = format!("cuda {} {:?}", self.device.facts().capability, self.decoder.element());
        Fingerprint::new(checkpoint, config, &how)
    }

    /// Keeps no other rank waiting for this one.
    pub(super) fn abort(&self) {
        self.device.abort();
    }

    fn model(&self) -> &ModelConfig {
        self.decoder.config()
    }

    /// Waits for `n_bytes` bytes of what was started.
    fn download(&mut self, from: DevicePtr, n_bytes: usize) -> Result<&[u8]> {
        self.bytes.resize(n_bytes, 0);
        self.device.download(from, &mut self.bytes)?;
        Ok(&self.bytes)
    }
}

impl Compute for CudaBackend {
    /// Starts the pass, and does not wait for it.
    fn forward(&mut self, rows: &ForwardRows<'_>, progress: &Progress) -> Result<()> {
        Ok(self.decoder.run(&*self.device, rows, &|| progress.layer())?)
    }

    fn outputs(&mut self, rows: &[usize], n_logits: usize, logits: &mut [f32]) -> Result<()> {
        self.decoder.outputs(&*self.device, rows, n_logits)?;
        if n_logits == 0 {
            return Ok(());
        }
        let bytes = self.download(self.decoder.logits(), size_of_val(logits))?;
        for (logit, bytes) in logits.iter_mut().zip(bytes.as_chunks().0) {
            *logit = f32::from_le_bytes(*bytes);
        }
        Ok(())
    }

    fn hidden(&mut self, n_rows: usize) -> Result<&[f32]> {
        let is_f16 = self.decoder.element() == Element::F16;
        let mut hidden = std::mem::take(&mut self.hidden);
        hidden.clear();
        let bytes = self.download(self.decoder.hidden(), n_rows * self.model().d_model * 2)?;
        hidden.extend(bytes.as_chunks().0.iter().map(|&bytes| match is_f16 {
            true => f16::from_le_bytes(bytes).to_f32(),
            false => bf16::from_le_bytes(bytes).to_f32(),
        }));
        self.hidden = hidden;
        Ok(&self.hidden)
    }

    fn copy(&mut self, copies: &Copies) -> Result<()> {
        Ok(self.decoder.copy_cells(&*self.device, &copies.from, &copies.to)?)
    }

    fn shift(&mut self, cells: &[u32], delta: i32) -> Result<()> {
        Ok(self.decoder.shift_cells(&*self.device, cells, delta)?)
    }

    fn read_cells(&self, cells: &[u32]) -> Result<Vec<u8>> {
        Ok(self.decoder.read_cells(&*self.device, cells)?)
    }

    fn write_cells(&mut self, cells: &[u32], data: &[u8]) -> Result<()> {
        Ok(self.decoder.write_cells(&*self.device, cells, data)?)
    }

    fn poison(&mut self, cells: &[u32]) -> Result<()> {
        Ok(self.decoder.poison_cells(&*self.device, cells)?)
    }

    fn poison_all(&mut self) -> Result<()> {
        Ok(self.decoder.poison_all(&*self.device)?)
    }

    fn replace(&mut self, slot: Slot, values: &Replacement<'_>) -> Result<()> {
        self.decoder.replace(&*self.device, slot, values)
    }

    fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes()
    }

    fn cell_bytes(&self) -> usize {
        self.decoder.cell_bytes()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn name(&self) -> &str {
        &self.device.facts().name
    }
}
