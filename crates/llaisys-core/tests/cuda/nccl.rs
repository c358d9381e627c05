//! Exchanges through a fake NCCL (`cuda_driver/fake/nccl.c`): the calls of each rank, the results, and that no rank
//! waits for a lost one.
#![allow(unsafe_code, reason = "loads the fake and calls its functions")]

use crate::c_library::build;
use crate::model_files::TempFolder;
use half::bf16;
use libloading::Library;
use llaisys_core::cuda::device::{DevicePtr, Element, Exchange};
use llaisys_core::cuda::driver::library::CudaUnavailable;
use llaisys_core::cuda::driver::nccl::{Communicator, Nccl, NcclRank};
use llaisys_core::error::DeviceError;
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, Barrier};

const FAKE: &str = include_str!("../cuda_driver/fake/nccl.c");
/// The stream argument, which is passed on and never used.
const STREAM: usize = 0x5e;

/// A fake NCCL and its test functions. Each value loads its own copy.
struct Fake {
    nccl: Arc<Nccl>,
    library: Library,
    _folder: TempFolder,
}

impl Fake {
    fn new() -> Self {
        let folder = TempFolder::new();
        let path = build(folder.path(), "libnccl.so.2", FAKE, &[]);
        let nccl = Nccl::find(&[folder.path().to_owned()]).unwrap();
        // SAFETY: loading it runs no code.
        Self { nccl, library: unsafe { Library::new(path) }.unwrap(), _folder: folder }
    }

    /// Returns the calls of a rank's thread.
    fn notes(&self, rank: usize) -> String {
        // SAFETY: the signature is the fake's; the text ends with a zero.
        unsafe {
            let notes =
                self.library.get::<unsafe extern "C" fn(c_int) -> *const c_char>(b"fake_notes").unwrap();
            CStr::from_ptr(notes(rank as c_int)).to_str().unwrap().to_owned()
        }
    }

    fn fail(&self, how: &str, rank: usize, status: c_int) {
        // SAFETY: the signature is the fake's.
        unsafe {
            self.library.get::<unsafe extern "C" fn(c_int, c_int)>(how.as_bytes()).unwrap()(
                rank as c_int,
                status,
            );
        }
    }

    /// Runs `job` with each `NcclRank` of a new group on its own thread. Returns the results in the order of the ranks,
    /// `Err` for a rank that panics.
    fn on_all<T: Send>(
        &self,
        world: usize,
        job: impl Fn(usize, NcclRank) -> T + Sync,
    ) -> Vec<std::thread::Result<T>> {
        let members = self.nccl.group(world).unwrap();
        let job = &job;
        std::thread::scope(|scope| {
            let threads: Vec<_> = members
                .into_iter()
                .enumerate()
                .map(|(rank, member)| scope.spawn(move || job(rank, member)))
                .collect();
            threads.into_iter().map(|thread| thread.join()).collect()
        })
    }
}

fn start(end: &Communicator, exchange: Exchange) -> Result<(), DeviceError> {
    // SAFETY: the fake runs the exchange during the call and does not use the stream.
    unsafe { end.start(&exchange, STREAM as *mut _) }
}

/// Returns the address of host memory, which the fake uses as device memory.
fn at<T>(memory: &mut [T]) -> DevicePtr {
    // SAFETY: the fake uses it only during an exchange, while the caller borrows the slice.
    unsafe { DevicePtr::from_raw(memory.as_mut_ptr() as u64, size_of_val(memory)) }
}

/// Returns numbers of a rank with very different magnitudes.
fn numbers(rank: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| ((rank * 31 + i * 13) % 23) as f32 * 10_f32.powi((i % 5) as i32 - 2) - 3.0).collect()
}

fn is_lost(result: Result<(), DeviceError>) -> bool {
    matches!(result, Err(DeviceError::RankLost { .. }))
}

