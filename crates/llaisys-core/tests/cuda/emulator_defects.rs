//! Tests of the emulator: it detects each defect of the kernels in `emulator/defects.cu`.

use crate::emulator::Emulator;
use crate::emulator::arrays::Arrays;
use llaisys_core::cuda::device::{Arg, Device, DevicePtr, Element, Launch, Product};
use llaisys_core::cuda::kernel_source::{self, Function, Kernel, KernelSource};
use llaisys_core::ops::cases::{Size, SplitMix64};

const fn warp(name: &'static str) -> Kernel {
    Kernel { name, max_threads: 32, max_registers: 64, max_shared_bytes: |_| 128 }
}

const fn block(name: &'static str) -> Kernel {
    Kernel { name, max_threads: 128, max_registers: 64, max_shared_bytes: Kernel::NO_SHARED }
}

static DEFECTS: KernelSource = KernelSource {
    name: "defects",
    text: include_str!("emulator/defects.cu"),
    variants: kernel_source::by_storage,
    kernels: &[
        warp("read_behind"),
        warp("write_behind"),
        block("barrier_missing"),
        block("barrier_there"),
        warp("warp_barrier_missing"),
        block("blocks_depend"),
        warp("shared_unwritten"),
        warp("dynamic_unwritten"),
        warp("dynamic_behind"),
        warp("index_outside"),
        block("barrier_of_some"),
        block("barriers_apart"),
        warp("shuffle_of_some"),
        warp("shuffle_of_half"),
        warp("misaligned"),
        warp("copy_unawaited"),
        warp("copy_awaited"),
        warp("copy_to_nowhere"),
        warp("divides"),
        warp("tile_product"),
        block("reductions"),
    ],
};

fn device() -> Emulator {
    Emulator::new()
}

fn function(element: Element, name: &'static str) -> Function {
    DEFECTS.function(&[kernel_source::storage(element)], name)
}

/// Runs one block of a kernel, with the most threads of that kernel.
fn run(device: &Emulator, name: &'static str, args: &[Arg]) -> Result<(), String> {
    run_grid(device, name, 1, args)
}

fn run_grid(device: &Emulator, name: &'static str, n_blocks: u32, args: &[Arg]) -> Result<(), String> {
    let kernel = DEFECTS.kernels.iter().find(|kernel| kernel.name == name).expect("it is listed");
    let function = function(Element::Bf16, name);
    let shared_bytes = if name.starts_with("dynamic") { 128 } else { 0 };
    let launch =
        Launch { function: &function, grid: [n_blocks, 1, 1], block: kernel.max_threads, shared_bytes, args };
    // SAFETY: the emulator's guard pages stop what the defects access outside of their arrays.
    unsafe { device.launch(&launch) }.map_err(|e| e.to_string())
}

fn floats(device: &Emulator, what: &'static str, n: usize) -> DevicePtr {
    device.unwritten(what, Element::F32, n)
}

/// Asserts that the launch fails with a message that has all `words`, and that the device is lost after that.
fn assert_fails(name: &'static str, arrays: &[usize], rest: &[Arg], words: &[&str]) {
    let device = device();
    let mut args: Vec<Arg> = arrays.iter().map(|&n| Arg::Ptr(floats(&device, "numbers", n))).collect();
    args.extend(rest);
    let error = run(&device, name, &args).expect_err(name);
    for word in words.iter().chain([&name]) {
        assert!(error.contains(word), "{name}: {word:?} is not in {error:?}");
    }
    let after = device.synchronize().expect_err("the device is lost").to_string();
    assert!(after.contains("the device is lost since") && after.contains(name), "{after}");
}

#[test]
fn accesses_outside_of_an_allocation_are_errors_that_name_it() {
    let words = ["block (0, 0, 0), thread", "behind the end of `numbers` (128 bytes)"];
    assert_fails("read_behind", &[32, 32], &[Arg::I32(1)], &words);
    assert_fails("write_behind", &[32], &[Arg::I32(1)], &words);
    // Far from the end, and before the start.
    assert_fails("read_behind", &[32, 32], &[Arg::I32(200_000)], &words);
    assert_fails("write_behind", &[32], &[Arg::I32(-2000)], &["before `numbers`"]);
    // In the padding behind an array of 29 numbers.
    let whole = device();
    let at = floats(&whole, "odd", 29);
    let error = run(&whole, "write_behind", &[Arg::Ptr(at), Arg::I32(0)]).expect_err("3 numbers too many");
    assert!(error.contains("wrote behind the end of `odd`"), "{error}");
}

