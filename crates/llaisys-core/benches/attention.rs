//! Attention on the shape of SmolLM2-135M, and the row-wise ops on its widths.
//!
//! `cargo bench -p llaisys-core --bench attention` runs on all usable CPUs. Results are compared with the reference
//! before they are timed. The throughput of attention is in elements of 2 flops (a product and its sum) of causal work,
//! bound by the machine's f32 rate. That of the row-wise ops is in bytes read and written, bound by its caches.

mod bound;

use bound::print_bound;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use llaisys_core::dtype::KvDType;
use llaisys_core::ops::cases::attention::{AttentionCase, AttentionInput, Placement, Sequence};
use llaisys_core::ops::cases::{Size, SplitMix64};
use llaisys_core::ops::dispatch::Kernels;
use llaisys_core::ops::{self, HeadWidths, OpContext, Queries, attention, reference};
use llaisys_core::threads::Pool;
use std::hint::black_box;

/// Query heads; heads of K and V; elements of a head; widths of the model and of its feed-forward block; tokens.
const HEADS: (usize, usize) = (9, 3);
const D_HEAD: usize = 64;
const D_MODEL: usize = 576;
const D_FF: usize = 1536;
const VOCAB_SIZE: usize = 49_152;
/// The largest number of rows of a call.
const MAX_ROWS: usize = 512;

fn context() -> OpContext {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let kernels = Kernels::select(None).expect("some kernels always run");
    let pool = Pool::new(n_threads).expect("threads start");
    OpContext::new(kernels, pool, MAX_ROWS, D_FF).expect("memory for the scratch")
}

fn check(input: &AttentionInput, got: &[f32]) {
    let (q, scoring) = input.queries();
    let want = reference::attention::attention(
        Queries { scoring, ..input.queries_of(&q) },
        input.numbers(),
        input.rows(),
    );
    let bound = input.tolerance();
    let wrong = got.iter().zip(&want).filter(|(got, want)| (f64::from(**got) - **want).abs() > bound);
    assert_eq!(wrong.count(), 0, "attention differs from the reference");
}

/// Cells that a batch reads.
fn n_cells(case: &AttentionCase) -> usize {
    case.sequences.iter().map(|sequence| sequence.len).sum()
}

/// Single rows after 96 to 4096 cells, 16 such rows, and prompts, with cells in order and shuffled.
fn attend(c: &mut Criterion) {
    let mut cx = context();
    let decode = |len, n| vec![Sequence { len, n_rows: 1 }; n];
    let prompt = |len| vec![Sequence { len, n_rows: MAX_ROWS.min(len) }];
    let batches = [
        ("decode-1x96", decode(96, 1)),
        ("decode-1x512", decode(512, 1)),
        ("decode-1x4096", decode(4096, 1)),
        ("decode-16x512", decode(512, 16)),
        ("prefill-64", prompt(64)),
        ("prefill-512", prompt(512)),
        ("prefill-512-of-2048", prompt(2048)),
    ];
    for (dtype, kind) in KvDType::ALL.into_iter().zip(["f32", "f16", "bf16", "int8"]) {
        let mut group = c.benchmark_group(format!("attention-{kind}"));
        for (name, sequences) in &batches {
            let sequences = sequences.clone();
            let case =
                AttentionCase { heads: HEADS, d_head: D_HEAD, dtype, sequences, ..AttentionCase::plain() };
            for (placement, place) in [(Placement::InOrder, "in-order"), (Placement::Shuffled(1), "shuffled")]
            {
                let input = case.build(placement).expect("memory for the cells");
                let mut out = vec![0.0; input.q.len()];
                attention(&mut cx, input.queries_of(&input.q), input.layer(), input.rows(), &mut out);
                check(&input, &out);
                let n_seen: u64 = input.rows().rows.iter().map(|row| u64::from(row.n_visible)).sum();
                let cells = n_cells(&case);
                let n_bytes = 2 * cells * HEADS.1 * dtype.head_bytes(D_HEAD);
                let n_flops = n_seen as usize * 4 * HEADS.0 * D_HEAD;
                print_bound(&format!("attention-{kind}/{name}/{place}"), n_bytes, n_flops);
                group.throughput(Throughput::Elements(n_seen * (2 * HEADS.0 * D_HEAD) as u64));
                group.bench_function(BenchmarkId::new(*name, place), |b| {
                    b.iter(|| {
                        attention(&mut cx, input.queries_of(&input.q), input.layer(), input.rows(), &mut out)
                    });
                });
            }
        }
    }
}

fn row_wise(c: &mut Criterion) {
    let cx = context();
    let draw = &mut SplitMix64::new(1);
    let (x, weight) = (draw.values(Size::Unit, MAX_ROWS * D_MODEL), draw.values(Size::Unit, D_MODEL));
    let angles = draw.values(Size::Unit, MAX_ROWS * D_HEAD / 2);
    let mut y = x.clone();
    let mut group = c.benchmark_group("rows");
    for n in [1, 16, MAX_ROWS] {
        let x = &x[..n * D_MODEL];
        print_bound(&format!("rows/{n}"), 2 * size_of_val(x), 4 * x.len());
        group.throughput(Throughput::Bytes((2 * size_of_val(x)) as u64));
        group.bench_function(BenchmarkId::new("rms_norm", n), |b| {
            b.iter(|| ops::rms_norm(&cx, x, &weight, 1e-5, &mut y[..x.len()]));
        });
        group.bench_function(BenchmarkId::new("rope", n), |b| {
            let angles = &angles[..n * D_HEAD / 2];
            b.iter(|| ops::rope(&cx, &mut y[..n * D_MODEL], HeadWidths::whole(D_HEAD), angles, angles));
        });
    }
    let logits = draw.values(Size::Unit, VOCAB_SIZE);
    print_bound("rows/argmax", size_of_val(&logits[..]), logits.len());
    group.throughput(Throughput::Bytes(size_of_val(&logits[..]) as u64));
    group.bench_function("argmax", |b| b.iter(|| ops::argmax(black_box(&logits))));
}

criterion_group!(benches, attend, row_wise);
criterion_main!(benches);