/// A sum of f32, one of bf16, a gather, and broadcasts from every root: results, counts, types, order, and the stream.
#[test]
fn exchanges_call_nccl_as_documented() {
    for world in [1, 2, 4] {
        let (fake, all_done) = (Fake::new(), Barrier::new(world));
        let results = fake.on_all(world, |rank, member| {
            let end = member.join().unwrap();
            assert_eq!((end.rank(), end.world()), (rank, world));
            let mut sum = numbers(rank, 37);
            start(&end, Exchange::AllReduceSum { at: at(&mut sum), n: 37, element: Element::F32 }).unwrap();
            let mut rounded: Vec<bf16> = numbers(rank, 5).into_iter().map(bf16::from_f32).collect();
            start(&end, Exchange::AllReduceSum { at: at(&mut rounded), n: 5, element: Element::Bf16 })
                .unwrap();
            let (mut own, mut gathered) = (numbers(rank, 3), vec![0.0_f32; 3 * world]);
            let (from, to) = (at(&mut own), at(&mut gathered));
            start(&end, Exchange::AllGather { from, to, n: 3, element: Element::F32 }).unwrap();
            let copies: Vec<Vec<u16>> = (0..world)
                .map(|root| {
                    let mut copy = vec![rank as u16; 2];
                    let of = Exchange::Broadcast { at: at(&mut copy), n: 2, element: Element::F16, root };
                    start(&end, of).unwrap();
                    copy
                })
                .collect();
            end.wait(|| Ok(true)).unwrap();
            all_done.wait();
            (sum, rounded, gathered, copies)
        });
        let in_order = |of: &dyn Fn(usize) -> Vec<f32>| {
            (1..world).fold(of(0), |sum, rank| sum.into_iter().zip(of(rank)).map(|(a, b)| a + b).collect())
        };
        for (rank, result) in results.into_iter().enumerate() {
            let (sum, rounded, gathered, copies) = result.unwrap();
            assert_eq!(sum, in_order(&|rank| numbers(rank, 37)), "rank {rank} of {world}");
            let of_bf16 = |rank| numbers(rank, 5).into_iter().map(|x| bf16::from_f32(x).to_f32()).collect();
            assert_eq!(rounded, in_order(&of_bf16).into_iter().map(bf16::from_f32).collect::<Vec<_>>());
            assert_eq!(gathered, (0..world).flat_map(|rank| numbers(rank, 3)).collect::<Vec<_>>());
            assert_eq!(copies, (0..world).map(|root| vec![root as u16; 2]).collect::<Vec<_>>());
            // ncclFloat32 is 7, ncclBfloat16 9, ncclFloat16 6.
            let copies: String = (0..world).map(|root| format!("copy(2,6,{root})@5e;")).collect();
            let calls =
                format!("init {rank} of {world};sum(37,7,0)@5e;sum(5,9,0)@5e;gather(3,7,0)@5e;{copies}");
            assert_eq!(fake.notes(rank), format!("{calls}destroy;"));
        }
    }
}

/// Runs two groups at once. A rank with a damaged id would join the other group.
#[test]
fn groups_are_independent() {
    let fake = Fake::new();
    let meet = |first: f32| {
        let (fake, all_done) = (&fake, Barrier::new(2));
        let sums = fake.on_all(2, |rank, member| {
            let end = member.join().unwrap();
            let mut sum = [first + rank as f32];
            let all: Vec<f32> = (0..50)
                .map(|_| {
                    start(&end, Exchange::AllReduceSum { at: at(&mut sum), n: 1, element: Element::F32 })
                        .unwrap();
                    std::mem::replace(&mut sum, [first + rank as f32])[0]
                })
                .collect();
            all_done.wait();
            all
        });
        for sum in sums {
            assert_eq!(sum.unwrap(), vec![2.0 * first + 1.0; 50]);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| meet(10.0));
        scope.spawn(|| meet(1000.0));
    });
}

/// NCCL would wait forever for a rank that could not open its GPU, so no other rank calls NCCL.
#[test]
fn ranks_do_not_wait_for_one_that_does_not_join() {
    let fake = Fake::new();
    let joined =
        fake.on_all(3, |rank, member| if rank == 1 { None } else { Some(member.join().map(|_| ())) });
    for (rank, joined) in joined.into_iter().enumerate() {
        assert_eq!(joined.unwrap().map(is_lost), (rank != 1).then_some(true), "rank {rank}");
        assert_eq!(fake.notes(rank), "");
    }
}

