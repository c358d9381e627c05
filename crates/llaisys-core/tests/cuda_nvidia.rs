//! The device of a GPU on a driver that is made for the test (`fake_cuda`): what reaches the driver, in which order, and
//! what becomes of its errors. Kernels are compiled by the real NVRTC; nothing runs them.
#![cfg(feature = "cuda")]
#![allow(unsafe_code, reason = "loads the fakes and asks them")]

#[path = "common/c_library.rs"]
mod c_library;
#[path = "common/folder.rs"]
mod folder;

use c_library::{build, nvrtc_folder};
use folder::Folder;
use half::bf16;
use libloading::Library;
use llaisys_core::ops::cuda::device::{Device, DevicePtr, Element, Product};
use llaisys_core::ops::cuda::embed::{self, Embed};
use llaisys_core::ops::cuda::nvidia::{Nvidia, NvidiaSettings};
use llaisys_core::ops::cuda::probe::Cuda;
use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;

/// The fakes, and what can be asked of them.
struct Fake {
    folder: Folder,
    driver: Library,
    blas: Library,
}

impl Fake {
    fn new() -> Self {
        let folder = Folder::new();
        let driver = build(folder.path(), "libcuda.so.1", include_str!("fake_cuda/driver.c"), &[]);
        let blas = build(folder.path(), "libcublasLt.so.13", include_str!("fake_cuda/cublas_lt.c"), &[]);
        // SAFETY: loading them runs no code.
        let open = |path: PathBuf| unsafe { Library::new(path) }.unwrap();
        Self { driver: open(driver), blas: open(blas), folder }
    }

    /// Opens the GPU, as the probe finds it.
    fn open(&self) -> Result<Nvidia, llaisys_core::error::DeviceError> {
        let driver = self.folder.path().join("libcuda.so.1");
        let folders = [self.folder.path().to_owned(), nvrtc_folder()];
        let cuda = Cuda::find(driver.to_str().unwrap(), &folders).unwrap();
        let cubin_folder = Some(self.folder.path().join("cubins"));
        Nvidia::open(cuda, &NvidiaSettings { ordinal: 0, cubin_folder, n_threads: 2, synchronous: false })
    }

    fn notes(&self) -> String {
        // SAFETY: the signature is the fake's; the text ends with a zero.
        unsafe {
            let notes = self.driver.get::<unsafe extern "C" fn() -> *const c_char>(b"fake_notes").unwrap();
            CStr::from_ptr(notes()).to_str().unwrap().to_owned()
        }
    }

    fn fail_next_launch(&self, status: c_int) {
        // SAFETY: the signature is the fake's.
        unsafe {
            self.driver.get::<unsafe extern "C" fn(c_int)>(b"fake_fail_next_launch").unwrap()(status);
        }
    }

    fn n_heuristics(&self) -> c_int {
        // SAFETY: the signature is the fake's.
        unsafe { self.blas.get::<unsafe extern "C" fn() -> c_int>(b"fake_heuristics").unwrap()() }
    }
}

/// One test: the driver is the process's, and at the end it is lost.
#[test]
fn the_life_of_a_device() {
    let fake = Fake::new();
    let device = fake.open().unwrap();
    assert_eq!((device.facts().name.as_str(), device.facts().capability), ("Fake H100", 90));
    assert_eq!((device.facts().n_sms, device.facts().max_shared_bytes), (132, 232_448));
    let at = device.alloc("a test", 1 << 20).unwrap();
    copies_keep_their_order(&device, at);
    results_are_read_back_while_others_are_on_their_way(&device, at);
    products_are_column_major_and_planned_once(&device, &fake);
    kernels_get_their_parameters(&device, &fake, at);
    what_does_not_fit_is_said_in_numbers(&device);
    // Python's collector may drop it on any thread.
    std::thread::spawn(move || drop(device)).join().unwrap();
    // The workspace, and what the test asked for.
    assert!(fake.notes().ends_with(&format!("{}release;", "free;".repeat(9))), "{}", fake.notes());
    a_fatal_error_is_the_process_s(&fake);
}

