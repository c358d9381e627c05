//! The product kernels for few rows, on a device (the emulator, or a GPU), compared with the f64 reference.

use crate::emulator::arrays::Arrays;
use crate::emulator::compare::ulp;
use crate::emulator::pick::{case, gpu_only, test_device};
use llaisys_core::cuda::device::{Device, DevicePtr, Element, Product};
use llaisys_core::cuda::ops::gemv;
use llaisys_core::ops::cases::{Size, SplitMix64};
use llaisys_core::ops::reference::linear::linear;

/// A product in device memory, and its numbers as they are stored.
struct Built {
    product: Product,
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
}

fn build(device: &dyn Device, shape: (usize, usize, usize), element: Element, out_element: Element) -> Built {
    let (m, n, k) = shape;
    let draw = &mut SplitMix64::new((m * 1_000_003 + n * 1009 + k) as u64);
    let has_bias = out_element == element && draw.below(2) == 0;
    let mut array = |what, n| {
        let at = device.elements(what, element, &draw.values(Size::Unit, n));
        (at, device.read(element, at, n).into_iter().map(f64::from).collect::<Vec<_>>())
    };
    let (input, x) = array("x", m * k);
    let (weight_at, weight) = array("weight", n * k);
    let (bias_at, bias) = if has_bias { array("bias", n) } else { (DevicePtr::NULL, Vec::new()) };
    let out = device.unwritten("out", out_element, m * n);
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

/// Returns the tolerance of a result. For each 16 elements of k the tensor core truncates summands below 2^-23 of the
/// largest. A warp adds k / 128 such products to its sum, and then eight sums and the bias are added. The tolerance is
/// relative to the sum of the products' absolute values. A result in T is rounded once more, to the nearest.
fn tolerance(built: &Built, want: f64, sizes: f64) -> f64 {
    let n_sums = built.product.k as f64 / 128.0 + 12.0;
    let rounding = match built.product.out_element {
        Element::F32 => 0.0,
        // A little more than half an ulp, because the sum may be on the other side of a power of two.
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

/// Covers every number of rows; rows of weight around a block's 16; columns around a thread's 8, a turn's 64 and the
/// 2048 of all warps' loads.
#[test]
fn gemv_matches_the_reference_within_its_roundings() {
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
        // The largest is an output head.
        let (m, out_element) = if n > 100_000 { (1, Element::F32) } else { (8 - i, element) };
        let built = build(device, (m, n, k), element, out_element);
        check(&built, &run(device, &built.product));
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_a_batch() {
    let device = &*test_device();
    for element in [Element::Bf16, Element::F16] {
        let built = build(device, (8, 40, 1096), element, Element::F32);
        let together = run(device, &built.product);
        for row in [0, 3, 7] {
            let Product { n, k, input, .. } = built.product;
            let out = device.unwritten("one row", Element::F32, n);
            let alone = run(device, &Product { m: 1, input: input.at(row * k * 2), out, ..built.product });
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&alone), bits(&together[row * n..][..n]), "{element:?}, row {row}");
        }
    }
}

#[test]
fn non_finite_numbers_affect_only_their_row_and_column() {
    let device = &*test_device();
    let (m, n, k) = (3, 20, 200);
    let mut x = SplitMix64::new(1).values(Size::Unit, m * k);
    let mut weight = SplitMix64::new(2).values(Size::Unit, n * k);
    x[k + 77] = f32::INFINITY;
    weight[18 * k + 199] = f32::NAN;
    let element = Element::Bf16;
    let (input, weight) = (device.elements("x", element, &x), device.elements("weight", element, &weight));
    let (bias, out) = (DevicePtr::NULL, device.unwritten("out", Element::F32, m * n));
    let product = Product { m, n, k, element, out_element: Element::F32, input, weight, bias, out };
    for (i, y) in run(device, &product).into_iter().enumerate() {
        assert_eq!(y.is_finite(), i / n != 1 && i % n != 18, "row {}, column {}: {y}", i / n, i % n);
    }
}

#[test]
fn fits_is_false_for_unsupported_products() {
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
