//! `Books`: the bookkeeping of a context without a model. Which sequence ids are lent, which cells they and the
//! segments hold, in which arena.
//!
//! The context owns one beside its tensors; a simulation of the engine uses one alone.

use crate::batch::{Batch, BatchArrays, BatchLimits};
use crate::error::{Rejected, Result};
use crate::kv::{Cells, Copies, KvError, KvShape, Reservation, RowPlace, Run};
use crate::seq::{SEQ_LIMIT, SeqId, SeqPool};
use std::hash::{DefaultHasher, Hash, Hasher};

/// The most arenas; more than any machine has NUMA nodes.
pub const STREAM_LIMIT: usize = 256;

/// Cells, sequence ids, segments and arenas. A sequence's id stands for its slot; every method that takes one
/// refuses an id that is not lent ([`Rejected::StaleSequence`]). A refused call has changed nothing.
///
/// Invariants, checked by [`Books::check`], beside those of [`Cells`] and [`SeqPool`]:
/// 1. A slot that is not lent has no cells and is in arena 0.
#[derive(Debug)]
pub struct Books {
    cells: Cells,
    seqs: SeqPool,
}

/// What a sequence or a segment holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding<Id> {
    /// Whose cells they are.
    pub id: Id,
    /// Its arena.
    pub stream: u32,
    /// Its positions and cells, in rising position order.
    pub runs: Vec<Run>,
}

/// Everything that is held, to look at from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The lent sequences, by slot.
    pub sequences: Vec<Holding<SeqId>>,
    /// The segments, by id.
    pub segments: Vec<Holding<u64>>,
    /// Free cells of each arena.
    pub n_free: Vec<usize>,
}

impl Books {
    /// Free cells and ids. Errors: a number out of its bounds, arenas that do not divide the cells.
    pub fn new(shape: KvShape) -> Result<Self> {
        let counts = [
            ("n_cells", shape.n_cells, i32::MAX as usize),
            ("n_seq_max", shape.n_seq_max, SEQ_LIMIT),
            ("n_streams", shape.n_streams, STREAM_LIMIT),
        ];
        for (what, got, max) in counts {
            if got < 1 || got > max {
                return Err(Rejected::OutOfRange { what, got: got as i64, min: 1, max: max as i64 }.into());
            }
        }
        let KvShape { n_cells, n_streams, .. } = shape;
        if !n_cells.is_multiple_of(n_streams) {
            return Err(Rejected::UnevenStreams { n_cells, n_streams }.into());
        }
        Ok(Self { cells: Cells::new(shape), seqs: SeqPool::new(shape.n_seq_max, shape.lifo) })
    }

    /// The cells, to look at.
    pub fn cells(&self) -> &Cells {
        &self.cells
    }

    /// Sequence ids that can be lent.
    pub fn n_seq_free(&self) -> usize {
        self.seqs.n_free()
    }

    /// Errors: [`Rejected::StaleSequence`] unless the id is lent.
    pub fn check_lent(&self, id: SeqId) -> Result<()> {
        Ok(self.seqs.check_lent(id)?)
    }

    /// Lends an id with no cells, to live in arena `stream`. Errors: no such arena, all ids are lent.
    pub fn seq_acquire(&mut self, stream: u32) -> Result<SeqId> {
        self.cells.n_free_in(stream)?;
        let id = self.seqs.acquire()?;
        self.cells.set_stream(id.slot(), stream)?;
        Ok(id)
    }

    /// Takes the id back, with its cells (those that a segment holds stay in use).
    pub fn seq_release(&mut self, id: SeqId) -> Result<()> {
        self.check_lent(id)?;
        self.cells.seq_rm(id.slot(), -1, -1)?;
        self.cells.set_stream(id.slot(), 0)?;
        Ok(self.seqs.release(id)?)
    }

    /// [`Cells::seq_rm`] of a lent id.
    pub fn seq_rm(&mut self, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        self.check_lent(id)?;
        self.cells.seq_rm(id.slot(), p0, p1)
    }

    /// [`Cells::seq_cp`] of lent ids.
    pub fn seq_cp(&mut self, src: SeqId, dst: SeqId, p0: i32, p1: i32) -> Result<Copies> {
        self.check_lent(src)?;
        self.check_lent(dst)?;
        self.cells.seq_cp(src.slot(), dst.slot(), p0, p1)
    }

    /// [`Cells::seq_keep`] of a lent id.
    pub fn seq_keep(&mut self, id: SeqId) -> Result<()> {
        self.check_lent(id)?;
        self.cells.seq_keep(id.slot())
    }

    /// [`Cells::seq_add`] of a lent id.
    pub fn seq_add(&mut self, id: SeqId, p0: i32, p1: i32, delta: i32) -> Result<Vec<u32>> {
        self.check_lent(id)?;
        self.cells.seq_add(id.slot(), p0, p1, delta)
    }

    /// Smallest position held, None if the sequence is empty.
    pub fn pos_min(&self, id: SeqId) -> Result<Option<i32>> {
        self.check_lent(id)?;
        Ok(self.cells.pos_min(id.slot()))
    }

