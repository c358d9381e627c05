//! Recurrent states: which sequence and which cache node has which. A state is never changed in place: a step writes a
//! new one, and the sequence gets it when the step is committed. So forks and nodes share states without copies, and a
//! rejected step leaves the old ones as they are.

use super::{KvCache, KvError, KvShape, rejected};
use crate::error::{Exhausted, Rejected, Result};
use crate::seq::SeqId;

/// The largest number of cache nodes with a state.
const KEPT_LIMIT: usize = 1 << 20;

/// The number of states of a cache for `n_seq_max` sequences, each of which may have one and write another, and for
/// `n_kept` cache nodes.
pub fn n_states(n_seq_max: usize, n_kept: usize) -> usize {
    2 * n_seq_max + n_kept
}

/// The states of a cache. Their contents are in [`super::StateStorage`].
///
/// Invariants, verified by [`States::check`]:
/// 1. The users of a state are the sequences and nodes that have it, and the live reservation. A state without users is
///    free.
/// 2. There are enough states that every sequence can have one and write another, and `n_kept_max` nodes have one: a
///    reservation always finds them.
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
    /// Cache nodes that have a state, and how many may.
    n_kept: usize,
    n_kept_max: usize,
}

impl States {
    /// States for `n_seq_max` sequences and `n_kept_max` cache nodes.
    pub(super) fn new(n_seq_max: usize, n_kept_max: usize) -> Self {
        let n = n_states(n_seq_max, n_kept_max) as u32;
        Self {
            of_slot: vec![None; n_seq_max],
            n_users: vec![0; n as usize],
            free: (0..n).rev().collect(),
            written: Vec::new(),
            freed: None,
            n_kept: 0,
            n_kept_max,
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

    /// Gives a sequence the state of a node, or none.
    fn attach(&mut self, slot: usize, state: Option<u32>) {
        let state = state.map(|state| self.share(state));
        if let Some(replaced) = std::mem::replace(&mut self.of_slot[slot], state) {
            self.release(replaced);
        }
    }

    /// Drops the state of a node.
    pub(super) fn drop_kept(&mut self, state: u32) {
        self.n_kept -= 1;
        self.release(state);
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

    /// Panics if an invariant is violated, or if a sequence has a state but no positions. `kept`: the states of nodes.
    pub(super) fn check(&self, kept: &[u32], has_positions: impl Fn(usize) -> bool) {
        let mut n_users = vec![0; self.n_users.len()];
        let written = self.written.iter().map(|&(_, state)| state);
        for state in self.of_slot.iter().flatten().chain(kept).copied().chain(written) {
            n_users[state as usize] += 1;
        }
        assert_eq!(self.n_kept, kept.len(), "the number of nodes with a state");
        assert!(self.n_kept <= self.n_kept_max, "invariant 2 of states: {} nodes have one", self.n_kept);
        assert_eq!(n_users, self.n_users, "invariant 1 of states: their users");
        let mut free: Vec<u32> =
            (0..).zip(&n_users).filter(|(_, n)| **n == 0).map(|(state, _)| state).collect();
        let mut listed = self.free.clone();
        listed.sort_unstable();
        free.sort_unstable();
        assert_eq!(listed, free, "invariant 1 of states: the free ones");
        for (slot, state) in self.of_slot.iter().enumerate() {
            assert!(state.is_none() || has_positions(slot), "slot {slot} has a state but no positions");
        }
    }

    /// What decides the results of later calls, for the digest of the cache.
    pub(super) fn digest_parts(&self) -> (&[Option<u32>], &[u32]) {
        (&self.of_slot, &self.free)
    }
}

impl KvCache {
    /// As [`KvCache::new`], for a model with recurrent layers: a computed sequence has a state, too. A state is that
    /// after the last position, so a part of a sequence cannot be removed, copied or shifted ([`KvError::Recurrent`]),
    /// and a removed row removes all rows of its sequence in the reservation. Up to `n_kept_max` cache nodes have the
    /// state after their last position. A sequence that such a node is attached to last continues from it.
    ///
    /// Errors: as [`KvCache::new`]; more than 2^20 nodes.
    pub fn with_states(shape: KvShape, n_kept_max: usize) -> Result<Self> {
        if n_kept_max > KEPT_LIMIT {
            let (got, max) = (n_kept_max as i64, KEPT_LIMIT as i64);
            return Err(Rejected::OutOfRange { what: "n_states_kept", got, min: 0, max }.into());
        }
        let states = Some(States::new(shape.n_seq_max, n_kept_max));
        Ok(Self { states, ..Self::new(shape)? })
    }

    /// Lets a node have the state of a sequence, after whose last position it ends; nothing is copied. A node that has a
    /// state keeps it.
    ///
    /// Errors: an id that is not acquired, [`KvError::NoNode`], [`KvError::NoState`] if the sequence has none,
    /// [`KvError::NotAtEnd`], [`Exhausted::States`].
    pub fn node_keep_state(&mut self, node: u64, id: SeqId) -> Result<()> {
        let (index, slot) = (self.acquired(id)?, id.slot());
        let (_, position) = self.node(node)?.ends();
        let Some(states) = &mut self.states else { return Err(rejected(KvError::NoState { slot })) };
        let Some(state) = states.of_slot[index] else { return Err(rejected(KvError::NoState { slot })) };
        let expected = self.index[index].end().unwrap_or(0);
        if position != expected {
            return Err(rejected(KvError::NotAtEnd { slot, position, expected }));
        }
        let cached = self.nodes.get_mut(&node).expect("found above");
        if cached.state.is_some() {
            return Ok(());
        }
        if states.n_kept == states.n_kept_max {
            return Err(Exhausted::States { capacity: states.n_kept_max }.into());
        }
        states.n_kept += 1;
        cached.state = Some(states.share(state));
        Ok(())
    }

    /// Gives a node without a state a new one, whose contents the caller writes. Returns its number.
    ///
    /// Errors: [`KvError::NoNode`], [`KvError::NodeState`] if it has a state or the model has none, [`Exhausted::States`].
    pub fn node_new_state(&mut self, node: u64) -> Result<u32> {
        let has_one = self.node(node)?.state.is_some();
        let Some(states) = self.states.as_mut().filter(|_| !has_one) else {
            return Err(rejected(KvError::NodeState { node, expected: "without" }));
        };
        if states.n_kept == states.n_kept_max {
            return Err(Exhausted::States { capacity: states.n_kept_max }.into());
        }
        let state = states.free.pop().expect("invariant 2: there is a state for each node that may have one");
        states.n_users[state as usize] = 1;
        states.n_kept += 1;
        self.nodes.get_mut(&node).expect("found above").state = Some(state);
        Ok(state)
    }

    /// The state of a node. Errors: [`KvError::NoNode`], [`KvError::NodeState`] if it has none.
    pub fn node_state(&self, node: u64) -> Result<u32> {
        let state = self.node(node)?.state;
        state.ok_or_else(|| rejected(KvError::NodeState { node, expected: "with" }))
    }

    /// Drops the state of a node; its cells stay. Errors: [`KvError::NoNode`].
    pub fn node_drop_state(&mut self, node: u64) -> Result<()> {
        self.node(node)?;
        self.drop_kept(node);
        Ok(())
    }

    /// Cache nodes that have a state.
    pub fn n_states_kept(&self) -> usize {
        self.states.as_ref().map_or(0, |states| states.n_kept)
    }

    /// Drops the state of an existing node, if it has one.
    pub(super) fn drop_kept(&mut self, node: u64) {
        let state = self.nodes.get_mut(&node).and_then(|cached| cached.state.take());
        if let (Some(states), Some(state)) = (&mut self.states, state) {
            states.drop_kept(state);
        }
    }

    /// Gives a sequence the state of a node that was attached to it up to the position `p1`.
    pub(super) fn attach_state(&mut self, node: u64, slot: usize, p1: i32) {
        let cached = &self.nodes[&node];
        let state = cached.state.filter(|_| cached.ends().1 == p1);
        self.states.iter_mut().for_each(|states| states.attach(slot, state));
    }

    /// Checks that a sequence can be continued. Errors: [`KvError::NoState`] if it has positions but no state.
    pub(super) fn check_has_state(&self, id: SeqId) -> Result<(), KvError> {
        let slot = id.slot();
        let lacks = |states: &States| {
            states.of_slot[slot as usize].is_none() && self.index[slot as usize].end().is_some()
        };
        if self.states.as_ref().is_some_and(lacks) { Err(KvError::NoState { slot }) } else { Ok(()) }
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
