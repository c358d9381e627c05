//! Recurrent states: a computed sequence has one, forks and cache nodes share it, and only a commit replaces it.

use llaisys_core::error::{Error, Exhausted, KvError, Rejected};
use llaisys_core::kv::{KvCache, KvRow, KvShape, n_states};
use llaisys_core::ops::cases::SplitMix64;
use llaisys_core::seq::SeqId;
use std::collections::BTreeMap;

const N_SEQS: usize = 4;
const N_KEPT: usize = 2;

fn cache() -> KvCache {
    let shape = KvShape { n_cells: 64, n_seq_max: N_SEQS, n_streams: 1, lifo: false };
    KvCache::with_states(shape, N_KEPT).unwrap()
}

fn rows(id: SeqId, positions: std::ops::Range<i32>) -> Vec<(i32, [SeqId; 1])> {
    positions.map(|position| (position, [id])).collect()
}

fn borrow(rows: &[(i32, [SeqId; 1])]) -> Vec<KvRow<'_>> {
    rows.iter().map(|(position, seqs)| KvRow { position: *position, seqs }).collect()
}

fn extend(cache: &mut KvCache, id: SeqId, positions: std::ops::Range<i32>) -> (Option<u32>, u32) {
    let rows = rows(id, positions);
    let reservation = cache.prepare_rows(&borrow(&rows)).unwrap();
    let states = reservation.kv().step_states(id).unwrap();
    reservation.commit();
    cache.check();
    states
}

fn refused(result: Result<impl std::fmt::Debug, Error>) -> KvError {
    match result {
        Err(Error::Rejected(Rejected::Kv(error))) => error,
        other => panic!("not rejected: {other:?}"),
    }
}

#[test]
fn a_step_reads_the_state_of_the_last_commit_and_writes_another() {
    let mut cache = cache();
    let id = cache.seq_acquire(0).unwrap();
    let (before, first) = extend(&mut cache, id, 0..3);
    assert_eq!(before, None);
    let digest = cache.digest();
    for _ in 0..3 {
        // Dropped: the next step finds the same states.
        let next = rows(id, 3..5);
        let reservation = cache.prepare_rows(&borrow(&next)).unwrap();
        let (before, after) = reservation.kv().step_states(id).unwrap();
        assert!(before == Some(first) && after != first);
        drop(reservation);
        cache.check();
        assert_eq!(cache.digest(), digest);
    }
    let (before, second) = extend(&mut cache, id, 3..4);
    assert!(before == Some(first) && second != first);
    cache.seq_release(id).unwrap();
    cache.check();
}

#[test]
fn forks_share_a_state_until_one_of_them_continues() {
    let mut cache = cache();
    let [a, b] = [(); 2].map(|()| cache.seq_acquire(0).unwrap());
    let (_, shared) = extend(&mut cache, a, 0..3);
    let _ = cache.seq_cp(a, b, -1, -1).unwrap();
    cache.check();
    let both = [rows(a, 3..4), rows(b, 3..4)].concat();
    let reservation = cache.prepare_rows(&borrow(&both)).unwrap();
    let states = [a, b].map(|id| reservation.kv().step_states(id).unwrap());
    assert_eq!(states.map(|(before, _)| before), [Some(shared); 2]);
    assert_ne!(states[0].1, states[1].1);
    reservation.commit();
    cache.check();
    cache.take_freed_states();
    cache.seq_release(a).unwrap();
    cache.seq_release(b).unwrap();
    assert_eq!(cache.take_freed_states(), states.map(|(_, after)| after));
}

