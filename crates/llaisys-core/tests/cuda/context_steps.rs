//! Decode steps of a context on the emulator. The KV cache and the tokens are the same with overlap, without it, and by
//! passes that the host samples, while sequences change between the steps. With debug assertions, every free or
//! reserved cell is NaN.

use crate::common::{Rows, Tiny};
use crate::context_host::{Host, How, open};
use crate::emulator::Emulator;
use crate::emulator::flaky::{Flaky, Fuse};
use llaisys_core::Error;
use llaisys_core::batch::output;
use llaisys_core::context::{Context, DecodeRequest, DecodeResult, RowMasks};
use llaisys_core::cuda::device::Device;
use llaisys_core::sample::{RowFault, SamplerSpec};
use llaisys_core::seq::SeqId;

/// Requests share cells or not, chunks of prompts are in batches with decode rows, and sequences end, are rolled back,
/// skip steps, are masked or find no free cell.
#[test]
fn tokens_and_kv_cache_are_equal_with_overlap_without_it_and_by_passes() {
    let model = Tiny::for_gpu("Qwen2ForCausalLM", true);
    let run = |how, (seed, n_cells)| {
        let mut host = Host::new(&model, n_cells, how, seed);
        (0..40).for_each(|_| host.step());
        (host.completions, host.digests, host.n_exhausted)
    };
    // Streams of a block and a half, where sequences compete for cells, and of four blocks.
    for (seed, n_cells) in [(1, 96), (2, 256)] {
        let want = run(How::ByPasses, (seed, n_cells));
        let n_tokens: usize = want.0.values().map(Vec::len).sum();
        assert!(
            n_tokens > 60 && (want.2 > 0) == (n_cells == 96),
            "{n_tokens} tokens, {} times no cells",
            want.2
        );
        for how in [How::Synchronous, How::Overlap] {
            assert!(run(how, (seed, n_cells)) == want, "{how:?}, seed {seed}");
        }
    }
}

/// Returns a context with two sequences of three tokens, one with penalties, after `n` decodes.
fn started(device: Box<dyn Device>, how: How, n: usize) -> (Context, Vec<(SeqId, Vec<i32>)>) {
    let mut context = open(&Tiny::for_gpu("Qwen2ForCausalLM", true), 96, device, how);
    let penalized = SamplerSpec { repetition_penalty: 1.4, temperature: 0.0, ..SamplerSpec::default() };
    let mut seqs = Vec::new();
    for (i, spec) in (0..).zip([penalized, SamplerSpec { seed: 9, ..SamplerSpec::default() }]) {
        // Each in its own stream, so that neither uses the other's next cell.
        let id = context.seq_acquire(i).unwrap();
        let tokens = vec![5 + i as i32, 30, 2];
        context.set_sampler(id, spec, &tokens, &[]).unwrap();
        let rows = Rows::default().row(tokens[0], 0, &[id], 0).row(tokens[1], 1, &[id], 0);
        rows.decode(&mut context).unwrap();
        seqs.push((id, tokens));
    }
    (0..n).for_each(|_| decode_token(&mut context, &mut seqs).unwrap());
    (context, seqs)
}

/// Decodes one token of each sequence.
fn decode_token(context: &mut Context, seqs: &mut [(SeqId, Vec<i32>)]) -> Result<(), Error> {
    let result = next(context, seqs, None)?;
    for ((_, tokens), token) in seqs.iter_mut().zip(result.token_ids) {
        tokens.push(token);
    }
    Ok(())
}

fn next(
    context: &mut Context,
    seqs: &[(SeqId, Vec<i32>)],
    masks: Option<RowMasks<'_>>,
) -> Result<DecodeResult, Error> {
    let last = |rows: Rows, (id, tokens): &(SeqId, Vec<i32>)| {
        rows.row(tokens[tokens.len() - 1], tokens.len() as i32 - 1, &[*id], output::LOGITS)
    };
    let rows = seqs.iter().fold(Rows::default(), last);
    let result = context.decode(&DecodeRequest { arrays: rows.arrays(), masks, return_logits: false });
    context.check_integrity();
    result
}

