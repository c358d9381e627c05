//! Sequence ids, cells and segments of a context: the books' operations, each with what it does to the tensors.

use super::Context;
use crate::books::Snapshot;
use crate::error::{Error, Rejected, Result};
use crate::faults::fault_point;
use crate::sample::{Sampler, SamplerSpec};
use crate::seq::SeqId;

/// Which sequences a change is about.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change {
    /// None: what they see stays as it is.
    None,
    One(SeqId),
    All,
}

impl Context {
    /// KV cells in all.
    pub fn n_cells(&self) -> usize {
        self.books.cells().n_cells()
    }

    /// KV cells that no sequence sees and no segment holds.
    pub fn n_cells_free(&self) -> usize {
        self.books.cells().n_free()
    }

    /// Free KV cells of one arena. Errors: no such arena.
    pub fn n_cells_free_in(&self, stream: u32) -> Result<usize> {
        self.books.cells().n_free_in(stream)
    }

    /// Sequence ids that can be lent.
    pub fn n_seq_free(&self) -> usize {
        self.books.n_seq_free()
    }

    /// Lends a sequence id with no cells and no sampler, to live in arena `stream`. Errors: all are lent, no such
    /// arena.
    pub fn seq_acquire(&mut self, stream: u32) -> Result<SeqId> {
        fault_point!("seq.acquire");
        let id = self.change(Change::None, |context| context.books.seq_acquire(stream))?;
        self.progress.lent();
        Ok(id)
    }

    /// Takes the id back, with its cells and its sampler. Errors: it is stale.
    pub fn seq_release(&mut self, id: SeqId) -> Result<()> {
        #[cfg(feature = "faults")]
        if crate::faults::table::hit("seq.release")? {
            return Ok(());
        }
        self.change(Change::One(id), |context| {
            context.books.seq_release(id)?;
            context.samplers.detach(id);
            if let Some(steps) = context.backend.steps() {
                steps.release(id);
            }
            Ok(())
        })?;
        self.progress.returned();
        Ok(())
    }

    /// Attaches sampling to a sequence; without it rows are sampled greedily. `prompt` and `output` are the
    /// tokens that penalties look at. Errors: a stale id, a parameter out of its bounds.
    pub fn set_sampler(
        &mut self,
        id: SeqId,
        spec: SamplerSpec,
        prompt: &[i32],
        output: &[i32],
    ) -> Result<()> {
        fault_point!("seq.set_sampler");
        self.books.check_lent(id)?;
        let sampler = Sampler::new(spec, self.config().vocab_size, prompt, output).map_err(Rejected::from)?;
        if let Some(steps) = self.backend.steps() {
            steps.set_sampling(id, sampler.spec(), (prompt, output));
        }
        self.samplers.attach(id, sampler);
        Ok(())
    }

    /// Forgets positions `p0 <= p < p1`; negative `p0`: from the start, negative `p1`: to the end.
    pub fn kv_seq_rm(&mut self, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        fault_point!("kv.seq_rm");
        self.change(Change::One(id), |context| context.books.seq_rm(id, p0, p1))
    }

    /// Lets `dst` see positions of `src` in a range (as in [`Context::kv_seq_rm`]): the same cells in the same
    /// arena, else copies of their keys and values in fresh cells.
    /// Errors: a stale id, `dst` has positions there, too few free cells for a copy.
    pub fn kv_seq_cp(&mut self, src: SeqId, dst: SeqId, p0: i32, p1: i32) -> Result<()> {
        fault_point!("kv.seq_cp");
        self.change(Change::One(dst), |context| {
            let copies = context.books.seq_cp(src, dst, p0, p1)?;
            context.backend.copy(&copies)
        })
    }

    /// Forgets the cells of every sequence but this one; their ids stay lent, segments stay.
    pub fn kv_seq_keep(&mut self, id: SeqId) -> Result<()> {
        fault_point!("kv.seq_keep");
        self.change(Change::All, |context| context.books.seq_keep(id))
    }

    /// Adds `delta` to the positions in a range (as in [`Context::kv_seq_rm`]) and rotates their stored keys
    /// by it. Errors: a stale id, a cell shared with another sequence or held by a segment, a position taken,
    /// negative or past `max_model_len`.
    pub fn kv_seq_add(&mut self, id: SeqId, p0: i32, p1: i32, delta: i32) -> Result<()> {
        fault_point!("kv.seq_add");
        self.books.check_lent(id)?;
        self.check_shift(id, (p0, p1), delta)?;
        self.change(Change::One(id), |context| {
            let moved = context.books.seq_add(id, p0, p1, delta)?;
            context.backend.shift(&moved, delta)
        })
    }

    /// Smallest position held, None if the sequence is empty. Errors: a stale id.
    pub fn kv_seq_pos_min(&self, id: SeqId) -> Result<Option<i32>> {
        self.books.pos_min(id)
    }

    /// Largest position held, None if the sequence is empty. Errors: a stale id.
    pub fn kv_seq_pos_max(&self, id: SeqId) -> Result<Option<i32>> {
        self.books.pos_max(id)
    }

