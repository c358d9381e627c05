//! Sequence ids are leases: lent once, returned once, recognised when stale.

mod seeded;

use llaisys_core::error::{Exhausted, Rejected};
use llaisys_core::seq::{SEQ_LIMIT, SeqId, SeqPool};
use proptest::prelude::*;
use std::collections::VecDeque;

fn is_stale(result: Result<(), Rejected>, id: SeqId, current: u32) -> bool {
    match result {
        Err(Rejected::StaleSequence { raw, slot, given, current: now }) => {
            (raw, slot, given, now) == (id.to_raw(), id.slot(), id.generation(), current)
        }
        _ => false,
    }
}

#[test]
fn a_first_lease_reads_as_its_slot() {
    let mut pool = SeqPool::new(3, false);
    let raw: Vec<i64> = (0..3).map(|_| pool.acquire().unwrap().to_raw()).collect();
    assert_eq!(raw, [0, 1, 2]);
    assert_eq!(pool.acquire(), Err(Exhausted::SequenceIds { capacity: 3 }));
    assert_eq!((pool.n_free(), pool.capacity()), (0, 3));
}

#[test]
fn the_slot_free_for_longest_is_lent_next() {
    let mut pool = SeqPool::new(3, false);
    let [a, b, c] = [(); 3].map(|()| pool.acquire().unwrap());
    for id in [b, a, c] {
        pool.release(id).unwrap();
    }
    let slots: Vec<u32> = (0..3).map(|_| pool.acquire().unwrap().slot()).collect();
    assert_eq!(slots, [1, 0, 2]);
}

#[test]
fn a_second_release_is_refused_and_changes_nothing() {
    let mut pool = SeqPool::new(2, false);
    let old = pool.acquire().unwrap();
    pool.release(old).unwrap();
    assert!(is_stale(pool.release(old), old, 1));
    assert_eq!(pool.n_free(), 2);
    pool.check();
    pool.acquire().unwrap();
    let new = pool.acquire().unwrap();
    assert_eq!((new.slot(), new.generation(), new.to_raw()), (0, 1, 1 << 16));
    assert!(is_stale(pool.check_lent(old), old, 1), "the slot's new holder is another one");
    assert!(is_stale(pool.release(old), old, 1));
    pool.check_lent(new).unwrap();
}

#[test]
fn what_was_never_lent_is_stale() {
    let mut pool = SeqPool::new(2, false);
    let far = SeqId::from_raw(2);
    assert!(is_stale(pool.check_lent(SeqId::from_raw(0)), SeqId::from_raw(0), 0));
    assert!(is_stale(pool.release(far), far, 0));
    pool.acquire().unwrap();
    // None of these may be taken for slot 0, generation 0.
    for raw in [-1, i64::MIN, i64::MAX, 1 << 48, -1 << 48, 1 << 16] {
        assert!(pool.check_lent(SeqId::from_raw(raw)).is_err(), "{raw}");
    }
}

#[test]
fn the_size_has_bounds() {
    for n_seq_max in [0, SEQ_LIMIT + 1] {
        assert!(std::panic::catch_unwind(|| SeqPool::new(n_seq_max, false)).is_err(), "{n_seq_max}");
    }
    let mut pool = SeqPool::new(SEQ_LIMIT, false);
    assert_eq!((0..SEQ_LIMIT).filter(|_| pool.acquire().is_ok()).count(), SEQ_LIMIT);
    pool.check();
}

#[test]
fn raw_numbers_go_there_and_back() {
    seeded::check(1_000, 0_i64..1 << 48, |raw| {
        prop_assert_eq!(SeqId::from_raw(raw).to_raw(), raw);
        Ok(())
    });
}

/// `Some(i)` returns the i-th id ever lent (often a stale one), `None` asks for one.
fn agrees_with_a_model(n_seq_max: usize, lifo: bool, ops: Vec<Option<u8>>) -> Result<(), TestCaseError> {
    let mut pool = SeqPool::new(n_seq_max, lifo);
    let mut free: VecDeque<(u32, u32)> = (0_u32..).take(n_seq_max).map(|slot| (slot, 0)).collect();
    let mut lent = Vec::new();
    let mut ever = Vec::new();
    for op in ops {
        match op {
            None => {
                let expected = free.pop_front().ok_or(Exhausted::SequenceIds { capacity: n_seq_max });
                let got = pool.acquire();
                prop_assert_eq!(got.map(|id| (id.slot(), id.generation())), expected);
                lent.extend(got);
                ever.extend(got);
            }
            Some(_) if ever.is_empty() => {}
            Some(i) => {
                let id: SeqId = ever[usize::from(i) % ever.len()];
                let held = lent.iter().position(|other| *other == id);
                prop_assert_eq!(pool.release(id).is_ok(), held.is_some());
                if let Some(held) = held {
                    lent.remove(held);
                    let next = (id.slot(), id.generation() + 1);
                    if lifo { free.push_front(next) } else { free.push_back(next) }
                }
            }
        }
        pool.check();
        lent.sort();
        prop_assert_eq!(pool.lent().collect::<Vec<_>>(), lent.clone());
        prop_assert_eq!(pool.n_free(), free.len());
    }
    Ok(())
}

#[test]
fn the_pool_agrees_with_a_model() {
    let input = (1_usize..9, any::<bool>(), prop::collection::vec(any::<Option<u8>>(), 1..300));
    seeded::check(500, input, |(n_seq_max, lifo, ops)| agrees_with_a_model(n_seq_max, lifo, ops));
}
