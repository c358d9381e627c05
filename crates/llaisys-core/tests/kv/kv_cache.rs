//! The KV cache as the engine uses it: ids, cells, nodes and streams together.

use crate::model::{Rejection, Row, acquired, id, kv_rows, one_stream, rejection};
use crate::seeded;
use llaisys_core::Error;
use llaisys_core::batch::BatchError;
use llaisys_core::error::{Exhausted, Rejected};
use llaisys_core::kv::{Allocation, CellRange, Copies, KvCache, KvError, KvShape, STREAM_LIMIT};
use llaisys_core::seq::SeqId;
use proptest::prelude::*;

const SHAPE: KvShape = KvShape { n_cells: 128, n_seq_max: 4, n_streams: 2, lifo: false };

fn new_cache() -> KvCache {
    KvCache::new(SHAPE).unwrap()
}

/// Appends `n` positions to a sequence.
fn extend(kv: &mut KvCache, id: SeqId, n: i32) -> Result<(), Error> {
    let start = kv.pos_max(id)?.map_or(0, |max| max + 1);
    let positions: Vec<i32> = (start..start + n).collect();
    let result = kv.extend(&positions, &vec![1; positions.len()], &vec![id.to_raw(); positions.len()]);
    kv.check();
    result
}

fn kv_error<T: std::fmt::Debug>(result: Result<T, Error>) -> KvError {
    match result.unwrap_err() {
        Error::Rejected(Rejected::Kv(error)) => error,
        other => panic!("expected an error of the cache, got {other}"),
    }
}

#[test]
fn sizes_out_of_bounds_and_unequal_streams_are_rejected() {
    let message = |shape| KvCache::new(shape).map(drop).unwrap_err().to_string();
    assert_eq!(
        message(KvShape { n_cells: 100, n_streams: 3, ..SHAPE }),
        "n_cells is 100, expected a multiple of n_streams (3)"
    );
    assert!(message(KvShape { n_cells: 0, ..SHAPE }).starts_with("n_cells is 0"));
    assert!(message(KvShape { n_seq_max: 257, ..SHAPE }).starts_with("n_seq_max is 257"));
    assert!(message(KvShape { n_streams: 0, ..SHAPE }).starts_with("n_streams is 0"));
    let most = KvShape { n_cells: STREAM_LIMIT, n_streams: STREAM_LIMIT, ..SHAPE };
    KvCache::new(most).unwrap().check();
    assert!(message(KvShape { n_cells: 257, n_streams: 257, ..SHAPE }).starts_with("n_streams is 257"));
}

#[test]
fn sequence_stays_in_its_stream() {
    let mut kv = new_cache();
    let empty = kv.digest();
    let a = kv.seq_acquire(0).unwrap();
    assert_ne!(kv.digest(), empty, "an acquired id is part of the state");
    let b = kv.seq_acquire(1).unwrap();
    assert_eq!(kv_error(kv.seq_acquire(2)), KvError::Stream { stream: 2, n_streams: 2 });
    assert_eq!(kv.n_seq_free(), 2, "a rejected call acquires nothing");
    extend(&mut kv, a, 3).unwrap();
    extend(&mut kv, b, 5).unwrap();
    let snapshot = kv.snapshot();
    let range = |cell, len| vec![CellRange { position: 0, cell, len }];
    let sequences = vec![
        Allocation { id: a, stream: 0, ranges: range(0, 3) },
        Allocation { id: b, stream: 1, ranges: range(64, 5) },
    ];
    assert_eq!((snapshot.sequences, snapshot.n_free), (sequences, vec![61, 59]));
    let full = extend(&mut kv, a, 62).unwrap_err();
    assert!(
        matches!(full, Error::Exhausted(Exhausted::Cells { needed: 62, free: 61, capacity: 64 })),
        "the other stream's free cells do not count: {full}"
    );
    extend(&mut kv, a, 61).unwrap();
    extend(&mut kv, b, 59).unwrap();
    assert_eq!(kv.n_cells_free(), 0);
}

#[test]
fn batch_over_two_streams_is_all_or_nothing() {
    let mut kv = new_cache();
    let (a, b) = (kv.seq_acquire(0).unwrap(), kv.seq_acquire(1).unwrap());
    extend(&mut kv, b, 63).unwrap();
    let before = kv.digest();
    let ids = [a, a, b, b].map(SeqId::to_raw);
    let short = kv.extend(&[0, 1, 63, 64], &[1; 4], &ids).unwrap_err();
    assert!(
        matches!(short, Error::Exhausted(Exhausted::Cells { needed: 2, free: 1, capacity: 64 })),
        "{short}"
    );
    assert_eq!(kv.digest(), before);
    kv.extend(&[0, 1, 63], &[1; 3], &ids[..3]).unwrap();
    assert_eq!(kv.snapshot().n_free, [62, 0]);
}

