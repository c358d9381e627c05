//! A context on a device with a minimal scheduler.

use crate::common::{Rows, Tiny};
use crate::emulator::Emulator;
use llaisys_core::Error;
use llaisys_core::batch::output;
use llaisys_core::context::{Context, ContextConfig, DecodeRequest, DecodeResult, RowMasks};
use llaisys_core::cuda::Gpu;
use llaisys_core::cuda::device::Device;
use llaisys_core::dtype::ComputeMode;
use llaisys_core::error::Exhausted;
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::ops::cases::SplitMix64;
use llaisys_core::sample::SamplerSpec;
use llaisys_core::seq::SeqId;
use std::collections::BTreeMap;

const VOCAB: usize = 75;

/// How a context decodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum How {
    /// The next step is launched before the tokens of the previous one are known.
    Overlap,
    /// Each step waits for the previous one.
    Synchronous,
    /// Logits are requested, so a pass computes every row and the host samples it.
    ByPasses,
}

fn settings(n_cells: usize) -> ContextConfig {
    let base = crate::common::settings();
    ContextConfig { mode: ComputeMode::Auto, n_cells, n_streams: 2, n_seq_max: 6, ..base }
}

pub(crate) fn open(model: &Tiny, n_cells: usize, device: Box<dyn Device>, how: How) -> Context {
    let folder = model.write();
    let gpu = Gpu { device, memory_share: None, graphs: true, overlap: how == How::Overlap };
    let context = Context::on_gpu(Checkpoint::open(&folder).unwrap(), settings(n_cells), gpu).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    context
}

/// A running sequence, whose first `n_done` tokens have cells.
#[derive(Debug, Clone)]
struct Running {
    request: usize,
    id: SeqId,
    stream: u32,
    tokens: Vec<i32>,
    n_prompt: usize,
    n_done: usize,
    spec: SamplerSpec,
}

/// A minimal scheduler. Its actions depend on a seed, not on tokens.
pub(crate) struct Host {
    context: Context,
    how: How,
    draw: SplitMix64,
    running: Vec<Running>,
    pub(crate) completions: BTreeMap<usize, Vec<i32>>,
    n_requests: usize,
    n_nodes: u64,
    /// Digests of the KV cache after each decode.
    pub(crate) digests: Vec<u64>,
    pub(crate) n_exhausted: usize,
}

impl Host {
    pub(crate) fn new(model: &Tiny, n_cells: usize, how: How, seed: u64) -> Self {
        Self {
            context: open(model, n_cells, Box::new(Emulator::new()), how),
            how,
            draw: SplitMix64::new(seed),
            running: Vec::new(),
            completions: BTreeMap::new(),
            n_requests: 0,
            n_nodes: 0,
            digests: Vec::new(),
            n_exhausted: 0,
        }
    }

    fn spec(&mut self) -> SamplerSpec {
        let base = SamplerSpec { temperature: 0.0, seed: self.draw.bits(), ..SamplerSpec::default() };
        match self.draw.below(4) {
            0 => base,
            1 => SamplerSpec { temperature: 0.9, top_k: 30, ..base },
            2 => SamplerSpec { repetition_penalty: 1.4, presence_penalty: 0.5, ..base },
            _ => SamplerSpec {
                temperature: 0.7,
                min_tokens: 5,
                stop_ids: vec![3],
                bad_words: vec![vec![4]],
                ..base
            },
        }
    }

    fn set_sampler(&mut self, index: usize) {
        let Running { id, ref tokens, n_prompt, ref spec, .. } = self.running[index];
        let (prompt, output) = tokens.split_at(n_prompt);
        self.context.set_sampler(id, spec.clone(), prompt, output).unwrap();
    }

    /// Starts a request, with its own prompt or with the first cells of another sequence.
    fn admit(&mut self) {
        let stream = self.draw.below(2) as u32;
        let Ok(id) = self.context.seq_acquire(stream) else { return };
        let (mut tokens, mut n_done) = (Vec::new(), 0);
        if let Some(parent) = self.running.first().filter(|_| self.draw.below(2) == 0).cloned() {
            n_done = self.draw.below(parent.n_done + 1);
            tokens.extend(&parent.tokens[..n_done]);
            // In the other stream it gets copies, if enough cells are free.
            if self.context.kv_seq_cp(parent.id, id, 0, n_done as i32).is_err() {
                (tokens, n_done) = (Vec::new(), 0);
            }
        }
        let n_own = 1 + self.draw.below(7);
        tokens.extend((0..n_own).map(|_| self.draw.below(VOCAB) as i32));
        let (n_prompt, spec, request) = (tokens.len(), self.spec(), self.n_requests);
        self.n_requests += 1;
        self.running.push(Running { request, id, stream, tokens, n_prompt, n_done, spec });
        self.set_sampler(self.running.len() - 1);
    }

