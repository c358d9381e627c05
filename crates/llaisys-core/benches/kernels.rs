//! `linear` on the shapes of SmolLM2-135M, compared with the memory bandwidth that bounds it.
//!
//! `cargo bench -p llaisys-core --bench kernels` runs on all usable CPUs. Each matrix has enough copies to exceed the
//! caches, used in turn like the layers of a model. The bandwidth of a machine varies, so `read` (a plain sum over
//! memory) is measured first and last: compare results with those of the same run.

mod bound;

use bound::print_bound;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use llaisys_core::ops::dispatch::Kernels;
use llaisys_core::ops::packed::{PackedFormat, PackedMatrix};
use llaisys_core::ops::{LinearPart, OpContext, linear};
use llaisys_core::tensor::RowView;
use llaisys_core::threads::Pool;
use std::hint::black_box;

/// Bytes of weights that exceed the caches of common machines.
const UNCACHED: usize = 128 << 20;
/// The largest number of rows of a call.
const MAX_ROWS: usize = 512;

/// SmolLM2-135M: query, key and value together; output; gate and up interleaved; down; the vocabulary.
const QKV: (usize, usize) = (960, 576);
const O: (usize, usize) = (576, 576);
const GATE_UP: (usize, usize) = (3072, 576);
const DOWN: (usize, usize) = (576, 1536);
const HEAD: (usize, usize) = (49152, 576);
const N_LAYERS: usize = 30;

fn context() -> OpContext {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let kernels = Kernels::select(None).expect("some kernels always run");
    let pool = Pool::new(n_threads).expect("threads start");
    OpContext::new(kernels, pool, MAX_ROWS, 1536).expect("memory for the scratch")
}

/// A matrix of small numbers that depend on their row and column.
fn matrix(pool: &Pool, format: PackedFormat, shape: (usize, usize)) -> PackedMatrix {
    let (n, k) = shape;
    let dtype = format.dtype();
    // 0x2x or 0x3x in the upper bytes makes every float (of 16 or 32 bits) a number below one.
    let byte = |i: usize| if format.is_grouped() { (i * 89 % 61) as u8 } else { 0x20 | (i * 7 % 29) as u8 };
    let bytes: Vec<u8> = (0..dtype.bytes_of(k).expect("whole blocks") + 64).map(byte).collect();
    let n_bytes = bytes.len() - 64;
    let row = |n: usize| RowView { dtype, bytes: &bytes[n % 64..n % 64 + n_bytes] };
    PackedMatrix::pack(pool, format, n, k, &row).expect("memory for the weights")
}

fn run(cx: &mut OpContext, weight: &PackedMatrix, x: &[f32], y: &mut [f32]) {
    let n_rows = x.len() / weight.n_columns();
    linear(cx, x, &[LinearPart { weight, bias: None }], &mut [&mut y[..n_rows * weight.n_rows()]]);
}

/// Panics unless the last output is the product with that row of weights, within the rounding of the inputs.
fn check(cx: &mut OpContext, weight: &PackedMatrix, x: &[f32], y: &mut [f32]) {
    let (n, k) = (weight.n_rows(), weight.n_columns());
    run(cx, weight, &x[..k], y);
    let mut w = vec![0.0; k];
    weight.read_row(n - 1, &mut w);
    let sum: f32 = w.iter().zip(x).map(|(w, x)| w * x).sum();
    let size: f32 = w.iter().zip(x).map(|(w, x)| (w * x).abs()).sum();
    let error = (y[n - 1] - sum).abs();
    assert!(error <= size / 100.0, "{:?} {n} x {k}: {} instead of {sum}", weight.format(), y[n - 1]);
}

fn read(c: &mut Criterion, name: &str) {
    let pool = context().pool;
    let data = vec![1_u64; UNCACHED / 8];
    let mut group = c.benchmark_group("memory");
    print_bound(&format!("memory/{name}"), UNCACHED, 0);
    group.throughput(Throughput::Bytes(UNCACHED as u64));
    group.bench_function(name, |b| {
        b.iter(|| {
            pool.run(&|worker| {
                let part = llaisys_core::threads::share(data.len(), pool.n_threads(), worker);
                black_box(data[part].iter().fold(0_u64, |sum, x| sum.wrapping_add(*x)));
            });
        });
    });
}

