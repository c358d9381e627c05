//! Reservations: taken whole or not at all, without a trace when dropped, handed out by blocks.

mod kv_model;
mod seeded;

use kv_model::{Model, Refusal, Row, cells, one_arena, places, refusal};
use llaisys_core::error::Exhausted;
use llaisys_core::kv::{BLOCK_CELLS, Cells, KvError, KvShape, RowPlace, Run};
use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// `n` rows that start a sequence at 0 or go on in it.
fn rows_from(slot: u32, start: i32, n: usize) -> Vec<Row> {
    (start..).take(n).map(|position| Row { position, seqs: vec![slot] }).collect()
}

fn commit(cells: &mut Cells, rows: &[Row]) -> Vec<u32> {
    let reservation = cells.prepare(&places(rows)).expect("right rows and room for them");
    let placed = reservation.placed().to_vec();
    reservation.commit();
    cells.check();
    placed
}

/// Goes on in a sequence by `n` rows.
fn extend(cells: &mut Cells, slot: u32, n: usize) -> Vec<u32> {
    let start = cells.pos_max(slot).map_or(0, |max| max + 1);
    commit(cells, &rows_from(slot, start, n))
}

/// Any history: sequences that grew by some rows and lost five positions.
type History = Vec<(u32, usize, i32)>;

/// A pool with that history.
fn pool_with(history: History) -> Cells {
    let mut cells = cells(150, 4);
    for (slot, n, trimmed) in history {
        if cells.n_free() >= n {
            extend(&mut cells, slot, n);
        }
        cells.seq_rm(slot, trimmed, trimmed + 5).expect("a range of a slot that is there");
    }
    cells
}

/// Rows that go on in the sequences, some each, one after the other.
fn rows_for(cells: &Cells, asked: &[(u32, usize)]) -> Vec<Row> {
    let mut next = [0, 1, 2, 3].map(|slot| cells.pos_max(slot).map_or(0, |max| max + 1));
    let mut rows = Vec::new();
    for &(slot, n) in asked {
        rows.extend(rows_from(slot, next[slot as usize], n));
        next[slot as usize] = rows.last().map_or(0, |row| row.position + 1);
    }
    rows
}

/// Dropped, a reservation leaves the digest as it was; prepared again, it takes the same cells, as it would not
/// if the order of the free cells had changed.
#[test]
fn a_dropped_reservation_leaves_no_trace() {
    let history = prop::collection::vec((0_u32..4, 1_usize..30, 0..20_i32), 0..12);
    let asked = prop::collection::vec((0_u32..4, 1_usize..20), 1..5);
    seeded::check(2_000, (history, asked), |(history, asked)| {
        let mut cells = pool_with(history);
        let rows = rows_for(&cells, &asked);
        let (before, contents) = (cells.digest(), cells.dump());
        let first = cells.prepare(&places(&rows)).map(|reservation| reservation.placed().to_vec());
        prop_assert_eq!(before, cells.digest());
        prop_assert_eq!(contents, cells.dump());
        let second = cells.prepare(&places(&rows)).map(|reservation| reservation.placed().to_vec());
        prop_assert_eq!(first.map_err(refusal), second.map_err(refusal));
        Ok(())
    });
}

/// What is foreseen is what comes, and looking ahead leaves no trace, not even on the list of cells that became free.
#[test]
fn what_is_foreseen_comes_and_leaves_no_trace() {
    let history = prop::collection::vec((0_u32..4, 1_usize..30, 0..20_i32), 0..12);
    let asked = prop::collection::vec((0_u32..4, 1_usize..20), 1..5);
    seeded::check(2_000, (history, asked, any::<bool>()), |(history, asked, lifo)| {
        let mut cells = Cells::new(KvShape { lifo, ..one_arena(150, 4) });
        for (slot, n, trimmed) in history {
            if cells.n_free() >= n {
                extend(&mut cells, slot, n);
            }
            cells.seq_rm(slot, trimmed, trimmed + 5).expect("a range of a slot that is there");
        }
        cells.take_freed();
        let rows = rows_for(&cells, &asked);
        let Ok(mut reservation) = cells.prepare(&places(&rows)) else { return Ok(()) };
        let last = |slot| rows.iter().rev().find(|row| row.seqs == [slot]).map(|row| row.position);
        let next = |slot| last(slot).map(|position| Row { position: position + 1, seqs: vec![slot] });
        let next: Vec<Row> = (0..4).filter_map(next).collect();
        let (digest, n_free) = (reservation.cells().digest(), reservation.cells().n_free());
        let foreseen = reservation.foresee(&places(&next));
        prop_assert_eq!(reservation.cells().digest(), digest);
        prop_assert_eq!(foreseen.is_some(), n_free >= next.len());
        reservation.commit();
        prop_assert_eq!(cells.take_freed(), Vec::<u32>::new());
        if let Some(foreseen) = foreseen {
            prop_assert!(foreseen.iter().all(|&cell| cells.is_free(cell)));
            prop_assert_eq!(commit(&mut cells, &next), foreseen);
        }
        Ok(())
    });
}

