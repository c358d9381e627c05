//! Collective operations of ranks: sums in one order, the same bits on every rank, and no rank that waits for a failed
//! one.

use llaisys_core::collective::{Collective, LocalRank, SingleRank};
use llaisys_core::error::DeviceError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

const WORLDS: [usize; 3] = [2, 3, 4];

/// Runs `job` with each rank of a new group on its own thread. Returns the results in the order of the ranks.
fn on_all<T: Send>(world: usize, job: impl Fn(&mut LocalRank) -> T + Sync) -> Vec<T> {
    let job = &job;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            LocalRank::group(world).into_iter().map(|mut end| scope.spawn(move || job(&mut end))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers of very different sizes, so that the order of a sum shows in its bits.
fn words(rank: usize, round: usize, n: usize) -> Vec<f32> {
    let at = |i: usize| (rank * 31 + round * 7 + i * 13) % 23;
    (0..n).map(|i| (at(i) as f32 - 11.0) * 10_f32.powi((at(i) % 9) as i32 - 4)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn sums_are_in_the_order_of_the_ranks() {
    for world in WORLDS {
        // Lengths change from round to round, and some are 0.
        let lengths = (0..300).map(|round| round % 40);
        let sums = on_all(world, |end| {
            let sum = |(round, n)| {
                let mut buf = words(end.rank(), round, n);
                end.all_reduce_sum(&mut buf).unwrap();
                bits(&buf)
            };
            lengths.clone().enumerate().map(sum).collect::<Vec<_>>()
        });
        for (round, n) in lengths.enumerate() {
            let mut want = words(0, round, n);
            for rank in 1..world {
                want.iter_mut().zip(words(rank, round, n)).for_each(|(sum, x)| *sum += x);
            }
            for (rank, sums) in sums.iter().enumerate() {
                assert_eq!(sums[round], bits(&want), "rank {rank} of {world}, round {round}");
            }
        }
    }
}

#[test]
fn gather_is_in_the_order_of_the_ranks() {
    for world in WORLDS {
        let want: Vec<f32> = (0..world).flat_map(|rank| words(rank, 5, 7)).collect();
        let gathered = on_all(world, |end| {
            let mut all = vec![0.0; world * 7];
            end.all_gather(&words(end.rank(), 5, 7), &mut all).unwrap();
            end.all_gather(&[], &mut []).unwrap();
            all
        });
        assert!(gathered.iter().all(|all| bits(all) == bits(&want)), "{world} ranks");
    }
}

#[test]
fn broadcast_sends_the_values_of_its_root() {
    for world in WORLDS {
        let got = on_all(world, |end| {
            let from = |root| {
                let mut buf = words(end.rank(), 0, 9);
                end.broadcast(&mut buf, root).unwrap();
                bits(&buf)
            };
            (0..world).map(from).collect::<Vec<_>>()
        });
        let want: Vec<_> = (0..world).map(|root| bits(&words(root, 0, 9))).collect();
        assert!(got.iter().all(|got| *got == want), "{world} ranks");
    }
}

#[test]
fn operations_of_a_single_rank_do_nothing() {
    let (mut buf, mut all) = ([1.5, -2.0], [0.0; 2]);
    assert_eq!((SingleRank.rank(), SingleRank.world()), (0, 1));
    SingleRank.all_reduce_sum(&mut buf).unwrap();
    SingleRank.broadcast(&mut buf, 0).unwrap();
    SingleRank.all_gather(&buf, &mut all).unwrap();
    assert_eq!((buf, all), ([1.5, -2.0], [1.5, -2.0]));
}

fn is_lost(result: Result<(), DeviceError>) -> bool {
    matches!(result, Err(DeviceError::RankLost { .. }))
}

/// The rank takes part in some operations before it panics; the others wait already or arrive later.
#[test]
fn panic_of_a_rank_is_an_error_of_the_others() {
    for world in WORLDS {
        for (dying, n_before) in [(0, 0), (1, 3), (world - 1, 20)] {
            let n_lost = AtomicUsize::new(0);
            let end_all = |mut end: LocalRank| {
                let rank = end.rank();
                let mut n_done = 0;
                loop {
                    assert!(rank != dying || n_done < n_before, "injected");
                    if let Err(error) = end.all_reduce_sum(&mut [1.0]) {
                        assert!(error.to_string().contains(&format!("rank {rank} of {world}")));
                        break;
                    }
                    n_done += 1;
                }
                assert_eq!(n_done, n_before);
                assert!(is_lost(end.all_gather(&[1.0], &mut vec![0.0; world])), "later operations fail too");
                assert!(is_lost(end.broadcast(&mut [1.0], 0)));
                n_lost.fetch_add(1, Ordering::Relaxed);
            };
            let end_all = &end_all;
            std::thread::scope(|scope| {
                for end in LocalRank::group(world) {
                    // The panic drops the rank's handle, as it would in a thread that is not joined.
                    scope.spawn(move || catch_unwind(AssertUnwindSafe(|| end_all(end))));
                }
            });
            assert_eq!(n_lost.into_inner(), world - 1, "{world} ranks, rank {dying} fails");
        }
    }
}

#[test]
fn abort_of_a_rank_is_an_error_of_the_others() {
    let lost = on_all(3, |end| {
        if end.rank() == 1 {
            end.abort();
        }
        is_lost(end.all_reduce_sum(&mut [1.0]))
    });
    assert_eq!(lost, [true; 3]);
}

/// A rank that ends after its last operation does not disturb ranks that have not finished that operation yet.
#[test]
fn rank_that_ends_after_the_last_operation_does_not_disturb_the_others() {
    for _ in 0..300 {
        let sums = on_all(3, |end| {
            let mut buf = [end.rank() as f32];
            end.all_reduce_sum(&mut buf).map(|()| buf[0])
        });
        assert!(sums.iter().all(|sum| matches!(sum, Ok(3.0))), "{sums:?}");
    }
}
