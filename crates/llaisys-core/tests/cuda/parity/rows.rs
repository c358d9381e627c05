//! The row-wise CUDA kernels, on a device (the emulator, or a GPU), compared with their references.

use crate::emulator::arrays::Arrays;
use crate::emulator::close::assert_close;
use crate::emulator::compare::{rounded, two_ulps};
use crate::emulator::pick::{case, gpu_only, test_device};
use half::{bf16, f16};
use llaisys_core::cuda::device::{Arg, Device, DevicePtr, Element, Launch};
use llaisys_core::cuda::kernel_source::{self, Kernel, KernelSource};
use llaisys_core::cuda::ops::add_rms_norm::{AddRmsNorm, MAX_WIDTH};
use llaisys_core::cuda::ops::embed::Embed;
use llaisys_core::cuda::ops::gate::Gate;
use llaisys_core::cuda::ops::gather::Gather;
use llaisys_core::ops::cases::{Size, SplitMix64};
use llaisys_core::ops::{Gate as GateKind, reference};

const STORED: [Element; 2] = [Element::Bf16, Element::F16];

const ROWS: [usize; 10] = [1, 2, 3, 7, 8, 9, 16, 17, 64, 257];

/// Returns pairs of rows and widths. The emulator's pairs cover every number of rows and every width within a second; a
/// GPU runs all pairs.
fn shapes(op: &str) -> Vec<(usize, usize)> {
    let mut shapes: Vec<_> = ROWS.map(|n| (n, 64)).to_vec();
    shapes.extend([1, 9, 64].map(|n| (n, 896)));
    shapes.extend([(3, 1536), (17, 1536), (2, 3584), (16, 3584)]);
    let all = ROWS.into_iter().flat_map(|n| [896, 1536, 3584].map(|width| (n, width)));
    let others: Vec<_> = all.filter(|shape| !shapes.contains(shape)).collect();
    shapes.extend(gpu_only(op, others));
    shapes
}

/// Creates an array on the device; returns it and its rounded values.
fn stored(
    device: &dyn Device,
    what: &'static str,
    element: Element,
    values: &[f32],
) -> (DevicePtr, Vec<f32>) {
    let at = device.elements(what, element, values);
    (at, device.read(element, at, values.len()))
}

#[test]
fn embed_and_gather_copy_rows_exactly() {
    for element in STORED {
        for (n_rows, width) in shapes("embed and gather") {
            let device = &*test_device();
            let draw = &mut SplitMix64::new(width as u64);
            let vocab_size = 40;
            let (table, values) =
                stored(device, "table", element, &draw.values(Size::Unit, vocab_size * width));
            let mut tokens: Vec<i32> = (0..n_rows).map(|_| draw.below(vocab_size) as i32).collect();
            tokens[0] = vocab_size as i32 - 1;
            let at = device.i32s("tokens", &tokens);
            let rows: Vec<u32> = tokens.iter().map(|&t| t as u32).collect();
            let want = reference::gather::gather(&values, width, &rows);
            for gathers in [false, true] {
                case(if gathers { "gather" } else { "embed" }, element, format!("{n_rows} x {width}"));
                let out = device.unwritten("out", element, n_rows * width);
                // SAFETY: the table has a row for each id.
                let done = unsafe {
                    if gathers {
                        Gather { element, x: table, rows: at, out, n_rows, width }.launch(device)
                    } else {
                        Embed { element, table, tokens: at, out, n_rows, width }.launch(device)
                    }
                };
                done.expect("the kernel runs");
                let what = format!("{element:?} {n_rows} x {width}, gathers: {gathers}");
                assert_eq!(device.read(element, out, n_rows * width), want, "{what}");
            }
        }
    }
}