/// Rows of up to four sequences, some coupled; each row is faulty by a roll. What stays is what preparing the kept
/// rows alone would give (up to the choice of cells), and each kept row keeps its cell.
#[test]
fn what_is_committed_without_faulty_rows_is_the_rest() {
    let coupled = prop::collection::vec((0_u32..16, 1_usize..6), 1..6);
    let faulty = prop::collection::vec(prop::bool::weighted(0.15), 40);
    seeded::check(3_000, (coupled, faulty, any::<bool>()), |(asked, faulty, lifo)| {
        let mut cells = Cells::new(KvShape { lifo, ..one_arena(150, 4) });
        let mut model = Model::new(one_arena(150, 4));
        let mut rows = Vec::new();
        for (slots, n) in asked {
            let seqs: Vec<u32> = (0..4).filter(|slot| slots >> slot & 1 == 1).collect();
            for _ in 0..n {
                let next = seqs.first().and_then(|slot| model.all(*slot).last().map(|(p, _)| p + 1));
                let row = Row { position: next.unwrap_or(0), seqs: seqs.clone() };
                // Wrong rows (coupled sequences that differ) are left out.
                if model.prepare(std::slice::from_ref(&row)).is_ok() {
                    rows.push(row);
                }
            }
        }
        let mut lost_slots: Vec<u32> = Vec::new();
        let mut kept = Vec::new();
        for (row, place) in rows.iter().enumerate() {
            if faulty[row] || place.seqs.iter().any(|slot| lost_slots.contains(slot)) {
                lost_slots.extend(&place.seqs);
            } else {
                kept.push(row);
            }
        }
        let faulty: Vec<usize> = (0..rows.len()).filter(|row| faulty[*row]).collect();
        let reservation = cells.prepare(&places(&rows)).unwrap();
        let placed = reservation.placed().to_vec();
        let lost_with = reservation.commit_without(&faulty);
        cells.check();
        prop_assert_eq!(&(0..rows.len()).filter(|row| lost_with[*row].is_none()).collect::<Vec<_>>(), &kept);
        for (row, culprit) in lost_with.iter().enumerate().filter_map(|(row, with)| Some((row, (*with)?))) {
            prop_assert!(faulty.contains(&culprit) && culprit <= row);
            prop_assert!(faulty.contains(&row) == (culprit == row));
        }
        let mut links: Vec<_> = kept
            .iter()
            .flat_map(|&row| rows[row].seqs.iter().map(move |slot| (*slot, row)))
            .map(|(slot, row)| (slot, rows[row].position, placed[row]))
            .collect();
        links.sort_unstable();
        prop_assert_eq!(cells.dump().links, links);
        prop_assert_eq!(cells.n_free(), 150 - kept.len());
        Ok(())
    });
}

#[test]
fn a_panic_while_reserved_rolls_back() {
    let mut cells = cells(64, 2);
    extend(&mut cells, 0, 10);
    let before = cells.digest();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let rows = rows_from(0, 10, 30);
        let _reservation = cells.prepare(&places(&rows)).unwrap();
        panic!("a kernel failed");
    }));
    assert!(panicked.is_err());
    cells.check();
    assert_eq!(before, cells.digest());
}

#[test]
fn a_live_reservation_shows_its_rows() {
    let mut cells = cells(64, 2);
    extend(&mut cells, 0, 3);
    let rows = rows_from(0, 3, 2);
    let reservation = cells.prepare(&places(&rows)).unwrap();
    let mut visible = Vec::new();
    reservation.cells().visible_cells(0, 3, &mut visible);
    assert_eq!(visible, [0, 1, 2, 3], "a row sees itself and what is before it, not the row after it");
    assert_eq!(reservation.placed(), [3, 4]);
    assert_eq!(reservation.cells().n_free(), 59);
}

#[test]
fn commit_changes_the_digest_and_an_empty_batch_does_not() {
    let mut cells = cells(64, 2);
    let empty = cells.digest();
    commit(&mut cells, &[]);
    assert_eq!(empty, cells.digest());
    extend(&mut cells, 0, 1);
    let one = cells.digest();
    assert_ne!(empty, one);
    let _linked = cells.seq_cp(0, 1, -1, -1).unwrap();
    assert_ne!(one, cells.digest(), "a second reader is part of the state");
}

