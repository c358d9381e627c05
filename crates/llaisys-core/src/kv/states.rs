//! Recurrent states: which sequence and which cache node has which. A state is never changed in place: a step writes a
//! new one, and the sequence gets it when the step is committed. So forks and nodes share states without copies, and a
//! rejected step leaves the old ones as they are.

use super::{KvCache, KvError, KvShape, rejected};
use crate::error::Result;
use crate::seq::SeqId;

/// The number of states of a cache for `n_seq_max` sequences: each may have one and write another.
pub fn n_states(n_seq_max: usize) -> usize {
    2 * n_seq_max
}

/// The states of a cache. Their contents are in [`super::StateStorage`].
///
/// Invariants, verified by [`States::check`]:
/// 1. The users of a state are the sequences and nodes that have it, and the live reservation. A state without users is
///    free.
/// 2. There are enough states that every sequence can have one and write another: a reservation always finds them.
#[derive(Debug)]
pub(super) struct States {
    /// By slot: the state after the sequence's last position; None: it has no positions.
    of_slot: Vec<Option<u32>>,
    /// By state: the number of its users.
    n_users: Vec<u32>,
    /// Free states; the next one to use is the last.
    free: Vec<u32>,
    /// Slots of the live reservation, with the states that the step writes.
    written: Vec<(usize, u32)>,
    /// States that became free, once recording has started.
    freed: Option<Vec<u32>>,
}

impl States {
    /// States for `n_seq_max` sequences.
    pub(super) fn new(n_seq_max: usize) -> Self {
        let n = n_states(n_seq_max) as u32;
        Self {
            of_slot: vec![None; n_seq_max],
            n_users: vec![0; n as usize],
            free: (0..n).rev().collect(),
            written: Vec::new(),
            freed: None,
        }
    }

    /// The state that the live reservation writes for a sequence.
    fn written(&self, slot: usize) -> Option<u32> {
        self.written.iter().find(|(of, _)| *of == slot).map(|&(_, state)| state)
    }

    /// Adds a user.
    fn share(&mut self, state: u32) -> u32 {
        self.n_users[state as usize] += 1;
        state
    }

    /// Removes a user.
    fn release(&mut self, state: u32) {
        let n_users = &mut self.n_users[state as usize];
        *n_users -= 1;
        if *n_users == 0 {
            self.free.push(state);
            self.freed.iter_mut().for_each(|freed| freed.push(state));
        }
    }

    /// Drops the state of a sequence.
    pub(super) fn clear(&mut self, slot: usize) {
        if let Some(state) = self.of_slot[slot].take() {
            self.release(state);
        }
    }

    /// Gives a sequence without a state that of another one.
    pub(super) fn copy(&mut self, from: usize, to: usize) {
        self.of_slot[to] = self.of_slot[from].map(|state| self.share(state));
    }

    /// Allocates the state that a step writes for a sequence, if it has none yet.
    pub(super) fn reserve(&mut self, slot: usize) {
        if self.written(slot).is_none() {
            let state = self.free.pop().expect("invariant 2: there is a state for each sequence to write");
            self.n_users[state as usize] = 1;
            self.written.push((slot, state));
        }
    }

    /// Gives the written states to their sequences, except those for which `keeps` is false.
    pub(super) fn commit(&mut self, keeps: impl Fn(usize) -> bool) {
        for (slot, state) in std::mem::take(&mut self.written) {
            let replaced = if keeps(slot) { self.of_slot[slot].replace(state) } else { Some(state) };
            replaced.into_iter().for_each(|state| self.release(state));
        }
    }

    /// Frees the written states in reverse order, which restores the order of the free ones.
    pub(super) fn cancel(&mut self) {
        while let Some((_, state)) = self.written.pop() {
            self.release(state);
        }
    }

    /// As [`super::KvCache::take_freed_cells`], for states.
    pub(super) fn take_freed(&mut self) -> Vec<u32> {
        self.freed.replace(Vec::new()).unwrap_or_default()
    }

    /// Panics if an invariant is violated, or if a sequence has a state but no positions, or positions but no state.
    pub(super) fn check(&self, has_positions: impl Fn(usize) -> bool) {
        let mut n_users = vec![0; self.n_users.len()];
        let written = self.written.iter().map(|&(_, state)| state);
        for state in self.of_slot.iter().flatten().copied().chain(written) {
            n_users[state as usize] += 1;
        }
        assert_eq!(n_users, self.n_users, "invariant 1 of states: their users");
        let mut free: Vec<u32> =
            (0..).zip(&n_users).filter(|(_, n)| **n == 0).map(|(state, _)| state).collect();
        let mut listed = self.free.clone();
        listed.sort_unstable();
        free.sort_unstable();
        assert_eq!(listed, free, "invariant 1 of states: the free ones");
        for (slot, state) in self.of_slot.iter().enumerate() {
            assert_eq!(
                state.is_some(),
                has_positions(slot),
                "slot {slot} has a state or positions, not both"
            );
        }
    }

    /// What decides the results of later calls, for the digest of the cache.
    pub(super) fn digest_parts(&self) -> (&[Option<u32>], &[u32]) {
        (&self.of_slot, &self.free)
    }
}

impl KvCache {
    /// As [`KvCache::new`], for a model with recurrent layers: each sequence with positions has a state, too. A state is
    /// that after the last position, so a part of a sequence cannot be removed, copied, attached or shifted
    /// ([`KvError::Recurrent`]), and a removed row removes all rows of its sequence in the reservation.
    pub fn with_states(shape: KvShape) -> Result<Self> {
        let states = Some(States::new(shape.n_seq_max));
        Ok(Self { states, ..Self::new(shape)? })
    }

    /// As [`KvCache::take_freed_cells`], for recurrent states.
    pub fn take_freed_states(&mut self) -> Vec<u32> {
        self.states.as_mut().map_or(Vec::new(), States::take_freed)
    }

    /// The recurrent states of a sequence in the live reservation: that before its rows (None: zeros), and that to
    /// write. None if it has no rows there.
    pub fn step_states(&self, id: SeqId) -> Option<(Option<u32>, u32)> {
        let (states, slot) = (self.states.as_ref()?, self.acquired(id).ok()?);
        Some((states.of_slot[slot], states.written(slot)?))
    }

    /// Checks that a call does not need the recurrent state after another position than the last one of a sequence.
    /// `does`: what the call does with all positions `lo..hi`. Errors: [`KvError::Recurrent`].
    pub(super) fn check_whole(&self, slot: usize, lo: i32, hi: i32, does: &'static str) -> Result<()> {
        let ranges = &self.index[slot];
        let is_whole =
            ranges.start().is_some_and(|start| lo <= start) && ranges.end().is_some_and(|end| hi >= end);
        if is_whole || ranges.pieces(lo, hi).next().is_none() { Ok(()) } else { self.check_no_states(does) }
    }

    /// Checks that the model has no recurrent layers. Errors: [`KvError::Recurrent`].
    pub(super) fn check_no_states(&self, does: &'static str) -> Result<()> {
        if self.states.is_none() { Ok(()) } else { Err(rejected(KvError::Recurrent { does })) }
    }
}
