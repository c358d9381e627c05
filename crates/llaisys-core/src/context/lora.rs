//! LoRA adapters of a context: slots, the adapter of each sequence, and the rows of a pass by adapter.

use super::Context;
use super::kv::Change;
use crate::batch::Batch;
use crate::error::{DeviceError, Error, Exhausted, LoraError, Result, Unsupported};
use crate::faults::fault_point;
use crate::forward::lora::{LoraAdapter, LoraAdapters, LoraPass};
use crate::load::lora::LoraCheckpoint;
use crate::ops::lora::LoraGrouping;
use crate::seq::SeqId;
use std::ops::Range;
use std::path::Path;

/// Upper bound on [`super::ContextConfig::max_loras`].
pub const LORA_SLOTS_MAX: usize = 1024;
/// Upper bound on [`super::ContextConfig::max_lora_rank`].
pub const LORA_RANK_MAX: usize = 512;

/// A loaded adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoraInfo {
    /// Its number in this context.
    pub slot: u32,
    /// A hash of everything that it adds to keys and values: 32 hexadecimal digits, the same in every process. Cells of
    /// adapters with the same hash, in contexts with the same fingerprint, are the same.
    pub hash: String,
    /// The largest rank of a module.
    pub rank: usize,
    /// Bytes of its matrices in memory.
    pub n_bytes: usize,
}

/// The adapters, and the sequences that use them.
#[derive(Debug)]
pub(super) struct LoraBank {
    adapters: LoraAdapters,
    /// The slot of each sequence's adapter, by the slot of its id.
    of_seq: Vec<Option<u32>>,
    /// Scratch of [`LoraBank::pass`].
    grouping: LoraGrouping,
}

impl LoraBank {
    pub(super) fn new(max_loras: usize, n_layers: usize, n_seq_max: usize) -> Self {
        let adapters = LoraAdapters::new(max_loras, n_layers);
        Self { adapters, of_seq: vec![None; n_seq_max], grouping: LoraGrouping::default() }
    }

    fn of(&self, id: SeqId) -> Option<u32> {
        self.of_seq[id.slot() as usize]
    }

    /// Removes the adapter of a sequence that is released.
    pub(super) fn release(&mut self, id: SeqId) {
        self.of_seq[id.slot() as usize] = None;
    }

    /// Checks that sequences that would share cells have the same adapter. Errors: [`LoraError::Differ`].
    pub(super) fn check_same(&self, seqs: &[SeqId]) -> Result<(), LoraError> {
        let Some((&first, others)) = seqs.split_first() else { return Ok(()) };
        match others.iter().find(|&&other| self.of(other) != self.of(first)) {
            Some(&other) => Err(LoraError::Differ { first: first.slot(), second: other.slot() }),
            None => Ok(()),
        }
    }

    /// Checks the sequences of every row of a batch, which are acquired. Errors: as [`Self::check_same`].
    pub(super) fn check_batch(&self, batch: &Batch) -> Result<(), LoraError> {
        if self.of_seq.iter().all(Option::is_none) {
            return Ok(());
        }
        (0..batch.n_rows()).try_for_each(|row| self.check_same(batch.row_seqs(row)))
    }

    /// Groups some rows of a batch by adapter. None if they use none.
    pub(super) fn pass(&mut self, batch: &Batch, rows: Range<usize>) -> Option<LoraPass<'_>> {
        let slots = rows.map(|row| self.of_seq[batch.row_seqs(row)[0].slot() as usize]);
        let rows = self.grouping.group(slots)?;
        Some(LoraPass { adapters: &self.adapters, rows })
    }
}

impl Context {
    /// Loads the LoRA adapter at `path`, a folder in PEFT's format or a GGUF file, into a free slot.
    ///
    /// Errors: a damaged adapter, one of another model, a rank above `max_lora_rank`; what is not implemented, by name;
    /// all slots are in use; no memory.
    pub fn lora_load(&mut self, path: &Path) -> Result<LoraInfo> {
        fault_point!("lora.load");
        let capacity = self.config.max_loras;
        if capacity == 0 {
            let supported = "contexts with max_loras of at least 1";
            return Err(Unsupported::feature("a LoRA adapter with max_loras", 0, supported).into());
        }
        let free = self.loras.adapters.free_slot();
        let slot = free.ok_or(Exhausted::LoraSlots { capacity })?;
        let checkpoint = LoraCheckpoint::open(path, &self.model, self.config.max_lora_rank)?;
        // Nothing of the context has changed, so it continues without the adapter.
        let adapter = LoraAdapter::pack(&checkpoint, self.config.mode, self.backend.host_pool());
        let adapter = adapter.map_err(|error| match error {
            Error::Device(DeviceError::Allocation { bytes, .. }) => Exhausted::LoraMemory { bytes }.into(),
            other => other,
        })?;
        let (hash, rank, n_bytes) = (format!("{:032x}", adapter.hash), adapter.rank, adapter.n_bytes());
        self.loras.adapters.insert(slot, adapter);
        Ok(LoraInfo { slot: slot as u32, hash, rank, n_bytes })
    }

    /// Unloads the adapter in a slot and frees its memory. Errors: an empty slot, an adapter that a sequence uses.
    pub fn lora_unload(&mut self, slot: u32) -> Result<()> {
        fault_point!("lora.unload");
        self.check_lora(slot)?;
        let n_sequences = self.loras.of_seq.iter().filter(|&&of_seq| of_seq == Some(slot)).count();
        if n_sequences > 0 {
            return Err(LoraError::InUse { slot, n_sequences }.into());
        }
        self.loras.adapters.remove(slot);
        Ok(())
    }

    /// Lets the rows of a sequence without cells use the adapter in `slot`; None: no adapter, as when the id was
    /// acquired. Nodes that the sequence attaches must have been computed with the same adapter.
    /// Errors: a stale id, a sequence with cells, an empty slot.
    pub fn seq_set_lora(&mut self, id: SeqId, slot: Option<u32>) -> Result<()> {
        fault_point!("seq.set_lora");
        if self.kv.pos_max(id)?.is_some() {
            return Err(LoraError::NotEmpty { slot: id.slot() }.into());
        }
        slot.map_or(Ok(()), |slot| self.check_lora(slot))?;
        self.change(Change::One(id), |context| {
            context.loras.of_seq[id.slot() as usize] = slot;
            Ok(())
        })
    }

    fn check_lora(&self, slot: u32) -> Result<(), LoraError> {
        if self.loras.adapters.is_loaded(slot) { Ok(()) } else { Err(LoraError::NotLoaded { slot }) }
    }
}