#[test]
fn the_last_free_cell_can_be_had_and_one_more_cannot() {
    for n_cells in [1, 31, 32, 33, 63, 64, 65, 100, 4097] {
        let mut cells = cells(n_cells, 2);
        extend(&mut cells, 0, n_cells - 1);
        let before = cells.digest();
        let rows = rows_from(1, 0, 2);
        let error = refusal(cells.prepare(&places(&rows)).map(drop).unwrap_err());
        assert_eq!(error, Refusal::Cells(Exhausted::Cells { needed: 2, free: 1, capacity: n_cells }));
        assert_eq!(before, cells.digest());
        extend(&mut cells, 1, 1);
        assert_eq!(cells.n_free(), 0);
    }
}

#[test]
fn a_wrong_row_is_named_even_when_cells_are_short() {
    let mut cells = cells(2, 2);
    let rows =
        [(0, 0), (1, 0), (2, 0), (9, 1), (11, 1)].map(|(position, slot)| Row { position, seqs: vec![slot] });
    let error = refusal(cells.prepare(&places(&rows)).map(drop).unwrap_err());
    assert_eq!(error, Refusal::Kv(KvError::NotNext { row: 4, slot: 1, position: 11, expected: 10 }));
}

#[test]
fn growing_side_by_side_gives_runs_of_a_block() {
    let n_seqs = 8;
    let mut cells = cells(n_seqs * BLOCK_CELLS * 2, n_seqs);
    for position in 0..2 * i32::try_from(BLOCK_CELLS).unwrap() {
        let slots = 0..u32::try_from(n_seqs).unwrap();
        let rows: Vec<Row> = slots.map(|slot| Row { position, seqs: vec![slot] }).collect();
        commit(&mut cells, &rows);
    }
    assert_eq!(cells.n_free(), 0);
    for slot in 0..8 {
        let long =
            |run: &Run| run.len as usize >= BLOCK_CELLS && (run.cell as usize).is_multiple_of(BLOCK_CELLS);
        assert!(cells.runs(slot).iter().all(long), "slot {slot}: {:?}", cells.runs(slot));
    }
}

#[test]
fn fragments_are_used_when_no_block_is_free() {
    let mut cells = cells(3 * BLOCK_CELLS, 4);
    for slot in 0..3 {
        extend(&mut cells, slot, 1);
    }
    let placed = extend(&mut cells, 3, 3 * BLOCK_CELLS - 3);
    assert_eq!(placed[..3], [1, 2, 3], "the lowest free cells, in another sequence's block");
    assert_eq!(cells.n_free(), 0);
}

#[test]
fn coupled_sequences_share_rows_while_they_see_the_same() {
    let mut cells = cells(64, 3);
    extend(&mut cells, 0, 4);
    let both = |position| Row { position, seqs: vec![0, 2] };
    let _linked = cells.seq_cp(0, 2, -1, -1).unwrap();
    commit(&mut cells, &[both(4), both(5)]);
    assert_eq!(cells.runs(0), cells.runs(2));
    // The batch itself can part them: after a row of one alone, no row of both can follow.
    let rows = [Row { position: 6, seqs: vec![0] }, Row { position: 6, seqs: vec![2] }, both(7)];
    let error = refusal(cells.prepare(&places(&rows)).map(drop).unwrap_err());
    assert_eq!(error, Refusal::Kv(KvError::CoupledDiffer { row: 2, first: 0, second: 2 }));
}

#[test]
fn four_mi_cells_are_cheap_until_used() {
    let mut cells = cells(4 << 20, 8);
    assert_eq!(cells.n_free(), 4 << 20);
    let placed = extend(&mut cells, 7, 100);
    assert_eq!(placed, (0..100).collect::<Vec<u32>>(), "low cells first: the pool is touched as it fills");
    cells.seq_rm(7, -1, -1).unwrap();
    assert_eq!(cells.n_free(), 4 << 20);
}

#[test]
#[should_panic(expected = "neither committed nor dropped")]
fn a_forgotten_reservation_is_a_bug() {
    let mut cells = cells(8, 1);
    std::mem::forget(cells.prepare(&[RowPlace { position: 0, seqs: &[0] }]).unwrap());
    drop(cells.prepare(&[RowPlace { position: 1, seqs: &[0] }]));
}

#[test]
fn the_model_itself_refuses_and_places() {
    let mut model = Model::new(one_arena(4, 1));
    assert_eq!(model.prepare(&rows_from(0, 0, 4)), Ok(vec![0, 1, 2, 3]));
    let full = Exhausted::Cells { needed: 1, free: 0, capacity: 4 };
    assert_eq!(model.prepare(&rows_from(0, 4, 1)), Err(Refusal::Cells(full)));
    assert_eq!((model.seq_rm(0, 1, 3), model.n_free()), (Ok(()), 2));
    assert_eq!(model.seq_add(0, 3, -1, -2), Ok(vec![3]));
    assert_eq!(model.all(0), [(0, 0), (1, 3)]);
    assert_eq!(
        (model.seq_cp(0, 0, -1, -1).map(|_| ()), model.seq_keep(0), model.dump().free),
        (Ok(()), Ok(()), vec![1, 2])
    );
}
