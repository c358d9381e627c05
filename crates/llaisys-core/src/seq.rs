//! Sequence ids: leases from a pool, each with a generation.

use crate::error::{Exhausted, Rejected};
use std::collections::VecDeque;

/// The most sequences that a pool can lend; `n_seq_max` is 1 to this.
pub const SEQ_LIMIT: usize = 256;

/// A lent sequence id: a slot below the pool's size, and the generation in which it was lent. Two holders of
/// the same slot at different times have different ids, so a late message about an old one is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId {
    slot: u16,
    generation: u32,
}

impl SeqId {
    /// The id as one number, `generation << 16 | slot`: the first lease of slot `n` reads `n`.
    pub fn to_raw(self) -> i64 {
        (i64::from(self.generation) << 16) | i64::from(self.slot)
    }

    /// The inverse of [`SeqId::to_raw`]; whether the id is lent is the pool's to say. A number that `to_raw`
    /// cannot give (negative, or above 48 bits) becomes an id that no pool ever lends.
    pub fn from_raw(raw: i64) -> Self {
        let slot = u16::try_from(raw & 0xffff).expect("sixteen bits");
        match u32::try_from(raw >> 16) {
            Ok(generation) => Self { slot, generation },
            Err(_) => Self { slot: u16::MAX, generation: u32::MAX },
        }
    }

    /// Index into per-sequence tables, below the pool's size for a lent id.
    pub fn slot(self) -> u32 {
        u32::from(self.slot)
    }

    /// How many times the slot had been returned when this id was lent.
    pub fn generation(self) -> u32 {
        self.generation
    }
}

/// Lends the sequence ids `0..n_seq_max`. The only owner of who holds which slot.
///
/// The free list is first in, first out: a slot rests as long as possible before it is lent again, so a
/// message about its former holder has the best chance to arrive while it is recognisably stale. Tests ask for
/// last in, first out: reuse is immediate, and so is the harm of a stale use.
///
/// Invariants, checked by [`SeqPool::check`]:
/// 1. Every slot is either lent or on the free list, never both.
/// 2. A slot is on the free list at most once.
/// 3. `generations[slot]` is the generation of the slot's present lease or, if free, of its next one.
#[derive(Debug)]
pub struct SeqPool {
    generations: Vec<u32>,
    lent: Vec<bool>,
    free: VecDeque<u16>,
    lifo: bool,
}

impl SeqPool {
    /// A pool with every id free, lending them in the order of production or of tests. Panics unless `n_seq_max` is 1 to [`SEQ_LIMIT`]; the context has checked it.
    pub fn new(n_seq_max: usize, lifo: bool) -> Self {
        assert!(
            (1..=SEQ_LIMIT).contains(&n_seq_max),
            "n_seq_max is {n_seq_max}, allowed are 1 to {SEQ_LIMIT}"
        );
        let n_slots = u16::try_from(n_seq_max).expect("at most SEQ_LIMIT");
        let free = (0..n_slots).collect();
        Self { generations: vec![0; n_seq_max], lent: vec![false; n_seq_max], free, lifo }
    }

    /// Lends the id that has been free for longest (in the order of tests: for the shortest time). Errors: [`Exhausted::SequenceIds`].
    pub fn acquire(&mut self) -> Result<SeqId, Exhausted> {
        let Some(slot) = self.free.pop_front() else {
            return Err(Exhausted::SequenceIds { capacity: self.lent.len() });
        };
        self.lent[usize::from(slot)] = true;
        Ok(SeqId { slot, generation: self.generations[usize::from(slot)] })
    }

    /// Takes an id back and starts the slot's next generation. Errors: [`Rejected::StaleSequence`] if the id
    /// is not lent (a second release, for one); nothing has changed then.
    pub fn release(&mut self, id: SeqId) -> Result<(), Rejected> {
        self.check_lent(id)?;
        let slot = usize::from(id.slot);
        self.lent[slot] = false;
        self.generations[slot] = self.generations[slot].wrapping_add(1);
        if self.lifo {
            self.free.push_front(id.slot);
        } else {
            self.free.push_back(id.slot);
        }
        Ok(())
    }

    /// Errors: [`Rejected::StaleSequence`] unless exactly this id, generation included, is lent.
    pub fn check_lent(&self, id: SeqId) -> Result<(), Rejected> {
        let slot = usize::from(id.slot);
        if self.lent.get(slot) == Some(&true) && self.generations[slot] == id.generation {
            return Ok(());
        }
        let current = self.generations.get(slot).copied().unwrap_or(0);
        Err(Rejected::StaleSequence { raw: id.to_raw(), slot: id.slot(), given: id.generation, current })
    }

    /// Ids that can still be lent.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Ids in all.
    pub fn capacity(&self) -> usize {
        self.lent.len()
    }

    /// The ids that are lent, by slot.
    pub fn lent(&self) -> impl Iterator<Item = SeqId> {
        let lent = self.lent.iter().zip(&self.generations).enumerate().filter(|(_, (lent, _))| **lent);
        lent.map(|(slot, (_, &generation))| SeqId {
            slot: u16::try_from(slot).expect("at most SEQ_LIMIT"),
            generation,
        })
    }

    /// Panics if a numbered invariant is broken.
    pub fn check(&self) {
        let mut is_free = vec![false; self.lent.len()];
        for &slot in &self.free {
            let seen = std::mem::replace(&mut is_free[usize::from(slot)], true);
            assert!(!seen, "invariant 2: slot {slot} is on the free list twice");
        }
        for (slot, (&lent, &free)) in self.lent.iter().zip(&is_free).enumerate() {
            assert!(lent != free, "invariant 1: slot {slot} is lent: {lent}, free: {free}");
        }
    }
}
