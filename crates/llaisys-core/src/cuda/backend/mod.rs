//! A context whose weights and cells are on a GPU. The host has the KV cache's bookkeeping. Rows that a decode step
//! (`steps.rs`) cannot sample are sampled on the host, from downloaded logits.

mod ranks;
mod steps;

use crate::arch::config::ModelConfig;
use crate::arch::weight_id::WeightId;
use crate::context::backend::{Backend, StepBatch};
use crate::context::fingerprint::{Fingerprint, kv_dtype_name};
use crate::context::sampling::LOGITS_ROWS;
use crate::context::{Context, ContextConfig, check};
use crate::cuda::device::{Device, DevicePtr, Element};
use crate::cuda::forward::steps::{StateLimits, StepSettings, Steps, Target};
use crate::cuda::forward::{CellCount, DeviceDecoder, DeviceLimits, load};
use crate::dtype::{ComputeMode, KvDType};
use crate::error::{Result, Unsupported};
use crate::forward::decoder::ForwardRows;
use crate::forward::weights::Replacement;
use crate::kv::{Copies, KvCache};
use crate::load::checkpoint::Checkpoint;
use crate::progress::Progress;
use crate::sample::{Outcome, SamplerSpec};
use crate::seq::SeqId;
use crate::threads::Pool;
use half::{bf16, f16};

/// A GPU for one context, and how the context uses it.
#[derive(Debug)]
pub struct Gpu {
    /// The device.
    pub device: Box<dyn Device>,
    /// Share of the device's memory, 0 to 1, that may be in use with the KV cells, which take the rest of it. `None`:
    /// [`ContextConfig::n_cells`] is their number.
    pub memory_share: Option<f64>,
    /// Capture and replay decode steps. A device that waits after every kernel cannot.
    pub graphs: bool,
    /// Launch a decode step before the tokens of the previous step are known.
    pub overlap: bool,
}

/// The part of the machine that a backend may use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share {
    /// See [`Gpu::memory_share`].
    memory: Option<f64>,
    /// Host threads.
    n_threads: usize,
}

/// A `Backend` on one device: weights, cells and activations.
#[derive(Debug)]
pub(crate) struct CudaBackend {
    pub(super) device: Box<dyn Device>,
    pub(super) decoder: DeviceDecoder,
    /// `None` for one rank of several.
    steps: Option<Steps>,
    pool: Pool,
    hidden: Vec<f32>,
    bytes: Vec<u8>,
}

impl Context {
    /// As [`Context::new`], on a GPU. Weights and cells have the checkpoint's 16-bit type; f32 and quantized
    /// checkpoints become bf16. With [`Gpu::memory_share`], `config.n_cells` is ignored and [`Context::n_cells`]
    /// returns the number.
    ///
    /// Errors: `Unsupported` for a setting or a model that the GPU does not support; too little memory; the device's.
    pub fn on_gpu(mut checkpoint: Checkpoint, mut config: ContextConfig, gpu: Gpu) -> Result<Self> {
        let Gpu { device, memory_share, graphs, overlap } = gpu;
        check_computed(&config, &checkpoint)?;
        checkpoint.choose_rope(config.max_model_len);
        if config.n_ranks > 1 {
            let value = format!("{} on one GPU", config.n_ranks);
            return Err(Unsupported::Feature { what: "tensor_parallel_size", value, supported: "1" }.into());
        }
        let state = StateLimits {
            n_slots: config.n_seq_max,
            n_rows: config.n_seq_max.min(config.n_batch),
            max_len: config.max_model_len,
        };
        // Before the decoder, whose cells may take the rest of the memory.
        let settings = StepSettings { overlap, graphs };
        let steps = Steps::new(&*device, checkpoint.config(), state, settings)?;
        let n_threads = config.n_threads;
        let mut backend =
            CudaBackend::load(device, &checkpoint, &config, Share { memory: memory_share, n_threads })?;
        backend.steps = Some(steps);
        config.n_cells = backend.n_cells(config.n_streams);
        let fingerprint = backend.fingerprint(&checkpoint, &config)?;
        Self::assemble(checkpoint, config, Box::new(backend), fingerprint)
    }
}

/// Refuses settings that no context supports, or no context on a GPU.
pub(super) fn check_computed(config: &ContextConfig, checkpoint: &Checkpoint) -> Result<()> {
    check(config, checkpoint.config())?;
    check_types(config, load::element_of(checkpoint))
}

