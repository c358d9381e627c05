//! One decode: check, prepare, compute in passes of `n_batch` rows, sample, commit.

use super::Context;
use super::backend::{Backend, StepBatch};
use super::layout::Layout;
use super::lora::LoraBank;
use super::sampling::{LOGITS_ROWS, RowMasks, SampleRow, SamplerBank};
use super::state_rows::{StateRows, VerifiedRows};
use crate::batch::{Batch, BatchArrays, output};
use crate::error::Result;
use crate::faults::fault_point;
use crate::forward::decoder::ForwardRows;
use crate::kv::{KvCache, KvRow, Reservation};
use crate::progress::Progress;
use crate::sample::{Logprobs, Outcome, RowFault, SampleAt};
use std::ops::Range;
use std::sync::Arc;

/// What to decode.
#[derive(Debug, Clone, Copy)]
pub struct DecodeRequest<'a> {
    /// The rows.
    pub arrays: BatchArrays<'a>,
    /// Allowed tokens of some rows.
    pub masks: Option<RowMasks<'a>>,
    /// Return the logits of rows with the flag `LOGITS`, as the model computes them (before masks and penalties).
    pub return_logits: bool,
}

/// The result of a decode. Output rows are the batch rows with flags, in batch order.
#[derive(Debug, Default)]
pub struct DecodeResult {
    /// The batch row of each output row, `[n_out]`.
    pub rows: Vec<i32>,
    /// The sampled id, `[n_out]`; -1 where the row has no flag `LOGITS`, is faulty, or is a rejected draft.
    pub token_ids: Vec<i32>,
    /// Batch rows that could not be sampled and the later output rows of the same sequences, ascending. Neither these
    /// rows nor later rows without output are committed: their sequences end before the first faulty row. The rows of
    /// other sequences are kept.
    pub faults: Vec<(usize, RowFault)>,
    /// `[n_out, vocab_size]` if requested; zeros for rows without the flag `LOGITS`.
    pub logits: Option<Vec<f32>>,
    /// `[n_out, d_model]` if any row has the flag `HIDDEN`; zeros for rows without it.
    pub hidden: Option<Vec<f32>>,
    /// By output row, for samplers with logprobs.
    pub logprobs: Vec<(usize, Logprobs)>,
    /// Why decode steps on a GPU run without a CUDA graph, if one could not be captured. They are slower, with the same
    /// results. Reported once.
    pub graph_refusal: Option<String>,
}

impl Context {
    /// Runs one forward pass for all rows, then samples an id for each row with the flag `LOGITS`. The sampled id of a
    /// sequence's last such row counts as its output for penalties. A row of several sequences uses the cells and the
    /// sampler of its first sequence and counts for that one. If the sampler has prompt logprobs, a row inside the
    /// prompt returns the prompt's next token with its logprobs. That token does not count as output.
    ///
    /// Rows with the flag `DRAFT` verify a draft. Each is sampled as if the drafts before it were output. A draft is
    /// accepted if the row before it was kept and sampled it. The rows of rejected drafts and the later rows of their
    /// sequences are not committed and have no id. So the ids of a row and of the accepted drafts after it are those
    /// that one decode per token would give, bit for bit.
    ///
    /// Errors: a wrong row, a stale id, too few cells. An error or a panic has no side effects.
    pub fn decode(&mut self, request: &DecodeRequest<'_>) -> Result<DecodeResult> {
        let progress = Arc::clone(&self.progress);
        let pool = self.backend.shared_pool();
        let _guard = pool.as_deref().map(|pool| progress.waiting_for_pool(|| pool.lock()));
        let _step = progress.begin_step();
        fault_point!("decode.begin");
        let batch = Batch::new(request.arrays, self.limits())?;
        let vocab_size = self.config().vocab_size;
        let masks = request.masks.map(|masks| masks.by_row(&batch, vocab_size)).transpose()?;
        let mut verified =
            self.state_rows.is_some().then(|| VerifiedRows::new(&batch, self.config.n_seq_max));
        self.backend.clear_journal();
        self.nan_fill_freed()?;
        fault_point!("decode.prepare");
        self.broken = true;
        let prepared = self.kv.prepare(&batch);
        fault_point!(panic "kv.prepare");
        self.broken = false;
        let mut reservation = prepared?;
        // The reservation has checked that the sequences exist.
        self.loras.check_batch(&batch)?;
        fault_point!("decode.placed");
        let mut step = Step {
            backend: &mut *self.backend,
            layout: &mut self.layout,
            loras: &mut self.loras,
            state_rows: self.state_rows.as_mut(),
            progress: &progress,
            samplers: &mut self.samplers,
            batch: &batch,
            masks: masks.as_deref(),
            result: DecodeResult::for_batch(
                &batch,
                self.model.d_model,
                request.return_logits.then_some(vocab_size),
            ),
        };
        let stepped = step.launch(&reservation, self.config.n_seq_max)?;
        let others: Vec<usize> =
            (0..batch.n_rows()).filter(|row| stepped.binary_search(row).is_err()).collect();
        for rows in others.chunk_by(|row, next| row + 1 == *next) {
            for rows in rows.chunks(self.config.n_batch) {
                let rows = rows[0]..rows[0] + rows.len();
                if let Some(verified) = &mut verified {
                    step.backend.journal_rows(verified.in_pass(&batch, rows.clone()));
                }
                step.pass(reservation.kv(), reservation.row_cells(), rows)?;
            }
        }
        step.collect(&mut reservation, &stepped)?;
        let mut result = step.result;
        let removed = result.rows_to_remove(&batch);
        let (replayed, replays) = verified
            .map_or_else(Default::default, |verified| verified.cut(&batch, reservation.kv(), &removed));
        if !replays.is_empty() {
            self.backend.replay(&replays);
        }
        fault_point!("decode.commit");
        self.broken = true;
        if removed.is_empty() {
            reservation.commit();
            progress.rows_committed(batch.n_rows());
        } else {
            let removed_with = reservation.commit_without(&removed, &replayed);
            progress.rows_committed(removed_with.iter().filter(|culprit| culprit.is_none()).count());
            result.remove_rows(&removed_with);
        }
        fault_point!(panic "kv.commit");
        self.accept(&batch, &result);
        self.broken = false;
        Ok(result)
    }

