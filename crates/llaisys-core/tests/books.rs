//! The books: ids, cells, segments and arenas together, as the engine drives them.

mod seeded;

use llaisys_core::Error;
use llaisys_core::batch::BatchError;
use llaisys_core::books::{Books, Holding, STREAM_LIMIT};
use llaisys_core::error::{Exhausted, Rejected};
use llaisys_core::kv::{Copies, KvError, KvShape, Run};
use llaisys_core::seq::SeqId;
use proptest::prelude::*;

const SHAPE: KvShape = KvShape { n_cells: 128, n_seq_max: 4, n_streams: 2, lifo: false };

fn books() -> Books {
    Books::new(SHAPE).unwrap()
}

/// Goes on in a sequence by `n` positions.
fn extend(books: &mut Books, id: SeqId, n: i32) -> Result<(), Error> {
    let start = books.pos_max(id)?.map_or(0, |max| max + 1);
    let positions: Vec<i32> = (start..start + n).collect();
    let result = books.extend(&positions, &vec![1; positions.len()], &vec![id.to_raw(); positions.len()]);
    books.check();
    result
}

fn kv<T: std::fmt::Debug>(result: Result<T, Error>) -> KvError {
    match result.unwrap_err() {
        Error::Rejected(Rejected::Kv(error)) => error,
        other => panic!("not about the cells: {other}"),
    }
}

#[test]
fn sizes_have_bounds_and_arenas_are_equal() {
    let refused = |shape| Books::new(shape).map(drop).unwrap_err().to_string();
    assert_eq!(
        refused(KvShape { n_cells: 100, n_streams: 3, ..SHAPE }),
        "n_cells is 100, which n_streams (3) does not divide"
    );
    assert!(refused(KvShape { n_cells: 0, ..SHAPE }).starts_with("n_cells is 0"));
    assert!(refused(KvShape { n_seq_max: 257, ..SHAPE }).starts_with("n_seq_max is 257"));
    assert!(refused(KvShape { n_streams: 0, ..SHAPE }).starts_with("n_streams is 0"));
    let most = KvShape { n_cells: STREAM_LIMIT, n_streams: STREAM_LIMIT, ..SHAPE };
    Books::new(most).unwrap().check();
    assert!(refused(KvShape { n_cells: 257, n_streams: 257, ..SHAPE }).starts_with("n_streams is 257"));
}

#[test]
fn a_sequence_lives_in_its_arena() {
    let mut books = books();
    let empty = books.digest();
    let a = books.seq_acquire(0).unwrap();
    assert_ne!(books.digest(), empty, "a lease is part of the state");
    let b = books.seq_acquire(1).unwrap();
    assert_eq!(kv(books.seq_acquire(2)), KvError::Stream { stream: 2, n_streams: 2 });
    assert_eq!(books.n_seq_free(), 2, "a refused ask lends nothing");
    extend(&mut books, a, 3).unwrap();
    extend(&mut books, b, 5).unwrap();
    let snapshot = books.snapshot();
    let run = |cell, len| vec![Run { position: 0, cell, len }];
    let sequences =
        vec![Holding { id: a, stream: 0, runs: run(0, 3) }, Holding { id: b, stream: 1, runs: run(64, 5) }];
    assert_eq!((snapshot.sequences, snapshot.n_free), (sequences, vec![61, 59]));
    let full = extend(&mut books, a, 62).unwrap_err();
    assert!(
        matches!(full, Error::Exhausted(Exhausted::Cells { needed: 62, free: 61, capacity: 64 })),
        "the other arena's free cells are of no use: {full}"
    );
    extend(&mut books, a, 61).unwrap();
    extend(&mut books, b, 59).unwrap();
    assert_eq!(books.cells().n_free(), 0);
}

