//! Sequence ids, cells and cache nodes of a context: the operations of [`crate::kv::KvCache`], each with its effect on
//! the tensors.

use super::Context;
use crate::arch::spec::QkNorm;
use crate::error::{Error, Rejected, Result, Unsupported};
use crate::faults::fault_point;
use crate::kv::{Snapshot, resolve_range};
use crate::sample::{Sampler, SamplerSpec};
use crate::seq::SeqId;

/// The sequences that a change affects.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change {
    /// No sequence sees other cells than before.
    None,
    One(SeqId),
    All,
}

impl Context {
    /// Number of KV cells.
    pub fn n_cells(&self) -> usize {
        self.kv.n_cells()
    }

    /// KV cells that no sequence sees and no node caches.
    pub fn n_cells_free(&self) -> usize {
        self.kv.n_cells_free()
    }

    /// Free KV cells of one stream. Errors: no such stream.
    pub fn n_cells_free_in(&self, stream: u32) -> Result<usize> {
        self.kv.n_cells_free_in(stream)
    }

    /// Sequence ids that can be acquired.
    pub fn n_seq_free(&self) -> usize {
        self.kv.n_seq_free()
    }

    /// Acquires a sequence id with no cells and no sampler, in KV stream `stream`. Errors: all ids are acquired, no
    /// such stream.
    pub fn seq_acquire(&mut self, stream: u32) -> Result<SeqId> {
        fault_point!("seq.acquire");
        let id = self.change(Change::None, |context| context.kv.seq_acquire(stream))?;
        self.progress.sequence_acquired();
        Ok(id)
    }

    /// Releases the id, its cells and its sampler. Errors: a stale id.
    pub fn seq_release(&mut self, id: SeqId) -> Result<()> {
        #[cfg(feature = "faults")]
        if crate::faults::table::hit("seq.release")? {
            return Ok(());
        }
        self.change(Change::One(id), |context| {
            context.kv.seq_release(id)?;
            context.samplers.detach(id);
            context.loras.release(id);
            context.backend.release_sequence(id);
            Ok(())
        })?;
        self.progress.sequence_released();
        Ok(())
    }

    /// Attaches a sampler to a sequence; without one, its rows are sampled greedily. `prompt` and `output` are the
    /// tokens that penalties count. Errors: a stale id, a parameter out of its bounds.
    pub fn set_sampler(
        &mut self,
        id: SeqId,
        spec: SamplerSpec,
        prompt: &[i32],
        output: &[i32],
    ) -> Result<()> {
        fault_point!("seq.set_sampler");
        self.kv.check_acquired(id)?;
        let sampler = Sampler::new(spec, self.config().vocab_size, prompt, output).map_err(Rejected::from)?;
        self.backend.set_sampling(id, sampler.spec(), prompt, output);
        self.samplers.attach(id, sampler);
        Ok(())
    }

    /// Removes positions `p0 <= p < p1`; negative `p0`: from the start, negative `p1`: to the end.
    pub fn kv_seq_rm(&mut self, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        fault_point!("kv.seq_rm");
        self.change(Change::One(id), |context| context.kv.seq_rm(id, p0, p1))
    }

    /// Lets `dst` see positions of `src` in a range (as in [`Context::kv_seq_rm`]): the same cells within a
    /// stream, else copies of their keys and values in newly allocated cells.
    /// Errors: a stale id, `dst` has positions there, sequences with different LoRA adapters, too few free cells for a
    /// copy.
    pub fn kv_seq_cp(&mut self, src: SeqId, dst: SeqId, p0: i32, p1: i32) -> Result<()> {
        fault_point!("kv.seq_cp");
        [src, dst].into_iter().try_for_each(|id| self.kv.check_acquired(id))?;
        self.loras.check_same(&[src, dst])?;
        self.change(Change::One(dst), |context| {
            let copies = context.kv.seq_cp(src, dst, p0, p1)?;
            context.backend.copy_cells(&copies)
        })
    }

    /// Removes the cells of every other sequence. All ids stay acquired, cache nodes keep their cells.
    pub fn kv_seq_keep(&mut self, id: SeqId) -> Result<()> {
        fault_point!("kv.seq_keep");
        self.change(Change::All, |context| context.kv.seq_keep(id))
    }

    /// Adds `delta` to the positions in a range (as in [`Context::kv_seq_rm`]) and rotates their stored keys
    /// by it. Errors: a stale id, a cell shared with another sequence or cached by a node, a position that is in use,
    /// negative or past `max_model_len`; a model whose keys cannot be rotated after they were stored, or whose results
    /// depend on absolute positions.
    pub fn kv_seq_add(&mut self, id: SeqId, p0: i32, p1: i32, delta: i32) -> Result<()> {
        fault_point!("kv.seq_add");
        self.kv.check_acquired(id)?;
        self.check_can_shift()?;
        self.check_shift(id, p0, p1, delta)?;
        self.change(Change::One(id), |context| {
            let moved = context.kv.seq_add(id, p0, p1, delta)?;
            context.backend.shift_cells(&moved, delta)
        })
    }