    fn release(&mut self, index: usize) {
        let ended = self.running.swap_remove(index);
        if self.draw.below(2) == 0 && ended.n_done > 2 {
            // Some of its cells stay cached for a while, as in a prefix cache.
            self.n_nodes += 1;
            let is_cached = self.context.kv_node_cache(self.n_nodes, ended.id, 0, 2).is_ok();
            if is_cached && self.draw.below(2) == 0 {
                self.context.kv_node_trim(self.n_nodes, 0).unwrap();
            }
        }
        self.context.seq_release(ended.id).unwrap();
    }

    /// Removes the newest tokens.
    fn roll_back(&mut self, index: usize) {
        let running = &mut self.running[index];
        let n = running.n_prompt + (running.tokens.len() - running.n_prompt) / 2;
        if running.n_done >= n {
            running.tokens.truncate(n);
            running.n_done = n - 1;
            self.context.kv_seq_rm(running.id, n as i32 - 1, -1).unwrap();
            self.set_sampler(index);
        }
    }

    pub(crate) fn step(&mut self) {
        if self.draw.below(3) == 0 {
            self.admit();
        }
        match self.draw.below(12) {
            0 if self.running.len() > 1 => {
                let index = self.draw.below(self.running.len());
                self.release(index);
            }
            1 if !self.running.is_empty() => {
                let index = self.draw.below(self.running.len());
                self.roll_back(index);
            }
            _ => {}
        }
        if self.draw.below(3) == 0 {
            self.running.reverse();
        }
        let (mut rows, mut parts, mut masks) = (Rows::default(), Vec::new(), Vec::new());
        let skipped = self.draw.below(8);
        for (index, running) in self.running.iter().enumerate().filter(|(index, _)| *index != skipped) {
            let end = running.tokens.len().min(running.n_done + 4);
            for position in running.n_done..end {
                let is_last = position + 1 == running.tokens.len();
                if is_last && self.draw.below(10) == 0 {
                    masks.push((rows.tokens.len() as i32, [self.draw.bits() as u32 | 1, 7, 0]));
                }
                let wants = if is_last { output::LOGITS } else { output::NONE };
                rows = rows.row(running.tokens[position], position as i32, &[running.id], wants);
            }
            parts.push((index, end));
        }
        if parts.is_empty() {
            return;
        }
        match self.decode(&rows, &masks) {
            Ok(result) => {
                assert!(result.faults.is_empty(), "{:?}", result.faults);
                for (&row, &token) in result.rows.iter().zip(&result.token_ids) {
                    let id = SeqId::from_raw(rows.seq_ids[row as usize]);
                    let running = self.running.iter_mut().find(|running| running.id == id).unwrap();
                    running.tokens.push(token);
                    let completion = running.tokens[running.n_prompt..].to_vec();
                    self.completions.insert(running.request, completion);
                }
                parts.iter().for_each(|&(index, end)| self.running[index].n_done = end);
            }
            Err(Error::Exhausted(Exhausted::Cells { .. })) => {
                self.n_exhausted += 1;
                self.release(0);
            }
            Err(error) => panic!("{error}"),
        }
        self.running.iter().for_each(|running| assert!(running.stream < 2));
        self.digests.push(self.context.digest());
    }

    fn decode(&mut self, rows: &Rows, masks: &[(i32, [u32; 3])]) -> Result<DecodeResult, Error> {
        let (of, bits): (Vec<i32>, Vec<[u32; 3]>) = masks.iter().copied().unzip();
        let masks = (!of.is_empty()).then(|| RowMasks { rows: &of, bits: bits.as_flattened() });
        let return_logits = self.how == How::ByPasses;
        let result = self.context.decode(&DecodeRequest { arrays: rows.arrays(), masks, return_logits });
        self.context.check_integrity();
        result
    }
}