/// A rank panics after some exchanges, and the work of the others never completes.
#[test]
fn a_panic_of_one_rank_is_an_error_on_the_others() {
    for (world, panicking, n_before) in [(2, 0, 0), (2, 1, 3), (4, 2, 5)] {
        let fake = Fake::new();
        let ends = fake.on_all(world, |rank, member| {
            let end = member.join().unwrap();
            let mut sum = [1.0_f32];
            for _ in 0..n_before {
                start(&end, Exchange::AllReduceSum { at: at(&mut sum), n: 1, element: Element::F32 })
                    .unwrap();
            }
            assert_ne!(rank, panicking, "this rank panics");
            let error = end.wait(|| Ok(false)).unwrap_err();
            assert!(error.to_string().contains(&format!("rank {rank} of {world}")), "{error}");
            assert!(is_lost(start(
                &end,
                Exchange::AllReduceSum { at: at(&mut sum), n: 1, element: Element::F32 }
            )));
            assert!(is_lost(end.wait(|| Ok(true))), "work that ended after an abort has no result");
        });
        for (rank, end) in ends.into_iter().enumerate() {
            assert_eq!(end.is_err(), rank == panicking, "rank {rank}");
            let notes = fake.notes(rank);
            assert_eq!(notes.matches("sum").count(), n_before, "{notes}");
            assert!(notes.ends_with("abort;") && notes.matches("abort").count() == 1, "{notes}");
            assert!(!notes.contains("destroy"), "{notes}");
        }
    }
}

#[test]
fn an_abort_of_one_rank_is_an_error_on_the_others() {
    let fake = Fake::new();
    let lost = fake.on_all(3, |rank, member| {
        let end = member.join().unwrap();
        if rank == 2 {
            end.abort();
        }
        is_lost(end.wait(|| Ok(false)))
    });
    assert!(lost.into_iter().all(|lost| lost.unwrap()));
}

#[test]
fn errors_have_the_text_of_nccl_and_the_operation() {
    let fake = Fake::new();
    fake.fail("fake_fail_next", 0, 2);
    let error = fake.nccl.group(2).unwrap_err().to_string();
    assert!(error.contains("make a group") && error.contains("unhandled system error (2)"), "{error}");
    let alone = || fake.nccl.group(1).unwrap().remove(0);
    let member = alone();
    fake.fail("fake_fail_next", 0, 6);
    let error = member.join().unwrap_err().to_string();
    assert!(
        error.contains("join 1 GPUs as rank 0") && error.contains("remote process exited (6)"),
        "{error}"
    );
    let end = alone().join().unwrap();
    fake.fail("fake_fail_next", 0, 6);
    let error = start(&end, Exchange::AllReduceSum { at: at(&mut [1.0_f32]), n: 1, element: Element::F32 });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("all-reduce of 1 x F32") && error.contains("remote process exited (6)"),
        "{error}"
    );
    // An asynchronous error ends the group, which was healthy until then.
    end.wait(|| Ok(true)).unwrap();
    fake.fail("fake_fail_async", 0, 6);
    let error = end.wait(|| Ok(false)).unwrap_err().to_string();
    assert!(error.contains("remote process exited (6)"), "{error}");
    assert!(is_lost(end.wait(|| Ok(true))));
    assert!(fake.notes(0).ends_with("abort;"), "{}", fake.notes(0));
}

#[test]
fn a_missing_library_is_an_error_that_names_the_package() {
    let folder = TempFolder::new();
    // No machine that runs this test has an NCCL in its loader's path.
    let error = Nccl::find(&[folder.path().to_owned()]).unwrap_err();
    let text = error.to_string();
    for part in ["libnccl.so.2", "nvidia-nccl-cu13", "llaisys[cuda-tp]", folder.path().to_str().unwrap()] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    std::fs::write(folder.path().join("libnccl.so.2"), b"not an object").unwrap();
    let error = Nccl::find(&[folder.path().to_owned()]).unwrap_err();
    assert!(matches!(error, CudaUnavailable::LibraryBroken { .. }), "{error:?}");
}

#[test]
fn a_library_that_is_not_nccl_or_too_old_is_refused() {
    let with = |define: &str| {
        let folder = TempFolder::new();
        build(folder.path(), "libnccl.so.2", FAKE, &[define]);
        Nccl::find(&[folder.path().to_owned()]).map(|nccl| nccl.version())
    };
    assert_eq!(with("VERSION=22809"), Ok(22_809));
    let text = with("VERSION=20908").unwrap_err().to_string();
    assert!(text.contains("NCCL 2.9,") && text.contains("2.10 or newer"), "{text}");
    let error = with("NO_DESTROY").unwrap_err();
    assert!(matches!(error, CudaUnavailable::MissingSymbol { symbol: "ncclCommDestroy", .. }), "{error:?}");
}