#[test]
fn one_batch_over_two_arenas_is_taken_whole_or_not_at_all() {
    let mut books = books();
    let (a, b) = (books.seq_acquire(0).unwrap(), books.seq_acquire(1).unwrap());
    extend(&mut books, b, 63).unwrap();
    let before = books.digest();
    let ids = [a, a, b, b].map(SeqId::to_raw);
    let short = books.extend(&[0, 1, 63, 64], &[1; 4], &ids).unwrap_err();
    assert!(
        matches!(short, Error::Exhausted(Exhausted::Cells { needed: 2, free: 1, capacity: 64 })),
        "{short}"
    );
    assert_eq!(books.digest(), before);
    books.extend(&[0, 1, 63], &[1; 3], &ids[..3]).unwrap();
    assert_eq!(books.snapshot().n_free, [62, 0]);
}

#[test]
fn rows_of_sequences_in_two_arenas_are_not_coupled() {
    let mut books = books();
    let (a, b) = (books.seq_acquire(0).unwrap(), books.seq_acquire(1).unwrap());
    let ids = [a.to_raw(), b.to_raw()];
    assert_eq!(kv(books.extend(&[0], &[2], &ids)), KvError::CoupledDiffer { row: 0, first: 0, second: 1 });
}

#[test]
fn extend_checks_as_a_decode_does() {
    let mut books = books();
    let id = books.seq_acquire(0).unwrap();
    let raw = id.to_raw();
    let empty = books.extend(&[], &[], &[]).unwrap_err();
    assert!(matches!(empty, Error::Rejected(Rejected::Batch(BatchError::Empty))), "{empty}");
    let ragged = books.extend(&[0, 1], &[1], &[raw]).unwrap_err();
    assert!(matches!(ragged, Error::Rejected(Rejected::Length { what: "n_seq_id", .. })), "{ragged}");
    let stale = books.extend(&[0], &[1], &[raw + 1]).unwrap_err();
    assert!(matches!(stale, Error::Rejected(Rejected::StaleSequence { .. })), "{stale}");
    let gap = books.extend(&[0, 2], &[1, 1], &[raw, raw]);
    assert_eq!(kv(gap), KvError::NotNext { row: 1, slot: 0, position: 2, expected: 1 });
    assert_eq!(books.cells().n_free(), 128);
}

#[test]
fn a_segment_outlives_its_sequence_and_serves_the_next() {
    let mut books = books();
    let empty = books.digest();
    let first = books.seq_acquire(0).unwrap();
    extend(&mut books, first, 40).unwrap();
    books.retain(7, first, 0, 30).unwrap();
    books.seq_release(first).unwrap();
    books.check();
    assert_eq!(books.snapshot().n_free, [34, 64], "ten positions nobody held");
    let next = books.seq_acquire(0).unwrap();
    assert_eq!(books.attach(7, next, 0, 20).unwrap(), Copies::default(), "one arena: linked");
    assert_eq!(books.snapshot().n_free, [34, 64]);
    extend(&mut books, next, 1).unwrap();
    // The rest of the segment goes while the sequence goes on.
    books.segment_split(7, 12, 8).unwrap();
    books.segment_trim(8, 20).unwrap();
    books.check();
    assert_eq!(books.snapshot().n_free, [43, 64], "positions 20 to 29 are free again, 20 is the new one");
    books.segment_trim(7, 0).unwrap();
    books.segment_trim(8, 12).unwrap();
    assert_eq!(books.snapshot().n_free, [43, 64], "the sequence still sees what the segments held");
    assert_eq!(kv(books.segment_trim(7, 0)), KvError::NoSegment { segment: 7 });
    books.seq_release(next).unwrap();
    assert_eq!(books.digest(), empty);
}

