//! Reservations: all cells or none, no side effects when dropped, allocation by blocks.

use crate::model::{Model, Rejection, Row, acquired, id, kv_rows, one_stream, rejection};
use crate::seeded;
use llaisys_core::error::Exhausted;
use llaisys_core::kv::{BLOCK_CELLS, CellRange, KvCache, KvError, KvRow, KvShape};
use llaisys_core::seq::SeqId;
use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// `n` rows of a sequence from position `start`.
fn rows_from(slot: u32, start: i32, n: usize) -> Vec<Row> {
    (start..).take(n).map(|position| Row { position, seqs: vec![id(slot)] }).collect()
}

fn commit(kv: &mut KvCache, rows: &[Row]) -> Vec<u32> {
    let reservation = kv.prepare_rows(&kv_rows(rows)).expect("valid rows and enough free cells");
    let cells = reservation.row_cells().to_vec();
    reservation.commit();
    kv.check();
    cells
}

/// The position after the last one of a sequence.
fn end(kv: &KvCache, slot: u32) -> i32 {
    kv.pos_max(id(slot)).expect("it is acquired").map_or(0, |max| max + 1)
}

/// Appends `n` rows to a sequence.
fn extend(kv: &mut KvCache, slot: u32, n: usize) -> Vec<u32> {
    let start = end(kv, slot);
    commit(kv, &rows_from(slot, start, n))
}

/// A random history: sequences that grew by some rows and lost five positions.
type History = Vec<(u32, usize, i32)>;

/// A cache with that history.
fn cache_with(history: History, lifo: bool) -> KvCache {
    let mut kv = acquired(KvShape { lifo, ..one_stream(150, 4) });
    for (slot, n, trimmed) in history {
        if kv.n_cells_free() >= n {
            extend(&mut kv, slot, n);
        }
        kv.seq_rm(id(slot), trimmed, trimmed + 5).expect("a range of an acquired sequence");
    }
    kv
}

/// Rows that continue the sequences, one sequence after the other, with a number of rows for each.
fn rows_for(kv: &KvCache, requested: &[(u32, usize)]) -> Vec<Row> {
    let mut next = [0, 1, 2, 3].map(|slot| end(kv, slot));
    let mut rows = Vec::new();
    for &(slot, n) in requested {
        rows.extend(rows_from(slot, next[slot as usize], n));
        next[slot as usize] = rows.last().map_or(0, |row| row.position + 1);
    }
    rows
}

/// A dropped reservation restores the digest. Preparing again allocates the same cells, so the order of the free cells
/// is restored too.
#[test]
fn dropped_reservation_has_no_side_effects() {
    let history = prop::collection::vec((0_u32..4, 1_usize..30, 0..20_i32), 0..12);
    let requested = prop::collection::vec((0_u32..4, 1_usize..20), 1..5);
    seeded::check(2_000, (history, requested), |(history, requested)| {
        let mut kv = cache_with(history, false);
        let rows = rows_for(&kv, &requested);
        let (before, contents) = (kv.digest(), kv.dump());
        let first = kv.prepare_rows(&kv_rows(&rows)).map(|reservation| reservation.row_cells().to_vec());
        prop_assert_eq!(before, kv.digest());
        prop_assert_eq!(contents, kv.dump());
        let second = kv.prepare_rows(&kv_rows(&rows)).map(|reservation| reservation.row_cells().to_vec());
        prop_assert_eq!(first.map_err(rejection), second.map_err(rejection));
        Ok(())
    });
}

/// `peek_next` predicts the next allocation and has no side effects, not even on the recording of freed cells.
#[test]
fn peek_next_predicts_the_next_allocation_and_changes_nothing() {
    let history = prop::collection::vec((0_u32..4, 1_usize..30, 0..20_i32), 0..12);
    let requested = prop::collection::vec((0_u32..4, 1_usize..20), 1..5);
    seeded::check(2_000, (history, requested, any::<bool>()), |(history, requested, lifo)| {
        let mut kv = cache_with(history, lifo);
        kv.take_freed_cells();
        let rows = rows_for(&kv, &requested);
        let Ok(mut reservation) = kv.prepare_rows(&kv_rows(&rows)) else { return Ok(()) };
        let last = |slot| rows.iter().rev().find(|row| row.seqs == [id(slot)]).map(|row| row.position);
        let next = |slot| last(slot).map(|position| Row { position: position + 1, seqs: vec![id(slot)] });
        let next: Vec<Row> = (0..4).filter_map(next).collect();
        let (digest, n_free) = (reservation.kv().digest(), reservation.kv().n_cells_free());
        let predicted = reservation.peek_next(&kv_rows(&next));
        prop_assert_eq!(reservation.kv().digest(), digest);
        prop_assert_eq!(predicted.is_some(), n_free >= next.len());
        reservation.commit();
        prop_assert_eq!(kv.take_freed_cells(), Vec::<u32>::new());
        if let Some(predicted) = predicted {
            prop_assert!(predicted.iter().all(|&cell| kv.is_free(cell)));
            prop_assert_eq!(commit(&mut kv, &next), predicted);
        }
        Ok(())
    });
}