#[test]
fn a_launch_whose_accesses_are_inside_its_arrays_succeeds() {
    let device = device();
    let (x, y) = (floats(&device, "x", 32), floats(&device, "y", 32));
    run(&device, "read_behind", &[Arg::Ptr(x), Arg::Ptr(y), Arg::I32(0)]).expect("all inside");
}

/// Under a random order of threads and blocks, results that depend on the order are wrong.
#[test]
fn missing_barriers_and_dependent_blocks_show_in_results() {
    let of_next_thread = |n: usize| (0..n).map(|i| ((i + 1) % n) as f32).collect::<Vec<_>>();
    let of = |name, n_blocks, n| {
        let device = device();
        let y = floats(&device, "y", n);
        run_grid(&device, name, n_blocks, &[Arg::Ptr(y)]).expect("it runs");
        device.read(Element::F32, y, n)
    };
    assert_eq!(of("barrier_there", 1, 128), of_next_thread(128));
    // Without barriers some thread runs before the next one in every order. 64 blocks run in order with probability
    // 1/64!.
    assert_ne!(of("barrier_missing", 1, 128), of_next_thread(128));
    assert_ne!(of("warp_barrier_missing", 1, 32), of_next_thread(32));
    assert_ne!(of("blocks_depend", 64, 64), (1..=64).map(|i| i as f32).collect::<Vec<_>>());
}

#[test]
fn the_seed_determines_the_order_of_threads() {
    let result = |seed| {
        let device = Emulator::with_seed(seed);
        let y = floats(&device, "y", 128);
        run(&device, "barrier_missing", &[Arg::Ptr(y)]).expect("it runs");
        device.read_bytes(y, 512)
    };
    assert_eq!(result(5), result(5));
    assert_ne!(result(5), result(6));
}

#[test]
fn unwritten_shared_memory_is_nan() {
    let of = |name| {
        let device = device();
        let y = floats(&device, "y", 32);
        run(&device, name, &[Arg::Ptr(y)]).expect("it runs");
        device.read(Element::F32, y, 32)
    };
    assert!(of("shared_unwritten")[31].is_nan());
    assert!(of("dynamic_unwritten").iter().all(|x| x.is_nan()));
}

#[test]
fn accesses_outside_of_shared_memory_are_errors() {
    assert_fails("dynamic_behind", &[32], &[], &["touches memory that is not its own"]);
    assert_fails("index_outside", &[32], &[Arg::I32(1)], &["index outside of an array"]);
}

#[test]
fn barriers_that_some_threads_do_not_reach_are_errors() {
    assert_fails("barrier_of_some", &[128], &[], &["waits at __syncthreads", "defects.cu", "has returned"]);
    assert_fails(
        "barriers_apart",
        &[128],
        &[],
        &["__syncthreads at", "while threads of the same group are at"],
    );
    assert_fails("shuffle_of_some", &[32], &[], &["waits at __shfl_xor_sync", "has returned"]);
    assert_fails("shuffle_of_half", &[32], &[], &["mask 0000ffff", "whole warps only"]);
}

#[test]
fn misaligned_16_byte_accesses_and_undefined_arithmetic_are_errors() {
    assert_fails("misaligned", &[256, 256], &[], &["misaligned access"]);
    assert_fails("divides", &[32], &[Arg::I32(0)], &["undefined arithmetic"]);
}