    /// Holds a sequence's cells at positions `p0 <= p < p1` as a new segment, whatever becomes of the sequence.
    /// Errors: a stale id, a known segment, an empty range, a position that is missing or held already.
    pub fn kv_retain(&mut self, segment: u64, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        fault_point!("kv.retain");
        self.change(Change::None, |context| context.books.retain(segment, id, p0, p1))
    }

    /// Lets a sequence that ends at `p0` see a segment's positions `p0 <= p < p1`: the same cells in the same
    /// arena, else copies of their keys and values in fresh cells.
    /// Errors: a stale id, an unknown segment, an empty range, a missing position, too few free cells for a copy.
    pub fn kv_attach(&mut self, segment: u64, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        fault_point!("kv.attach");
        self.change(Change::One(id), |context| {
            let copies = context.books.attach(segment, id, p0, p1)?;
            context.backend.copy(&copies)
        })
    }

    /// Leaves positions below `at` to the segment and gives the others to the new segment `tail`.
    /// Errors: an unknown segment, a known tail, a part that would be empty.
    pub fn kv_segment_split(&mut self, segment: u64, at: i32, tail: u64) -> Result<()> {
        fault_point!("kv.segment_split");
        self.change(Change::None, |context| context.books.segment_split(segment, at, tail))
    }

    /// Forgets a segment's positions from `at`; from its first one on, the segment is gone.
    /// Errors: an unknown segment, `at` outside of it.
    pub fn kv_segment_trim(&mut self, segment: u64, at: i32) -> Result<()> {
        fault_point!("kv.segment_trim");
        self.change(Change::None, |context| context.books.segment_trim(segment, at))
    }

    /// The keys and values of a segment's positions `p0 <= p < p1`: for each layer the keys
    /// `[p1 - p0][n_kv_heads][d_head]`, then the values likewise, in the cells' type, little endian (int8: each head's
    /// f32 scale follows it). Of several ranks:
    /// all this for the heads of each in turn.
    /// Errors: an unknown segment, an empty range, a missing position.
    pub fn kv_export(&self, segment: u64, p0: i32, p1: i32) -> Result<Vec<u8>> {
        fault_point!("kv.export");
        self.backend.read_cells(&self.books.cells().segment_cells(segment, p0, p1)?)
    }

    /// A new segment on fresh cells of arena `stream`, at positions from `p0`, with the contents that
    /// [`Context::kv_export`] gave, of a context with the same [`Context::fingerprint`].
    /// Errors: a known segment, no such arena, a number of bytes that is not that of whole cells, positions past
    /// `max_model_len`, too few free cells.
    pub fn kv_import(&mut self, segment: u64, stream: u32, p0: i32, data: &[u8]) -> Result<()> {
        fault_point!("kv.import");
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
            let cells = context.books.segment_create(segment, stream, p0, n)?;
            context.backend.write_cells(&cells, data)
        })
    }

    /// Everything that is held.
    pub fn snapshot(&self) -> Snapshot {
        self.books.snapshot()
    }

    /// Checks every invariant of cells, segments and sequence ids. Panics, and marks the context as broken, if one
    /// does not hold.
    pub fn check_integrity(&mut self) {
        self.broken = true;
        self.books.check();
        self.broken = false;
    }

    /// A number that changes when a cell, a segment, a lent id or the order of the free cells changes.
    pub fn digest(&self) -> u64 {
        self.books.digest()
    }

    /// Runs a change of the books, and of the sequences `of`, and clears what it freed. If it panics or the device fails,
    /// the context stays marked as broken.
    pub(super) fn change<T>(&mut self, of: Change, change: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.broken = true;
        let result = change(self);
        if let Some(steps) = self.backend.steps() {
            match of {
                Change::None => {}
                Change::One(id) if self.books.check_lent(id).is_ok() => steps.forget(id),
                Change::One(_) => {}
                Change::All => steps.forget_all(),
            }
            // The cells of rows under way were free before the change.
            steps.forget_taken(&|cell| !self.books.cells().is_free(cell));
        }
        fault_point!(panic "books.change");
        let poisoned = self.poison_freed();
        self.broken = matches!(result, Err(Error::Device(_))) || poisoned.is_err();
        poisoned.and(result)
    }

    /// In poison mode, overwrites the cells that became free. Errors: the device's.
    pub(super) fn poison_freed(&mut self) -> Result<()> {
        if !self.config.poison {
            return Ok(());
        }
        let freed = self.books.take_freed();
        if let Some(steps) = self.backend.steps() {
            steps.forget_taken(&|cell| freed.contains(&cell));
        }
        self.backend.poison(&freed)
    }

    /// Refuses a shift that would leave the context's range; the cells know no such bound.
    fn check_shift(&self, id: SeqId, (p0, p1): (i32, i32), delta: i32) -> Result<()> {
        let (p0, p1) = (p0.max(0), if p1 < 0 { i32::MAX } else { p1 });
        let mut runs = self.books.cells().runs(id.slot()).iter().rev();
        let last = runs.find(|run| run.position < p1).map(|run| run.end().min(p1) - 1);
        let Some(last) = last.filter(|&last| last >= p0) else { return Ok(()) };
        let (got, max) = (i64::from(last) + i64::from(delta), self.config.max_model_len as i64 - 1);
        if got > max {
            return Err(Rejected::OutOfRange { what: "the shifted position", got, min: 0, max }.into());
        }
        Ok(())
    }
}