    /// Counts as output of each sequence the last id sampled for it, after the accepted drafts before that row.
    fn accept(&mut self, batch: &Batch, result: &DecodeResult) {
        let mut is_counted = vec![false; self.config.n_seq_max];
        for (&row, &token) in result.rows.iter().zip(&result.token_ids).rev() {
            if token < 0 {
                continue;
            }
            let row = row as usize;
            let seq = batch.row_seqs(row)[0];
            if std::mem::replace(&mut is_counted[seq.slot() as usize], true) {
                continue;
            }
            let drafts = batch.drafts_up_to(row);
            let first_position = batch.positions[row] as u32 + 1 - drafts.len() as u32;
            for (n_before, &token) in (first_position..).zip(drafts.iter().chain([&token])) {
                if self.samplers.accept(seq, n_before, token as u32) {
                    self.backend.append_token(seq, token as u32);
                }
            }
        }
    }
}

impl DecodeResult {
    /// Returns a result for the output rows of `batch` in which no row has an id, logits or hidden states yet.
    fn for_batch(batch: &Batch, d_model: usize, logits_width: Option<usize>) -> Self {
        let out_rows = (0..batch.n_rows()).filter(|&row| batch.wants_output[row] != output::NONE);
        let rows: Vec<i32> = out_rows.map(|row| row as i32).collect();
        let wants_hidden = batch.wants_output.iter().any(|flags| flags & output::HIDDEN != 0);
        Self {
            token_ids: vec![-1; rows.len()],
            logits: logits_width.map(|width| vec![0.0; rows.len() * width]),
            hidden: wants_hidden.then(|| vec![0.0; rows.len() * d_model]),
            rows,
            ..Self::default()
        }
    }

    /// Returns the faulty rows and the rejected drafts, ascending. Rejected drafts are no faults.
    fn rows_to_remove(&mut self, batch: &Batch) -> Vec<usize> {
        let mut removed = Vec::new();
        for (out, &row) in self.rows.iter().enumerate().filter(|(_, row)| batch.is_draft(**row as usize)) {
            // The row before a draft has logits, so it is the output row before it.
            let is_accepted = self.token_ids[out - 1] == batch.tokens[row as usize];
            if !is_accepted {
                self.token_ids[out] = -1;
                removed.push(row as usize);
            }
        }
        if !removed.is_empty() {
            self.faults.retain(|(row, _)| removed.binary_search(row).is_err());
            self.logprobs.retain(|(out, _)| self.token_ids[*out] >= 0);
        }
        removed.extend(self.faults.iter().map(|(row, _)| *row));
        removed.sort_unstable();
        removed
    }

    /// Removes the ids of rows that were removed with an earlier row of their sequence, and reports the fault of that
    /// row for them.
    fn remove_rows(&mut self, removed_with: &[Option<usize>]) {
        let culprits = std::mem::take(&mut self.faults);
        for (&row, token) in self.rows.iter().zip(&mut self.token_ids) {
            if let Some(culprit) = removed_with[row as usize] {
                *token = -1;
                let fault = culprits.iter().find(|(faulty, _)| *faulty == culprit);
                self.faults.extend(fault.map(|(_, fault)| (row as usize, *fault)));
            }
        }
        self.logprobs.retain(|(out, _)| self.token_ids[*out] >= 0);
    }
}