#[test]
fn parts_of_a_sequence_are_refused_without_side_effects() {
    let mut cache = cache();
    let [a, b] = [(); 2].map(|()| cache.seq_acquire(0).unwrap());
    extend(&mut cache, a, 0..5);
    cache.node_cache(1, a, 0, 5).unwrap();
    let digest = cache.digest();
    let recurrent = |error: KvError| assert!(matches!(error, KvError::Recurrent { .. }), "{error}");
    recurrent(refused(cache.seq_rm(a, 3, -1)));
    recurrent(refused(cache.seq_rm(a, 0, 2)));
    recurrent(refused(cache.seq_cp(a, b, 0, 4)));
    recurrent(refused(cache.seq_cp(a, b, 1, -1)));
    recurrent(refused(cache.seq_add(a, 0, -1, 2)));
    let coupled = [KvRow { position: 0, seqs: &[b, a] }];
    assert_eq!(refused(cache.prepare_rows(&coupled).map(drop)), KvError::RecurrentCoupled { row: 0 });
    assert_eq!(cache.digest(), digest);
    // Nothing beyond the end is removed, and a copy needs an empty sequence.
    cache.seq_rm(a, 5, -1).unwrap();
    assert_eq!(cache.digest(), digest);
    cache.node_trim(1, 0).unwrap();
    let shape = KvShape { n_cells: 8, n_seq_max: 2, n_streams: 1, lifo: false };
    let mut other = KvCache::with_states(shape, 0).unwrap();
    let [c, d] = [(); 2].map(|()| other.seq_acquire(0).unwrap());
    extend(&mut other, c, 3..5);
    extend(&mut other, d, 0..2);
    recurrent(refused(other.seq_cp(c, d, 3, 5)));
    other.check();
}

#[test]
fn a_removed_row_removes_all_rows_of_its_sequence() {
    let mut cache = cache();
    let [a, b] = [(); 2].map(|()| cache.seq_acquire(0).unwrap());
    let (_, old) = extend(&mut cache, a, 0..2);
    let step = [rows(a, 2..5), rows(b, 0..2)].concat();
    let reservation = cache.prepare_rows(&borrow(&step)).unwrap();
    assert_eq!(reservation.commit_without(&[1], &[]), [Some(1), Some(1), Some(1), None, None]);
    cache.check();
    assert_eq!([a, b].map(|id| cache.pos_max(id).unwrap()), [Some(1), Some(1)]);
    assert_eq!(extend(&mut cache, a, 2..3).0, Some(old));
}

#[test]
fn a_sequence_continues_from_the_state_of_the_node_that_was_attached_last() {
    let mut cache = cache();
    let [a, b, c] = [(); 3].map(|()| cache.seq_acquire(0).unwrap());
    let (_, early) = extend(&mut cache, a, 0..3);
    cache.node_cache(1, a, 0, 3).unwrap();
    cache.node_keep_state(1, a).unwrap();
    let (_, late) = extend(&mut cache, a, 3..5);
    cache.node_cache(2, a, 3, 5).unwrap();
    cache.node_keep_state(2, a).unwrap();
    cache.node_keep_state(2, a).unwrap();
    assert_eq!(cache.n_states_kept(), 2);
    cache.seq_release(a).unwrap();
    cache.check();
    let _ = cache.node_attach(1, b, 0, 3).unwrap();
    let _ = cache.node_attach(1, c, 0, 3).unwrap();
    let _ = cache.node_attach(2, c, 3, 5).unwrap();
    cache.check();
    assert_eq!(extend(&mut cache, b, 3..4).0, Some(early));
    assert_eq!(extend(&mut cache, c, 5..6).0, Some(late));
    // Nothing is left once nodes and sequences are gone.
    cache.take_freed_states();
    cache.node_trim(2, 3).unwrap();
    cache.node_drop_state(1).unwrap();
    cache.node_drop_state(1).unwrap();
    assert_eq!(cache.take_freed_states(), [late, early]);
    cache.node_trim(1, 0).unwrap();
    for id in [b, c] {
        cache.seq_release(id).unwrap();
    }
    cache.check();
    assert_eq!((cache.n_states_kept(), cache.n_cells_free()), (0, 64));
}

#[test]
fn a_sequence_without_a_state_cannot_be_continued() {
    let mut cache = cache();
    let [a, b] = [(); 2].map(|()| cache.seq_acquire(0).unwrap());
    extend(&mut cache, a, 0..5);
    cache.node_cache(1, a, 0, 5).unwrap();
    cache.node_keep_state(1, a).unwrap();
    let slot = b.slot();
    // A part of the node, then the node with the state dropped.
    for p1 in [4, 5] {
        let _ = cache.node_attach(1, b, 0, p1).unwrap();
        let digest = cache.digest();
        let next = rows(b, p1..p1 + 1);
        let lacks = p1 < 5;
        match cache.prepare_rows(&borrow(&next)).map(drop) {
            Err(Error::Rejected(Rejected::Kv(error))) if lacks => {
                assert_eq!(error, KvError::NoState { slot });
            }
            result => assert!(result.is_ok() && !lacks, "{p1}: {result:?}"),
        }
        assert_eq!(cache.digest(), digest);
        cache.seq_rm(b, -1, -1).unwrap();
    }
    cache.node_drop_state(1).unwrap();
    let _ = cache.node_attach(1, b, 0, 5).unwrap();
    assert_eq!(refused(cache.node_keep_state(1, b)), KvError::NoState { slot });
    let next = rows(b, 5..6);
    assert_eq!(refused(cache.prepare_rows(&borrow(&next)).map(drop)), KvError::NoState { slot });
    cache.check();
}