/// The changes happen while the sequence's next row is in flight.
#[test]
fn the_next_step_sees_every_change_of_a_sequence() {
    type Change = fn(&mut Context, &mut Vec<(SeqId, Vec<i32>)>);
    let changes: [Change; 6] = [
        // Another token than the one that the device sampled.
        |_, seqs| *seqs[0].1.last_mut().unwrap() = 7,
        // The newest positions are removed.
        |context, seqs| {
            seqs[0].1.truncate(4);
            context.kv_seq_rm(seqs[0].0, 3, -1).unwrap();
            let spec = SamplerSpec { temperature: 0.0, ..SamplerSpec::default() };
            context.set_sampler(seqs[0].0, spec, &seqs[0].1, &[]).unwrap();
        },
        // Positions are shifted, and their keys are rotated.
        |context, seqs| {
            context.kv_seq_add(seqs[0].0, 2, -1, 3).unwrap();
            let spec = SamplerSpec { temperature: 0.0, ..SamplerSpec::default() };
            seqs[0].1.splice(2..2, [0; 3]);
            context.set_sampler(seqs[0].0, spec, &seqs[0].1, &[]).unwrap();
        },
        // One ends, and another sequence gets its slot. An imported node gets the cells of the rows in flight.
        |context, seqs| {
            context.seq_release(seqs[1].0).unwrap();
            let n = context.n_cells_free_in(0).unwrap();
            let data = vec![0; n * 2 * 2 * 2 * 64 * 2];
            context.kv_node_import(1, 0, 0, &data).unwrap();
            context.kv_node_trim(1, 0).unwrap();
            seqs[1].0 = context.seq_acquire(0).unwrap();
            context.kv_seq_cp(seqs[0].0, seqs[1].0, 0, 4).unwrap();
            seqs[1].1 = [&seqs[0].1[..4], &[9]].concat();
        },
        // The cells of all other sequences are removed.
        |context, seqs| {
            context.kv_seq_keep(seqs[0].0).unwrap();
            seqs[1].1.truncate(1);
        },
        // Later rows are computed with other weights.
        |context, _| {
            let values: Vec<f32> = (0..72).map(|i| i as f32 / 36.0).collect();
            context.replace_weight("model.norm.weight", &[72], &values).unwrap();
        },
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let run = |how| {
            let (mut context, mut seqs) = started(Box::new(Emulator::new()), how, 3);
            change(&mut context, &mut seqs);
            (0..3).for_each(|_| decode_token(&mut context, &mut seqs).unwrap());
            seqs
        };
        assert_eq!(run(How::Overlap), run(How::Synchronous), "change {i}");
    }
}

#[test]
fn a_row_with_a_fault_is_dropped_and_the_others_are_committed() {
    let run = |how, masked: bool| {
        let (mut context, mut seqs) = started(Box::new(Emulator::new()), how, 3);
        if masked {
            let digest = context.digest();
            let masks = RowMasks { rows: &[0], bits: &[0; 3] };
            let result = next(&mut context, &seqs[..1], Some(masks)).unwrap();
            assert_eq!((result.token_ids, result.faults), (vec![-1], vec![(0, RowFault::AllMasked)]));
            assert_eq!(context.digest(), digest);
            let result = next(&mut context, &seqs, Some(masks)).unwrap();
            assert_eq!(result.faults, [(0, RowFault::AllMasked)]);
            seqs[1].1.push(result.token_ids[1]);
            decode_token(&mut context, &mut seqs[..1]).unwrap();
        } else {
            decode_token(&mut context, &mut seqs).unwrap();
        }
        (0..2).for_each(|_| decode_token(&mut context, &mut seqs).unwrap());
        seqs
    };
    let want = run(How::Synchronous, false);
    assert_eq!(run(How::Synchronous, true), want);
    assert_eq!(run(How::Overlap, true), want);
}

/// A launch fails in the first step of a bucket, which runs kernel by kernel, and in a pass in the same decode as a
/// step.
#[test]
fn a_failed_decode_changes_nothing() {
    let want = started(Box::new(Emulator::new()), How::Synchronous, 4).1;
    for how in [How::Synchronous, How::Overlap] {
        for n in [1, 2, 9, 14] {
            let fuse = Fuse::new();
            let (mut context, mut seqs) = started(Box::new(Flaky::new(&fuse, 1 << 30)), how, 0);
            let before = context.digest();
            fuse.fail(n);
            assert!(matches!(decode_token(&mut context, &mut seqs), Err(Error::Device(_))), "launch {n}");
            assert_eq!(context.digest(), before);
            assert!(!context.is_broken());
            (0..2).for_each(|_| decode_token(&mut context, &mut seqs).unwrap());
            // A prompt in the same batch, in whose pass a launch fails.
            let other = context.seq_acquire(0).unwrap();
            let last = |i: usize| (seqs[i].1[seqs[i].1.len() - 1], seqs[i].1.len() as i32 - 1);
            let rows = Rows::default()
                .row(last(0).0, last(0).1, &[seqs[0].0], output::LOGITS)
                .row(last(1).0, last(1).1, &[seqs[1].0], output::LOGITS)
                .row(1, 0, &[other], 0)
                .row(2, 1, &[other], output::LOGITS);
            let request = DecodeRequest { arrays: rows.arrays(), masks: None, return_logits: false };
            let before = context.digest();
            fuse.fail(3);
            assert!(matches!(context.decode(&request), Err(Error::Device(_))));
            assert_eq!(context.digest(), before);
            let result = context.decode(&request).unwrap();
            seqs.iter_mut().zip(result.token_ids).for_each(|((_, tokens), token)| tokens.push(token));
            decode_token(&mut context, &mut seqs).unwrap();
            assert_eq!(seqs, want, "{how:?}, launch {n}");
        }
    }
}