#[test]
fn rows_of_sequences_in_two_streams_are_not_coupled() {
    let mut kv = new_cache();
    let (a, b) = (kv.seq_acquire(0).unwrap(), kv.seq_acquire(1).unwrap());
    let ids = [a.to_raw(), b.to_raw()];
    assert_eq!(kv_error(kv.extend(&[0], &[2], &ids)), KvError::CoupledDiffer { row: 0, first: 0, second: 1 });
}

#[test]
fn extend_has_the_checks_of_a_decode() {
    let mut kv = new_cache();
    let id = kv.seq_acquire(0).unwrap();
    let raw = id.to_raw();
    let empty = kv.extend(&[], &[], &[]).unwrap_err();
    assert!(matches!(empty, Error::Rejected(Rejected::Batch(BatchError::Empty))), "{empty}");
    let ragged = kv.extend(&[0, 1], &[1], &[raw]).unwrap_err();
    assert!(matches!(ragged, Error::Rejected(Rejected::Length { what: "n_seq_id", .. })), "{ragged}");
    let stale = kv.extend(&[0], &[1], &[raw + 1]).unwrap_err();
    assert!(matches!(stale, Error::Rejected(Rejected::StaleSequence { .. })), "{stale}");
    let gap = kv.extend(&[0, 2], &[1, 1], &[raw, raw]);
    assert_eq!(kv_error(gap), KvError::NotNext { row: 1, slot: 0, position: 2, expected: 1 });
    assert_eq!(kv.n_cells_free(), 128);
}

#[test]
fn node_outlives_its_sequence_and_is_attached_to_the_next() {
    let mut kv = new_cache();
    let empty = kv.digest();
    let first = kv.seq_acquire(0).unwrap();
    extend(&mut kv, first, 40).unwrap();
    kv.node_cache(7, first, 0, 30).unwrap();
    kv.seq_release(first).unwrap();
    kv.check();
    assert_eq!(kv.snapshot().n_free, [34, 64], "ten positions were not cached");
    let next = kv.seq_acquire(0).unwrap();
    assert_eq!(kv.node_attach(7, next, 0, 20).unwrap(), Copies::default(), "one stream: linked");
    assert_eq!(kv.snapshot().n_free, [34, 64]);
    extend(&mut kv, next, 1).unwrap();
    // The rest of the node is trimmed while the sequence continues.
    kv.node_split(7, 12, 8).unwrap();
    kv.node_trim(8, 20).unwrap();
    kv.check();
    assert_eq!(kv.snapshot().n_free, [43, 64], "positions 20 to 29 are free again, 20 is the new one");
    kv.node_trim(7, 0).unwrap();
    kv.node_trim(8, 12).unwrap();
    assert_eq!(kv.snapshot().n_free, [43, 64], "the sequence still sees the cached cells");
    assert_eq!(kv_error(kv.node_trim(7, 0)), KvError::NoNode { node: 7 });
    kv.seq_release(next).unwrap();
    assert_eq!(kv.digest(), empty);
}

#[test]
fn sequence_in_another_stream_gets_copies() {
    let mut kv = new_cache();
    let (here, there) = (kv.seq_acquire(0).unwrap(), kv.seq_acquire(1).unwrap());
    extend(&mut kv, here, 10).unwrap();
    kv.node_cache(1, here, 0, 10).unwrap();
    let copies = kv.node_attach(1, there, 0, 6).unwrap();
    assert_eq!(copies, Copies { from: (0..6).collect(), to: (64..70).collect() });
    let copies = kv.seq_cp(here, there, 6, 9).unwrap();
    assert_eq!(copies, Copies { from: (6..9).collect(), to: (70..73).collect() });
    assert_eq!(kv.ranges(there), [CellRange { position: 0, cell: 64, len: 9 }]);
    kv.seq_rm(here, -1, -1).unwrap();
    kv.check();
    assert_eq!(
        kv.snapshot().n_free,
        [54, 55],
        "a copy is used by its sequence only, and the node keeps its cells"
    );
    let full = kv.seq_acquire(1).unwrap();
    extend(&mut kv, full, 55).unwrap();
    let before = kv.digest();
    let short = kv.node_attach(1, there, 9, 10).unwrap_err();
    assert!(
        matches!(short, Error::Exhausted(Exhausted::Cells { needed: 1, free: 0, capacity: 64 })),
        "{short}"
    );
    let short = kv.seq_cp(full, here, -1, -1).unwrap_err();
    assert!(matches!(short, Error::Exhausted(Exhausted::Cells { needed: 55, free: 54, .. })), "{short}");
    assert_eq!(kv.digest(), before);
}

