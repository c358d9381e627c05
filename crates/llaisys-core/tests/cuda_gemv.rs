//! The product kernels for few rows, run by a device (the emulator, or a GPU), against the f64 reference.

#[allow(unsafe_code, dead_code, reason = "runs compiled kernels; each test file uses a part of it")]
mod cuda_emu;

use cuda_emu::arrays::Arrays;
use cuda_emu::close::assert_close;
use cuda_emu::compare::ulp;
use cuda_emu::pick::{case, gpu_only, test_device};
use half::f16;
use llaisys_core::ops::contract::{Draw, Size};
use llaisys_core::ops::cuda::device::{Device, DevicePtr, Element, Product};
use llaisys_core::ops::cuda::gemv;
use llaisys_core::ops::cuda::gemv_quant::{GROUP, Grouped, GroupedProduct, pack_codes, pack_scales};
use llaisys_core::ops::reference::linear::linear;

/// A product in a device's memory, and its numbers as they are stored there.
struct Built {
    product: Product,
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
}

fn build(
    device: &dyn Device,
    (m, n, k): (usize, usize, usize),
    element: Element,
    out_element: Element,
) -> Built {
    let draw = &mut Draw::new((m * 1_000_003 + n * 1009 + k) as u64);
    let has_bias = draw.below(2) == 0;
    let mut array = |what, n| {
        let at = device.elements(what, element, &draw.values(Size::Unit, n));
        (at, device.read(element, at, n).into_iter().map(f64::from).collect::<Vec<_>>())
    };
    let (input, x) = array("x", m * k);
    let (weight_at, weight) = array("weight", n * k);
    let (bias_at, bias) = if has_bias { array("bias", n) } else { (DevicePtr::NULL, Vec::new()) };
    let out = device.room("out", out_element, m * n);
    let product = Product { m, n, k, element, out_element, input, weight: weight_at, bias: bias_at, out };
    Built { product, x, weight, bias }
}

fn run(device: &dyn Device, product: &Product) -> Vec<f32> {
    assert!(gemv::fits(product), "{product:?}");
    let Product { m, n, k, out_element, .. } = product;
    case("gemv", product.element, format!("{m} x {n} x {k} to {out_element:?}"));
    gemv::launch(device, product).expect("the kernel runs");
    device.read(product.out_element, product.out, product.m * product.n)
}

/// How far a result may be: the tensor core cuts what it adds below 2^-23 of the largest, once for each 16 elements of
/// k; a warp adds k / 128 such products to its sum, and then eight sums and the bias are added. All relative to the sum
/// of the products' sizes. A result in T is rounded once more, to the nearest.
fn tolerance(built: &Built, want: f64, sizes: f64) -> f64 {
    let n_sums = built.product.k as f64 / 128.0 + 12.0;
    let rounding = match built.product.out_element {
        Element::F32 => 0.0,
        // A little more than half: the sum may lie across the border to larger numbers.
        stored => 0.51 * ulp(stored, want),
    };
    n_sums * 2.0_f64.powi(-23) * sizes + rounding
}

fn check(built: &Built, got: &[f32]) {
    let Product { m, n, k, .. } = built.product;
    let want = linear(&built.x, k, &built.weight, &built.bias);
    let abs = |x: &[f64]| x.iter().map(|x| x.abs()).collect::<Vec<_>>();
    let sizes = linear(&abs(&built.x), k, &abs(&built.weight), &abs(&built.bias));
    assert_eq!(got.len(), m * n);
    for (i, (&got, (&want, &sizes))) in got.iter().zip(want.iter().zip(&sizes)).enumerate() {
        let (error, bound) = ((f64::from(got) - want).abs(), tolerance(built, want, sizes));
        assert!(error <= bound, "{:?}, number {i}: {got} for {want}, {error:e} > {bound:e}", built.product);
    }
}

/// Weights of the 0.5B, 1.5B and 7B shapes, `[n, k]`.
const OF_MODELS: [(usize, usize); 7] =
    [(1152, 896), (9728, 896), (896, 4864), (2048, 1536), (1536, 8960), (4608, 3584), (151_936, 896)];