#[test]
fn another_arena_gets_copies() {
    let mut books = books();
    let (here, there) = (books.seq_acquire(0).unwrap(), books.seq_acquire(1).unwrap());
    extend(&mut books, here, 10).unwrap();
    books.retain(1, here, 0, 10).unwrap();
    let copies = books.attach(1, there, 0, 6).unwrap();
    assert_eq!(copies, Copies { from: (0..6).collect(), to: (64..70).collect() });
    let copies = books.seq_cp(here, there, 6, 9).unwrap();
    assert_eq!(copies, Copies { from: (6..9).collect(), to: (70..73).collect() });
    assert_eq!(books.cells().runs(there.slot()), [Run { position: 0, cell: 64, len: 9 }]);
    books.seq_rm(here, -1, -1).unwrap();
    books.check();
    assert_eq!(
        books.snapshot().n_free,
        [54, 55],
        "a copy is its sequence's own, the segment keeps its cells"
    );
    let full = books.seq_acquire(1).unwrap();
    extend(&mut books, full, 55).unwrap();
    let before = books.digest();
    let short = books.attach(1, there, 9, 10).unwrap_err();
    assert!(
        matches!(short, Error::Exhausted(Exhausted::Cells { needed: 1, free: 0, capacity: 64 })),
        "{short}"
    );
    let short = books.seq_cp(full, here, -1, -1).unwrap_err();
    assert!(matches!(short, Error::Exhausted(Exhausted::Cells { needed: 55, free: 54, .. })), "{short}");
    assert_eq!(books.digest(), before);
}

#[test]
fn what_a_segment_holds_cannot_be_shifted() {
    let mut books = books();
    let id = books.seq_acquire(0).unwrap();
    extend(&mut books, id, 10).unwrap();
    books.retain(1, id, 4, 6).unwrap();
    assert_eq!(kv(books.seq_add(id, 5, -1, 3)), KvError::SharedCells { slot: 0, position: 5 });
    assert_eq!(books.seq_add(id, 6, -1, 3).unwrap(), [6, 7, 8, 9]);
    books.check();
}

#[test]
fn the_order_of_tests_lends_what_was_freed_last() {
    let mut books = Books::new(KvShape { lifo: true, ..SHAPE }).unwrap();
    let ids = [0, 1, 0].map(|stream| books.seq_acquire(stream).unwrap());
    for id in ids {
        extend(&mut books, id, 2).unwrap();
    }
    books.seq_release(ids[0]).unwrap();
    books.seq_release(ids[1]).unwrap();
    let again = books.seq_acquire(0).unwrap();
    assert_eq!((again.slot(), again.generation()), (1, 1), "slot 1 was returned last");
    extend(&mut books, again, 3).unwrap();
    let runs: Vec<u32> = books.cells().runs(1).iter().flat_map(|run| run.cells()).collect();
    assert_eq!(runs, [1, 0, 4], "cells 1 and 0 were freed last, then the lowest one never used");
}

#[test]
fn stale_ids_are_refused_everywhere_and_change_nothing() {
    let mut books = books();
    let (id, stale) = (books.seq_acquire(0).unwrap(), books.seq_acquire(1).unwrap());
    extend(&mut books, id, 4).unwrap();
    books.retain(1, id, 0, 4).unwrap();
    books.seq_release(stale).unwrap();
    let before = books.digest();
    let refusals = [
        books.seq_release(stale),
        books.seq_rm(stale, -1, -1),
        books.seq_cp(stale, id, -1, -1).map(|_| ()),
        books.seq_cp(id, stale, -1, -1).map(|_| ()),
        books.seq_keep(stale),
        books.seq_add(stale, -1, -1, 1).map(|_| ()),
        books.pos_min(stale).map(|_| ()),
        books.pos_max(stale).map(|_| ()),
        books.retain(2, stale, 0, 1),
        books.attach(1, stale, 0, 1).map(|_| ()),
        books.extend(&[0], &[1], &[stale.to_raw()]),
    ];
    for refusal in refusals {
        assert!(matches!(refusal, Err(Error::Rejected(Rejected::StaleSequence { .. }))), "{refusal:?}");
    }
    assert_eq!(books.digest(), before);
}