#[test]
fn cached_positions_cannot_be_shifted() {
    let mut kv = new_cache();
    let id = kv.seq_acquire(0).unwrap();
    extend(&mut kv, id, 10).unwrap();
    kv.node_cache(1, id, 4, 6).unwrap();
    assert_eq!(kv_error(kv.seq_add(id, 5, -1, 3)), KvError::SharedCells { slot: 0, position: 5 });
    assert_eq!(kv.seq_add(id, 6, -1, 3).unwrap(), [6, 7, 8, 9]);
    kv.check();
}

#[test]
fn lifo_reuses_the_last_freed_first() {
    let mut kv = KvCache::new(KvShape { lifo: true, ..SHAPE }).unwrap();
    let ids = [0, 1, 0].map(|stream| kv.seq_acquire(stream).unwrap());
    for id in ids {
        extend(&mut kv, id, 2).unwrap();
    }
    kv.seq_release(ids[0]).unwrap();
    kv.seq_release(ids[1]).unwrap();
    let again = kv.seq_acquire(0).unwrap();
    assert_eq!((again.slot(), again.generation()), (1, 1), "slot 1 was released last");
    extend(&mut kv, again, 3).unwrap();
    let cells: Vec<u32> = kv.ranges(again).iter().flat_map(|range| range.cells()).collect();
    assert_eq!(cells, [1, 0, 4], "cells 1 and 0 were freed last, then the lowest one never used");
}

#[test]
fn stale_ids_are_rejected_everywhere_without_side_effects() {
    let mut kv = new_cache();
    let (id, stale) = (kv.seq_acquire(0).unwrap(), kv.seq_acquire(1).unwrap());
    extend(&mut kv, id, 4).unwrap();
    kv.node_cache(1, id, 0, 4).unwrap();
    kv.seq_release(stale).unwrap();
    let before = kv.digest();
    let results = [
        kv.seq_release(stale),
        kv.seq_rm(stale, -1, -1),
        kv.seq_cp(stale, id, -1, -1).map(|_| ()),
        kv.seq_cp(id, stale, -1, -1).map(|_| ()),
        kv.seq_keep(stale),
        kv.seq_add(stale, -1, -1, 1).map(|_| ()),
        kv.pos_min(stale).map(|_| ()),
        kv.pos_max(stale).map(|_| ()),
        kv.node_cache(2, stale, 0, 1),
        kv.node_attach(1, stale, 0, 1).map(|_| ()),
        kv.extend(&[0], &[1], &[stale.to_raw()]),
    ];
    for result in results {
        assert!(matches!(result, Err(Error::Rejected(Rejected::StaleSequence { .. }))), "{result:?}");
    }
    assert_eq!(kv.digest(), before);
}

#[derive(Debug, Clone)]
enum Op {
    Acquire(u32),
    Release(usize),
    Extend(usize, i32),
    Cache(u64, usize, i32, i32),
    Attach(u64, usize, i32),
    Trim(u64, i32),
    Split(u64, i32, u64),
    Fork(usize, usize),
}

fn any_op() -> impl Strategy<Value = Op> {
    let id = || 0..4_usize;
    let node = || 0..5_u64;
    prop_oneof![
        3 => (0..3_u32).prop_map(Op::Acquire),
        2 => id().prop_map(Op::Release),
        4 => (id(), 1..20_i32).prop_map(|(id, n)| Op::Extend(id, n)),
        2 => (node(), id(), 0..5_i32, 1..15_i32).prop_map(|(s, id, p0, n)| Op::Cache(s, id, p0, p0 + n)),
        2 => (node(), id(), 1..15_i32).prop_map(|(s, id, n)| Op::Attach(s, id, n)),
        1 => (node(), 0..12_i32).prop_map(|(s, at)| Op::Trim(s, at)),
        1 => (node(), 1..9_i32, node()).prop_map(|(s, at, tail)| Op::Split(s, at, tail)),
        1 => (id(), id()).prop_map(|(a, b)| Op::Fork(a, b)),
    ]
}

