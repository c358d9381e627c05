//! Decode steps of a context on a device: the same books and tokens with a step ahead, without, and by passes that the
//! host samples, whatever happens to the sequences in between. On the emulator; with debug assertions every cell that
//! is free or reserved holds NaN.

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

/// Requests of their own and on others' cells, chunks of prompts beside decode rows, sequences that end, are taken back,
/// sit out, are masked or find no cell: the tokens and the books are those of passes that the host samples.
#[test]
fn tokens_and_books_are_those_of_passes_whatever_happens_to_sequences() {
    let model = Tiny::for_gpu("Qwen2ForCausalLM", true);
    let run = |how, (seed, n_cells)| {
        let mut host = Host::new(&model, n_cells, how, seed);
        (0..40).for_each(|_| host.step());
        (host.answers, host.digests, host.n_exhausted)
    };
    // Arenas of a block and a half, where sequences get in each other's way, and of four blocks.
    for (seed, n_cells) in [(1, 96), (2, 256)] {
        let want = run(How::ByPasses, (seed, n_cells));
        let n_tokens: usize = want.0.values().map(Vec::len).sum();
        assert!(
            n_tokens > 60 && (want.2 > 0) == (n_cells == 96),
            "{n_tokens} tokens, {} times no cells",
            want.2
        );
        for how in [How::Synchronous, How::Ahead] {
            assert!(run(how, (seed, n_cells)) == want, "{how:?}, seed {seed}");
        }
    }
}

/// A context with two sequences of three tokens, one of them sampled with penalties, that were decoded `n` times.
fn started(device: Box<dyn Device>, how: How, n: usize) -> (Context, Vec<(SeqId, Vec<i32>)>) {
    let mut context = open(&Tiny::for_gpu("Qwen2ForCausalLM", true), 96, device, how);
    let penalised = SamplerSpec { repetition_penalty: 1.4, temperature: 0.0, ..SamplerSpec::default() };
    let mut seqs = Vec::new();
    for (i, spec) in (0..).zip([penalised, SamplerSpec { seed: 9, ..SamplerSpec::default() }]) {
        // Each in an arena of its own, so that none is in the way of the other's next cell.
        let id = context.seq_acquire(i).unwrap();
        let tokens = vec![5 + i as i32, 30, 2];
        context.set_sampler(id, spec, &tokens, &[]).unwrap();
        let rows = Rows::default().row(tokens[0], 0, &[id], 0).row(tokens[1], 1, &[id], 0);
        rows.decode(&mut context).unwrap();
        seqs.push((id, tokens));
    }
    (0..n).for_each(|_| go_on(&mut context, &mut seqs).unwrap());
    (context, seqs)
}

/// One token for each sequence.
fn go_on(context: &mut Context, seqs: &mut [(SeqId, Vec<i32>)]) -> Result<(), Error> {
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

/// What may happen to a sequence whose next row is under way.
#[test]
fn a_change_between_two_steps_is_what_the_next_one_sees() {
    type Change = fn(&mut Context, &mut Vec<(SeqId, Vec<i32>)>);
    let changes: [Change; 6] = [
        // Another token than the device's own.
        |_, seqs| *seqs[0].1.last_mut().unwrap() = 7,
        // The newest positions are forgotten.
        |context, seqs| {
            seqs[0].1.truncate(4);
            context.kv_seq_rm(seqs[0].0, 3, -1).unwrap();
            let spec = SamplerSpec { temperature: 0.0, ..SamplerSpec::default() };
            context.set_sampler(seqs[0].0, spec, &seqs[0].1, &[]).unwrap();
        },
        // Positions move, and their keys turn.
        |context, seqs| {
            context.kv_seq_add(seqs[0].0, 2, -1, 3).unwrap();
            let spec = SamplerSpec { temperature: 0.0, ..SamplerSpec::default() };
            seqs[0].1.splice(2..2, [0; 3]);
            context.set_sampler(seqs[0].0, spec, &seqs[0].1, &[]).unwrap();
        },
        // One ends, and its slot is another's; the cells under way go to a segment.
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
        // Others' cells are forgotten, the sequence itself stays.
        |context, seqs| {
            context.kv_seq_keep(seqs[0].0).unwrap();
            seqs[1].1.truncate(1);
        },
        // What was computed stays, what comes is of other weights.
        |context, _| {
            let values: Vec<f32> = (0..72).map(|i| i as f32 / 36.0).collect();
            context.replace_weight("model.norm.weight", &[72], &values).unwrap();
        },
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let run = |how| {
            let (mut context, mut seqs) = started(Box::new(Emulator::new()), how, 3);
            change(&mut context, &mut seqs);
            (0..3).for_each(|_| go_on(&mut context, &mut seqs).unwrap());
            seqs
        };
        assert_eq!(run(How::Ahead), run(How::Synchronous), "change {i}");
    }
}

#[test]
fn a_row_that_cannot_be_sampled_is_not_kept_and_the_others_are() {
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
            go_on(&mut context, &mut seqs[..1]).unwrap();
        } else {
            go_on(&mut context, &mut seqs).unwrap();
        }
        (0..2).for_each(|_| go_on(&mut context, &mut seqs).unwrap());
        seqs
    };
    let want = run(How::Synchronous, false);
    assert_eq!(run(How::Synchronous, true), want);
    assert_eq!(run(How::Ahead, true), want);
}

