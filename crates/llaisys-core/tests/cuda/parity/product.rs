//! The library's matrix product on a device (the emulator, or a GPU), of whole numbers. Their sums are exact in f32 in
//! any order, so results are equal. Results in 16 bits are rounded once, or as [`Product`] says.

use crate::emulator::arrays::Arrays;
use crate::emulator::compare::rounded;
use crate::emulator::pick::{case, gpu_only, test_device};
use llaisys_core::cuda::device::{Device, DevicePtr, Element, Product};
use llaisys_core::ops::cases::SplitMix64;

const ROWS: [usize; 10] = [1, 2, 3, 7, 8, 9, 16, 17, 64, 257];
/// An odd shape, `[n, k]`.
const ODD: (usize, usize) = (33, 72);
/// The shapes of 0.5B, 1.5B and 7B models, `[n, k]`; the last is an output head.
const OF_MODELS: [(usize, usize); 7] =
    [(1152, 896), (9728, 896), (896, 4864), (2048, 1536), (1536, 8960), (4608, 3584), (151_936, 896)];
/// The most products that a comparison computes: it compares evenly spaced columns, and the last.
const MOST: usize = 1 << 24;

/// Returns whole numbers from -8 to 8. Sums of 8960 of their products are far below 2^24, and sums of random ones are
/// below f16's 65504.
fn whole(draw: &mut SplitMix64, n: usize) -> Vec<f32> {
    (0..n).map(|_| draw.below(17) as f32 - 8.0).collect()
}

fn check(device: &dyn Device, shape: (usize, usize, usize), element: Element, out_element: Element) {
    let (m, n, k) = shape;
    let what = format!("{m} x {n} x {k} to {out_element:?}");
    case("product", element, &what);
    let draw = &mut SplitMix64::new((m * 31 + n * 7 + k) as u64);
    let (x, weight, bias) = (whole(draw, m * k), whole(draw, n * k), whole(draw, n));
    let has_bias = out_element == element && draw.below(2) == 0;
    let out = device.unwritten("out", out_element, m * n);
    let product = Product {
        m,
        n,
        k,
        element,
        out_element,
        input: device.elements("x", element, &x),
        weight: device.elements("weight", element, &weight),
        bias: if has_bias { device.elements("bias", element, &bias) } else { DevicePtr::NULL },
        out,
    };
    device.product(&product).expect("the product runs");
    let got = device.read(out_element, out, m * n);
    let step = (m * n * k).div_ceil(MOST).min(n);
    for column in (0..n).step_by(step).chain([n - 1]) {
        let weight = &weight[column * k..][..k];
        for (row, x) in x.chunks_exact(k).enumerate() {
            let dot: f32 = x.iter().zip(weight).map(|(x, w)| x * w).sum();
            let of_type = |x: f32| rounded(out_element, f64::from(x)) as f32;
            let bias = if has_bias { bias[column] } else { 0.0 };
            let want = [of_type(dot + bias), of_type(of_type(dot) + bias)];
            let want = if n.is_multiple_of(8) { &want[..1] } else { &want };
            let got = got[row * n + column];
            assert!(
                want.contains(&got),
                "{element:?} {what}, row {row}, column {column}: {got} instead of {want:?}"
            );
        }
    }
}

#[test]
fn a_bias_needs_a_result_of_its_type() {
    let device = &*test_device();
    let array = |what, element, n| device.elements(what, element, &vec![0.0; n]);
    let product = Product {
        m: 1,
        n: 8,
        k: 8,
        element: Element::F16,
        out_element: Element::F32,
        input: array("x", Element::F16, 8),
        weight: array("weight", Element::F16, 64),
        bias: array("bias", Element::F16, 8),
        out: array("out", Element::F32, 8),
    };
    let refused = device.product(&product).expect_err("cublasLt does not have this product").to_string();
    assert!(refused.contains("a bias of F16 cannot be added to a result of F32"), "{refused}");
    device.product(&Product { bias: DevicePtr::NULL, ..product }).expect("the same product without a bias");
}

#[test]
fn products_of_whole_numbers_are_exact() {
    let device = &*test_device();
    let of_models = OF_MODELS.into_iter().flat_map(|(n, k)| ROWS.map(|m| (m, n, k)));
    let shapes = ROWS.map(|m| (m, ODD.0, ODD.1)).into_iter().chain(gpu_only("product", of_models));
    for (i, shape) in shapes.enumerate() {
        let element = [Element::Bf16, Element::F16][i % 2];
        check(device, shape, element, element);
        check(device, shape, element, Element::F32);
    }
}