#[test]
fn splits_and_trims_move_and_drop_the_state_of_a_node() {
    let mut cache = cache();
    let a = cache.seq_acquire(0).unwrap();
    let (_, state) = extend(&mut cache, a, 0..6);
    cache.node_cache(1, a, 0, 6).unwrap();
    cache.node_keep_state(1, a).unwrap();
    cache.node_trim(1, 6).unwrap();
    cache.node_split(1, 4, 2).unwrap();
    cache.check();
    assert_eq!(cache.n_states_kept(), 1);
    let b = cache.seq_acquire(0).unwrap();
    let _ = cache.node_attach(1, b, 0, 4).unwrap();
    let _ = cache.node_attach(2, b, 4, 6).unwrap();
    assert_eq!(extend(&mut cache, b, 6..7).0, Some(state));
    cache.node_trim(2, 5).unwrap();
    assert_eq!(cache.n_states_kept(), 0);
    cache.check();
}

#[test]
fn a_state_is_kept_where_the_node_ends_and_within_the_bound() {
    let mut cache = cache();
    let a = cache.seq_acquire(0).unwrap();
    for node in 0..3_i32 {
        extend(&mut cache, a, node..node + 1);
        cache.node_cache(node as u64, a, node, node + 1).unwrap();
        let kept = cache.node_keep_state(node as u64, a);
        if node < 2 {
            kept.unwrap();
            let digest = cache.digest();
            let error = refused(cache.node_keep_state(7, a));
            assert_eq!(error, KvError::NoNode { node: 7 });
            assert_eq!(cache.digest(), digest);
        } else {
            assert!(matches!(kept, Err(Error::Exhausted(Exhausted::States { capacity: 2 }))), "{kept:?}");
        }
    }
    cache.node_drop_state(0).unwrap();
    let error = refused(cache.node_keep_state(0, a));
    assert_eq!(error, KvError::NotAtEnd { slot: a.slot(), position: 1, expected: 3 });
    cache.node_keep_state(2, a).unwrap();
    cache.check();
    let too_many = KvShape { n_cells: 8, n_seq_max: 2, n_streams: 1, lifo: false };
    assert!(KvCache::with_states(too_many, (1 << 20) + 1).is_err());
}

#[test]
fn a_relinked_sequence_sees_the_cells_of_the_node_and_keeps_its_state() {
    let mut cache = cache();
    let [a, b] = [(); 2].map(|()| cache.seq_acquire(0).unwrap());
    extend(&mut cache, a, 0..4);
    cache.node_cache(1, a, 0, 4).unwrap();
    let (_, own) = extend(&mut cache, b, 0..6);
    let n_free = cache.n_cells_free();
    for (node, p0, p1) in [(1, 3, 5), (7, 0, 4), (1, 2, 2)] {
        let digest = cache.digest();
        refused(cache.node_relink(node, b, p0, p1));
        assert_eq!(cache.digest(), digest);
    }
    // Twice: the second time it sees the cells already.
    for _ in 0..2 {
        cache.node_relink(1, b, 1, 4).unwrap();
        cache.check();
        assert_eq!(cache.n_cells_free(), n_free + 3);
    }
    let cells = |id| {
        let mut cells = Vec::new();
        cache.visible_cells(id, 3, &mut cells);
        cells
    };
    assert_eq!(cells(a)[1..], cells(b)[1..]);
    assert_ne!(cells(a)[0], cells(b)[0]);
    assert_eq!(extend(&mut cache, b, 6..7).0, Some(own));
    // A node of another stream.
    let mut two = KvCache::new(KvShape { n_cells: 64, n_seq_max: 2, n_streams: 2, lifo: false }).unwrap();
    let [a, b] = [0, 1].map(|stream| two.seq_acquire(stream).unwrap());
    for id in [a, b] {
        let new = rows(id, 0..4);
        two.prepare_rows(&borrow(&new)).unwrap().commit();
    }
    two.node_cache(1, a, 0, 4).unwrap();
    let want = KvError::NodeStream { node: 1, stream: 0, slot: b.slot(), expected: 1 };
    assert_eq!(refused(two.node_relink(1, b, 0, 4)), want);
}