/// Refuses types that the kernels do not support.
fn check_types(config: &ContextConfig, element: Element) -> Result<()> {
    let refuse = |what, value: String, supported| {
        Err(Unsupported::Feature { what, value: format!("{value} on a GPU"), supported }.into())
    };
    if config.max_loras > 0 {
        return refuse("enable_lora", "true".to_owned(), "the same model on the CPU");
    }
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
            if config.max_loras > 0 {
                return refuse("enable_lora", "true".to_owned(), "the same model on the CPU");
            }
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
    /// Loads the weights of the device's rank and allocates its cells.
    pub(super) fn load(
        device: Box<dyn Device>,
        checkpoint: &Checkpoint,
        config: &ContextConfig,
        share: Share,
    ) -> Result<Self> {
        let pool = Pool::new(share.n_threads)?;
        let decoder = DeviceDecoder::new(&*device, checkpoint, limits(config, share.memory), &pool)?;
        Ok(Self { device, decoder, steps: None, pool, hidden: Vec::new(), bytes: Vec::new() })
    }

    /// Returns the number of cells, rounded down so that each of `n_streams` streams gets the same number.
    pub(super) fn n_cells(&self, n_streams: usize) -> usize {
        self.decoder.n_cells() / n_streams * n_streams
    }

    /// Returns the fingerprint of everything that keys and values depend on. Errors: as [`Fingerprint::new`].
    pub(super) fn fingerprint(&self, checkpoint: &Checkpoint, config: &ContextConfig) -> Result<Fingerprint> {
        let cell = match self.decoder.element() {
            Element::Bf16 => KvDType::Bfloat16,
            Element::F16 => KvDType::Float16,
            Element::F32 => KvDType::Float32,
        };
        let backend_format = format!("cuda {} {}", self.device.facts().capability, kv_dtype_name(cell));
        Fingerprint::new(checkpoint, config, &backend_format)
    }

    /// Ends the exchanges of all ranks, so that no other rank waits for this one.
    pub(super) fn abort(&self) {
        self.device.abort();
    }

    fn model(&self) -> &ModelConfig {
        self.decoder.config()
    }

    /// Waits for the launched work, and downloads `n_bytes` bytes.
    fn download(&mut self, from: DevicePtr, n_bytes: usize) -> Result<&[u8]> {
        self.bytes.resize(n_bytes, 0);
        self.device.download(from, &mut self.bytes)?;
        Ok(&self.bytes)
    }
}

impl Backend for CudaBackend {
    /// Launches the pass and does not wait for it.
    fn forward(&mut self, rows: &ForwardRows<'_>, progress: &Progress) -> Result<()> {
        Ok(self.decoder.run(&*self.device, rows, &|| progress.begin_layer())?)
    }

    fn compute_outputs(&mut self, rows: &[usize], n_logits: usize, logits: &mut [f32]) -> Result<()> {
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

    fn hidden_states(&mut self, n_rows: usize) -> Result<&[f32]> {
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

    fn copy_cells(&mut self, copies: &Copies) -> Result<()> {
        Ok(self.decoder.copy_cells(&*self.device, &copies.from, &copies.to)?)
    }

    fn shift_cells(&mut self, cells: &[u32], delta: i32) -> Result<()> {
        Ok(self.decoder.shift_cells(&*self.device, cells, delta)?)
    }

    fn read_cells(&self, cells: &[u32]) -> Result<Vec<u8>> {
        Ok(self.decoder.read_cells(&*self.device, cells)?)
    }

    fn write_cells(&mut self, cells: &[u32], data: &[u8]) -> Result<()> {
        Ok(self.decoder.write_cells(&*self.device, cells, data)?)
    }

    fn nan_fill(&mut self, cells: &[u32]) -> Result<()> {
        Ok(self.decoder.nan_fill(&*self.device, cells)?)
    }

    fn nan_fill_all(&mut self) -> Result<()> {
        Ok(self.decoder.nan_fill_all(&*self.device)?)
    }

    fn replace_weight(&mut self, id: WeightId, values: &Replacement<'_>) -> Result<()> {
        self.decoder.replace(&*self.device, id, values)
    }

    fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes()
    }

    fn cell_bytes(&self) -> usize {
        self.decoder.cell_bytes()
    }

    fn host_pool(&self) -> &Pool {
        &self.pool
    }

    fn name(&self) -> &str {
        &self.device.facts().name
    }

    fn max_step_rows(&self) -> usize {
        self.steps.as_ref().map_or(0, Steps::n_rows)
    }

    fn can_step(&self, kv: &KvCache, id: SeqId, position: i32) -> bool {
        self.steps
            .as_ref()
            .is_some_and(|steps| steps::can_step(steps, self.decoder.config(), kv, id, position))
    }

    fn launch_step(&mut self, step: &StepBatch<'_>) -> Result<()> {
        let target = Target { device: &*self.device, decoder: &self.decoder };
        self.steps.as_mut().map_or(Ok(()), |steps| steps::launch(steps, target, step))
    }

    fn launch_next_step(&mut self, next_cells: &[u32]) -> Result<()> {
        let target = Target { device: &*self.device, decoder: &self.decoder };
        self.steps.as_mut().map_or(Ok(()), |steps| steps.launch_next(target, next_cells))
    }

    fn collect_step(&mut self) -> Result<Vec<Outcome>> {
        self.steps.as_mut().map_or(Ok(Vec::new()), |steps| steps.collect(&*self.device))
    }

    fn set_sampling(&mut self, id: SeqId, spec: &SamplerSpec, prompt: &[i32], output: &[i32]) {
        if let Some(steps) = &mut self.steps {
            steps.attach(steps::slot(id), spec, prompt, output);
        }
    }

    fn append_token(&mut self, id: SeqId, token: u32) {
        if let Some(steps) = &mut self.steps {
            steps.append_token(steps::slot(id).index, token);
        }
    }

    fn invalidate_sequence(&mut self, id: SeqId) {
        if let Some(steps) = &mut self.steps {
            steps.invalidate_sequence(steps::slot(id));
        }
    }

    fn invalidate_all(&mut self) {
        if let Some(steps) = &mut self.steps {
            steps.invalidate_all();
        }
    }

    fn invalidate_cells(&mut self, is_taken: &dyn Fn(u32) -> bool) {
        if let Some(steps) = &mut self.steps {
            steps.invalidate_cells(is_taken);
        }
    }

    fn release_sequence(&mut self, id: SeqId) {
        if let Some(steps) = &mut self.steps {
            steps.detach(steps::slot(id));
        }
    }

    fn take_graph_refusal(&mut self) -> Option<String> {
        self.steps.as_mut().and_then(Steps::take_graph_refusal)
    }
}