/// A decode in progress: everything of the context except the KV cache, which the reservation borrows.
struct Step<'a> {
    backend: &'a mut dyn Backend,
    layout: &'a mut Layout,
    loras: &'a mut LoraBank,
    state_rows: Option<&'a mut StateRows>,
    progress: &'a Progress,
    samplers: &'a mut SamplerBank,
    batch: &'a Batch,
    /// By batch row.
    masks: Option<&'a [Option<&'a [u32]>]>,
    result: DecodeResult,
}

impl<'a> Step<'a> {
    /// Launches the rows that the backend computes in a decode step: rows of one sequence that is in no other row, with
    /// a sampled id as their only output. Returns these rows, ascending.
    fn launch(&mut self, reservation: &Reservation<'_>, n_seq_max: usize) -> Result<Vec<usize>> {
        if self.backend.max_step_rows() == 0 {
            return Ok(Vec::new());
        }
        let batch = self.batch;
        let mut n_rows_of = vec![0; n_seq_max];
        batch.seqs.iter().for_each(|seq| n_rows_of[seq.slot() as usize] += 1);
        let can_step = |&row: &usize| match batch.row_seqs(row) {
            [seq] => {
                n_rows_of[seq.slot() as usize] == 1
                    && batch.wants_output[row] == output::LOGITS
                    && self.result.logits.is_none()
                    && self.backend.can_step(reservation.kv(), *seq, batch.positions[row])
            }
            _ => false,
        };
        let rows: Vec<usize> =
            (0..batch.n_rows()).filter(can_step).take(self.backend.max_step_rows()).collect();
        for row in (0..batch.n_rows()).filter(|row| rows.binary_search(row).is_err()) {
            batch.row_seqs(row).iter().for_each(|&seq| self.backend.invalidate_sequence(seq));
        }
        let (kv, row_cells, masks) = (reservation.kv(), reservation.row_cells(), self.masks);
        self.backend.launch_step(&StepBatch { kv, batch, row_cells, rows: &rows, masks })?;
        Ok(rows)
    }

    /// Launches the next step of the launched rows, then collects their ids.
    fn collect(&mut self, reservation: &mut Reservation<'_>, rows: &[usize]) -> Result<()> {
        if self.backend.max_step_rows() == 0 {
            return Ok(());
        }
        let next: Vec<KvRow<'_>> = rows
            .iter()
            .map(|&row| KvRow { position: self.batch.positions[row] + 1, seqs: self.batch.row_seqs(row) })
            .collect();
        if let Some(cells) = reservation.peek_next(&next) {
            self.backend.launch_next_step(&cells)?;
        }
        let outcomes = self.backend.collect_step()?;
        self.result.graph_refusal = self.backend.take_graph_refusal();
        for (row, outcome) in rows.iter().zip(outcomes) {
            let out = self.result.rows.partition_point(|&of| (of as usize) < *row);
            self.set_outcome(out, outcome);
        }
        self.result.faults.sort_unstable_by_key(|(row, _)| *row);
        self.result.logprobs.sort_unstable_by_key(|(out, _)| *out);
        if !rows.is_empty() {
            self.progress.begin_layer();
        }
        Ok(())
    }

    /// Computes `rows`, at most `n_batch` of them, and their outputs.
    fn pass(&mut self, kv: &KvCache, row_cells: &[u32], rows: Range<usize>) -> Result<()> {
        self.layout.fill(kv, self.batch, row_cells, rows.clone());
        let batch = self.batch;
        let recurrent = self.state_rows.as_mut().map(|states| states.fill(kv, batch, rows.clone()));
        let forward = ForwardRows {
            tokens: &self.batch.tokens[rows.clone()],
            positions: &self.batch.positions[rows.clone()],
            cells: &row_cells[rows.clone()],
            attention: self.layout.attention(),
            windowed: self.layout.windowed(),
            recurrent,
            lora: self.loras.pass(self.batch, rows.clone()),
        };
        self.backend.forward(&forward, self.progress)?;
        fault_point!("decode.forward");
        let first_out = self.result.rows.partition_point(|&row| (row as usize) < rows.start);
        let end_out = self.result.rows.partition_point(|&row| (row as usize) < rows.end);
        for start in (first_out..end_out).step_by(LOGITS_ROWS) {
            self.outputs(rows.start, start..end_out.min(start + LOGITS_ROWS))?;
        }
        Ok(())
    }

