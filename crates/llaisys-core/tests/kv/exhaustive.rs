//! Every history of six operations on a small cache (6 cells in two streams, 3 sequence ids, 2 nodes), compared with
//! the reference model. Histories that lead to the same state are continued once.

use crate::model::{Model, Rejection, Row, rejection};
use llaisys_core::kv::{KvCache, KvShape};
use llaisys_core::seq::SeqId;
use llaisys_core::{Error, error::Exhausted};
use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

const DEPTH: usize = 6;
const N_SEQS: usize = 3;
const SHAPE: KvShape = KvShape { n_cells: 6, n_seq_max: N_SEQS, n_streams: 2, lifo: false };

#[derive(Debug, Clone, Copy)]
enum Op {
    Acquire(u32),
    /// The current or last id of a slot.
    Release(u32),
    /// Rows of one sequence, or (the second slot another one) of two at once.
    Extend(u32, u32, i32),
    Fork(u32, u32),
    Cut(u32, i32),
    Keep(u32),
    Shift(u32, i32),
    Cache(u64, u32, i32, i32),
    Attach(u64, u32, i32),
    Split(u64, i32, u64),
    Trim(u64, i32),
}

fn alphabet() -> Vec<Op> {
    let slots = || 0..3_u32;
    let mut ops = vec![Op::Acquire(0), Op::Acquire(1)];
    ops.extend(slots().map(Op::Release));
    ops.extend(slots().flat_map(|slot| [1, 2, 4].map(|n| Op::Extend(slot, slot, n))));
    ops.extend([Op::Extend(0, 1, 1), Op::Extend(1, 2, 1)]);
    ops.extend(slots().flat_map(|a| slots().filter(move |b| *b != a).map(move |b| Op::Fork(a, b))));
    ops.extend(slots().flat_map(|slot| [Op::Cut(slot, 1), Op::Keep(slot), Op::Shift(slot, 1)]));
    for node in 0..2 {
        ops.extend(slots().flat_map(|slot| {
            [Op::Cache(node, slot, 0, 1), Op::Cache(node, slot, 0, 2), Op::Cache(node, slot, 1, 2)]
        }));
        ops.extend(slots().flat_map(|slot| [Op::Attach(node, slot, 1), Op::Attach(node, slot, 2)]));
        ops.extend([Op::Split(node, 1, 1 - node), Op::Trim(node, 0), Op::Trim(node, 1)]);
    }
    ops
}

/// The cache, and its state as known from the outside.
struct World {
    kv: KvCache,
    model: Model,
    /// By slot: the current or last id.
    ids: [Option<SeqId>; N_SEQS],
    is_acquired: [bool; N_SEQS],
    free: VecDeque<u32>,
}

impl World {
    fn new() -> Self {
        Self {
            kv: KvCache::new(SHAPE).unwrap(),
            model: Model::new(SHAPE),
            ids: [None; N_SEQS],
            is_acquired: [false; N_SEQS],
            free: (0..3).collect(),
        }
    }

    fn id(&self, slot: u32) -> SeqId {
        self.ids[slot as usize].unwrap_or(SeqId::from_raw(1 << 40 | i64::from(slot)))
    }

    fn end(&self, slot: u32) -> i32 {
        self.model.all(slot).last().map_or(0, |(position, _)| position + 1)
    }

    /// Applies the operation to the cache.
    fn on_cache(&mut self, op: Op) -> Result<(), Error> {
        let end = |world: &Self, slot: u32| world.end(slot);
        match op {
            Op::Acquire(stream) => {
                let id = self.kv.seq_acquire(stream)?;
                assert_eq!(Some(&id.slot()), self.free.front(), "first in, first out");
                assert!(self.ids[id.slot() as usize].is_none_or(|old| old.generation() < id.generation()));
                self.ids[id.slot() as usize] = Some(id);
                Ok(())
            }
            Op::Release(slot) => self.kv.seq_release(self.id(slot)),
            Op::Extend(a, b, n) => {
                let ids: Vec<i64> = slots_of(a, b).iter().map(|slot| self.id(*slot).to_raw()).collect();
                let positions: Vec<i32> = (end(self, a)..end(self, a) + n).collect();
                let counts = vec![ids.len() as i32; positions.len()];
                self.kv.extend(&positions, &counts, &ids.repeat(positions.len()))
            }
            Op::Fork(a, b) => self.kv.seq_cp(self.id(a), self.id(b), -1, -1).map(|_| ()),
            Op::Cut(slot, p0) => self.kv.seq_rm(self.id(slot), p0, -1),
            Op::Keep(slot) => self.kv.seq_keep(self.id(slot)),
            Op::Shift(slot, delta) => self.kv.seq_add(self.id(slot), 0, -1, delta).map(|_| ()),
            Op::Cache(node, slot, p0, p1) => self.kv.node_cache(node, self.id(slot), p0, p1),
            Op::Attach(node, slot, n) => {
                let p0 = end(self, slot);
                self.kv.node_attach(node, self.id(slot), p0, p0 + n).map(|_| ())
            }
            Op::Split(node, at, tail) => self.kv.node_split(node, at, tail),
            Op::Trim(node, at) => self.kv.node_trim(node, at),
        }
    }