/// Random calls against a map from sequences and nodes to the number of the commit that made their state.
#[test]
fn random_calls_keep_the_states_of_a_plain_model() {
    for seed in 0..20 {
        let rng = &mut SplitMix64::new(seed);
        let mut cache = cache();
        let ids: Vec<SeqId> = (0..N_SEQS).map(|_| cache.seq_acquire(0).unwrap()).collect();
        // By sequence: its length, and the content of its state. By node: its length, and the content of its state.
        let mut model = [(0, 0_u64); N_SEQS];
        let mut nodes: BTreeMap<u64, (i32, Option<u64>)> = BTreeMap::new();
        let mut contents = vec![0; n_states(N_SEQS, N_KEPT)];
        for number in 1..=400 {
            let (i, j) = (rng.below(N_SEQS), rng.below(N_SEQS));
            let n_kept = nodes.values().filter(|(_, content)| content.is_some()).count();
            assert_eq!(cache.n_states_kept(), n_kept, "seed {seed}, call {number}");
            let chosen = nodes.keys().nth(rng.below(4)).copied();
            match rng.below(10) {
                0 => {
                    cache.seq_rm(ids[i], -1, -1).unwrap();
                    model[i] = (0, 0);
                }
                1 if model[j].0 == 0 => {
                    let _ = cache.seq_cp(ids[i], ids[j], -1, -1).unwrap();
                    model[j] = if i == j { model[j] } else { model[i] };
                }
                // A new node of a whole sequence, with its state if the bound allows.
                5 if model[i].0 > 0 && cache.node_cache(number, ids[i], 0, model[i].0).is_ok() => {
                    let kept = cache.node_keep_state(number, ids[i]).is_ok();
                    assert_eq!(kept, n_kept < N_KEPT);
                    nodes.insert(number, (model[i].0, kept.then_some(model[i].1)));
                }
                6 if chosen.is_some() && model[j].0 == 0 => {
                    let node = chosen.unwrap();
                    let (n, content) = nodes[&node];
                    let _ = cache.node_attach(node, ids[j], 0, n).unwrap();
                    match content {
                        Some(content) => model[j] = (n, content),
                        None => cache.seq_rm(ids[j], -1, -1).unwrap(),
                    }
                }
                7 if chosen.is_some() => {
                    cache.node_drop_state(chosen.unwrap()).unwrap();
                    nodes.get_mut(&chosen.unwrap()).unwrap().1 = None;
                }
                // Other cells at the same positions, with the same state.
                9 if chosen.is_some_and(|node| nodes[&node].0 <= model[j].0) => {
                    let node = chosen.unwrap();
                    cache.node_relink(node, ids[j], 0, nodes[&node].0).unwrap();
                }
                8 if chosen.is_some() => {
                    cache.node_trim(chosen.unwrap(), 0).unwrap();
                    nodes.remove(&chosen.unwrap());
                }
                kind => {
                    if model.iter().map(|(n, _)| n).sum::<i32>() > 50 {
                        cache.seq_keep(ids[i]).unwrap();
                        let kept = model[i];
                        model = [(0, 0); N_SEQS];
                        model[i] = kept;
                    }
                    let mut step = rows(ids[i], model[i].0..model[i].0 + 2);
                    if i != j {
                        step.extend(rows(ids[j], model[j].0..model[j].0 + 1));
                    }
                    let Ok(reservation) = cache.prepare_rows(&borrow(&step)) else { continue };
                    for (of, n) in [(i, 2), (j, 1)].into_iter().take(if i == j { 1 } else { 2 }) {
                        let (before, after) = reservation.kv().step_states(ids[of]).unwrap();
                        let got = before.map_or(0, |state| contents[state as usize]);
                        assert_eq!(got, model[of].1, "seed {seed}, call {number}");
                        // Written also where the step is dropped.
                        contents[after as usize] = number * 10 + of as u64;
                        if kind < 4 {
                            model[of] = (model[of].0 + n, number * 10 + of as u64);
                        }
                    }
                    if kind < 4 { reservation.commit() } else { drop(reservation) }
                }
            }
            cache.check();
        }
    }
}