    /// Computes hidden states, logits and ids of the output rows `outs`. Row 0 of the workspace is batch row
    /// `first_row`.
    fn outputs(&mut self, first_row: usize, outs: Range<usize>) -> Result<()> {
        let wants =
            |out: &usize, flag: u8| self.batch.wants_output[self.result.rows[*out] as usize] & flag != 0;
        let mut sampled: Vec<usize> = outs.clone().filter(|out| wants(out, output::LOGITS)).collect();
        let hidden_only: Vec<usize> = outs.clone().filter(|out| !wants(out, output::LOGITS)).collect();
        let n_ids = sampled.len();
        self.prune_argmax(first_row, &mut sampled)?;
        if !(sampled.is_empty() && hidden_only.is_empty()) {
            self.compute(first_row, &sampled, &hidden_only)?;
        }
        if n_ids > 0 {
            fault_point!("decode.logits");
            self.sample(&sampled);
            fault_point!("decode.sampled");
        }
        Ok(())
    }

    /// Computes the logits of the output rows `sampled` into the sampler bank, and the final hidden states of these
    /// rows and of `hidden_only`.
    fn compute(&mut self, first_row: usize, sampled: &[usize], hidden_only: &[usize]) -> Result<()> {
        // Rows with logits come first, so that the head's input is one block.
        let order: Vec<usize> = sampled.iter().chain(hidden_only).copied().collect();
        let work_rows: Vec<usize> =
            order.iter().map(|&out| self.result.rows[out] as usize - first_row).collect();
        let logits = self.samplers.logits(sampled.len());
        self.backend.compute_outputs(&work_rows, sampled.len(), logits)?;
        if let Some(kept) = &mut self.result.hidden {
            let hidden = self.backend.hidden_states(order.len())?;
            let d_model = hidden.len() / order.len();
            for (&out, values) in order.iter().zip(hidden.chunks_exact(d_model)) {
                if self.batch.wants_output[self.result.rows[out] as usize] & output::HIDDEN != 0 {
                    kept[out * d_model..(out + 1) * d_model].copy_from_slice(values);
                }
            }
        }
        if let Some(kept) = &mut self.result.logits
            && !sampled.is_empty()
        {
            let logits = self.samplers.logits(sampled.len());
            let width = logits.len() / sampled.len();
            for (&out, values) in sampled.iter().zip(logits.chunks_exact(width)) {
                kept[out * width..(out + 1) * width].copy_from_slice(values);
            }
        }
        Ok(())
    }

    /// Sets the ids of greedy output rows that pruned argmax finds without computing all logits, and removes them from
    /// `outs`.
    fn prune_argmax(&mut self, first_row: usize, outs: &mut Vec<usize>) -> Result<()> {
        if self.result.logits.is_some() {
            return Ok(());
        }
        let is_prunable = |&out: &usize| {
            let row = self.result.rows[out] as usize;
            self.batch.wants_output[row] & output::HIDDEN == 0
                && self.samplers.is_greedy(&self.sample_row(row))
        };
        let pruned: Vec<usize> = outs.iter().copied().filter(is_prunable).collect();
        if pruned.is_empty() {
            return Ok(());
        }
        let work_rows: Vec<usize> =
            pruned.iter().map(|&out| self.result.rows[out] as usize - first_row).collect();
        let ids = self.backend.pruned_argmax(&work_rows)?;
        self.progress.argmax_rows(ids.len(), ids.iter().flatten().count());
        for (&out, id) in pruned.iter().zip(ids) {
            if let Some(id) = *id {
                self.result.token_ids[out] = id as i32;
            }
        }
        outs.retain(|&out| self.result.token_ids[out] < 0);
        Ok(())
    }

    /// Samples the ids of the output rows `outs`, whose logits are in the sampler bank.
    fn sample(&mut self, outs: &[usize]) {
        if outs.is_empty() {
            return;
        }
        let rows: Vec<SampleRow<'_>> =
            outs.iter().map(|&out| self.sample_row(self.result.rows[out] as usize)).collect();
        for (&out, outcome) in outs.iter().zip(self.samplers.sample(self.backend.host_pool(), &rows)) {
            self.set_outcome(out, outcome);
        }
    }

    fn sample_row(&self, row: usize) -> SampleRow<'a> {
        let at = SampleAt {
            position: self.batch.positions[row] as u32 + 1,
            drafts: self.batch.drafts_up_to(row),
            mask: self.masks.and_then(|masks| masks[row]),
        };
        SampleRow { seq: self.batch.row_seqs(row)[0], at }
    }

    fn set_outcome(&mut self, out: usize, outcome: Outcome) {
        match outcome {
            Outcome::Token { id, logprobs } => {
                self.result.token_ids[out] = id as i32;
                self.result.logprobs.extend(logprobs.map(|logprobs| (out, logprobs)));
            }
            Outcome::Fault(fault) => self.result.faults.push((self.result.rows[out] as usize, fault)),
        }
    }
}