/// In the first step of a bucket, whose launches are single, and in a pass beside a step.
#[test]
fn a_decode_that_fails_leaves_everything_as_it_was() {
    let want = started(Box::new(Emulator::new()), How::Synchronous, 4).1;
    for how in [How::Synchronous, How::Ahead] {
        for n in [1, 2, 9, 14] {
            let fuse = Fuse::new();
            let (mut context, mut seqs) = started(Box::new(Flaky::new(&fuse, 1 << 30)), how, 0);
            let before = context.digest();
            fuse.fail(n);
            assert!(matches!(go_on(&mut context, &mut seqs), Err(Error::Device(_))), "launch {n}");
            assert_eq!(context.digest(), before);
            assert!(!context.is_broken());
            (0..2).for_each(|_| go_on(&mut context, &mut seqs).unwrap());
            // A prompt beside them, in whose pass a launch fails.
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
            go_on(&mut context, &mut seqs).unwrap();
            assert_eq!(seqs, want, "{how:?}, launch {n}");
        }
    }
}

/// Without this all of the above could hold for a context that never makes a step of its decodes.
#[test]
fn a_decode_that_goes_on_launches_graphs_alone() {
    for how in [How::Synchronous, How::Ahead] {
        let fuse = Fuse::new();
        let (mut context, mut seqs) = started(Box::new(Flaky::new(&fuse, 1 << 30)), how, 3);
        fuse.fail(1000);
        (0..3).for_each(|_| go_on(&mut context, &mut seqs).unwrap());
        assert_eq!(fuse.left(), 1000, "{how:?}");
        // Of a row alone there is no graph yet.
        go_on(&mut context, &mut seqs[..1]).unwrap();
        assert!(fuse.left() < 1000, "{how:?}");
    }
}

/// The second step of a bucket is captured: its first launch fails.
#[test]
fn why_a_step_is_no_graph_comes_once_with_what_it_gives() {
    let fuse = Fuse::new();
    let (mut context, mut seqs) = started(Box::new(Flaky::new(&fuse, 1 << 30)), How::Synchronous, 1);
    fuse.fail(1);
    let first = next(&mut context, &seqs, None).unwrap();
    let told = first.graph_refusal.expect("a capture failed");
    assert!(told.contains("2 rows") && told.contains("(701)"), "{told}");
    seqs.iter_mut().zip(first.token_ids).for_each(|((_, tokens), token)| tokens.push(token));
    assert_eq!(next(&mut context, &seqs, None).unwrap().graph_refusal, None);
}

/// The same tokens, other parameters; then none at all.
#[test]
fn a_sampler_that_is_set_anew_is_what_the_next_step_asks() {
    for how in [How::Synchronous, How::Ahead] {
        let (mut context, mut seqs) = started(Box::new(Emulator::new()), how, 3);
        for id in [7, 11] {
            let spec = SamplerSpec { allowed_ids: vec![id], ..SamplerSpec::default() };
            let (prompt, output) = seqs[0].1.split_at(3);
            context.set_sampler(seqs[0].0, spec, prompt, output).unwrap();
            go_on(&mut context, &mut seqs).unwrap();
            assert_eq!(seqs[0].1.last(), Some(&(id as i32)), "{how:?}");
        }
        // The only free slot is the one that was just given back.
        let others: Vec<SeqId> = (0..4).map(|_| context.seq_acquire(0).unwrap()).collect();
        context.seq_release(seqs[0].0).unwrap();
        seqs[0] = (context.seq_acquire(0).unwrap(), vec![11]);
        assert_eq!(seqs[0].0.slot(), 0, "beside {others:?}");
        go_on(&mut context, &mut seqs).unwrap();
        let logits = Rows::default().row(11, 0, &[others[0]], output::LOGITS).decode(&mut context).unwrap();
        assert_eq!(seqs[0].1[1], logits.token_ids[0], "{how:?}");
    }
}

/// What penalties look at comes from either side: here every third token is sampled by the host.
#[test]
fn tokens_that_the_host_sampled_count_on_the_device() {
    // 7 and 8 in turn, as no 7 may follow one of the answer.
    let spec = SamplerSpec {
        temperature: 0.0,
        bad_words: vec![vec![7, 7]],
        logit_bias: vec![(7, 200.0), (8, 100.0)],
        ..SamplerSpec::default()
    };
    for how in [How::Synchronous, How::Ahead] {
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
