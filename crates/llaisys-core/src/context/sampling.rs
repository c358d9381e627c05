//! Samplers by sequence, and the sampling of a block of rows over all threads.

use super::ContextConfig;
use crate::batch::{Batch, BatchError, output};
use crate::error::{DeviceError, Rejected, Result};
use crate::faults::fault_point;
use crate::ops::dispatch::Kernels;
use crate::sample::{Outcome, SampleAt, Sampler, Scratch, sample_after_drafts};
use crate::seq::SeqId;
use crate::tensor::AlignedBuf;
use crate::threads::Pool;

/// Rows whose logits exist at a time. Bounds the largest activation for any batch.
pub(crate) const LOGITS_ROWS: usize = 64;

/// Allowed tokens of some rows. Bit `id % 32` of word `id / 32` set: allowed.
#[derive(Debug, Clone, Copy)]
pub struct RowMasks<'a> {
    /// Batch rows, `[n]`, each with the flag `LOGITS`, none twice.
    pub rows: &'a [i32],
    /// `[n, ceil(vocab_size / 32)]`.
    pub bits: &'a [u32],
}

impl<'a> RowMasks<'a> {
    /// Returns the mask of each row of `batch`. Errors: wrong sizes, or a row that has no flag `LOGITS` or is named
    /// twice.
    pub(super) fn by_row(self, batch: &Batch, vocab_size: usize) -> Result<Vec<Option<&'a [u32]>>, Rejected> {
        let n_words = vocab_size.div_ceil(32);
        let (got, want) = (self.bits.len(), self.rows.len() * n_words);
        if got != want {
            return Err(Rejected::Length { what: "the bits of logits_mask", got, want });
        }
        let mut masks = vec![None; batch.n_rows()];
        for (&row, bits) in self.rows.iter().zip(self.bits.chunks_exact(n_words)) {
            let index = usize::try_from(row).unwrap_or(usize::MAX);
            let has_logits = batch.wants_output.get(index).is_some_and(|flags| flags & output::LOGITS != 0);
            if !has_logits || masks[index].is_some() {
                return Err(BatchError::Mask { row }.into());
            }
            masks[index] = Some(bits);
        }
        Ok(masks)
    }
}

/// The samplers of the acquired sequences, and the buffers of sampling.
#[derive(Debug)]
pub(super) struct SamplerBank {
    by_slot: Vec<Option<Sampler>>,
    scratch: Vec<Scratch>,
    /// `[LOGITS_ROWS, vocab_size]`
    logits: AlignedBuf,
    vocab_size: usize,
}

/// One row to sample, with the sampler of `seq`.
pub(super) struct SampleRow<'a> {
    pub(super) seq: SeqId,
    pub(super) at: SampleAt<'a>,
}

struct Job<'a> {
    row: &'a SampleRow<'a>,
    logits: &'a mut [f32],
    sampler: Option<&'a Sampler>,
    outcome: Option<Outcome>,
}

impl SamplerBank {
    pub(super) fn new(
        config: &ContextConfig,
        vocab_size: usize,
        kernels: Kernels,
    ) -> Result<Self, DeviceError> {
        let n_rows = LOGITS_ROWS.min(config.n_batch);
        Ok(Self {
            by_slot: (0..config.n_seq_max).map(|_| None).collect(),
            scratch: (0..config.n_threads).map(|_| Scratch::new(kernels)).collect(),
            logits: AlignedBuf::zeroed("logits", n_rows * vocab_size * size_of::<f32>())?,
            vocab_size,
        })
    }

    pub(super) fn attach(&mut self, id: SeqId, sampler: Sampler) {
        self.by_slot[id.slot() as usize] = Some(sampler);
    }

    pub(super) fn detach(&mut self, id: SeqId) {
        self.by_slot[id.slot() as usize] = None;
    }

    /// Counts `token`, which comes after `n_before` others, as output of the sequence, unless it is a token of the
    /// prompt that was only scored. Returns whether it was counted.
    pub(super) fn accept(&mut self, id: SeqId, n_before: u32, token: u32) -> bool {
        let sampler = self.by_slot[id.slot() as usize].as_mut();
        let Some(sampler) = sampler.filter(|sampler| sampler.prompt_token(n_before).is_none()) else {
            return false;
        };
        sampler.accept(token);
        true
    }

    /// True if `row` needs only the id of its largest logit.
    pub(super) fn is_greedy(&self, row: &SampleRow<'_>) -> bool {
        let SampleRow { seq, at } = row;
        let sampler = self.by_slot[seq.slot() as usize].as_ref();
        at.mask.is_none() && sampler.is_none_or(|sampler| sampler.is_greedy(at.position, at.drafts.len()))
    }

    /// Returns the buffer for the logits of `n <= LOGITS_ROWS` rows, `[n, vocab_size]`.
    pub(super) fn logits(&mut self, n: usize) -> &mut [f32] {
        &mut self.logits.as_mut_slice()[..n * self.vocab_size]
    }

    /// Samples `rows` from the logits in the same order, and overwrites these. Rows are independent, so the result does
    /// not depend on the split over threads.
    pub(super) fn sample(&mut self, pool: &Pool, rows: &[SampleRow<'_>]) -> Vec<Outcome> {
        let logits = self.logits.as_mut_slice::<f32>().chunks_exact_mut(self.vocab_size);
        let by_slot = &self.by_slot;
        let mut jobs: Vec<Job<'_>> = rows
            .iter()
            .zip(logits)
            .map(|(row, logits)| Job {
                row,
                logits,
                sampler: by_slot[row.seq.slot() as usize].as_ref(),
                outcome: None,
            })
            .collect();
        let per_thread = jobs.len().div_ceil(self.scratch.len()).max(1);
        let mut shares: Vec<_> = self.scratch.iter_mut().zip(jobs.chunks_mut(per_thread)).collect();
        pool.run_chunks(&mut shares, 1, &|_, share| {
            for (scratch, jobs) in share {
                for job in jobs.iter_mut() {
                    fault_point!(panic "sampler.row");
                    let outcome = sample_after_drafts(scratch, job.logits, job.sampler, job.row.at);
                    job.outcome = Some(outcome);
                }
            }
        });
        jobs.into_iter().map(|job| job.outcome.expect("every job was run")).collect()
    }
}
