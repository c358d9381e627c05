//! `EncoderContext`: one encoder on the CPU. A call computes whole texts, and nothing is kept between calls.

use super::{IsaName, THREADS_MAX};
use crate::arch::encoder::EncoderConfig;
use crate::dtype::{ComputeMode, KvDType};
use crate::error::{Rejected, Result, Unsupported};
use crate::forward::decoder::KvLayers;
use crate::forward::encoder::{Encoder, EncoderRows, EncoderWorkspace};
use crate::kv::Storage;
use crate::load::encoder::EncoderCheckpoint;
use crate::load::weight_format::quantizes;
use crate::ops::dispatch::Kernels;
use crate::ops::{KvHeads, OpContext};
use crate::progress::Progress;
use crate::tensor::{KvLayer, KvLayerMut};
use crate::threads::Pool;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Settings of an encoder.
#[derive(Debug, Clone, Copy)]
pub struct EncoderSettings {
    /// Number formats of weights and products; a mode that quantizes is rejected.
    pub mode: ComputeMode,
    /// Instruction set. None: the best of the machine.
    pub isa: Option<IsaName>,
    /// Rows of one call.
    pub n_batch: usize,
    /// Tokens of a text; at most the model's own limit and `n_batch`.
    pub max_model_len: usize,
    /// Compute threads, including the caller's.
    pub n_threads: usize,
    /// With exactly as many CPUs as threads, pin each thread to a CPU.
    pub pins: bool,
}

/// What to compute: texts one after the other.
#[derive(Debug, Clone, Copy)]
pub struct EncodeRequest<'a> {
    /// Token ids, `[n]`.
    pub tokens: &'a [i32],
    /// Token types, `[n]`; empty for zeros.
    pub types: &'a [i32],
    /// The number of tokens of each text, `[n_texts]`, each at least 1. Their sum is n.
    pub lengths: &'a [usize],
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodeResult {
    /// Final hidden states, `[n, d_model]`.
    pub hidden: Vec<f32>,
    /// The classifier's output for each text, `[n_texts]`; None without a classifier.
    pub scores: Option<Vec<f32>>,
}

/// One encoder. As with [`super::Context`], one thread owns it; a rejected call and a panic have no side effects.
#[derive(Debug)]
pub struct EncoderContext {
    encoder: Encoder,
    settings: EncoderSettings,
    ops: OpContext,
    work: EncoderWorkspace,
    /// Keys and values of one layer, which every layer uses again.
    storage: Storage,
    progress: Arc<Progress>,
}

impl EncoderContext {
    /// Opens the folder or the GGUF file at `path`, packs its weights, and closes its files. Any thread may read the
    /// progress of loading from `progress`.
    ///
    /// Errors: a damaged or unsupported checkpoint, or one that is no encoder; a setting out of its bounds; no memory.
    pub fn load(path: &Path, settings: EncoderSettings, progress: Arc<Progress>) -> Result<Self> {
        if quantizes(settings.mode) {
            let value = format!("{:?}", settings.mode).to_lowercase();
            return Err(
                Unsupported::feature("quantization of an encoder", value, "auto, float32, bfloat16").into()
            );
        }
        let Some(checkpoint) = EncoderCheckpoint::open(path)? else {
            let (path, supported) = (path.display(), "BERT, XLM-RoBERTa, ModernBERT");
            return Err(Unsupported::feature("as an encoder the model", path, supported).into());
        };
        check(&settings, checkpoint.config())?;
        let kernels = Kernels::select(settings.isa)?;
        let pool = Pool::shared(settings.n_threads, settings.pins)?;
        progress.start_packing(checkpoint.info().packed_bytes.of(settings.mode));
        let encoder = Encoder::pack(&checkpoint, settings.mode, &pool, &progress)?;
        progress.finish_packing();
        let (config, n) = (encoder.config(), settings.n_batch);
        let ops = OpContext::new(kernels, pool, n, config.d_model.max(config.d_ff))?;
        let work = EncoderWorkspace::new(config, n)?;
        let heads = KvHeads { n_kv_heads: config.n_heads, d_head: config.d_head() };
        let storage = Storage::new(&[heads], n, KvDType::Float32)?;
        Ok(Self { encoder, settings, ops, work, storage, progress })
    }

    /// Configuration of the model.
    pub fn config(&self) -> &EncoderConfig {
        self.encoder.config()
    }

    /// The name of the instruction set that computes.
    pub fn computes_on(&self) -> &str {
        self.ops.kernels.isa().name()
    }

