//! Sequence ids: each is acquired once and released once, and stale ids are rejected.

use crate::seeded;
use llaisys_core::Error;
use llaisys_core::error::{Exhausted, Rejected};
use llaisys_core::kv::{KvCache, KvShape};
use llaisys_core::seq::{SEQ_LIMIT, SeqId};
use proptest::prelude::*;
use std::collections::VecDeque;

/// A cache of four cells with `n_seq_max` ids.
fn new_pool(n_seq_max: usize, lifo: bool) -> KvCache {
    KvCache::new(KvShape { n_cells: 4, n_seq_max, n_streams: 1, lifo }).unwrap()
}

fn is_stale(result: Result<(), Error>, id: SeqId, current: u32) -> bool {
    match result {
        Err(Error::Rejected(Rejected::StaleSequence { raw, slot, given, current: now })) => {
            (raw, slot, given, now) == (id.to_raw(), id.slot(), id.generation(), current)
        }
        _ => false,
    }
}

#[test]
fn first_id_of_a_slot_is_its_number() {
    let mut pool = new_pool(3, false);
    let raw: Vec<i64> = (0..3).map(|_| pool.seq_acquire(0).unwrap().to_raw()).collect();
    assert_eq!(raw, [0, 1, 2]);
    let full = pool.seq_acquire(0).unwrap_err();
    assert!(matches!(full, Error::Exhausted(Exhausted::SequenceIds { capacity: 3 })), "{full}");
    assert_eq!((pool.n_seq_free(), pool.n_seq_max()), (0, 3));
}

#[test]
fn slot_that_is_free_for_longest_is_acquired_next() {
    let mut pool = new_pool(3, false);
    let [a, b, c] = [(); 3].map(|()| pool.seq_acquire(0).unwrap());
    for id in [b, a, c] {
        pool.seq_release(id).unwrap();
    }
    let slots: Vec<u32> = (0..3).map(|_| pool.seq_acquire(0).unwrap().slot()).collect();
    assert_eq!(slots, [1, 0, 2]);
}

#[test]
fn second_release_is_rejected_without_side_effects() {
    let mut pool = new_pool(2, false);
    let old = pool.seq_acquire(0).unwrap();
    pool.seq_release(old).unwrap();
    assert!(is_stale(pool.seq_release(old), old, 1));
    assert_eq!(pool.n_seq_free(), 2);
    pool.check();
    pool.seq_acquire(0).unwrap();
    let new = pool.seq_acquire(0).unwrap();
    assert_eq!((new.slot(), new.generation(), new.to_raw()), (0, 1, 1 << 16));
    assert!(is_stale(pool.check_acquired(old), old, 1), "the slot's new id is another one");
    assert!(is_stale(pool.seq_release(old), old, 1));
    pool.check_acquired(new).unwrap();
}

#[test]
fn id_that_was_never_acquired_is_stale() {
    let mut pool = new_pool(2, false);
    let far = SeqId::from_raw(2);
    assert!(is_stale(pool.check_acquired(SeqId::from_raw(0)), SeqId::from_raw(0), 0));
    assert!(is_stale(pool.seq_release(far), far, 0));
    pool.seq_acquire(0).unwrap();
    // None of these may be read as slot 0, generation 0.
    for raw in [-1, i64::MIN, i64::MAX, 1 << 48, -1 << 48, 1 << 16] {
        assert!(pool.check_acquired(SeqId::from_raw(raw)).is_err(), "{raw}");
    }
}

#[test]
fn sizes_out_of_bounds_are_rejected() {
    for n_seq_max in [0, SEQ_LIMIT + 1] {
        let shape = KvShape { n_cells: 4, n_seq_max, n_streams: 1, lifo: false };
        assert!(KvCache::new(shape).is_err(), "{n_seq_max}");
    }
    let mut pool = new_pool(SEQ_LIMIT, false);
    assert_eq!((0..SEQ_LIMIT).filter(|_| pool.seq_acquire(0).is_ok()).count(), SEQ_LIMIT);
    pool.check();
}

#[test]
fn raw_numbers_round_trip() {
    seeded::check(1_000, 0_i64..1 << 48, |raw| {
        prop_assert_eq!(SeqId::from_raw(raw).to_raw(), raw);
        Ok(())
    });
}

/// `Some(i)` releases the i-th id ever acquired (often a stale one), `None` acquires one.
fn agrees_with_a_model(n_seq_max: usize, lifo: bool, ops: Vec<Option<u8>>) -> Result<(), TestCaseError> {
    let mut pool = new_pool(n_seq_max, lifo);
    let mut free: VecDeque<(u32, u32)> = (0_u32..).take(n_seq_max).map(|slot| (slot, 0)).collect();
    let mut acquired = Vec::new();
    let mut ever = Vec::new();
    for op in ops {
        match op {
            None => {
                let got = pool.seq_acquire(0).ok();
                prop_assert_eq!(got.map(|id| (id.slot(), id.generation())), free.pop_front());
                acquired.extend(got);
                ever.extend(got);
            }
            Some(_) if ever.is_empty() => {}
            Some(i) => {
                let id: SeqId = ever[usize::from(i) % ever.len()];
                let index = acquired.iter().position(|other| *other == id);
                prop_assert_eq!(pool.seq_release(id).is_ok(), index.is_some());
                if let Some(index) = index {
                    acquired.remove(index);
                    let next = (id.slot(), id.generation() + 1);
                    if lifo { free.push_front(next) } else { free.push_back(next) }
                }
            }
        }
        pool.check();
        acquired.sort();
        let ids: Vec<SeqId> = pool.snapshot().sequences.iter().map(|sequence| sequence.id).collect();
        prop_assert_eq!(&ids, &acquired);
        prop_assert_eq!(pool.n_seq_free(), free.len());
    }
    Ok(())
}

#[test]
fn pool_agrees_with_a_model() {
    let input = (1_usize..9, any::<bool>(), prop::collection::vec(any::<Option<u8>>(), 1..300));
    seeded::check(500, input, |(n_seq_max, lifo, ops)| agrees_with_a_model(n_seq_max, lifo, ops));
}
