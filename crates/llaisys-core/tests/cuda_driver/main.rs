//! The GPU's device on a fake driver, NVRTC, cublasLt and NCCL (`fake`), which run the work as late as possible. The
//! tests check the calls, their order, and how errors are reported.
#![cfg(feature = "cuda")]
#![allow(unsafe_code, reason = "calls the fakes' functions and launches kernels")]

#[path = "../common/temp_folder.rs"]
mod temp_folder;

use half::bf16;
use libloading::Library;
use llaisys_core::cuda::device::{Device, DevicePtr, Element, Exchange, Product};
use llaisys_core::cuda::driver::nccl::Nccl;
use llaisys_core::cuda::driver::nvidia::{Nvidia, NvidiaSettings};
use llaisys_core::cuda::driver::probe::Cuda;
use llaisys_core::cuda::ops::embed::{self, Embed};
use llaisys_core::error::DeviceError;
use std::ffi::{c_int, c_ulonglong};
use std::process::Command;
use temp_folder::TempFolder;

/// The fakes and their test functions.
struct Fake {
    folder: TempFolder,
    driver: Library,
    blas: Library,
}

impl Fake {
    fn new() -> Self {
        let folder = TempFolder::new();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cuda_driver/fake/build.sh");
        assert!(Command::new(script).arg(folder.path()).status().unwrap().success());
        // SAFETY: loading them runs only the constructors of their tables.
        let open = |name| unsafe { Library::new(folder.path().join(name)) }.unwrap();
        Self { driver: open("libcuda.so.1"), blas: open("libcublasLt.so.13"), folder }
    }

    /// Opens the GPU that the probe finds.
    fn open(&self) -> Result<Nvidia, DeviceError> {
        let driver = self.folder.path().join("libcuda.so.1");
        let cuda = Cuda::find(driver.to_str().unwrap(), &[self.folder.path().to_owned()]).unwrap();
        let cubin_folder = Some(self.folder.path().join("cubins"));
        Nvidia::open(cuda, &NvidiaSettings { ordinal: 0, cubin_folder, n_threads: 2, synchronous: false })
    }

    /// Returns the number of contexts and allocations that were not freed.
    fn n_not_freed(&self) -> c_ulonglong {
        // SAFETY: the signature is the fake's.
        unsafe { self.driver.get::<unsafe extern "C" fn() -> c_ulonglong>(b"fake_not_freed").unwrap()() }
    }

    fn fail_next_launch(&self, status: c_int) {
        // SAFETY: the signature is the fake's.
        unsafe {
            self.driver.get::<unsafe extern "C" fn(c_int)>(b"fake_fail_next_launch").unwrap()(status);
        }
    }

    /// Makes the driver never complete any work.
    fn get_stuck(&self) {
        // SAFETY: the signature is the fake's.
        unsafe { self.driver.get::<unsafe extern "C" fn()>(b"fake_get_stuck").unwrap()() };
    }

    fn n_heuristics(&self) -> c_int {
        // SAFETY: the signature is the fake's.
        unsafe { self.blas.get::<unsafe extern "C" fn() -> c_int>(b"fake_heuristics").unwrap()() }
    }
}

/// One test, because the process has one driver, which is lost at the end.
#[test]
fn a_device_works_from_open_to_a_fatal_error() {
    let fake = Fake::new();
    let device = fake.open().unwrap();
    assert_eq!((device.facts().name.as_str(), device.facts().capability), ("Fake H100", 90));
    assert_eq!((device.facts().n_sms, device.facts().max_shared_bytes), (8, 99 << 10));
    let at = device.alloc("a test", 1 << 20).unwrap();
    copies_keep_their_order(&device, at);
    read_backs_are_collected_while_later_work_runs(&device, at);
    products_are_column_major_and_planned_once(&device, &fake);
    kernels_run_with_their_parameters(&device, at);
    a_replayed_graph_repeats_the_captured_work(&device);
    an_allocation_that_does_not_fit_is_reported_with_its_numbers(&device);
    // Python's garbage collector may drop it on any thread.
    std::thread::spawn(move || drop(device)).join().unwrap();
    assert_eq!(fake.n_not_freed(), 0);
    exchanges_do_not_wait_for_a_lost_rank(&fake);
    a_fatal_error_makes_cuda_unusable_in_the_process(&fake);
}