/// Rows of up to four sequences, some coupled, with random faulty rows. The result equals that of preparing only the
/// kept rows (except for the choice of cells), and each kept row keeps its cell.
#[test]
fn commit_without_keeps_the_rows_that_do_not_depend_on_faulty_ones() {
    let coupled = prop::collection::vec((0_u32..16, 1_usize..6), 1..6);
    let faulty = prop::collection::vec(prop::bool::weighted(0.15), 40);
    seeded::check(3_000, (coupled, faulty, any::<bool>()), |(requested, faulty, lifo)| {
        let mut kv = acquired(KvShape { lifo, ..one_stream(150, 4) });
        let mut model = Model::new(one_stream(150, 4));
        let mut rows = Vec::new();
        for (slots, n) in requested {
            let seqs: Vec<SeqId> = (0..4).filter(|slot| slots >> slot & 1 == 1).map(id).collect();
            for _ in 0..n {
                let next = seqs.first().and_then(|id| model.all(id.slot()).last().map(|(p, _)| p + 1));
                let row = Row { position: next.unwrap_or(0), seqs: seqs.clone() };
                // Invalid rows (coupled sequences that differ) are left out.
                if model.prepare(std::slice::from_ref(&row)).is_ok() {
                    rows.push(row);
                }
            }
        }
        let mut lost_seqs: Vec<SeqId> = Vec::new();
        let mut kept = Vec::new();
        for (row, place) in rows.iter().enumerate() {
            if faulty[row] || place.seqs.iter().any(|id| lost_seqs.contains(id)) {
                lost_seqs.extend(&place.seqs);
            } else {
                kept.push(row);
            }
        }
        let faulty: Vec<usize> = (0..rows.len()).filter(|row| faulty[*row]).collect();
        let reservation = kv.prepare_rows(&kv_rows(&rows)).unwrap();
        let placed = reservation.row_cells().to_vec();
        let removed_with = reservation.commit_without(&faulty, &[]);
        kv.check();
        prop_assert_eq!(
            &(0..rows.len()).filter(|row| removed_with[*row].is_none()).collect::<Vec<_>>(),
            &kept
        );
        for (row, culprit) in removed_with.iter().enumerate().filter_map(|(row, with)| Some((row, (*with)?)))
        {
            prop_assert!(faulty.contains(&culprit) && culprit <= row);
            prop_assert!(faulty.contains(&row) == (culprit == row));
        }
        let mut links: Vec<_> = kept
            .iter()
            .flat_map(|&row| rows[row].seqs.iter().map(move |id| (id.slot(), row)))
            .map(|(slot, row)| (slot, rows[row].position, placed[row]))
            .collect();
        links.sort_unstable();
        prop_assert_eq!(kv.dump().links, links);
        prop_assert_eq!(kv.n_cells_free(), 150 - kept.len());
        Ok(())
    });
}

#[test]
fn panic_during_a_reservation_rolls_back() {
    let mut kv = acquired(one_stream(64, 2));
    extend(&mut kv, 0, 10);
    let before = kv.digest();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let rows = rows_from(0, 10, 30);
        let _reservation = kv.prepare_rows(&kv_rows(&rows)).unwrap();
        panic!("a kernel failed");
    }));
    assert!(panicked.is_err());
    kv.check();
    assert_eq!(before, kv.digest());
}

#[test]
fn rows_of_a_live_reservation_are_visible() {
    let mut kv = acquired(one_stream(64, 2));
    extend(&mut kv, 0, 3);
    let rows = rows_from(0, 3, 2);
    let reservation = kv.prepare_rows(&kv_rows(&rows)).unwrap();
    let mut visible = Vec::new();
    reservation.kv().visible_cells(id(0), 3, &mut visible);
    assert_eq!(visible, [0, 1, 2, 3], "a row sees itself and earlier rows, but not the row after it");
    assert_eq!(reservation.row_cells(), [3, 4]);
    assert_eq!(reservation.kv().n_cells_free(), 59);
}

#[test]
fn commit_changes_the_digest_and_an_empty_batch_does_not() {
    let mut kv = acquired(one_stream(64, 2));
    let empty = kv.digest();
    commit(&mut kv, &[]);
    assert_eq!(empty, kv.digest());
    extend(&mut kv, 0, 1);
    let one = kv.digest();
    assert_ne!(empty, one);
    let _linked = kv.seq_cp(id(0), id(1), -1, -1).unwrap();
    assert_ne!(one, kv.digest(), "a second sequence of a cell is part of the state");
}

#[test]
fn exactly_the_free_cells_can_be_allocated() {
    for n_cells in [1, 31, 32, 33, 63, 64, 65, 100, 4097] {
        let mut kv = acquired(one_stream(n_cells, 2));
        extend(&mut kv, 0, n_cells - 1);
        let before = kv.digest();
        let rows = rows_from(1, 0, 2);
        let error = rejection(kv.prepare_rows(&kv_rows(&rows)).map(drop).unwrap_err());
        assert_eq!(error, Rejection::Exhausted(Exhausted::Cells { needed: 2, free: 1, capacity: n_cells }));
        assert_eq!(before, kv.digest());
        extend(&mut kv, 1, 1);
        assert_eq!(kv.n_cells_free(), 0);
    }
}