    /// Largest position held, None if the sequence is empty.
    pub fn pos_max(&self, id: SeqId) -> Result<Option<i32>> {
        self.check_lent(id)?;
        Ok(self.cells.pos_max(id.slot()))
    }

    /// [`Cells::retain`] of a lent id.
    pub fn retain(&mut self, segment: u64, id: SeqId, p0: i32, p1: i32) -> Result<()> {
        self.check_lent(id)?;
        self.cells.retain(segment, id.slot(), p0, p1)
    }

    /// [`Cells::attach`] to a lent id.
    pub fn attach(&mut self, segment: u64, id: SeqId, p0: i32, p1: i32) -> Result<Copies> {
        self.check_lent(id)?;
        self.cells.attach(segment, id.slot(), p0, p1)
    }

    /// [`Cells::segment_split`].
    pub fn segment_split(&mut self, segment: u64, at: i32, tail: u64) -> Result<()> {
        self.cells.segment_split(segment, at, tail)
    }

    /// [`Cells::segment_trim`].
    pub fn segment_trim(&mut self, segment: u64, at: i32) -> Result<()> {
        self.cells.segment_trim(segment, at)
    }

    /// [`Cells::segment_create`].
    pub fn segment_create(&mut self, segment: u64, stream: u32, p0: i32, n: usize) -> Result<Vec<u32>> {
        self.cells.segment_create(segment, stream, p0, n)
    }

    /// [`Cells::take_freed`].
    pub fn take_freed(&mut self) -> Vec<u32> {
        self.cells.take_freed()
    }

    /// [`Cells::prepare`] for the rows of a batch. Errors beside its own: an id that is not lent, a row that
    /// names another arena than its sequences'.
    pub fn prepare(&mut self, batch: &Batch) -> Result<Reservation<'_>> {
        for &id in &batch.seqs {
            self.check_lent(id)?;
        }
        for (row, &stream) in batch.stream.iter().enumerate() {
            let slot = batch.row_seqs(row)[0].slot();
            let home = self.cells.stream(slot);
            if stream != home {
                return Err(Rejected::Kv(KvError::WrongStream { row, stream, slot, home }).into());
            }
        }
        let slots: Vec<u32> = batch.seqs.iter().map(|id| id.slot()).collect();
        let places: Vec<RowPlace<'_>> = (0..batch.n_rows())
            .map(|row| {
                let seqs = batch.seq_start[row] as usize..batch.seq_start[row + 1] as usize;
                RowPlace { position: batch.positions[row], seqs: &slots[seqs] }
            })
            .collect();
        self.cells.prepare(&places)
    }

    /// What a decode of these rows does to the books: the same checks, the same errors. Tokens and outputs do not
    /// matter.
    pub fn extend(&mut self, positions: &[i32], n_seq_id: &[i32], seq_ids: &[i64]) -> Result<()> {
        let limits = BatchLimits {
            vocab_size: 1,
            max_positions: i32::MAX as usize,
            n_seq_max: self.seqs.capacity(),
            n_streams: self.cells.n_streams(),
        };
        let tokens = vec![0; positions.len()];
        let wants_output = vec![0; positions.len()];
        let arrays = BatchArrays {
            tokens: &tokens,
            positions,
            n_seq_id,
            seq_ids,
            stream: &[],
            wants_output: &wants_output,
        };
        let batch = Batch::new(arrays, limits)?;
        self.prepare(&batch)?.commit();
        Ok(())
    }

    /// Everything that is held. Costs the number of runs.
    pub fn snapshot(&self) -> Snapshot {
        let holding = |id: SeqId| Holding {
            id,
            stream: self.cells.stream(id.slot()),
            runs: self.cells.runs(id.slot()).to_vec(),
        };
        let segments = self.cells.segments();
        Snapshot {
            sequences: self.seqs.lent().map(holding).collect(),
            segments: segments
                .map(|(id, stream, runs)| Holding { id, stream, runs: runs.to_vec() })
                .collect(),
            n_free: self.cells.n_free_by_stream(),
        }
    }

    /// Panics if a numbered invariant is broken. Costs the size of the pool.
    pub fn check(&self) {
        self.cells.check();
        self.seqs.check();
        let mut lent = vec![false; self.seqs.capacity()];
        self.seqs.lent().for_each(|id| lent[id.slot() as usize] = true);
        for slot in (0_u32..).zip(&lent).filter(|(_, lent)| !**lent).map(|(slot, _)| slot) {
            let is_bare = self.cells.runs(slot).is_empty() && self.cells.stream(slot) == 0;
            assert!(is_bare, "invariant 1 of the books: slot {slot} is not lent and holds cells or an arena");
        }
    }

    /// A hash of the cells ([`Cells::digest`]) and of the lent ids. Not of the generations to come nor of the order
    /// in which ids will be lent: when the last sequence and segment are gone it is that of new books.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.cells.digest().hash(&mut hasher);
        self.seqs.lent().for_each(|id| id.hash(&mut hasher));
        hasher.finish()
    }
}
