//! Every history of six operations on small books (6 cells in two arenas, 3 leases, 2 segments) against the naive
//! model: the bounded proof that Kani would give (reliability, suite 17), by enumeration. Histories that lead to the
//! same state are followed once.

mod kv_model;

use kv_model::{Model, Refusal, Row, refusal};
use llaisys_core::books::Books;
use llaisys_core::kv::KvShape;
use llaisys_core::seq::SeqId;
use llaisys_core::{Error, error::Exhausted, error::Rejected};
use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

const DEPTH: usize = 6;
const N_LEASES: usize = 3;
const SHAPE: KvShape = KvShape { n_cells: 6, n_seq_max: N_LEASES, n_streams: 2, lifo: false };

#[derive(Debug, Clone, Copy)]
enum Op {
    Acquire(u32),
    /// The lease of a slot, or the one that it had last.
    Release(u32),
    /// Rows of one sequence, or (the second slot another one) of two at once.
    Extend(u32, u32, i32),
    Fork(u32, u32),
    Cut(u32, i32),
    Keep(u32),
    Shift(u32, i32),
    Retain(u64, u32, i32, i32),
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
    for segment in 0..2 {
        ops.extend(slots().flat_map(|slot| {
            [
                Op::Retain(segment, slot, 0, 1),
                Op::Retain(segment, slot, 0, 2),
                Op::Retain(segment, slot, 1, 2),
            ]
        }));
        ops.extend(slots().flat_map(|slot| [Op::Attach(segment, slot, 1), Op::Attach(segment, slot, 2)]));
        ops.extend([Op::Split(segment, 1, 1 - segment), Op::Trim(segment, 0), Op::Trim(segment, 1)]);
    }
    ops
}

/// The books, and all that is known of them from outside.
struct World {
    books: Books,
    model: Model,
    /// By slot: the lease that is lent, or was last.
    leases: [Option<SeqId>; N_LEASES],
    lent: [bool; N_LEASES],
    free: VecDeque<u32>,
}

/// Either side's refusal; a stale id is the pool's.
#[derive(Debug, PartialEq, Eq)]
enum No {
    Stale,
    IdsGone,
    Cells(Refusal),
}

fn no(error: Error) -> No {
    match error {
        Error::Rejected(Rejected::StaleSequence { .. }) => No::Stale,
        Error::Exhausted(Exhausted::SequenceIds { .. }) => No::IdsGone,
        other => No::Cells(refusal(other)),
    }
}

impl World {
    fn new() -> Self {
        Self {
            books: Books::new(SHAPE).unwrap(),
            model: Model::new(SHAPE),
            leases: [None; N_LEASES],
            lent: [false; N_LEASES],
            free: (0..3).collect(),
        }
    }

    fn id(&self, slot: u32) -> SeqId {
        self.leases[slot as usize].unwrap_or(SeqId::from_raw(1 << 40 | i64::from(slot)))
    }

    fn end(&self, slot: u32) -> i32 {
        self.model.all(slot).last().map_or(0, |(position, _)| position + 1)
    }

    /// The operation on the real thing.
    fn real(&mut self, op: Op) -> Result<(), Error> {
        let end = |world: &Self, slot: u32| world.end(slot);
        match op {
            Op::Acquire(stream) => {
                let id = self.books.seq_acquire(stream)?;
                assert_eq!(Some(&id.slot()), self.free.front(), "first in, first out");
                assert!(self.leases[id.slot() as usize].is_none_or(|old| old.generation() < id.generation()));
                self.leases[id.slot() as usize] = Some(id);
                Ok(())
            }
            Op::Release(slot) => self.books.seq_release(self.id(slot)),
            Op::Extend(a, b, n) => {
                let ids: Vec<i64> = slots_of(a, b).iter().map(|slot| self.id(*slot).to_raw()).collect();
                let positions: Vec<i32> = (end(self, a)..end(self, a) + n).collect();
                let counts = vec![ids.len() as i32; positions.len()];
                self.books.extend(&positions, &counts, &ids.repeat(positions.len()))
            }
            Op::Fork(a, b) => self.books.seq_cp(self.id(a), self.id(b), -1, -1).map(|_| ()),
            Op::Cut(slot, p0) => self.books.seq_rm(self.id(slot), p0, -1),
            Op::Keep(slot) => self.books.seq_keep(self.id(slot)),
            Op::Shift(slot, delta) => self.books.seq_add(self.id(slot), 0, -1, delta).map(|_| ()),
            Op::Retain(segment, slot, p0, p1) => self.books.retain(segment, self.id(slot), p0, p1),
            Op::Attach(segment, slot, n) => {
                let p0 = end(self, slot);
                self.books.attach(segment, self.id(slot), p0, p0 + n).map(|_| ())
            }
            Op::Split(segment, at, tail) => self.books.segment_split(segment, at, tail),
            Op::Trim(segment, at) => self.books.segment_trim(segment, at),
        }
    }

