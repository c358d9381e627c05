//! Cache nodes and KV streams with a real forward pass: the same bits for any placement of the cells, whether a prefix
//! was computed, linked or copied. With debug assertions, every cell that is free or reserved is filled with NaN.

use crate::common::{Outputs, Rows, Tiny, feed, load};
use llaisys_core::Error;
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::dtype::{ComputeMode, KvDType};
use llaisys_core::error::{Exhausted, Rejected};
use llaisys_core::kv::KvError;

/// One thread: the bits do not depend on the number of threads (`decode.rs`), and many small decodes are faster.
fn settings() -> ContextConfig {
    ContextConfig { n_threads: 1, ..crate::common::settings() }
}

fn model() -> Tiny {
    Tiny::odd("Qwen2ForCausalLM", true)
}

/// The settings of each number type that cells can have.
fn configs() -> [ContextConfig; 3] {
    let with = |mode, kv_dtype| ContextConfig { mode, kv_dtype: Some(kv_dtype), ..settings() };
    [
        with(ComputeMode::Float32, KvDType::Float32),
        with(ComputeMode::Bfloat16, KvDType::Bfloat16),
        with(ComputeMode::Float32, KvDType::Int8),
    ]
}

/// The outputs of each of `tokens` in a separate sequence.
fn alone(config: ContextConfig, tokens: &[i32]) -> Outputs {
    let mut loaded = load(&model(), config);
    let seq = loaded.context.seq_acquire(0).unwrap();
    feed(&mut loaded.context, seq, tokens, tokens.len())
}

/// The bits of the rows of `tokens` after the first `n`.
fn tail(outputs: &Outputs, tokens: &[i32], n: usize) -> Outputs {
    let cut = |values: &[u32]| values[values.len() / tokens.len() * n..].to_vec();
    Outputs { logits: cut(&outputs.logits), hidden: cut(&outputs.hidden) }
}

fn cache_prompt(context: &mut Context, tokens: &[i32], stream: u32) {
    let seq = context.seq_acquire(stream).unwrap();
    feed(context, seq, tokens, 11);
    context.kv_node_cache(u64::from(stream), seq, 0, 40).unwrap();
    context.seq_release(seq).unwrap();
    context.check_integrity();
}

#[test]
fn one_two_and_four_streams_give_the_same_bits() {
    let tokens = model().tokens(1, 50);
    for config in configs() {
        let want = tail(&alone(config, &tokens), &tokens, 37);
        for n_streams in [1, 2, 4] {
            let mut loaded = load(&model(), ContextConfig { n_streams, n_cells: 512, ..config });
            let context = &mut loaded.context;
            // Sequences of every stream use the prefix of every stream: linked in the same stream, copied to another
            // one.
            for stream in 0..n_streams as u32 {
                cache_prompt(context, &tokens, stream);
            }
            for stream in 0..n_streams as u32 {
                for node in 0..n_streams as u64 {
                    let seq = context.seq_acquire(stream).unwrap();
                    let free = context.n_cells_free();
                    context.kv_node_attach(node, seq, 0, 37).unwrap();
                    let n_copied = if node == u64::from(stream) { 0 } else { 37 };
                    assert_eq!(free - context.n_cells_free(), n_copied);
                    let mut got = Outputs::default();
                    got.push(&Rows::default().run(seq, 37, &tokens[37..]).decode(context).unwrap());
                    assert!(got == want, "node {node} in stream {stream} of {n_streams}");
                    context.seq_release(seq).unwrap();
                }
            }
            assert_eq!(context.n_cells_free(), context.n_cells() - 40 * n_streams);
        }
    }
}