/// Every number of rows; rows of weight around a block's 16; columns around a thread's 8, a turn's 64 and the 2048 of
/// all warps' loads.
#[test]
fn gemv_is_the_reference_within_its_roundings() {
    let device = &*test_device();
    let ns = [1, 15, 16, 17, 33, 48];
    let ks = [8, 56, 64, 72, 512, 896, 2040, 2048, 2056, 4864];
    for (i, &k) in ks.iter().enumerate() {
        for j in 0..4 {
            let (m, n) = ((i * 4 + j) % gemv::MAX_ROWS + 1, ns[(i + j) % ns.len()]);
            let element = [Element::Bf16, Element::F16][j % 2];
            let out_element = if j < 2 { element } else { Element::F32 };
            let built = build(device, (m, n, k), element, out_element);
            check(&built, &run(device, &built.product));
        }
    }
    for (i, &(n, k)) in gpu_only("gemv", OF_MODELS).iter().enumerate() {
        let element = [Element::Bf16, Element::F16][i % 2];
        // The largest is a head.
        let (m, out_element) = if n > 100_000 { (1, Element::F32) } else { (8 - i, element) };
        let built = build(device, (m, n, k), element, out_element);
        check(&built, &run(device, &built.product));
    }
}

#[test]
fn a_row_is_bitwise_the_same_alone_and_with_others() {
    let device = &*test_device();
    for element in [Element::Bf16, Element::F16] {
        let built = build(device, (8, 40, 1096), element, Element::F32);
        let together = run(device, &built.product);
        for row in [0, 3, 7] {
            let Product { n, k, input, .. } = built.product;
            let out = device.room("one row", Element::F32, n);
            let alone = run(device, &Product { m: 1, input: input.at(row * k * 2), out, ..built.product });
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&alone), bits(&together[row * n..][..n]), "{element:?}, row {row}");
        }
    }
}

/// What is not finite shows in its own results and in no others.
#[test]
fn infinities_stay_with_their_row_and_column() {
    let device = &*test_device();
    let (m, n, k) = (3, 20, 200);
    let mut x = Draw::new(1).values(Size::Unit, m * k);
    let mut weight = Draw::new(2).values(Size::Unit, n * k);
    x[k + 77] = f32::INFINITY;
    weight[18 * k + 199] = f32::NAN;
    let element = Element::Bf16;
    let (input, weight) = (device.elements("x", element, &x), device.elements("weight", element, &weight));
    let (bias, out) = (DevicePtr::NULL, device.room("out", Element::F32, m * n));
    let product = Product { m, n, k, element, out_element: Element::F32, input, weight, bias, out };
    for (i, y) in run(device, &product).into_iter().enumerate() {
        assert_eq!(y.is_finite(), i / n != 1 && i % n != 18, "row {}, column {}: {y}", i / n, i % n);
    }
}

#[test]
fn what_the_kernel_does_not_do_is_said_before_it_starts() {
    let device = &*test_device();
    let fitting = build(device, (8, 16, 64), Element::Bf16, Element::Bf16).product;
    assert!(gemv::fits(&fitting));
    for other in [
        Product { m: 9, ..fitting },
        Product { m: 0, ..fitting },
        Product { k: 60, ..fitting },
        Product { out_element: Element::F16, ..fitting },
        Product { element: Element::F32, out_element: Element::F32, ..fitting },
    ] {
        assert!(!gemv::fits(&other), "{other:?}");
    }
}

/// A weight of integers, its numbers, and those rounded to the storage type as `dequantize` gives them.
struct Integers {
    weight: Grouped,
    numbers: Vec<f64>,
}