#[derive(Debug, Clone)]
enum Op {
    Acquire(u32),
    Release(usize),
    Extend(usize, i32),
    Retain(u64, usize, i32, i32),
    Attach(u64, usize, i32),
    Trim(u64, i32),
    Split(u64, i32, u64),
    Fork(usize, usize),
}

fn any_op() -> impl Strategy<Value = Op> {
    let id = || 0..4_usize;
    let segment = || 0..5_u64;
    prop_oneof![
        3 => (0..3_u32).prop_map(Op::Acquire),
        2 => id().prop_map(Op::Release),
        4 => (id(), 1..20_i32).prop_map(|(id, n)| Op::Extend(id, n)),
        2 => (segment(), id(), 0..5_i32, 1..15_i32).prop_map(|(s, id, p0, n)| Op::Retain(s, id, p0, p0 + n)),
        2 => (segment(), id(), 1..15_i32).prop_map(|(s, id, n)| Op::Attach(s, id, n)),
        1 => (segment(), 0..12_i32).prop_map(|(s, at)| Op::Trim(s, at)),
        1 => (segment(), 1..9_i32, segment()).prop_map(|(s, at, tail)| Op::Split(s, at, tail)),
        1 => (id(), id()).prop_map(|(a, b)| Op::Fork(a, b)),
    ]
}

fn apply(books: &mut Books, ids: &[SeqId], op: &Op) -> Result<Option<SeqId>, Error> {
    let id = |i: usize| ids.get(i).copied().unwrap_or(SeqId::from_raw(-1));
    match *op {
        Op::Acquire(stream) => return books.seq_acquire(stream).map(Some),
        Op::Release(i) => books.seq_release(id(i))?,
        Op::Extend(i, n) => extend(books, id(i), n)?,
        Op::Retain(segment, i, p0, p1) => books.retain(segment, id(i), p0, p1)?,
        Op::Attach(segment, i, n) => {
            let p0 = books.pos_max(id(i))?.map_or(0, |max| max + 1);
            books.attach(segment, id(i), p0, p0 + n).map(|_| ())?;
        }
        Op::Trim(segment, at) => books.segment_trim(segment, at)?,
        Op::Split(segment, at, tail) => books.segment_split(segment, at, tail)?,
        Op::Fork(a, b) => books.seq_cp(id(a), id(b), -1, -1).map(|_| ())?,
    }
    Ok(None)
}

/// Whatever happens: a refusal leaves the digest, the invariants hold, every free cell is counted, and when the
/// last holder is gone the books are as new (I14).
#[test]
fn any_history_can_be_undone() {
    let input = (any::<bool>(), prop::collection::vec(any_op(), 1..80));
    seeded::check(1_500, input, |(lifo, ops)| {
        let mut books = Books::new(KvShape { lifo, ..SHAPE }).unwrap();
        let empty = books.digest();
        let mut ids: Vec<SeqId> = Vec::new();
        for op in &ops {
            let before = books.digest();
            match apply(&mut books, &ids, op) {
                Ok(lent) => ids.extend(lent),
                Err(_) => prop_assert_eq!(books.digest(), before, "{:?} left a trace", op),
            }
            ids.retain(|id| books.check_lent(*id).is_ok());
            books.check();
            let snapshot = books.snapshot();
            prop_assert_eq!(
                snapshot.sequences.iter().map(|held| held.id.slot()).max(),
                ids.iter().map(|id| id.slot()).max()
            );
            prop_assert_eq!(snapshot.n_free.iter().sum::<usize>(), books.cells().n_free());
        }
        for held in books.snapshot().segments {
            books.segment_trim(held.id, held.runs[0].position).unwrap();
        }
        for id in ids {
            books.seq_release(id).unwrap();
        }
        books.check();
        prop_assert_eq!((books.cells().n_free(), books.n_seq_free()), (128, 4));
        prop_assert!(lifo || books.digest() == empty);
        Ok(())
    });
}