/// The fake copies when somebody waits: an upload whose staging memory were used again too early would bring the bytes
/// of a later one.
fn copies_keep_their_order(device: &Nvidia, at: DevicePtr) {
    // More than the staging memory holds at once.
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

fn results_are_read_back_while_others_are_on_their_way(device: &Nvidia, at: DevicePtr) {
    let mut events = Vec::new();
    for step in 0..2000_u32 {
        device.upload(at, &step.to_le_bytes().repeat(2000)).unwrap();
        events.push((step, device.read_back(at, 8000).unwrap()));
        // Two steps are under way, as they will be.
        if events.len() == 2 {
            let (step, event) = events.remove(0);
            let mut back = [0; 8000];
            device.collect(event, &mut back).unwrap();
            assert!(back.chunks_exact(4).all(|word| word == step.to_le_bytes()), "step {step}");
        }
    }
    let refused = (0..2000).find_map(|_| device.read_back(at, 8000).err()).unwrap().to_string();
    assert!(refused.contains("waits to be collected"), "{refused}");
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
    for (bias_at, with_bias) in [(bias_at, 1.0), (bias_at, 1.0), (DevicePtr::NULL, 0.0)] {
        let out = device.alloc("a result", m * n * 4).unwrap();
        let product = Product {
            m,
            n,
            k,
            element: Element::Bf16,
            out_element: Element::F32,
            input: input_at,
            weight: weight_at,
            bias: bias_at,
            out,
        };
        device.product(&product).unwrap();
        let mut bytes = vec![0; m * n * 4];
        device.download(out, &mut bytes).unwrap();
        for (i, word) in bytes.chunks_exact(4).enumerate() {
            let (row, column) = (i / n, i % n);
            let dot: f32 = (0..k).map(|j| input[row * k + j] * weight[column * k + j]).sum();
            let got = f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            assert_eq!(got, dot + with_bias * bias[column], "row {row}, column {column}");
        }
    }
    assert_eq!(fake.n_heuristics(), 2, "one for each shape");
}

fn kernels_get_their_parameters(device: &Nvidia, fake: &Fake, at: DevicePtr) {
    let kernel = Embed {
        element: Element::Bf16,
        table: at,
        tokens: at.at(0x1000),
        out: at.at(0x2000),
        n_rows: 3,
        width: 64,
    };
    let function = embed::function(Element::Bf16);
    device.prepare(&[&function, &function]).unwrap();
    assert_eq!(device.n_compiled(), 1);
    kernel.launch(device).unwrap();
    let p = at.0;
    let launch = format!("embed(3,1,1)x(128,1,1)+0[{p:x},{:x},{:x},64];", p + 0x1000, p + 0x2000);
    assert!(fake.notes().ends_with(&launch), "{launch} is not at the end of {}", fake.notes());
    device.begin_capture().unwrap();
    kernel.launch(device).unwrap();
    let in_capture = device.upload(at, &[1]).unwrap_err().to_string();
    assert!(in_capture.contains("(906)"), "{in_capture}");
    let graph = device.end_capture().unwrap();
    device.replay(graph).unwrap();
    assert!(fake.notes().ends_with(&format!("captured {launch}replay;")), "{}", fake.notes());
}

fn what_does_not_fit_is_said_in_numbers(device: &Nvidia) {
    let error = device.alloc("the KV cells", 3 << 30).unwrap_err().to_string();
    for part in ["allocate the KV cells", "3.00 GiB", "1.00 of 2.00 GiB", "gpu_memory_utilization"] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
}

fn a_fatal_error_is_the_process_s(fake: &Fake) {
    let device = fake.open().unwrap();
    let at = device.alloc("a test", 1 << 12).unwrap();
    let kernel = Embed { element: Element::Bf16, table: at, tokens: at, out: at, n_rows: 1, width: 8 };
    fake.fail_next_launch(1);
    let error = kernel.launch(&device).unwrap_err().to_string();
    assert!(error.contains("launch embed of embed__T1") && error.contains("(1)"), "{error}");
    assert_eq!(device.n_compiled(), 0, "the first device left it on disk");
    kernel.launch(&device).unwrap();
    fake.fail_next_launch(700);
    let error = kernel.launch(&device).unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{error}");
    drop(device);
    let refused = fake.open().unwrap_err().to_string();
    for part in ["open GPU 0", "CUDA_ERROR_ILLEGAL_ADDRESS (700)", "restart"] {
        assert!(refused.contains(part), "{part} is not in: {refused}");
    }
}
