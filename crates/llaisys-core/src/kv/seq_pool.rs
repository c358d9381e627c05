//! The pool of sequence ids.

use crate::error::{Exhausted, Rejected};
use crate::seq::{SEQ_LIMIT, SeqId};
use std::collections::VecDeque;

/// The sequence ids `0..n_seq_max`, acquired and released.
///
/// The free list is first in, first out: a slot is reused as late as possible, so that a late message about its former
/// sequence most likely still has a recognizably stale id. With `lifo` (for tests) it is last in, first out: a slot is
/// reused immediately, so that a stale use shows immediately.
///
/// Invariants, verified by [`SeqPool::check`]:
/// 1. Every slot is either acquired or on the free list, never both.
/// 2. A slot is on the free list at most once.
/// 3. `generations[slot]` is the generation of the slot's current id or, if it is free, of its next one.
#[derive(Debug)]
pub(super) struct SeqPool {
    generations: Vec<u32>,
    is_acquired: Vec<bool>,
    free: VecDeque<u16>,
    lifo: bool,
}

impl SeqPool {
    /// A pool with every id free. [`super::KvCache::new`] has checked that `n_seq_max` is 1 to [`SEQ_LIMIT`].
    pub(super) fn new(n_seq_max: usize, lifo: bool) -> Self {
        assert!((1..=SEQ_LIMIT).contains(&n_seq_max), "n_seq_max is {n_seq_max}");
        let n_slots = u16::try_from(n_seq_max).expect("at most SEQ_LIMIT");
        let free = (0..n_slots).collect();
        Self { generations: vec![0; n_seq_max], is_acquired: vec![false; n_seq_max], free, lifo }
    }

    /// Acquires the id that has been free for longest (with `lifo`, for the shortest time). Errors:
    /// [`Exhausted::SequenceIds`].
    pub(super) fn acquire(&mut self) -> Result<SeqId, Exhausted> {
        let Some(slot) = self.free.pop_front() else {
            return Err(Exhausted::SequenceIds { capacity: self.is_acquired.len() });
        };
        self.is_acquired[usize::from(slot)] = true;
        Ok(SeqId::new(slot, self.generations[usize::from(slot)]))
    }

    /// Releases an id, which the caller has checked, and starts its slot's next generation.
    pub(super) fn release(&mut self, id: SeqId) {
        let slot = id.slot() as usize;
        self.is_acquired[slot] = false;
        self.generations[slot] = self.generations[slot].wrapping_add(1);
        let slot = u16::try_from(slot).expect("at most SEQ_LIMIT");
        if self.lifo {
            self.free.push_front(slot);
        } else {
            self.free.push_back(slot);
        }
    }

    /// Checks that this id, generation included, is acquired. Errors: [`Rejected::StaleSequence`].
    pub(super) fn check_acquired(&self, id: SeqId) -> Result<(), Rejected> {
        let slot = id.slot() as usize;
        if self.is_acquired.get(slot) == Some(&true) && self.generations[slot] == id.generation() {
            return Ok(());
        }
        let current = self.generations.get(slot).copied().unwrap_or(0);
        Err(Rejected::StaleSequence { raw: id.to_raw(), slot: id.slot(), given: id.generation(), current })
    }

    /// Ids that can be acquired.
    pub(super) fn n_free(&self) -> usize {
        self.free.len()
    }

    /// The acquired ids, by slot.
    pub(super) fn acquired(&self) -> impl Iterator<Item = SeqId> {
        let slots = (0_u16..).zip(self.is_acquired.iter().zip(&self.generations));
        slots
            .filter(|(_, (acquired, _))| **acquired)
            .map(|(slot, (_, &generation))| SeqId::new(slot, generation))
    }

    /// Panics if a numbered invariant is violated.
    pub(super) fn check(&self) {
        let mut is_free = vec![false; self.is_acquired.len()];
        for &slot in &self.free {
            let seen = std::mem::replace(&mut is_free[usize::from(slot)], true);
            assert!(!seen, "id pool, invariant 2: slot {slot} is on the free list twice");
        }
        for (slot, (&acquired, &free)) in self.is_acquired.iter().zip(&is_free).enumerate() {
            assert!(
                acquired != free,
                "id pool, invariant 1: slot {slot} is acquired: {acquired}, free: {free}"
            );
        }
    }
}