/// The fake copies when the host waits. If staging memory were reused too early, an upload would copy the bytes of a
/// later one.
fn copies_keep_their_order(device: &Nvidia, at: DevicePtr) {
    // More than fits into the staging memory.
    let piece = |i: u8| vec![i; 12 << 20];
    let large = device.alloc("pieces", 9 * (12 << 20)).unwrap();
    for i in 0..9 {
        device.upload(large.at(usize::from(i) * (12 << 20)), &piece(i)).unwrap();
    }
    let mut back = vec![0; 12 << 20];
    for i in 0..9 {
        device.download(large.at(usize::from(i) * (12 << 20)), &mut back).unwrap();
        assert!(back == piece(i), "piece {i}");
    }
    let numbers: Vec<u8> = (0..(40 << 20)).map(|i: u32| (i % 251) as u8).collect();
    device.upload(large, &numbers).unwrap();
    let mut back = vec![0; numbers.len()];
    device.download(large, &mut back).unwrap();
    assert!(back == numbers, "one upload of several pieces");
    device.fill(at, 7, 100).unwrap();
    device.upload(at.at(10), &[1, 2, 3]).unwrap();
    let mut back = [0; 16];
    device.download(at, &mut back).unwrap();
    assert_eq!(back, [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 1, 2, 3, 7, 7, 7]);
}

fn read_backs_are_collected_while_later_work_runs(device: &Nvidia, at: DevicePtr) {
    let mut events = Vec::new();
    for step in 0..2000_u32 {
        device.upload(at, &step.to_le_bytes().repeat(2000)).unwrap();
        events.push((step, device.read_back(at, 8000).unwrap()));
        // Two steps are in flight, as in async scheduling.
        if events.len() == 2 {
            let (step, event) = events.remove(0);
            let mut back = [0; 8000];
            device.collect(event, &mut back).unwrap();
            assert!(back.chunks_exact(4).all(|word| word == step.to_le_bytes()), "step {step}");
        }
    }
    let refused = (0..2000).find_map(|_| device.read_back(at, 8000).err()).unwrap().to_string();
    assert!(refused.contains("uncollected read-backs"), "{refused}");
}