    /// Smallest position, None if the sequence is empty. Errors: a stale id.
    pub fn kv_seq_pos_min(&self, id: SeqId) -> Result<Option<i32>> {
        self.kv.pos_min(id)
    }

    /// Largest position, None if the sequence is empty. Errors: a stale id.
    pub fn kv_seq_pos_max(&self, id: SeqId) -> Result<Option<i32>> {
        self.kv.pos_max(id)
    }

    /// Caches a sequence's cells at positions `p0 <= p < p1` in a new node: they stay allocated after the sequence is
    /// released. Errors: a stale id, an existing node, an empty range, a position that is missing or already cached.
    pub fn kv_node_cache(&mut self, node: u64, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        fault_point!("kv.node_cache");
        self.change(Change::None, |context| context.kv.node_cache(node, id, p0, p1))
    }

    /// Lets a sequence that ends at `p0` see a node's positions `p0 <= p < p1`: the same cells within a
    /// stream, else copies of their keys and values in newly allocated cells. In a model with recurrent layers, the
    /// sequence can be continued only if the last attached node was attached up to its end and has a state.
    /// Errors: a stale id, an unknown node, an empty range, a missing position, too few free cells for a copy.
    pub fn kv_node_attach(&mut self, node: u64, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        fault_point!("kv.node_attach");
        self.change(Change::One(id), |context| {
            let copies = context.kv.node_attach(node, id, p0, p1)?;
            context.backend.copy_cells(&copies)
        })
    }

    /// Lets a sequence see a node's cells at positions `p0 <= p < p1` in place of its own, which have the same contents:
    /// the same tokens computed by this context. Its own become free if nothing else uses them.
    /// Errors: a stale id, an unknown node or one of another stream, an empty range, a missing position.
    pub fn kv_node_relink(&mut self, node: u64, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        fault_point!("kv.node_relink");
        self.change(Change::One(id), |context| context.kv.node_relink(node, id, p0, p1))
    }

    /// Lets a node have the recurrent state of a sequence that ends where the node ends, so that a sequence that the node
    /// is attached to can be continued. A node that has a state keeps it.
    /// Errors: a stale id, an unknown node or one with another end, a sequence without a state, as many nodes with a
    /// state as [`super::ContextConfig::n_states_kept`] allows.
    pub fn kv_node_keep_state(&mut self, node: u64, id: SeqId) -> Result<()> {
        fault_point!("kv.node_keep_state");
        self.change(Change::None, |context| context.kv.node_keep_state(node, id))
    }

    /// Drops the recurrent state of a node, if it has one; its cells stay. Errors: an unknown node.
    pub fn kv_node_drop_state(&mut self, node: u64) -> Result<()> {
        fault_point!("kv.node_drop_state");
        self.change(Change::None, |context| context.kv.node_drop_state(node))
    }

    /// Returns the recurrent state of a node: for each recurrent layer the window of the short convolution, then a matrix
    /// for each value head, in f32, little endian. Errors: an unknown node, a node without a state.
    pub fn kv_node_export_state(&self, node: u64) -> Result<Vec<u8>> {
        fault_point!("kv.node_export_state");
        Ok(self.backend.read_state(self.kv.node_state(node)?))
    }

    /// Gives a node without a recurrent state one with the contents that [`Context::kv_node_export_state`] returned in a
    /// context with the same [`Context::fingerprint`].
    /// Errors: an unknown node, a node with a state, a number of bytes that is not that of a state, as many nodes with a
    /// state as [`super::ContextConfig::n_states_kept`] allows.
    pub fn kv_node_import_state(&mut self, node: u64, data: &[u8]) -> Result<()> {
        fault_point!("kv.node_import_state");
        let want = self.backend.state_bytes();
        if data.len() != want || data.is_empty() {
            return Err(Rejected::StateBytes { got: data.len(), want }.into());
        }
        self.change(Change::None, |context| {
            let state = context.kv.node_new_state(node)?;
            context.backend.write_state(state, data);
            Ok(())
        })
    }

    /// Cache nodes that have a recurrent state.
    pub fn n_states_kept(&self) -> usize {
        self.kv.n_states_kept()
    }

    /// Moves the positions from `at` on, and the recurrent state after the last one, to the new node `tail`; the
    /// positions below `at` stay in the node.
    /// Errors: an unknown node, an existing tail, a part that would be empty.
    pub fn kv_node_split(&mut self, node: u64, at: i32, tail: u64) -> Result<()> {
        fault_point!("kv.node_split");
        self.change(Change::None, |context| context.kv.node_split(node, at, tail))
    }

    /// Removes a node's positions from `at` on, with its recurrent state, and the node if none is left. Errors: an unknown node, `at` outside of
    /// it.
    pub fn kv_node_trim(&mut self, node: u64, at: i32) -> Result<()> {
        fault_point!("kv.node_trim");
        self.change(Change::None, |context| context.kv.node_trim(node, at))
    }