fn integers(device: &dyn Device, bits: usize, n: usize, k: usize) -> Integers {
    let draw = &mut Draw::new((bits + n * 1009 + k) as u64);
    let (mut codes, mut scales, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..n {
        let q: Vec<u8> = (0..k).map(|_| draw.below(1 << bits) as u8).collect();
        // Around zero, as trained weights are: the minimum is about half the largest number.
        let values = draw.values(Size::Unit, 2 * k / GROUP);
        let groups = values.chunks_exact(2).map(|x| {
            let scale = f16::from_f32(x[0] / 100.0);
            let min = f16::from_f32(-scale.to_f32() * (1 << (bits - 1)) as f32 * (1.0 + x[1] / 10.0));
            (scale, min)
        });
        let groups: Vec<(f16, f16)> = groups.collect();
        numbers.extend(q.iter().enumerate().map(|(i, &q)| {
            let (scale, min) = groups[i / GROUP];
            scale.to_f64() * f64::from(q) + min.to_f64()
        }));
        codes.extend(pack_codes(bits, &q));
        scales
            .extend(pack_scales(&groups.iter().map(|(s, m)| (s.to_bits(), m.to_bits())).collect::<Vec<_>>()));
    }
    let (codes, scales) = (device.bytes("codes", &codes), device.bytes("scales", &scales));
    Integers { weight: Grouped { bits, n, k, codes, scales }, numbers }
}

/// How much further a product with integers may be off: the tensor core sums numbers that have 128 scales on top of
/// them (bf16; 1024 in f16), 17 times as many with 8 bits, and takes them out again. Scales are below 0.01.
fn more_for_integers(element: Element, bits: usize, sum_of_x: f64) -> f64 {
    let bias = if element == Element::Bf16 { 128.0 } else { 1024.0 };
    let n_biases = if bits == 8 { 17.0 } else { 1.0 };
    4.0 * 2.0_f64.powi(-23) * n_biases * bias * 0.01 * sum_of_x
}

/// Both widths, blocks of k that are whole and that are not, every number of rows.
#[test]
fn products_with_integers_are_the_reference_within_their_roundings() {
    let device = &*test_device();
    let mut ks = vec![32, 96, 128, 576, 896, 1184];
    ks.extend(gpu_only("gemv_quant, of four each", [1536, 3584, 4864, 8960]));
    for (i, k) in ks.into_iter().enumerate() {
        for (j, bits) in [4, 8, 4, 8].into_iter().enumerate() {
            let (m, n) = ((i * 4 + j) % 8 + 1, [16, 1, 33, 20][j]);
            let element = [Element::Bf16, Element::F16][(i + j / 2) % 2];
            let out_element = if (i + j) % 3 == 0 { element } else { Element::F32 };
            let Integers { weight, numbers } = integers(device, bits, n, k);
            let built = Built { weight: numbers, ..build(device, (m, n, k), element, out_element) };
            let Product { input, bias, out, .. } = built.product;
            let product = GroupedProduct { m, element, out_element, input, weight, bias, out };
            case("gemv_quant", element, format!("{m} x {n} x {k} of {bits} bits to {out_element:?}"));
            product.launch(device).expect("the kernel runs");
            let want = linear(&built.x, k, &built.weight, &built.bias);
            let abs = |x: &[f64]| x.iter().map(|x| x.abs()).collect::<Vec<_>>();
            let sizes = linear(&abs(&built.x), k, &abs(&built.weight), &abs(&built.bias));
            for (at, got) in device.read(out_element, out, m * n).into_iter().enumerate() {
                let sum_of_x: f64 = built.x[at / n * k..][..k].iter().map(|x| x.abs()).sum();
                let bound =
                    tolerance(&built, want[at], sizes[at]) + more_for_integers(element, bits, sum_of_x);
                let error = (f64::from(got) - want[at]).abs();
                assert!(
                    error <= bound,
                    "{product:?}, number {at}: {got} for {}, {error:e} > {bound:e}",
                    want[at]
                );
            }
        }
    }
}

/// One rounding in f32 and one to the storage type.
#[test]
fn integers_become_plain_numbers() {
    let device = &*test_device();
    for (bits, n, k) in [(4, 3, 32), (8, 5, 160), (4, 17, 576), (8, 2, 1184)] {
        for element in [Element::Bf16, Element::F16] {
            let Integers { weight, numbers } = integers(device, bits, n, k);
            let out = device.room("plain", element, n * k);
            case("dequantize", element, format!("{n} x {k} of {bits} bits"));
            weight.dequantize(device, element, out).expect("the kernel runs");
            let got = device.read(element, out, n * k);
            assert_close(&got, &numbers, |_, want| 0.51 * ulp(element, want) + 2e-7, &format!("{weight:?}"));
        }
    }
}