/// Without this test, all tests above could pass for a context that never uses decode steps.
#[test]
fn a_repeated_decode_launches_only_graphs() {
    for how in [How::Synchronous, How::Overlap] {
        let fuse = Fuse::new();
        let (mut context, mut seqs) = started(Box::new(Flaky::new(&fuse, 1 << 30)), how, 3);
        fuse.fail(1000);
        (0..3).for_each(|_| decode_token(&mut context, &mut seqs).unwrap());
        assert_eq!(fuse.left(), 1000, "{how:?}");
        // There is no graph yet for one row.
        decode_token(&mut context, &mut seqs[..1]).unwrap();
        assert!(fuse.left() < 1000, "{how:?}");
    }
}

/// The second step of a bucket is captured, and its first launch fails.
#[test]
fn the_reason_of_a_failed_capture_is_reported_once() {
    let fuse = Fuse::new();
    let (mut context, mut seqs) = started(Box::new(Flaky::new(&fuse, 1 << 30)), How::Synchronous, 1);
    fuse.fail(1);
    let first = next(&mut context, &seqs, None).unwrap();
    let refusal = first.graph_refusal.expect("a capture failed");
    assert!(refusal.contains("2 rows") && refusal.contains("(701)"), "{refusal}");
    seqs.iter_mut().zip(first.token_ids).for_each(|((_, tokens), token)| tokens.push(token));
    assert_eq!(next(&mut context, &seqs, None).unwrap().graph_refusal, None);
}

/// The sampler changes while the tokens stay; then the slot has a sequence without a sampler.
#[test]
fn the_next_step_uses_a_sampler_that_was_set_again() {
    for how in [How::Synchronous, How::Overlap] {
        let (mut context, mut seqs) = started(Box::new(Emulator::new()), how, 3);
        for id in [7, 11] {
            let spec = SamplerSpec { allowed_ids: vec![id], ..SamplerSpec::default() };
            let (prompt, output) = seqs[0].1.split_at(3);
            context.set_sampler(seqs[0].0, spec, prompt, output).unwrap();
            decode_token(&mut context, &mut seqs).unwrap();
            assert_eq!(seqs[0].1.last(), Some(&(id as i32)), "{how:?}");
        }
        // The only free slot is the one that was just released.
        let others: Vec<SeqId> = (0..4).map(|_| context.seq_acquire(0).unwrap()).collect();
        context.seq_release(seqs[0].0).unwrap();
        seqs[0] = (context.seq_acquire(0).unwrap(), vec![11]);
        assert_eq!(seqs[0].0.slot(), 0, "the others are {others:?}");
        decode_token(&mut context, &mut seqs).unwrap();
        let logits = Rows::default().row(11, 0, &[others[0]], output::LOGITS).decode(&mut context).unwrap();
        assert_eq!(seqs[0].1[1], logits.token_ids[0], "{how:?}");
    }
}

/// The host samples every third token.
#[test]
fn penalties_on_the_device_see_tokens_that_the_host_sampled() {
    // 7 and 8 alternate, because no 7 may follow a 7 of the completion.
    let spec = SamplerSpec {
        temperature: 0.0,
        bad_words: vec![vec![7, 7]],
        logit_bias: vec![(7, 200.0), (8, 100.0)],
        ..SamplerSpec::default()
    };
    for how in [How::Synchronous, How::Overlap] {
        let (mut context, mut seqs) = started(Box::new(Emulator::new()), how, 0);
        let (id, tokens) = &mut seqs[0];
        context.set_sampler(*id, spec.clone(), tokens, &[]).unwrap();
        for i in 0..9 {
            let (token, position) = (tokens[tokens.len() - 1], tokens.len() as i32 - 1);
            let rows = Rows::default().row(token, position, &[*id], output::LOGITS);
            let return_logits = i % 3 == 2;
            let request = DecodeRequest { arrays: rows.arrays(), masks: None, return_logits };
            tokens.push(context.decode(&request).unwrap().token_ids[0]);
        }
        assert_eq!(tokens[3..], [7, 8, 7, 8, 7, 8, 7, 8, 7], "{how:?}");
    }
}