#[test]
fn fork_into_another_stream_is_independent() {
    let tokens = model().tokens(2, 30);
    for config in configs() {
        let want = tail(&alone(config, &tokens), &tokens, 20);
        let mut loaded = load(&model(), ContextConfig { n_streams: 2, ..config });
        let context = &mut loaded.context;
        let (here, there) = (context.seq_acquire(0).unwrap(), context.seq_acquire(1).unwrap());
        feed(context, here, &tokens[..20], 7);
        context.kv_seq_cp(here, there, -1, -1).unwrap();
        // The original is released; a fork that still used its cells would read NaN from now on.
        context.seq_release(here).unwrap();
        let other = context.seq_acquire(0).unwrap();
        feed(context, other, &model().tokens(3, 60), 60);
        let mut got = Outputs::default();
        got.push(&Rows::default().run(there, 20, &tokens[20..]).decode(context).unwrap());
        assert!(got == want);
    }
}

#[test]
fn sequences_of_all_streams_share_a_batch() {
    let prompts: Vec<Vec<i32>> = (0..4).map(|i| model().tokens(20 + i, 9 + 5 * i as usize)).collect();
    let want: Vec<Outputs> = prompts.iter().map(|prompt| alone(settings(), prompt)).collect();
    let mut loaded = load(&model(), ContextConfig { n_streams: 4, n_batch: 7, ..settings() });
    let seqs = [0, 1, 2, 3].map(|stream| loaded.context.seq_acquire(stream).unwrap());
    let rows = prompts.iter().zip(seqs).fold(Rows::default(), |rows, (prompt, seq)| rows.run(seq, 0, prompt));
    let mut got = Outputs::default();
    got.push(&rows.decode(&mut loaded.context).unwrap());
    assert!(got.logits == want.iter().flat_map(|outputs| outputs.logits.clone()).collect::<Vec<_>>());
    for stream in 0..4 {
        let n_free = 64 - prompts[stream as usize].len();
        assert_eq!(loaded.context.n_cells_free_in(stream).unwrap(), n_free);
    }
}

#[test]
fn row_with_another_stream_is_rejected() {
    let mut loaded = load(&model(), ContextConfig { n_streams: 2, ..settings() });
    let context = &mut loaded.context;
    let seq = context.seq_acquire(1).unwrap();
    let rows = Rows::default().run(seq, 0, &[1, 2]);
    let mut decode = |stream: &[u32]| {
        let arrays = llaisys_core::batch::BatchArrays { stream, ..rows.arrays() };
        let request = llaisys_core::context::DecodeRequest { arrays, masks: None, return_logits: false };
        context.decode(&request).map(|_| ())
    };
    let wrong = decode(&[1, 0]).unwrap_err();
    let expected = KvError::WrongStream { row: 1, stream: 0, slot: 0, expected: 1 };
    assert!(matches!(wrong, Error::Rejected(Rejected::Kv(error)) if error == expected), "{wrong}");
    decode(&[1, 1]).unwrap();
}

#[test]
fn rejected_attach_or_copy_has_no_side_effects() {
    let mut loaded = load(&model(), ContextConfig { n_streams: 2, n_cells: 100, ..settings() });
    let context = &mut loaded.context;
    cache_prompt(context, &model().tokens(4, 40), 0);
    let there = context.seq_acquire(1).unwrap();
    feed(context, there, &model().tokens(5, 20), 20);
    let late = context.seq_acquire(1).unwrap();
    let before = context.digest();
    let short = context.kv_node_attach(0, late, 0, 40).unwrap_err();
    assert!(
        matches!(short, Error::Exhausted(Exhausted::Cells { needed: 40, free: 30, capacity: 50 })),
        "{short}"
    );
    assert!(context.kv_node_attach(9, late, 0, 1).is_err());
    assert!(context.kv_node_attach(0, late, 1, 2).is_err(), "an empty sequence ends at 0");
    assert!(context.kv_node_attach(0, late, 0, 41).is_err());
    assert!(context.kv_node_cache(0, there, 0, 1).is_err(), "the id is in use");
    assert!(context.kv_node_split(0, 40, 1).is_err());
    assert!(context.kv_node_trim(0, 41).is_err());
    assert_eq!(context.digest(), before);
}