#[test]
fn add_rms_norm_matches_the_reference_within_two_ulp() {
    for element in STORED {
        let mut shapes = shapes("add_rms_norm");
        shapes.extend([(2, 8), (2, 264), (1, MAX_WIDTH)]);
        for (number, (n_rows, width)) in shapes.into_iter().enumerate() {
            case("add_rms_norm", element, format!("{n_rows} x {width}"));
            let (device, draw) = (&*test_device(), &mut SplitMix64::new(number as u64));
            let n = n_rows * width;
            // Squares of larger numbers exceed f16's range; models avoid that.
            let size = [Size::Unit, Size::Outliers, Size::Zero][number % 3];
            let (residual, before) = stored(device, "residual", element, &draw.values(size, n));
            let (x, branch) = stored(device, "x", element, &draw.values(Size::Unit, n));
            let (weight_at, weight) = stored(device, "weight", Element::F32, &draw.values(Size::Unit, width));
            let out = device.unwritten("out", element, n);
            let (eps, x_or_null) = (1e-5, if number % 4 == 3 { DevicePtr::NULL } else { x });
            let op =
                AddRmsNorm { element, residual, x: x_or_null, weight: weight_at, out, n_rows, width, eps };
            op.launch(device).expect("the kernel runs");
            let what = format!("{element:?} {n_rows} x {width}, case {number}");
            let sum: Vec<f32> = match x_or_null {
                DevicePtr::NULL => before,
                _ => before
                    .iter()
                    .zip(&branch)
                    .map(|(a, b)| rounded(element, f64::from(a + b)) as f32)
                    .collect(),
            };
            assert_eq!(device.read(element, residual, n), sum, "the residual stream, {what}");
            let want: Vec<f64> = sum
                .chunks_exact(width)
                .flat_map(|row| reference::rms_norm::rms_norm(row, &weight, eps))
                .collect();
            assert_close(&device.read(element, out, n), &want, two_ulps(element), &what);
            // The branch is read only.
            assert_eq!(device.read(element, x, n), branch, "{what}");
        }
    }
}

/// The result replaces the branch, as in the decoder.
#[test]
fn add_rms_norm_works_in_place_and_rounds_before_and_after_the_weight() {
    let (element, width, n_rows, eps) = (Element::Bf16, 64, 1, 1e-6);
    let device = &*test_device();
    let draw = &mut SplitMix64::new(9);
    let residual = device.elements("residual", element, &draw.values(Size::Unit, width));
    let x = device.elements("x", element, &draw.values(Size::Unit, width));
    let weight = draw.values(Size::Unit, width);
    let weight_at = device.elements("weight", Element::F32, &weight);
    AddRmsNorm { element, residual, x, weight: weight_at, out: x, n_rows, width, eps }
        .launch(device)
        .expect("the kernel runs");
    let sum = device.read(element, residual, width);
    let normed = reference::rms_norm::rms_norm(&sum, &vec![1.0; width], eps);
    let products = |of: &dyn Fn(f64) -> f64| -> Vec<f32> {
        let product = |(&normed, &weight)| rounded(element, of(normed) * f64::from(weight)) as f32;
        normed.iter().zip(&weight).map(product).collect()
    };
    let want = products(&|normed| rounded(element, normed));
    assert_ne!(want, products(&|normed| normed), "the case shows the difference");
    // No number of this case is within f32's error of the middle of two bf16 numbers.
    assert_eq!(device.read(element, x, width), want);
}

#[test]
fn gates_match_swiglu_and_geglu_within_two_ulp() {
    for element in STORED {
        for kind in [GateKind::Silu, GateKind::GeluTanh] {
            let mut shapes = vec![(1, 64), (3, 2048), (2, 4864), (9, 896), (64, 72), (257, 8)];
            let widths = [4864, 8960, 18944];
            shapes.extend(gpu_only("gate", ROWS.into_iter().flat_map(|n| widths.map(|width| (n, width)))));
            for (n_rows, width) in shapes {
                case("gate", element, format!("{n_rows} x {width}, {kind:?}"));
                let (device, draw) = (&*test_device(), &mut SplitMix64::new(width as u64));
                // Gates in the curved range of the function, and some where it is zero or one.
                let mut values = draw.values(Size::Unit, n_rows * 2 * width);
                for row in values.chunks_exact_mut(2 * width) {
                    row[..width].iter_mut().step_by(2).for_each(|x| *x *= 6.0);
                    row[..width].iter_mut().step_by(37).for_each(|x| *x *= 100.0);
                }
                let (gate_up, values) = stored(device, "gate_up", element, &values);
                let out = device.unwritten("out", element, n_rows * width);
                Gate { element, kind, gate_up, out, n_rows, width }.launch(device).expect("the kernel runs");
                let of_row = |row: &[f32]| match kind {
                    GateKind::Silu => reference::swiglu::swiglu(&row[..width], &row[width..]),
                    GateKind::GeluTanh => reference::geglu::geglu(&row[..width], &row[width..]),
                    GateKind::ClampedSilu(_) => unreachable!("models with it run on the CPU"),
                    GateKind::Gelu => unreachable!("only encoders have it, which run on the CPU"),
                };
                let want: Vec<f64> = values.chunks_exact(2 * width).flat_map(of_row).collect();
                let what = format!("{element:?} {kind:?} {n_rows} x {width}");
                // Near zero, f16 has multiples of 2^-24, one of which may be lost before the product. e^-x exceeds
                // f32's range below -88, where the gate is less than 1e-36.
                let tolerance = |i: usize, want: f64| {
                    let up = values[i / width * 2 * width + width + i % width];
                    let least = if element == Element::F16 { (-24.0_f64).exp2() } else { 1e-36 };
                    two_ulps(element)(i, want) + least * f64::from(up).abs()
                };
                assert_close(&device.read(element, out, n_rows * width), &want, tolerance, &what);
            }
        }
    }
}