#[test]
fn an_async_copy_arrives_when_it_was_waited_for() {
    let device = device();
    let values = SplitMix64::new(1).values(Size::Unit, 256);
    let x = device.elements("x", Element::Bf16, &values);
    let y = device.unwritten("y", Element::Bf16, 256);
    run(&device, "copy_unawaited", &[Arg::Ptr(x), Arg::Ptr(y)]).expect("it runs");
    assert!(device.read(Element::Bf16, y, 256).iter().all(|x| x.is_nan()));
    run(&device, "copy_awaited", &[Arg::Ptr(x), Arg::Ptr(y)]).expect("it runs");
    let stored = device.read(Element::Bf16, x, 256);
    let want: Vec<f32> =
        stored.iter().enumerate().map(|(i, &x)| if i / 8 % 2 == 0 { x } else { 0.0 }).collect();
    assert_eq!(device.read(Element::Bf16, y, 256), want);
    assert_fails("copy_to_nowhere", &[256, 256], &[], &["is not shared memory"]);
}

#[test]
fn arguments_that_differ_from_the_signature_are_refused() {
    let start = |args: fn(DevicePtr) -> Vec<Arg>| {
        let device = device();
        let at = floats(&device, "y", 32);
        run(&device, "write_behind", &args(at)).expect_err("the signature is (float*, int)")
    };
    assert!(start(|at| vec![Arg::Ptr(at)]).contains("1 arguments, the kernel has 2 parameters"));
    assert!(
        start(|at| vec![Arg::I32(1), Arg::Ptr(at)]).contains("argument 0 is int, the parameter is a pointer")
    );
    for wrong in [Arg::U32(0), Arg::U64(0), Arg::F32(0.0), Arg::Ptr(DevicePtr::NULL)] {
        let device = device();
        let at = floats(&device, "y", 32);
        let error =
            run(&device, "write_behind", &[Arg::Ptr(at), wrong]).expect_err("the parameter is an int");
        assert!(error.contains("argument 1 is") && error.contains("the parameter is int"), "{error}");
    }
}

