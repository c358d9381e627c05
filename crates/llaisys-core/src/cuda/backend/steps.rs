//! Decode steps of a context on a GPU: translates the sequence ids and cells of the KV cache to the device's slots.

use crate::arch::config::ModelConfig;
use crate::context::backend::StepBatch;
use crate::cuda::forward::steps::{SequenceSlot, StepRow, Steps, Target};
use crate::error::Result;
use crate::kv::KvCache;
use crate::seq::SeqId;

/// Returns the slot of a sequence.
pub(super) fn slot(id: SeqId) -> SequenceSlot {
    SequenceSlot { sequence: id.to_raw(), index: id.slot() as usize }
}

/// Returns whether a step can compute and sample the row of `id` at `position`. The device counts a window in cells, so
/// where layers have one the positions of a sequence must have no gap.
pub(super) fn can_step(steps: &Steps, config: &ModelConfig, kv: &KvCache, id: SeqId, position: i32) -> bool {
    let has_gap = || kv.ranges(id).windows(2).any(|ranges| ranges[0].end() != ranges[1].position);
    steps.can_sample_after(slot(id).index, position as u32) && (config.window.is_none() || !has_gap())
}

/// Launches those rows of a step that are not in flight.
pub(super) fn launch(steps: &mut Steps, target: Target<'_>, step: &StepBatch<'_>) -> Result<()> {
    let StepBatch { kv, batch, row_cells, rows, masks } = *step;
    let row = |&row: &usize| StepRow {
        slot: slot(batch.row_seqs(row)[0]),
        position: batch.positions[row] as u32,
        token: batch.tokens[row] as u32,
        cell: row_cells[row],
        mask: masks.and_then(|masks| masks[row]),
    };
    let rows: Vec<StepRow<'_>> = rows.iter().map(row).collect();
    let before = |row: &StepRow<'_>| {
        let mut list = Vec::new();
        kv.visible_cells(SeqId::from_raw(row.slot.sequence), row.position as i32 - 1, &mut list);
        list
    };
    steps.launch(target, &rows, &before)
}