/// Converts between the types with the functions of `prim.cuh`.
static CONVERT: KernelSource = KernelSource {
    name: "convert",
    text: include_str!("convert.cu"),
    variants: kernel_source::by_storage,
    kernels: &[convert_kernel("convert_f32"), convert_kernel("convert_bf16"), convert_kernel("convert_f16")],
};

const fn convert_kernel(name: &'static str) -> Kernel {
    Kernel { name, max_threads: 256, max_registers: 16, max_shared_bytes: Kernel::NO_SHARED }
}

/// Launches the kernel that rounds `n` numbers of `x` to the storage type `to`.
fn convert(device: &dyn Device, n: usize, from: (Element, DevicePtr), to: (Element, DevicePtr)) {
    let name = match from.0 {
        Element::F32 => "convert_f32",
        Element::Bf16 => "convert_bf16",
        Element::F16 => "convert_f16",
    };
    let launch = Launch {
        function: &CONVERT.function(&[kernel_source::storage(to.0)], name),
        grid: [n.div_ceil(256) as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
        args: &[Arg::Ptr(from.1), Arg::Ptr(to.1), Arg::U64(n as u64)],
    };
    // SAFETY: both arrays have `n` elements.
    unsafe { device.launch(&launch) }.expect("the kernel runs");
}

#[test]
fn conversions_round_every_number_as_the_half_crate() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let bytes: Vec<u8> = all.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let mut wide =
        vec![0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 65504.0, 65519.9, 65520.0, 3.4e38];
    for &bits in &all {
        // Each f16 and bf16 number, the middle between it and the next, and both sides of the middle.
        for x in [f16::from_bits(bits).to_f32(), bf16::from_bits(bits).to_f32()] {
            let step = if f16::from_f32(x).to_f32() == x { 0x1000 } else { 0x8000 };
            wide.extend(
                [step - 1, step, step + 1].map(|more| f32::from_bits(x.to_bits().wrapping_add(more))),
            );
        }
    }
    let device = &*test_device();
    for from in [Element::F32, Element::Bf16, Element::F16] {
        let (x, values) = match from {
            Element::F32 => (device.elements("x", from, &wide), wide.clone()),
            Element::Bf16 => {
                (device.bytes("x", &bytes), all.iter().map(|&x| bf16::from_bits(x).to_f32()).collect())
            }
            Element::F16 => (
                device.bytes("x", &bytes),
                all.iter().map(|&x| f16::from_bits(x).to_f32()).collect::<Vec<_>>(),
            ),
        };
        for to in STORED {
            let n = values.len();
            case("convert", to, format!("{n} from {from:?}"));
            let out = device.unwritten("out", to, n);
            convert(device, n, (from, x), (to, out));
            for (i, (got, x)) in device.read(to, out, n).iter().zip(&values).enumerate() {
                let want = match to {
                    Element::F16 => f16::from_f32(*x).to_f32(),
                    _ => bf16::from_f32(*x).to_f32(),
                };
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{from:?} to {to:?}, number {i}: {x:e} became {got:e}, not {want:e}");
            }
        }
    }
}