#[test]
fn launches_that_a_gpu_refuses_are_refused() {
    let function = function(Element::Bf16, "barrier_of_some");
    let whole = Launch { function: &function, grid: [1, 1, 1], block: 128, shared_bytes: 0, args: &[] };
    let unknown = Function { name: "nothing", ..function.clone() };
    let of_other = DEFECTS.function(&[("LL_T", 3)], function.name);
    let cases = [
        (Launch { grid: [1, 0, 1], ..whole }, "a grid of"),
        (Launch { grid: [1, 1, 70_000], ..whole }, "a grid of"),
        (Launch { block: 33, ..whole }, "33 threads"),
        (Launch { block: 256, ..whole }, "256 threads"),
        (Launch { shared_bytes: 4, ..whole }, "4 bytes of shared memory"),
        (Launch { function: &unknown, ..whole }, "defects.cu has no kernel nothing"),
        (Launch { function: &of_other, ..whole }, "defects.cu has no module defects__T3"),
    ];
    for (launch, word) in cases {
        // SAFETY: the emulator refuses the launch before it starts.
        let error = unsafe { device().launch(&launch) }.expect_err(word).to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn matrix_fragments_have_the_layout_of_the_instruction_set() {
    for element in [Element::Bf16, Element::F16] {
        let device = device();
        let draw = &mut SplitMix64::new(7);
        let (a, b) = (draw.values(Size::Unit, 256), draw.values(Size::Unit, 128));
        let (a, b) = (device.elements("a", element, &a), device.elements("b", element, &b));
        let c = floats(&device, "c", 128);
        let function = function(element, "tile_product");
        let args = &[Arg::Ptr(a), Arg::Ptr(b), Arg::Ptr(c)];
        let launch = Launch { function: &function, grid: [1, 1, 1], block: 32, shared_bytes: 0, args };
        // SAFETY: the arrays have the tile's 256, 128 and 128 elements.
        unsafe { device.launch(&launch) }.expect("it runs");
        let (a, b) = (device.read(element, a, 256), device.read(element, b, 128));
        let want = (0..128).map(|i| {
            let (row, column) = (&a[i / 8 * 16..][..16], &b[i % 8 * 16..][..16]);
            row.iter().zip(column).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>() as f32
        });
        // Sums of 16 products of 16-bit numbers are exact in f64 in any order.
        assert_eq!(device.read(Element::F32, c, 128), want.collect::<Vec<_>>(), "{element:?}");
    }
}

#[test]
fn reductions_reach_every_thread() {
    let device = device();
    let values: Vec<f32> = SplitMix64::new(3).order(128).iter().map(|&i| i as f32 - 200.0).collect();
    let (x, y) = (device.elements("x", Element::F32, &values), floats(&device, "y", 256));
    run(&device, "reductions", &[Arg::Ptr(x), Arg::Ptr(y)]).expect("it runs");
    let got = device.read(Element::F32, y, 256);
    assert_eq!(got[..128], [values.iter().sum::<f32>(); 128]);
    assert_eq!(got[128..], [-73.0; 128]);
}

#[test]
fn products_are_sums_over_k_with_a_bias() {
    let device = device();
    let input = device.elements("input", Element::Bf16, &[1.0, 2.0, 3.0, -1.0, 0.5, 4.0]);
    let weight = device.elements("weight", Element::Bf16, &[1.0, 0.0, 2.0, 1.0, 1.0, 1.0]);
    let bias = device.elements("bias", Element::Bf16, &[10.0, 20.0]);
    let out = device.unwritten("out", Element::Bf16, 4);
    let (element, out_element) = (Element::Bf16, Element::Bf16);
    let product = Product { m: 2, n: 2, k: 3, element, out_element, input, weight, bias, out };
    device.product(&product).expect("shapes fit");
    assert_eq!(device.read(Element::Bf16, out, 4), [17.0, 26.0, 17.0, 23.5]);
    let wide = floats(&device, "wide", 4);
    let without = Product { bias: DevicePtr::NULL, out_element: Element::F32, out: wide, ..product };
    device.product(&without).expect("shapes fit");
    assert_eq!(device.read(Element::F32, wide, 4), [7.0, 6.0, 7.0, 3.5]);
    let error = device.product(&Product { m: 3, ..product }).expect_err("input is too short").to_string();
    assert!(error.contains("18 bytes"), "{error}");
}

#[test]
fn a_graph_repeats_the_captured_work() {
    let device = device();
    let (x, y) = (floats(&device, "x", 32), floats(&device, "y", 32));
    device.fill(y, 1, 128).expect("the array is inside the allocation");
    let launch = || run(&device, "read_behind", &[Arg::Ptr(x), Arg::Ptr(y), Arg::I32(0)]);
    device.begin_capture().expect("none is open");
    let error = launch().expect_err("the kernel is not loaded").to_string();
    assert!(error.contains("not allowed in a capture"), "{error}");
    device.end_capture().expect("one is open");
    device.prepare(&[&function(Element::Bf16, "read_behind")]).expect("the kernel exists");
    device.begin_capture().expect("none is open");
    device.fill(x, 0, 128).expect("recorded");
    launch().expect("recorded");
    for refused in [device.upload(x, &[0]), device.synchronize(), device.begin_capture()] {
        let error = refused.expect_err("a capture is open").to_string();
        assert!(error.contains("not allowed in a capture"), "{error}");
    }
    let graph = device.end_capture().expect("one is open");
    assert_eq!(device.read_bytes(y, 128), [1; 128], "recorded, not run");
    device.replay(graph).expect("it was captured");
    assert_eq!(device.read(Element::F32, y, 32), [0.0; 32]);
    device.upload(y, &[7; 128]).expect("the array is inside the allocation");
    device.replay(graph).expect("it was captured");
    assert_eq!(device.read(Element::F32, y, 32), [0.0; 32]);
    assert!(device.replay(graph + 1).is_err() && device.end_capture().is_err());
}

#[test]
fn later_work_does_not_change_a_read_back() {
    let device = device();
    let at = device.bytes("x", &[1, 2, 3, 4]);
    let first = device.read_back(at, 4).expect("the array is inside the allocation");
    device.fill(at, 9, 4).expect("the array is inside the allocation");
    let second = device.read_back(at, 2).expect("the array is inside the allocation");
    let (mut one, mut two) = ([0; 4], [0; 2]);
    assert!(device.collect(second, &mut two).is_err(), "in the order of the calls");
    device.collect(first, &mut one).expect("the next in order");
    device.collect(second, &mut two).expect("the next in order");
    assert_eq!((one, two), ([1, 2, 3, 4], [9, 9]));
}