    /// The same on the model.
    fn modelled(&mut self, op: Op) -> Result<(), No> {
        let used: &[u32] = match op {
            Op::Release(slot) | Op::Cut(slot, _) | Op::Keep(slot) | Op::Shift(slot, _) => &[slot],
            Op::Retain(_, slot, _, _) | Op::Attach(_, slot, _) => &[slot],
            Op::Extend(a, b, _) | Op::Fork(a, b) => &[a, b],
            Op::Acquire(_) | Op::Split(..) | Op::Trim(..) => &[],
        };
        if used.iter().any(|slot| !self.lent[*slot as usize]) {
            return Err(No::Stale);
        }
        let result = match op {
            Op::Acquire(stream) => {
                let slot = self.free.pop_front().ok_or(No::IdsGone)?;
                self.lent[slot as usize] = true;
                self.model.set_stream(slot, stream)
            }
            Op::Release(slot) => {
                self.lent[slot as usize] = false;
                self.free.push_back(slot);
                self.model.seq_rm(slot, -1, -1).and_then(|()| self.model.set_stream(slot, 0))
            }
            Op::Extend(a, b, n) => {
                let seqs = slots_of(a, b);
                let rows =
                    (self.end(a)..self.end(a) + n).map(|position| Row { position, seqs: seqs.clone() });
                self.model.prepare(&rows.collect::<Vec<_>>()).map(|_| ())
            }
            Op::Fork(a, b) => self.model.seq_cp(a, b, -1, -1).map(|_| ()),
            Op::Cut(slot, p0) => self.model.seq_rm(slot, p0, -1),
            Op::Keep(slot) => self.model.seq_keep(slot),
            Op::Shift(slot, delta) => self.model.seq_add(slot, 0, -1, delta).map(|_| ()),
            Op::Retain(segment, slot, p0, p1) => self.model.retain(segment, slot, p0, p1),
            Op::Attach(segment, slot, n) => {
                let p0 = self.end(slot);
                self.model.attach(segment, slot, p0, p0 + n).map(|_| ())
            }
            Op::Split(segment, at, tail) => self.model.split(segment, at, tail),
            Op::Trim(segment, at) => self.model.trim(segment, at),
        };
        result.map_err(No::Cells)
    }

    /// Both, compared; true if it was carried out.
    fn apply(&mut self, op: Op) -> bool {
        let before = self.books.digest();
        let real = self.real(op);
        let done = real.is_ok();
        assert_eq!(real.map_err(no), self.modelled(op), "{op:?}");
        assert!(done || self.books.digest() == before, "refused {op:?} left a trace");
        done
    }

    fn compare(&self) {
        self.books.check();
        assert_eq!(self.books.cells().dump(), self.model.dump());
        assert_eq!(self.books.n_seq_free(), self.free.len());
        let lent = self.lent.iter().filter(|lent| **lent).count();
        assert_eq!(lent + self.free.len(), N_LEASES, "I1");
    }

    /// Everything goes; then the books are as new (I14).
    fn drain(mut self) {
        for (segment, start) in [0, 1].map(|id| (id, self.model.segment(id).first().map(|(p, _)| *p))) {
            assert!(start.is_none_or(|at| self.apply(Op::Trim(segment, at))));
        }
        for slot in 0..3 {
            assert!(!self.lent[slot as usize] || self.apply(Op::Release(slot)));
        }
        self.compare();
        assert_eq!(self.books.digest(), Books::new(SHAPE).unwrap().digest());
    }

    /// What decides what can come next. Generations only ever grow, so they do not count.
    fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let dump = self.model.dump();
        (dump.links, dump.held, self.lent, &self.free).hash(&mut hasher);
        (0..3).for_each(|slot| self.books.cells().stream(slot).hash(&mut hasher));
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
    // A smaller number would mean that the enumeration no longer enumerates.
    println!("{n_tried} operations on {} states", seen.len());
    assert!(seen.len() > 1_000, "{} states", seen.len());
}
