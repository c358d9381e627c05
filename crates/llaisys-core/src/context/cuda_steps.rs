//! Decode steps of a context on a GPU: from the books' ids and cells to the device's slots.

use super::backend::DecodeSteps;
use super::cuda::CudaBackend;
use crate::batch::Batch;
use crate::error::Result;
use crate::kv::cells::Cells;
use crate::model::device::steps::{StepRow, Steps};
use crate::sample::{Outcome, SamplerSpec};
use crate::seq::SeqId;

fn slot(id: SeqId) -> usize {
    id.slot() as usize
}

/// One GPU, with the steps whose state it keeps.
#[derive(Debug)]
pub(super) struct SteppedGpu {
    pub(super) gpu: CudaBackend,
    pub(super) steps: Steps,
}

impl DecodeSteps for SteppedGpu {
    fn n_rows(&self) -> usize {
        self.steps.n_rows()
    }

    /// A window is counted in cells there, so where layers have one the positions of a sequence must have no gap.
    fn takes(&self, cells: &Cells, id: SeqId, position: i32) -> bool {
        let has_gap = || cells.runs(id.slot()).windows(2).any(|runs| runs[0].end() != runs[1].position);
        self.steps.samples_after(slot(id), position as u32)
            && (self.gpu.decoder.config().window.is_none() || !has_gap())
    }

    fn launch(
        &mut self,
        cells: &Cells,
        batch: &Batch,
        (placed, rows): (&[u32], &[usize]),
        masks: Option<&[Option<&[u32]>]>,
    ) -> Result<()> {
        let row = |&row: &usize| {
            let id = batch.row_seqs(row)[0];
            StepRow {
                sequence: id.to_raw(),
                slot: slot(id),
                position: batch.positions[row] as u32,
                token: batch.tokens[row] as u32,
                cell: placed[row],
                mask: masks.and_then(|masks| masks[row]),
            }
        };
        let rows: Vec<StepRow<'_>> = rows.iter().map(row).collect();
        let before = |row: &StepRow<'_>| {
            let mut list = Vec::new();
            cells.visible_cells(row.slot as u32, row.position as i32 - 1, &mut list);
            list
        };
        self.steps.launch((&*self.gpu.device, &self.gpu.decoder), &rows, &before)
    }

    fn launch_ahead(&mut self, next_cells: &[u32]) -> Result<()> {
        self.steps.launch_ahead((&*self.gpu.device, &self.gpu.decoder), next_cells)
    }

    fn collect(&mut self) -> Result<Vec<Outcome>> {
        self.steps.collect(&*self.gpu.device)
    }

    fn set_sampling(&mut self, id: SeqId, spec: &SamplerSpec, (prompt, output): (&[i32], &[i32])) {
        self.steps.attach((id.to_raw(), slot(id)), spec, prompt, output);
    }

    fn accept(&mut self, id: SeqId, token: u32) {
        self.steps.accept(slot(id), token);
    }

    fn forget(&mut self, id: SeqId) {
        self.steps.forget(id.to_raw(), slot(id));
    }

    fn release(&mut self, id: SeqId) {
        self.steps.detach((id.to_raw(), slot(id)));
    }

    fn forget_all(&mut self) {
        self.steps.forget_all();
    }

    fn forget_taken(&mut self, is_taken: &dyn Fn(u32) -> bool) {
        self.steps.forget_taken(is_taken);
    }

    fn take_graph_refusal(&mut self) -> Option<String> {
        self.steps.take_graph_refusal()
    }
}