fn read_first(c: &mut Criterion) {
    read(c, "read-first");
}

fn read_last(c: &mut Criterion) {
    read(c, "read-last");
}

/// One shape in one format for several numbers of rows: bytes per second for few rows, products for many.
fn shapes(c: &mut Criterion) {
    let mut cx = context();
    // The formats of K types fit only the shape `down`; the other formats are measured there for comparison.
    let everywhere =
        [PackedFormat::Q4_1, PackedFormat::Q4_0, PackedFormat::Q8_0, PackedFormat::BF16, PackedFormat::F32];
    let names = [("qkv", QKV), ("o", O), ("gate-up", GATE_UP), ("down", DOWN), ("head", HEAD)];
    let x: Vec<f32> = (0..MAX_ROWS * 1536).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
    let n_results = MAX_ROWS * GATE_UP.0;
    let mut y = vec![0.0; n_results];
    for format in PackedFormat::ALL {
        for (name, shape) in names.into_iter().filter(|(n, _)| *n == "down" || everywhere.contains(&format)) {
            let first = matrix(&cx.pool, format, shape);
            check(&mut cx, &first, &x, &mut y);
            let n_copies = UNCACHED.div_ceil(first.n_bytes());
            let copies: Vec<_> = (0..n_copies).map(|_| matrix(&cx.pool, format, shape)).collect();
            let mut group = c.benchmark_group(format!("linear-{}-{name}", format.dtype().name()));
            for n_rows in [1, 4, 16, 64, 512].into_iter().filter(|n| n * shape.0 <= n_results) {
                let n_flops = 2 * n_rows * shape.0 * shape.1;
                print_bound(
                    &format!("linear-{}-{name}/{n_rows}", format.dtype().name()),
                    first.n_bytes(),
                    n_flops,
                );
                group.throughput(match n_rows {
                    0..16 => Throughput::Bytes(first.n_bytes() as u64),
                    _ => Throughput::Elements(n_flops as u64),
                });
                let mut next = 0;
                group.bench_function(format!("{n_rows}"), |b| {
                    b.iter(|| {
                        run(&mut cx, &copies[next % n_copies], &x[..n_rows * shape.1], &mut y);
                        next += 1;
                    });
                });
            }
        }
    }
}

/// All products of one token: 30 layers and the head, Q4_1 with a Q8_0 head as in the embedded model.
fn decode(c: &mut Criterion) {
    let mut cx = context();
    let mut layers = Vec::new();
    for _ in 0..N_LAYERS {
        layers.extend([QKV, O, GATE_UP, DOWN].map(|shape| matrix(&cx.pool, PackedFormat::Q4_1, shape)));
    }
    layers.push(matrix(&cx.pool, PackedFormat::Q8_0, HEAD));
    let n_bytes: usize = layers.iter().map(PackedMatrix::n_bytes).sum();
    let mut group = c.benchmark_group("smollm2-products");
    for n_rows in [1, 4, 16] {
        let x = vec![0.5; n_rows * 1536];
        let mut y = vec![0.0; n_rows * HEAD.0];
        let n_flops = layers.iter().map(|weight| 2 * n_rows * weight.n_rows() * weight.n_columns()).sum();
        print_bound(&format!("smollm2-products/{n_rows}"), n_bytes, n_flops);
        group.throughput(Throughput::Bytes(n_bytes as u64));
        group.bench_function(format!("{n_rows}"), |b| {
            b.iter(|| {
                for weight in &layers {
                    run(&mut cx, weight, &x[..n_rows * weight.n_columns()], &mut y);
                }
            });
        });
    }
}

criterion_group!(benches, read_first, decode, shapes, read_last);
criterion_main!(benches);
