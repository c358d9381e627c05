//! One decode: check, prepare, compute in passes of `n_batch` rows, sample, commit.

use super::Context;
use super::backend::Backend;
use super::layout::Layout;
use super::sampling::{LOGITS_ROWS, RowMasks, SampleRow, SamplerBank};
use crate::batch::{Batch, BatchArrays, output};
use crate::error::Result;
use crate::faults::fault_point;
use crate::kv::cells::{Cells, RowPlace};
use crate::kv::reserve::Reservation;
use crate::model::decoder::ForwardRows;
use crate::progress::Progress;
use crate::sample::{Logprobs, Outcome, RowFault};
use std::ops::Range;
use std::sync::Arc;

/// What to decode.
#[derive(Debug, Clone, Copy)]
pub struct DecodeRequest<'a> {
    /// The rows.
    pub arrays: BatchArrays<'a>,
    /// Allowed tokens of some rows.
    pub masks: Option<RowMasks<'a>>,
    /// Give back the logits of rows that want them, as the model computes them (before masks and penalties).
    pub return_logits: bool,
}

/// What a decode gives. Output rows are the batch rows with flags, in batch order.
#[derive(Debug, Default)]
pub struct DecodeResult {
    /// The batch row of each output row, `[n_out]`.
    pub rows: Vec<i32>,
    /// The sampled id, -1 where the row asked for no logits or is faulty, `[n_out]`.
    pub token_ids: Vec<i32>,
    /// Batch rows that could not be sampled, and the output rows after them in the same sequences, ascending. None
    /// of these rows, nor rows without output after them, is committed: their sequences end before them, as if the
    /// rows had not been in the batch. The other sequences' rows are kept.
    pub faults: Vec<(usize, RowFault)>,
    /// `[n_out, vocab_size]` if asked for; zeros where a row asked for none.
    pub logits: Option<Vec<f32>>,
    /// `[n_out, d_model]` if any row asked for its final hidden state; zeros where a row did not.
    pub hidden: Option<Vec<f32>>,
    /// By output row, for samplers that want them.
    pub logprobs: Vec<(usize, Logprobs)>,
    /// Why decode steps on a GPU are launched kernel by kernel, if one could not be captured: slower, not wrong. Told
    /// once.
    pub graph_refusal: Option<String>,
}

impl Context {
    /// One forward pass for all rows, then a sampled id for each row that wants logits. The sampled id of a
    /// sequence's last such row counts as its output for penalties. A row of several sequences is seen
    /// through, sampled by and counted for its first one. Where its sampler wants the prompt's logprobs, a row
    /// inside the prompt gives the prompt's next token, with its logprobs and not counted.
    ///
    /// Errors: a wrong row, a stale id, too few cells. On any error, and on a panic, nothing has changed.
    pub fn decode(&mut self, request: &DecodeRequest<'_>) -> Result<DecodeResult> {
        let progress = Arc::clone(&self.progress);
        let pool = self.backend.shared_pool();
        let _turn = pool.as_deref().map(|pool| progress.in_line(|| pool.turn()));
        let _step = progress.step();
        fault_point!("decode.begin");
        let batch = Batch::new(request.arrays, self.limits())?;
        let vocab_size = self.config().vocab_size;
        let masks = request.masks.map(|masks| masks.by_row(&batch, vocab_size)).transpose()?;
        self.poison_freed()?;
        fault_point!("decode.prepare");
        self.broken = true;
        let prepared = self.books.prepare(&batch);
        fault_point!(panic "books.prepare");
        self.broken = false;
        let mut reservation = prepared?;
        fault_point!("decode.placed");
        let mut step = Step {
            backend: &mut self.backend,
            layout: &mut self.layout,
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
                step.pass(reservation.cells(), reservation.placed(), rows)?;
            }
        }
        step.collect(&mut reservation, &stepped)?;
        let mut result = step.result;
        fault_point!("decode.commit");
        self.broken = true;
        if result.faults.is_empty() {
            reservation.commit();
            progress.committed(batch.n_rows());
        } else {
            let faulty: Vec<usize> = result.faults.iter().map(|(row, _)| *row).collect();
            let lost_with = reservation.commit_without(&faulty);
            progress.committed(lost_with.iter().filter(|culprit| culprit.is_none()).count());
            result.forget(&lost_with);
        }
        fault_point!(panic "books.commit");
        self.accept(&batch, &result);
        self.broken = false;
        Ok(result)
    }

    /// Tells each sequence's sampler the last id that the batch gave it.
    fn accept(&mut self, batch: &Batch, result: &DecodeResult) {
        let mut told = vec![false; self.config.n_seq_max];
        for (&row, &token) in result.rows.iter().zip(&result.token_ids).rev() {
            let Ok(token) = u32::try_from(token) else { continue };
            let seq = batch.row_seqs(row as usize)[0];
            if std::mem::replace(&mut told[seq.slot() as usize], true) {
                continue;
            }
            let n_before = batch.positions[row as usize] as u32 + 1;
            if self.samplers.accept(seq, n_before, token)
                && let Some(steps) = self.backend.steps()
            {
                steps.accept(seq, token);
            }
        }
    }
}