fn products_are_column_major_and_planned_once(device: &Nvidia, fake: &Fake) {
    let (m, n, k) = (3, 5, 16);
    let numbers = |n: usize, step: usize| (0..n).map(move |i| ((i * step) % 7) as f32 - 3.0);
    let elements = |values: &[f32]| {
        let at = device.alloc("elements", values.len() * 2).unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
        device.upload(at, &bytes).unwrap();
        device.synchronize().unwrap();
        at
    };
    let (input, weight, bias): (Vec<f32>, Vec<f32>, Vec<f32>) =
        (numbers(m * k, 3).collect(), numbers(n * k, 5).collect(), numbers(n, 2).collect());
    let [input_at, weight_at, bias_at] = [&input, &weight, &bias].map(|values| elements(values));
    let (stored, wide) = ((bias_at, 1.0, Element::Bf16), (DevicePtr::NULL, 0.0, Element::F32));
    for (bias_at, with_bias, out_element) in [stored, stored, wide] {
        let n_bytes = out_element.n_bytes(m * n);
        let out = device.alloc("a result", n_bytes).unwrap();
        let product = Product {
            m,
            n,
            k,
            element: Element::Bf16,
            out_element,
            input: input_at,
            weight: weight_at,
            bias: bias_at,
            out,
        };
        device.product(&product).unwrap();
        let mut bytes = vec![0; n_bytes];
        device.download(out, &mut bytes).unwrap();
        // Sums below 256 are exact in bf16.
        for (i, word) in bytes.chunks_exact(n_bytes / (m * n)).enumerate() {
            let (row, column) = (i / n, i % n);
            let dot: f32 = (0..k).map(|j| input[row * k + j] * weight[column * k + j]).sum();
            let got = match *word {
                [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
                [a, b] => bf16::from_le_bytes([a, b]).to_f32(),
                _ => unreachable!("an element has 2 or 4 bytes"),
            };
            assert_eq!(got, dot + with_bias * bias[column], "row {row}, column {column}");
        }
    }
    assert_eq!(fake.n_heuristics(), 2, "one per shape");
}

/// Returns `n` rows of different bf16 numbers.
fn rows(n: usize, width: usize) -> Vec<u8> {
    (0..(n * width) as u16).flat_map(|bits| (0x3f80 + bits).to_le_bytes()).collect()
}

fn tokens(ids: &[i32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn kernels_run_with_their_parameters(device: &Nvidia, at: DevicePtr) {
    let (table, width) = (rows(5, 64), 64);
    let [table_at, tokens_at, out] = [at, at.at(0x1000), at.at(0x2000)];
    device.upload(table_at, &table).unwrap();
    device.upload(tokens_at, &tokens(&[4, 0, 3])).unwrap();
    let function = embed::function(Element::Bf16);
    device.prepare(&[&function, &function]).unwrap();
    assert_eq!(device.n_compiled(), 1);
    let kernel = Embed { element: Element::Bf16, table: table_at, tokens: tokens_at, out, n_rows: 3, width };
    // SAFETY: the table has a row for each token.
    unsafe { kernel.launch(device) }.unwrap();
    let mut got = vec![0; 3 * width * 2];
    device.download(out, &mut got).unwrap();
    let row = |i: usize| &table[i * width * 2..][..width * 2];
    assert!(got == [row(4), row(0), row(3)].concat());
}

/// A fill, a kernel and a product with a bias, whose inputs change between replays.
fn a_replayed_graph_repeats_the_captured_work(device: &Nvidia) {
    let alloc = |n_bytes| device.alloc("a graph's", n_bytes).unwrap();
    let [table, ids, picked, bias, out, filled] = [256, 8, 64, 32, 16, 16].map(alloc);
    device.upload(table, &rows(4, 16)).unwrap();
    device.upload(bias, &[0; 32]).unwrap();
    let kernel = Embed { element: Element::Bf16, table, tokens: ids, out: picked, n_rows: 2, width: 16 };
    let product = Product {
        m: 2,
        n: 4,
        k: 16,
        element: Element::Bf16,
        out_element: Element::Bf16,
        input: picked,
        weight: table,
        bias,
        out,
    };
    device.prepare(&[&embed::function(Element::Bf16)]).unwrap();
    device.begin_capture().unwrap();
    device.fill(filled, 9, 16).unwrap();
    // SAFETY: the table has a row for each id that is uploaded before a replay.
    unsafe { kernel.launch(device) }.unwrap();
    device.product(&product).unwrap();
    let refused = [
        device.upload(ids, &[1]).unwrap_err(),
        device.download(ids, &mut [0]).unwrap_err(),
        device.read_back(ids, 1).unwrap_err(),
        device.alloc("in a capture", 1).unwrap_err(),
        device.synchronize().unwrap_err(),
    ];
    assert!(refused.iter().all(|e| e.to_string().contains("not allowed in a capture")), "{refused:?}");
    let graph = device.end_capture().unwrap();
    let mut nothing = [0; 16];
    device.download(filled, &mut nothing).unwrap();
    assert_eq!(nothing, [255; 16], "a capture runs nothing");
    for picks in [[0, 3], [2, 1]] {
        device.upload(ids, &tokens(&picks)).unwrap();
        device.fill(filled, 0, 16).unwrap();
        device.replay(graph).unwrap();
        let mut by_graph = [0; 16];
        device.download(out, &mut by_graph).unwrap();
        // SAFETY: the table has a row for each id.
        unsafe { kernel.launch(device) }.unwrap();
        device.product(&product).unwrap();
        let mut eager = [0; 16];
        device.download(out, &mut eager).unwrap();
        assert_eq!(by_graph, eager, "rows {picks:?}");
        assert!(by_graph[..8] != by_graph[8..], "different rows have different products");
        let mut nines = [0; 16];
        device.download(filled, &mut nines).unwrap();
        assert_eq!(nines, [9; 16]);
    }
}

fn an_allocation_that_does_not_fit_is_reported_with_its_numbers(device: &Nvidia) {
    let free = device.free_bytes().unwrap() as f64 / (1_u64 << 30) as f64;
    let error = device.alloc("the KV cells", 3 << 30).unwrap_err().to_string();
    let numbers = format!("{free:.2} of 2.00 GiB");
    for part in ["allocate the KV cells", "3.00 GiB", &numbers, "gpu_memory_utilization"] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
}

/// Rank 0 has a GPU. Rank 1 is a thread without one that takes part in one exchange. At the end the GPU never
/// completes, and rank 1 ends.
fn exchanges_do_not_wait_for_a_lost_rank(fake: &Fake) {
    let nccl = Nccl::find(&[fake.folder.path().to_owned()]).unwrap();
    let mut members = nccl.group(2).unwrap();
    let (other, own) = (members.remove(1), members.remove(0));
    let mut device = fake.open().unwrap();
    assert_eq!((device.rank(), device.world()), (0, 1));
    let at = device.alloc("numbers", 16).unwrap();
    let exchange = Exchange::AllReduceSum { at, n: 4, element: Element::F32 };
    let alone = device.exchange(&exchange).unwrap_err().to_string();
    assert!(alone.contains("joined no other ranks"), "{alone}");
    let words = |values: [f32; 4]| values.map(f32::to_le_bytes).concat();
    let (leave, may_leave) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let peer = scope.spawn(move || {
            let end = other.join().unwrap();
            let mut numbers = [10.0_f32, 20.0, 30.0, 40.0];
            // SAFETY: the memory lives until the end of the thread, and only the exchange below uses the pointer.
            let at = unsafe { DevicePtr::from_raw(numbers.as_mut_ptr() as u64, size_of_val(&numbers)) };
            let exchange = Exchange::AllReduceSum { at, n: 4, element: Element::F32 };
            // SAFETY: the fake runs the exchange during the call and does not use the stream.
            unsafe { end.start(&exchange, std::ptr::null_mut()) }.unwrap();
            // The sender is dropped when this rank may end.
            let _ = may_leave.recv();
        });
        device.join(own).unwrap();
        assert_eq!((device.rank(), device.world()), (0, 2));
        device.upload(at, &words([1.0, 2.0, 3.0, 4.0])).unwrap();
        device.exchange(&exchange).unwrap();
        let mut back = [0; 16];
        device.download(at, &mut back).unwrap();
        assert_eq!(back.as_slice(), words([11.0, 22.0, 33.0, 44.0]));
        let event = device.read_back(at, 16).unwrap();
        device.collect(event, &mut back).unwrap();
        assert_eq!(back.as_slice(), words([11.0, 22.0, 33.0, 44.0]));
        fake.get_stuck();
        let event = device.read_back(at, 16).unwrap();
        drop(leave);
        peer.join().unwrap();
        let lost = |result| matches!(result, Err(DeviceError::RankLost { rank: 0, world: 2 }));
        assert!(lost(device.collect(event, &mut back)));
        assert!(lost(device.synchronize()) && lost(device.exchange(&exchange)));
    });
}

fn a_fatal_error_makes_cuda_unusable_in_the_process(fake: &Fake) {
    let device = fake.open().unwrap();
    let at = device.alloc("a test", 1 << 12).unwrap();
    let kernel = Embed { element: Element::Bf16, table: at, tokens: at, out: at, n_rows: 1, width: 8 };
    // SAFETY: token 0 is in the table. The fake checks addresses, so it reports the row that is not, below.
    let launch = || unsafe { kernel.launch(&device) };
    device.fill(at, 0, 1 << 12).unwrap();
    fake.fail_next_launch(1);
    let error = launch().unwrap_err().to_string();
    assert!(error.contains("launch embed of embed__T1") && error.contains("(1)"), "{error}");
    assert_eq!(device.n_compiled(), 0, "the disk cache has it from the first device");
    launch().unwrap();
    device.synchronize().unwrap();
    // A row half a MiB behind the table. The launch itself succeeds, because it is asynchronous.
    device.upload(at, &tokens(&[1 << 15])).unwrap();
    launch().unwrap();
    let event = device.read_back(at, 8).unwrap();
    let error = device.collect(event, &mut [0; 8]).unwrap_err().to_string();
    assert!(error.contains("a step failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{error}");
    assert!(launch().unwrap_err().to_string().contains("(700)"), "the error persists");
    drop(device);
    let refused = fake.open().unwrap_err().to_string();
    for part in ["open GPU 0", "CUDA_ERROR_ILLEGAL_ADDRESS (700)", "restart"] {
        assert!(refused.contains(part), "{part} is not in: {refused}");
    }
}