    /// Returns the keys and values of a node's positions `p0 <= p < p1`: for each layer the keys
    /// `[p1 - p0][n_kv_heads][d_head]`, then the values likewise, in the cells' type, little endian (int8: each head's
    /// f32 scale follows it). With several ranks, all of this for the heads of rank 0, then of rank 1, and so on.
    /// Errors: an unknown node, an empty range, a missing position.
    pub fn kv_node_export(&self, node: u64, p0: i32, p1: i32) -> Result<Vec<u8>> {
        fault_point!("kv.node_export");
        self.backend.read_cells(&self.kv.node_cells(node, p0, p1)?)
    }

    /// Creates a node on newly allocated cells of stream `stream`, at positions from `p0`, with the contents that
    /// [`Context::kv_node_export`] returned in a context with the same [`Context::fingerprint`].
    /// Errors: an existing node, no such stream, a number of bytes that is not that of whole cells, positions past
    /// `max_model_len`, too few free cells.
    pub fn kv_node_import(&mut self, node: u64, stream: u32, p0: i32, data: &[u8]) -> Result<()> {
        fault_point!("kv.node_import");
        let of_cell = self.backend.cell_bytes();
        if data.is_empty() || !data.len().is_multiple_of(of_cell) {
            return Err(Rejected::CellBytes { got: data.len(), of_cell }.into());
        }
        let n = data.len() / of_cell;
        let (got, max) = (i64::from(p0) + n as i64, self.config.max_model_len as i64);
        if got > max {
            return Err(Rejected::OutOfRange { what: "the end of the positions", got, min: 1, max }.into());
        }
        self.change(Change::None, |context| {
            let cells = context.kv.node_create(node, stream, p0, n)?;
            context.backend.write_cells(&cells, data)
        })
    }

    /// All allocated cells.
    pub fn snapshot(&self) -> Snapshot {
        self.kv.snapshot()
    }

    /// Checks every invariant of the KV cache. Panics and marks the context as broken if one is violated.
    pub fn check_integrity(&mut self) {
        self.broken = true;
        self.kv.check();
        self.broken = false;
    }

    /// A hash of the cells, the cache nodes, the acquired ids and the order in which free cells are allocated.
    pub fn digest(&self) -> u64 {
        self.kv.digest()
    }

    /// Runs a change of the KV cache that affects the sequences `affected`, then fills the freed cells with NaN if
    /// `nan_fill` is set. If it panics or the device fails, the context stays marked as broken.
    pub(super) fn change<T>(
        &mut self,
        affected: Change,
        change: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        self.broken = true;
        let result = change(self);
        match affected {
            Change::None => {}
            Change::One(id) if self.kv.check_acquired(id).is_ok() => self.backend.invalidate_sequence(id),
            Change::One(_) => {}
            Change::All => self.backend.invalidate_all(),
        }
        // The cells of rows in flight count as free in the KV cache; the change may have allocated them.
        self.backend.invalidate_cells(&|cell| !self.kv.is_free(cell));
        fault_point!(panic "kv.change");
        let filled = self.nan_fill_freed();
        self.broken = matches!(result, Err(Error::Device(_))) || filled.is_err();
        filled.and(result)
    }

    /// With `nan_fill`, fills the cells that became free with NaN. Errors: those of the device.
    pub(super) fn nan_fill_freed(&mut self) -> Result<()> {
        if !self.config.nan_fill {
            return Ok(());
        }
        self.backend.nan_fill_states(&self.kv.take_freed_states());
        let freed = self.kv.take_freed_cells();
        self.backend.invalidate_cells(&|cell| freed.contains(&cell));
        self.backend.nan_fill(&freed)
    }

    /// Rejects shifts in a model that normalizes rotated keys, because the norm's weights belong to the original angle,
    /// and in one that scales queries by position.
    fn check_can_shift(&self) -> Result<(), Unsupported> {
        let arch = self.model.arch;
        let supported = if arch.qk_norm == QkNorm::RotatedHead {
            "architectures that do not normalize keys after the rotation"
        } else if self.model.query_scaling.is_some() {
            "architectures that do not scale queries by position"
        } else {
            return Ok(());
        };
        let what = "kv_seq_add (rotating stored keys) of the architecture";
        Err(Unsupported::feature(what, arch.architecture, supported))
    }

    /// Rejects a shift past `max_model_len`, a bound that the KV cache does not have.
    fn check_shift(&self, id: SeqId, p0: i32, p1: i32, delta: i32) -> Result<()> {
        let (p0, p1) = resolve_range(p0, p1)?;
        let mut ranges = self.kv.ranges(id).iter().rev();
        let last = ranges.find(|range| range.position < p1).map(|range| range.end().min(p1) - 1);
        let Some(last) = last.filter(|&last| last >= p0) else { return Ok(()) };
        let (got, max) = (i64::from(last) + i64::from(delta), self.config.max_model_len as i64 - 1);
        if got > max {
            return Err(Rejected::OutOfRange { what: "the shifted position", got, min: 0, max }.into());
        }
        Ok(())
    }
}
