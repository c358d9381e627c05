//! The draw of one token from a vocabulary of 151,936, as Qwen's, on one thread.
//!
//! `cargo bench -p llaisys-core --bench sampling`. Flat rows are those of random weights: every token has a weight. In
//! peaked rows, as of trained models, most tokens are far below the best. The bound is one read of the logits.

mod bound;

use bound::print_bound;
use criterion::{Criterion, criterion_group, criterion_main};
use llaisys_core::ops::cases::SplitMix64;
use llaisys_core::sample::{Sampler, SamplerSpec, Scratch, sample};
use std::hint::black_box;

const VOCAB: usize = 151_936;

/// A sum of uniform numbers is nearly normal; `spread` is its standard deviation.
fn row(spread: f32) -> Vec<f32> {
    let draw = &mut SplitMix64::new(7);
    let mut uniform = || (draw.bits() >> 40) as f32 / (1 << 24) as f32 - 0.5;
    (0..VOCAB).map(|_| spread * (0..12).map(|_| uniform()).sum::<f32>()).collect()
}

fn draws(c: &mut Criterion) {
    let base = SamplerSpec { seed: 7, ..SamplerSpec::default() };
    let specs = [
        ("temperature", base.clone()),
        ("top-p", SamplerSpec { top_p: 0.9, ..base.clone() }),
        ("min-p", SamplerSpec { min_p: 0.05, ..base.clone() }),
        ("top-k-and-top-p", SamplerSpec { temperature: 0.7, top_k: 20, top_p: 0.8, ..base }),
    ];
    let mut scratch = Scratch::default();
    for (kind, logits) in [("flat", row(0.5)), ("peaked", row(3.0))] {
        let mut group = c.benchmark_group(format!("draw-{kind}"));
        for (name, spec) in &specs {
            let sampler = Sampler::new(spec.clone(), VOCAB, &[], &[]).expect("a valid spec");
            let (mut logits, mut position) = (logits.clone(), 0);
            print_bound(&format!("draw-{kind}/{name}"), 4 * VOCAB, 0);
            group.bench_function(*name, |b| {
                b.iter(|| {
                    position += 1;
                    black_box(sample(&mut scratch, &mut logits, Some(&sampler), position, None))
                });
            });
        }
    }
}

criterion_group!(benches, draws);
criterion_main!(benches);