#[test]
fn invalid_row_is_reported_before_too_few_cells() {
    let mut kv = acquired(one_stream(2, 2));
    let rows = [(0, 0), (1, 0), (2, 0), (9, 1), (11, 1)]
        .map(|(position, slot)| Row { position, seqs: vec![id(slot)] });
    let error = rejection(kv.prepare_rows(&kv_rows(&rows)).map(drop).unwrap_err());
    assert_eq!(error, Rejection::Kv(KvError::NotNext { row: 4, slot: 1, position: 11, expected: 10 }));
}

#[test]
fn sequences_that_grow_together_get_whole_blocks() {
    let n_seqs = 8;
    let mut kv = acquired(one_stream(n_seqs * BLOCK_CELLS * 2, n_seqs));
    for position in 0..2 * i32::try_from(BLOCK_CELLS).unwrap() {
        let slots = 0..u32::try_from(n_seqs).unwrap();
        let rows: Vec<Row> = slots.map(|slot| Row { position, seqs: vec![id(slot)] }).collect();
        commit(&mut kv, &rows);
    }
    assert_eq!(kv.n_cells_free(), 0);
    for slot in 0..8 {
        let long = |range: &CellRange| {
            range.len as usize >= BLOCK_CELLS && (range.cell as usize).is_multiple_of(BLOCK_CELLS)
        };
        assert!(kv.ranges(id(slot)).iter().all(long), "slot {slot}: {:?}", kv.ranges(id(slot)));
    }
}

#[test]
fn fragments_are_used_when_no_block_is_free() {
    let mut kv = acquired(one_stream(3 * BLOCK_CELLS, 4));
    for slot in 0..3 {
        extend(&mut kv, slot, 1);
    }
    let placed = extend(&mut kv, 3, 3 * BLOCK_CELLS - 3);
    assert_eq!(placed[..3], [1, 2, 3], "the lowest free cells, in another sequence's block");
    assert_eq!(kv.n_cells_free(), 0);
}

#[test]
fn coupled_sequences_share_rows_while_they_see_the_same() {
    let mut kv = acquired(one_stream(64, 3));
    extend(&mut kv, 0, 4);
    let both = |position| Row { position, seqs: vec![id(0), id(2)] };
    let _linked = kv.seq_cp(id(0), id(2), -1, -1).unwrap();
    commit(&mut kv, &[both(4), both(5)]);
    assert_eq!(kv.ranges(id(0)), kv.ranges(id(2)));
    // The batch itself can separate them: no row of both can follow a row of one of them.
    let rows = [Row { position: 6, seqs: vec![id(0)] }, Row { position: 6, seqs: vec![id(2)] }, both(7)];
    let error = rejection(kv.prepare_rows(&kv_rows(&rows)).map(drop).unwrap_err());
    assert_eq!(error, Rejection::Kv(KvError::CoupledDiffer { row: 2, first: 0, second: 2 }));
}

#[test]
fn cache_of_4_mi_cells_touches_no_memory_until_used() {
    let mut kv = acquired(one_stream(4 << 20, 8));
    assert_eq!(kv.n_cells_free(), 4 << 20);
    let placed = extend(&mut kv, 7, 100);
    assert_eq!(
        placed,
        (0..100).collect::<Vec<u32>>(),
        "low cells are used first, so memory is touched as the cache fills"
    );
    kv.seq_rm(id(7), -1, -1).unwrap();
    assert_eq!(kv.n_cells_free(), 4 << 20);
}

#[test]
#[should_panic(expected = "neither committed nor dropped")]
fn forgotten_reservation_panics() {
    let mut kv = acquired(one_stream(8, 1));
    std::mem::forget(kv.prepare_rows(&[KvRow { position: 0, seqs: &[id(0)] }]).unwrap());
    drop(kv.prepare_rows(&[KvRow { position: 1, seqs: &[id(0)] }]));
}

#[test]
fn reference_model_rejects_and_allocates() {
    let mut model = Model::new(one_stream(4, 1));
    assert_eq!(model.prepare(&rows_from(0, 0, 4)), Ok(vec![0, 1, 2, 3]));
    let full = Exhausted::Cells { needed: 1, free: 0, capacity: 4 };
    assert_eq!(model.prepare(&rows_from(0, 4, 1)), Err(Rejection::Exhausted(full)));
    assert_eq!((model.seq_rm(0, 1, 3), model.n_free()), (Ok(()), 2));
    assert_eq!(model.seq_add(0, 3, -1, -2), Ok(vec![3]));
    assert_eq!(model.all(0), [(0, 0), (1, 3)]);
    assert_eq!(
        (model.seq_cp(0, 0, -1, -1).map(|_| ()), model.seq_keep(0), model.dump().free),
        (Ok(()), Ok(()), vec![1, 2])
    );
}