    /// Bytes of the packed weights.
    pub fn weight_bytes(&self) -> usize {
        self.encoder.n_bytes()
    }

    /// Progress counters; any thread may read them, also during a call.
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// Computes the final hidden states of texts, and their scores if the model has a classifier. On one instruction
    /// set, the bits of a text's rows depend only on its own tokens.
    ///
    /// Errors: no text, an empty one, or one that is too long; more rows than `n_batch`; a token or a type that does not
    /// exist.
    pub fn encode(&mut self, request: &EncodeRequest<'_>) -> Result<EncodeResult> {
        let progress = Arc::clone(&self.progress);
        let pool = Arc::clone(&self.ops.pool);
        let _guard = progress.waiting_for_pool(|| pool.lock());
        let _step = progress.begin_step();
        let texts = self.check_request(request)?;
        let zeros = vec![0; if request.types.is_empty() { request.tokens.len() } else { 0 }];
        let types = if request.types.is_empty() { &zeros[..] } else { request.types };
        let rows = EncoderRows { tokens: request.tokens, types, texts: &texts };
        let mut layers = OneLayer { storage: &mut self.storage, progress: &progress };
        let hidden = self.encoder.forward(&mut self.ops, &rows, &mut layers, &mut self.work).to_vec();
        let scores = self.encoder.scores(&mut self.ops, &hidden, &texts, &mut self.work);
        progress.rows_committed(request.tokens.len());
        // To a detector, each text is a sequence that ends with its call.
        texts.iter().for_each(|_| {
            progress.sequence_acquired();
            progress.sequence_released();
        });
        Ok(EncodeResult { hidden, scores })
    }

    /// Checks a request and returns the rows of each text.
    fn check_request(&self, request: &EncodeRequest<'_>) -> Result<Vec<Range<usize>>> {
        let (n, config) = (request.tokens.len(), self.encoder.config());
        let out_of =
            |what, got: i64, min: i64, max: usize| Rejected::OutOfRange { what, got, min, max: max as i64 };
        if n < 1 || n > self.settings.n_batch {
            return Err(out_of("the number of tokens", n as i64, 1, self.settings.n_batch).into());
        }
        let (mut texts, mut end) = (Vec::with_capacity(request.lengths.len()), 0_usize);
        for &length in request.lengths {
            if length < 1 || length > self.settings.max_model_len {
                return Err(
                    out_of("the length of a text", length as i64, 1, self.settings.max_model_len).into()
                );
            }
            texts.push(end..end.saturating_add(length));
            end = end.saturating_add(length);
        }
        if end != n {
            return Err(Rejected::Length { what: "tokens", got: n, want: end }.into());
        }
        if !request.types.is_empty() && request.types.len() != n {
            return Err(Rejected::Length { what: "types", got: request.types.len(), want: n }.into());
        }
        for (what, ids, n_ids) in [
            ("a token", request.tokens, config.vocab_size),
            ("a token type", request.types, config.n_types.max(1)),
        ] {
            if let Some(&id) = ids.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= n_ids)) {
                return Err(out_of(what, id.into(), 0, n_ids - 1).into());
            }
        }
        Ok(texts)
    }
}

/// Rejects settings out of their bounds.
fn check(settings: &EncoderSettings, config: &EncoderConfig) -> Result<()> {
    let n_batch = settings.n_batch;
    for (what, got, max) in [
        ("n_batch", n_batch, i32::MAX as usize),
        ("max_model_len", settings.max_model_len, config.max_positions.min(n_batch)),
        ("n_threads", settings.n_threads, THREADS_MAX),
    ] {
        if got < 1 || got > max {
            return Err(Rejected::OutOfRange { what, got: got as i64, min: 1, max: max as i64 }.into());
        }
    }
    Ok(())
}

/// The cells that all layers share. Counts the layers that begin.
struct OneLayer<'a> {
    storage: &'a mut Storage,
    progress: &'a Progress,
}

impl KvLayers for OneLayer<'_> {
    fn begin_layer(&mut self) {
        self.progress.begin_layer();
    }

    fn states_mut(&mut self, _index: usize) -> &mut [f32] {
        &mut [] // encoders have no recurrent layers
    }

    fn layer(&self, index: usize) -> KvLayer<'_> {
        self.storage.layer(index)
    }

    fn layer_mut(&mut self, index: usize) -> KvLayerMut<'_> {
        self.storage.layer_mut(index)
    }
}
