//! Recurrent states: a sequence has one exactly while it has positions, forks share it, and only a commit replaces it.

use llaisys_core::error::{Error, KvError, Rejected};
use llaisys_core::kv::{KvCache, KvRow, KvShape, n_states};
use llaisys_core::ops::cases::SplitMix64;
use llaisys_core::seq::SeqId;

const N_SEQS: usize = 4;

fn cache() -> KvCache {
    KvCache::with_states(KvShape { n_cells: 64, n_seq_max: N_SEQS, n_streams: 1, lifo: false }).unwrap()
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
    recurrent(refused(cache.node_attach(1, b, 0, 5)));
    let coupled = [KvRow { position: 0, seqs: &[b, a] }];
    assert_eq!(refused(cache.prepare_rows(&coupled).map(drop)), KvError::RecurrentCoupled { row: 0 });
    assert_eq!(cache.digest(), digest);
    // Nothing beyond the end is removed, and a copy needs an empty sequence.
    cache.seq_rm(a, 5, -1).unwrap();
    assert_eq!(cache.digest(), digest);
    cache.node_trim(1, 0).unwrap();
    let mut other =
        KvCache::with_states(KvShape { n_cells: 8, n_seq_max: 2, n_streams: 1, lifo: false }).unwrap();
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
    assert_eq!(reservation.commit_without(&[1]), [Some(1), Some(1), Some(1), None, None]);
    cache.check();
    assert_eq!([a, b].map(|id| cache.pos_max(id).unwrap()), [Some(1), Some(1)]);
    assert_eq!(extend(&mut cache, a, 2..3).0, Some(old));
}

/// Random calls against a map from sequences to the number of the commit that made their state.
#[test]
fn random_calls_keep_the_states_of_a_plain_model() {
    for seed in 0..20 {
        let rng = &mut SplitMix64::new(seed);
        let mut cache = cache();
        let ids: Vec<SeqId> = (0..N_SEQS).map(|_| cache.seq_acquire(0).unwrap()).collect();
        // By sequence: its length, and the content of its state.
        let mut model = [(0, 0_u64); N_SEQS];
        let mut contents = vec![0; n_states(N_SEQS)];
        for number in 1..=400 {
            let (i, j) = (rng.below(N_SEQS), rng.below(N_SEQS));
            match rng.below(5) {
                0 => {
                    cache.seq_rm(ids[i], -1, -1).unwrap();
                    model[i] = (0, 0);
                }
                1 if model[j].0 == 0 => {
                    let _ = cache.seq_cp(ids[i], ids[j], -1, -1).unwrap();
                    model[j] = if i == j { model[j] } else { model[i] };
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
