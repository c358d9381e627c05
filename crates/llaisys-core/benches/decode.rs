//! The decode step and prefill of a six-layer model with SmolLM2's widths (random weights, bf16), on two threads.
//! `throughput` is in tokens. The same steps on the real file are in `benches/` at the project's root.

mod bound;
#[path = "../tests/common/mod.rs"]
mod common;

use bound::print_bound;
use common::{Loaded, Rows, Tiny, load, settings};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use llaisys_core::batch::output;
use llaisys_core::context::{ContextConfig, DecodeRequest};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::seq::SeqId;

/// Positions of every sequence before its timed step.
const N_CONTEXT: usize = 96;

fn start() -> Loaded {
    let model = Tiny::sized("LlamaForCausalLM", true, |model| {
        (model.n_layers, model.d_model, model.d_ff, model.vocab_size) = (6, 576, 1536, 8192);
        (model.n_heads, model.n_kv_heads, model.d_head) = (9, 3, 64);
    });
    let config = ContextConfig {
        mode: ComputeMode::Bfloat16,
        n_cells: 4096,
        n_seq_max: 16,
        n_batch: 512,
        ..settings()
    };
    load(&model, ContextConfig { max_model_len: 512, ..config })
}

/// Decodes and checks that every row has a token, so that no failed decode is measured.
fn step(loaded: &mut Loaded, rows: &Rows) {
    let request = DecodeRequest { arrays: rows.arrays(), masks: None, return_logits: false };
    let result = loaded.context.decode(&request).expect("enough free cells");
    assert!(result.token_ids.iter().all(|&token| token >= 0), "every row has a token");
}

/// Every weight, in 16 bits, is read once and multiplied with each row.
fn print_weights_bound(loaded: &Loaded, name: &str, n_rows: usize) {
    let n_bytes = loaded.context.weight_bytes();
    print_bound(name, n_bytes, n_bytes * n_rows);
}

fn one_token_each(c: &mut Criterion, loaded: &mut Loaded, n_seqs: usize) {
    let seqs: Vec<SeqId> =
        (0..n_seqs).map(|_| loaded.context.seq_acquire(0).expect("an id is free")).collect();
    for &seq in &seqs {
        let prompt =
            (0..N_CONTEXT).fold(Rows::default(), |rows, i| rows.row(i as i32 * 7, i as i32, &[seq], 0));
        step(loaded, &prompt);
    }
    let rows = seqs
        .iter()
        .fold(Rows::default(), |rows, &seq| rows.row(11, N_CONTEXT as i32, &[seq], output::LOGITS));
    let mut group = c.benchmark_group("decode");
    print_weights_bound(loaded, &format!("decode/{n_seqs}"), n_seqs);
    group.throughput(Throughput::Elements(n_seqs as u64));
    group.bench_function(format!("{n_seqs} sequences at {N_CONTEXT}"), |b| {
        b.iter(|| {
            step(loaded, &rows);
            for &seq in &seqs {
                loaded.context.kv_seq_rm(seq, N_CONTEXT as i32, -1).expect("the id is acquired");
            }
        });
    });
    group.finish();
    seqs.into_iter().for_each(|seq| loaded.context.seq_release(seq).expect("the id is acquired"));
}

fn prefill(c: &mut Criterion, loaded: &mut Loaded, n_tokens: usize) {
    let seq = loaded.context.seq_acquire(0).expect("an id is free");
    let rows = (0..n_tokens).fold(Rows::default(), |rows, i| {
        let wants = if i + 1 == n_tokens { output::LOGITS } else { output::NONE };
        rows.row(i as i32 * 5, i as i32, &[seq], wants)
    });
    let mut group = c.benchmark_group("prefill");
    print_weights_bound(loaded, &format!("prefill/{n_tokens}"), n_tokens);
    group.throughput(Throughput::Elements(n_tokens as u64)).sample_size(20);
    group.bench_function(format!("{n_tokens} tokens"), |b| {
        b.iter(|| {
            step(loaded, &rows);
            loaded.context.kv_seq_rm(seq, -1, -1).expect("the id is acquired");
        });
    });
    group.finish();
    loaded.context.seq_release(seq).expect("the id is acquired");
}

fn decode_step(c: &mut Criterion) {
    let mut loaded = start();
    for n_seqs in [1, 4, 16] {
        one_token_each(c, &mut loaded, n_seqs);
    }
    prefill(c, &mut loaded, 512);
}

criterion_group!(benches, decode_step);
criterion_main!(benches);