impl DecodeResult {
    /// Room for everything that `batch` asks for, filled with what rows that ask for nothing get.
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

    /// Takes back what was sampled on rows that went with a faulty one, and gives them its fault.
    fn forget(&mut self, lost_with: &[Option<usize>]) {
        let culprits = std::mem::take(&mut self.faults);
        for (&row, token) in self.rows.iter().zip(&mut self.token_ids) {
            if let Some(culprit) = lost_with[row as usize] {
                *token = -1;
                let fault = culprits.iter().find(|(faulty, _)| *faulty == culprit);
                self.faults.extend(fault.map(|(_, fault)| (row as usize, *fault)));
            }
        }
        self.logprobs.retain(|(out, _)| self.token_ids[*out] >= 0);
    }
}

/// A decode under way: everything of the context but the books.
struct Step<'a> {
    backend: &'a mut Backend,
    layout: &'a mut Layout,
    progress: &'a Progress,
    samplers: &'a mut SamplerBank,
    batch: &'a Batch,
    /// By batch row.
    masks: Option<&'a [Option<&'a [u32]>]>,
    result: DecodeResult,
}

impl Step<'_> {
    /// Starts the rows that a decode step of the backend takes: those of one sequence that is in no other row and wants
    /// a token alone. Which ones, ascending.
    fn launch(&mut self, reservation: &Reservation<'_>, n_seq_max: usize) -> Result<Vec<usize>> {
        let Some(steps) = self.backend.steps() else { return Ok(Vec::new()) };
        let batch = self.batch;
        let mut n_rows_of = vec![0; n_seq_max];
        batch.seqs.iter().for_each(|seq| n_rows_of[seq.slot() as usize] += 1);
        let takes = |&row: &usize| match batch.row_seqs(row) {
            [seq] => {
                n_rows_of[seq.slot() as usize] == 1
                    && batch.wants_output[row] == output::LOGITS
                    && self.result.logits.is_none()
                    && steps.takes(reservation.cells(), *seq, batch.positions[row])
            }
            _ => false,
        };
        let rows: Vec<usize> = (0..batch.n_rows()).filter(takes).take(steps.n_rows()).collect();
        for row in (0..batch.n_rows()).filter(|row| rows.binary_search(row).is_err()) {
            batch.row_seqs(row).iter().for_each(|&seq| steps.forget(seq));
        }
        steps.launch(reservation.cells(), batch, (reservation.placed(), &rows), self.masks)?;
        Ok(rows)
    }

    /// Takes the ids of the launched rows, after one more step of them is started.
    fn collect(&mut self, reservation: &mut Reservation<'_>, rows: &[usize]) -> Result<()> {
        let Some(steps) = self.backend.steps() else { return Ok(()) };
        let slots: Vec<[u32; 1]> = rows.iter().map(|&row| [self.batch.row_seqs(row)[0].slot()]).collect();
        let next: Vec<RowPlace<'_>> = rows
            .iter()
            .zip(&slots)
            .map(|(&row, seqs)| RowPlace { position: self.batch.positions[row] + 1, seqs })
            .collect();
        if let Some(cells) = reservation.foresee(&next) {
            steps.launch_ahead(&cells)?;
        }
        let outcomes = steps.collect()?;
        self.result.graph_refusal = steps.take_graph_refusal();
        for (row, outcome) in rows.iter().zip(outcomes) {
            let out = self.result.rows.partition_point(|&of| (of as usize) < *row);
            self.give(out, outcome);
        }
        self.result.faults.sort_unstable_by_key(|(row, _)| *row);
        self.result.logprobs.sort_unstable_by_key(|(out, _)| *out);
        if !rows.is_empty() {
            self.progress.layer();
        }
        Ok(())
    }

    /// Computes `rows`, at most `n_batch` of them, and their outputs.
    fn pass(&mut self, cells: &Cells, placed: &[u32], rows: Range<usize>) -> Result<()> {
        self.layout.fill(cells, self.batch, placed, rows.clone());
        let forward = ForwardRows {
            tokens: &self.batch.tokens[rows.clone()],
            positions: &self.batch.positions[rows.clone()],
            cells: &placed[rows.clone()],
            attention: self.layout.attention(),
            near: self.layout.near(),
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

    /// Hidden states, logits and ids of the output rows `outs`; row 0 of the workspace is batch row `first_row`.
    fn outputs(&mut self, first_row: usize, outs: Range<usize>) -> Result<()> {
        let wants =
            |out: &usize, flag: u8| self.batch.wants_output[self.result.rows[*out] as usize] & flag != 0;
        let mut sampled: Vec<usize> = outs.clone().filter(|out| wants(out, output::LOGITS)).collect();
        let hidden_only: Vec<usize> = outs.clone().filter(|out| !wants(out, output::LOGITS)).collect();
        let n_ids = sampled.len();
        self.screen(first_row, &mut sampled)?;
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

    /// Logits of the output rows `sampled`, in the sampler bank, and final hidden states of them and of `hidden_only`.
    fn compute(&mut self, first_row: usize, sampled: &[usize], hidden_only: &[usize]) -> Result<()> {
        // Rows with logits come first, so that the head's input is one block.
        let order: Vec<usize> = sampled.iter().chain(hidden_only).copied().collect();
        let work_rows: Vec<usize> =
            order.iter().map(|&out| self.result.rows[out] as usize - first_row).collect();
        let logits = self.samplers.logits(sampled.len());
        self.backend.outputs(&work_rows, sampled.len(), logits)?;
        if let Some(kept) = &mut self.result.hidden {
            let hidden = self.backend.hidden(order.len())?;
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

    /// Gives those of the output rows `outs` their ids whose largest logit is wanted alone and found without the others,
    /// and takes them out.
    fn screen(&mut self, first_row: usize, outs: &mut Vec<usize>) -> Result<()> {
        if self.result.logits.is_some() {
            return Ok(());
        }
        let is_screened = |&out: &usize| {
            let row = self.result.rows[out] as usize;
            let (seq, n_before) = (self.batch.row_seqs(row)[0], self.batch.positions[row] as u32 + 1);
            let is_masked = self.masks.is_some_and(|masks| masks[row].is_some());
            self.batch.wants_output[row] == output::LOGITS
                && !is_masked
                && self.samplers.takes_largest(seq, n_before)
        };
        let screened: Vec<usize> = outs.iter().copied().filter(is_screened).collect();
        if screened.is_empty() {
            return Ok(());
        }
        let work_rows: Vec<usize> =
            screened.iter().map(|&out| self.result.rows[out] as usize - first_row).collect();
        let ids = self.backend.greedy(&work_rows)?;
        self.progress.screened(ids.len(), ids.iter().flatten().count());
        for (&out, id) in screened.iter().zip(ids) {
            if let Some(id) = *id {
                self.result.token_ids[out] = id as i32;
            }
        }
        outs.retain(|&out| self.result.token_ids[out] < 0);
        Ok(())
    }

    /// Ids of the output rows `outs`, whose logits lie in the sampler bank.
    fn sample(&mut self, outs: &[usize]) {
        if outs.is_empty() {
            return;
        }
        let rows: Vec<SampleRow<'_>> = outs
            .iter()
            .map(|&out| {
                let row = self.result.rows[out] as usize;
                SampleRow {
                    seq: self.batch.row_seqs(row)[0],
                    n_before: self.batch.positions[row] as u32 + 1,
                    mask: self.masks.and_then(|masks| masks[row]),
                }
            })
            .collect();
        for (&out, outcome) in outs.iter().zip(self.samplers.sample(self.backend.pool(), &rows)) {
            self.give(out, outcome);
        }
    }

    fn give(&mut self, out: usize, outcome: Outcome) {
        match outcome {
            Outcome::Token { id, logprobs } => {
                self.result.token_ids[out] = id as i32;
                self.result.logprobs.extend(logprobs.map(|logprobs| (out, logprobs)));
            }
            Outcome::Fault(fault) => self.result.faults.push((self.result.rows[out] as usize, fault)),
        }
    }
}