    /// Applies the operation to the model.
    fn on_model(&mut self, op: Op) -> Result<(), Rejection> {
        let used: &[u32] = match op {
            Op::Release(slot) | Op::Cut(slot, _) | Op::Keep(slot) | Op::Shift(slot, _) => &[slot],
            Op::Cache(_, slot, _, _) | Op::Attach(_, slot, _) => &[slot],
            Op::Extend(a, b, _) | Op::Fork(a, b) => &[a, b],
            Op::Acquire(_) | Op::Split(..) | Op::Trim(..) => &[],
        };
        if used.iter().any(|slot| !self.is_acquired[*slot as usize]) {
            return Err(Rejection::Stale);
        }
        match op {
            Op::Acquire(stream) => {
                let slot = self
                    .free
                    .pop_front()
                    .ok_or(Rejection::Exhausted(Exhausted::SequenceIds { capacity: N_SEQS }))?;
                self.is_acquired[slot as usize] = true;
                self.model.acquire_again(slot, stream)
            }
            Op::Release(slot) => {
                self.is_acquired[slot as usize] = false;
                self.free.push_back(slot);
                self.model.acquire_again(slot, 0)
            }
            Op::Extend(a, b, n) => {
                let seqs: Vec<SeqId> = slots_of(a, b).iter().map(|slot| self.id(*slot)).collect();
                let rows =
                    (self.end(a)..self.end(a) + n).map(|position| Row { position, seqs: seqs.clone() });
                self.model.prepare(&rows.collect::<Vec<_>>()).map(|_| ())
            }
            Op::Fork(a, b) => self.model.seq_cp(a, b, -1, -1).map(|_| ()),
            Op::Cut(slot, p0) => self.model.seq_rm(slot, p0, -1),
            Op::Keep(slot) => self.model.seq_keep(slot),
            Op::Shift(slot, delta) => self.model.seq_add(slot, 0, -1, delta).map(|_| ()),
            Op::Cache(node, slot, p0, p1) => self.model.node_cache(node, slot, p0, p1),
            Op::Attach(node, slot, n) => {
                let p0 = self.end(slot);
                self.model.node_attach(node, slot, p0, p0 + n).map(|_| ())
            }
            Op::Split(node, at, tail) => self.model.node_split(node, at, tail),
            Op::Trim(node, at) => self.model.node_trim(node, at),
        }
    }

    /// Applies the operation to both and compares them. Returns true if it succeeded.
    fn apply(&mut self, op: Op) -> bool {
        let before = self.kv.digest();
        let real = self.on_cache(op);
        let done = real.is_ok();
        assert_eq!(real.map_err(rejection), self.on_model(op), "{op:?}");
        assert!(done || self.kv.digest() == before, "the rejected {op:?} has side effects");
        done
    }

    fn compare(&self) {
        self.kv.check();
        assert_eq!(self.kv.dump(), self.model.dump());
        assert_eq!(self.kv.n_seq_free(), self.free.len());
        let n_acquired = self.is_acquired.iter().filter(|acquired| **acquired).count();
        assert_eq!(n_acquired + self.free.len(), N_SEQS);
    }

    /// Releases everything. The cache must then equal a new one.
    fn drain(mut self) {
        for (node, start) in [0, 1].map(|id| (id, self.model.node(id).first().map(|(p, _)| *p))) {
            assert!(start.is_none_or(|at| self.apply(Op::Trim(node, at))));
        }
        for slot in 0..3 {
            assert!(!self.is_acquired[slot as usize] || self.apply(Op::Release(slot)));
        }
        self.compare();
        assert_eq!(self.kv.digest(), KvCache::new(SHAPE).unwrap().digest());
    }

    /// A hash of the state that determines later behavior. Generations only grow, so they are left out.
    fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let dump = self.model.dump();
        (dump.links, dump.cached, self.is_acquired, &self.free).hash(&mut hasher);
        (0..3).for_each(|slot| self.kv.stream(self.id(slot)).ok().hash(&mut hasher));
        hasher.finish()
    }
}

fn slots_of(a: u32, b: u32) -> Vec<u32> {
    if a == b { vec![a] } else { vec![a, b] }
}

fn replay(path: &[Op]) -> World {
    let mut world = World::new();
    for &op in path {
        world.apply(op);
    }
    world
}

#[test]
fn every_short_history_keeps_the_invariants() {
    let ops = alphabet();
    let mut seen = HashSet::from([World::new().key()]);
    let mut frontier: Vec<Vec<Op>> = vec![Vec::new()];
    let mut n_tried = 0_u64;
    for _ in 0..DEPTH {
        let mut next = Vec::new();
        for path in &frontier {
            for &op in &ops {
                let mut world = replay(path);
                n_tried += 1;
                if !world.apply(op) {
                    continue;
                }
                world.compare();
                if seen.insert(world.key()) {
                    next.push([path.as_slice(), &[op]].concat());
                    world.drain();
                }
            }
        }
        frontier = next;
    }
    // A smaller number would mean that the enumeration no longer works.
    println!("{n_tried} operations on {} states", seen.len());
    assert!(seen.len() > 1_000, "{} states", seen.len());
}