fn apply(kv: &mut KvCache, ids: &[SeqId], op: &Op) -> Result<Option<SeqId>, Error> {
    let id = |i: usize| ids.get(i).copied().unwrap_or(SeqId::from_raw(-1));
    match *op {
        Op::Acquire(stream) => return kv.seq_acquire(stream).map(Some),
        Op::Release(i) => kv.seq_release(id(i))?,
        Op::Extend(i, n) => extend(kv, id(i), n)?,
        Op::Cache(node, i, p0, p1) => kv.node_cache(node, id(i), p0, p1)?,
        Op::Attach(node, i, n) => {
            let p0 = kv.pos_max(id(i))?.map_or(0, |max| max + 1);
            kv.node_attach(node, id(i), p0, p0 + n).map(|_| ())?;
        }
        Op::Trim(node, at) => kv.node_trim(node, at)?,
        Op::Split(node, at, tail) => kv.node_split(node, at, tail)?,
        Op::Fork(a, b) => kv.seq_cp(id(a), id(b), -1, -1).map(|_| ())?,
    }
    Ok(None)
}

/// In any history, rejected calls keep the digest, the invariants hold, and every free cell is counted. A cache without
/// sequences and nodes equals a new one.
#[test]
fn any_history_can_be_undone() {
    let input = (any::<bool>(), prop::collection::vec(any_op(), 1..80));
    seeded::check(1_500, input, |(lifo, ops)| {
        let mut kv = KvCache::new(KvShape { lifo, ..SHAPE }).unwrap();
        let empty = kv.digest();
        let mut ids: Vec<SeqId> = Vec::new();
        for op in &ops {
            let before = kv.digest();
            match apply(&mut kv, &ids, op) {
                Ok(id) => ids.extend(id),
                Err(_) => prop_assert_eq!(kv.digest(), before, "{:?} has side effects", op),
            }
            ids.retain(|id| kv.check_acquired(*id).is_ok());
            kv.check();
            let snapshot = kv.snapshot();
            prop_assert_eq!(
                snapshot.sequences.iter().map(|sequence| sequence.id.slot()).max(),
                ids.iter().map(|id| id.slot()).max()
            );
            prop_assert_eq!(snapshot.n_free.iter().sum::<usize>(), kv.n_cells_free());
        }
        for node in kv.snapshot().nodes {
            kv.node_trim(node.id, node.ranges[0].position).unwrap();
        }
        for id in ids {
            kv.seq_release(id).unwrap();
        }
        kv.check();
        prop_assert_eq!((kv.n_cells_free(), kv.n_seq_free()), (128, 4));
        prop_assert!(lifo || kv.digest() == empty);
        Ok(())
    });
}

#[test]
fn range_that_is_cut_and_copied_back_is_one_range_again() {
    let mut kv = acquired(one_stream(64, 2));
    let rows: Vec<Row> = (0..30).map(|position| Row { position, seqs: vec![id(0)] }).collect();
    kv.prepare_rows(&kv_rows(&rows)).unwrap().commit();
    let _linked = kv.seq_cp(id(0), id(1), -1, -1).unwrap();
    for (p0, p1) in [(0, 10), (10, 20), (20, 30), (5, 5)] {
        kv.seq_rm(id(1), p0, p1).unwrap();
        kv.check();
        let _linked = kv.seq_cp(id(0), id(1), p0, p1).unwrap();
        kv.check();
        assert_eq!(kv.ranges(id(1)), [CellRange { position: 0, cell: 0, len: 30 }], "{p0} to {p1}");
    }
}

#[test]
fn largest_positions_are_accepted() {
    let mut kv = acquired(one_stream(8, 1));
    let last = i32::MAX - 1;
    let rows = [last - 1, last].map(|position| Row { position, seqs: vec![id(0)] });
    kv.prepare_rows(&kv_rows(&rows)).unwrap().commit();
    kv.check();
    let mut visible = Vec::new();
    kv.visible_cells(id(0), i32::MAX, &mut visible);
    assert_eq!((visible, kv.pos_max(id(0)).unwrap()), (vec![0, 1], Some(last)));
    let past = [Row { position: i32::MAX, seqs: vec![id(0)] }];
    let error = rejection(kv.prepare_rows(&kv_rows(&past)).map(drop).unwrap_err());
    assert_eq!(error, Rejection::Kv(KvError::Position { row: 0, position: i32::MAX, max: last }));
    assert_eq!(kv.seq_add(id(0), -1, -1, -last + 1).unwrap(), [0, 1]);
    assert_eq!((kv.pos_min(id(0)).unwrap(), kv.pos_max(id(0)).unwrap()), (Some(0), Some(1)));
    kv.check();
}
