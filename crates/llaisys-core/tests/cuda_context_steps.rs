//! Decode steps of a context on a device: the same books and tokens with a step ahead, without, and by passes that the
//! host samples, whatever happens to the sequences in between. On the emulator; with debug assertions every cell that
//! is free or reserved holds NaN.
#![cfg(feature = "cuda")]

mod common;
#[allow(unsafe_code, dead_code, reason = "runs compiled kernels; each test file uses a part of it")]
mod cuda_emu;

use common::{Rows, Tiny};
use cuda_emu::Emulator;
use cuda_emu::flaky::{Flaky, Fuse};
use llaisys_core::Error;
use llaisys_core::batch::output;
use llaisys_core::context::{Context, ContextConfig, DecodeRequest, DecodeResult, Gpu, RowMasks};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::error::Exhausted;
use llaisys_core::model::checkpoint::Checkpoint;
use llaisys_core::ops::contract::Draw;
use llaisys_core::ops::cuda::device::Device;
use llaisys_core::sample::{RowFault, SamplerSpec};
use llaisys_core::seq::SeqId;
use std::collections::BTreeMap;

const VOCAB: usize = 75;

/// How a context's decodes are done.
#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    Ahead,
    /// Each step waits for the one before.
    Synchronous,
    /// Logits are asked for, so every row is a pass's and the host's to sample.
    ByPasses,
}

fn settings() -> ContextConfig {
    let base = common::settings();
    ContextConfig { mode: ComputeMode::Auto, n_cells: 96, n_streams: 2, n_seq_max: 6, ..base }
}

fn open(model: &Tiny, device: Box<dyn Device>, how: How) -> Context {
    let folder = model.write();
    let gpu = Gpu { device, memory_share: None, overlap: how == How::Ahead };
    let context = Context::on_gpu(Checkpoint::open(&folder).unwrap(), settings(), gpu).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    context
}

fn on_emulator(model: &Tiny, how: How) -> Context {
    open(model, Box::new(Emulator::new()), how)
}

/// A sequence that runs; its first `n_done` tokens have cells.
#[derive(Debug, Clone)]
struct Running {
    request: usize,
    id: SeqId,
    stream: u32,
    tokens: Vec<i32>,
    n_prompt: usize,
    n_done: usize,
    spec: SamplerSpec,
}

/// A scheduler of a few lines: what it does is drawn from a seed and does not look at tokens.
struct Host {
    context: Context,
    how: How,
    draw: Draw,
    running: Vec<Running>,
    answers: BTreeMap<usize, Vec<i32>>,
    n_requests: usize,
    n_segments: u64,
    /// Of the books after each decode.
    digests: Vec<u64>,
    n_exhausted: usize,
}

impl Host {
    fn new(model: &Tiny, how: How, seed: u64) -> Self {
        Self {
            context: on_emulator(model, how),
            how,
            draw: Draw::new(seed),
            running: Vec::new(),
            answers: BTreeMap::new(),
            n_requests: 0,
            n_segments: 0,
            digests: Vec::new(),
            n_exhausted: 0,
        }
    }

    fn spec(&mut self) -> SamplerSpec {
        let base = SamplerSpec { temperature: 0.0, seed: self.draw.bits(), ..SamplerSpec::default() };
        match self.draw.below(4) {
            0 => base,
            1 => SamplerSpec { temperature: 0.9, top_k: 30, ..base },
            2 => SamplerSpec { repetition_penalty: 1.4, presence_penalty: 0.5, ..base },
            _ => SamplerSpec {
                temperature: 0.7,
                min_tokens: 5,
                stop_ids: vec![3],
                bad_words: vec![vec![4]],
                ..base
            },
        }
    }

    fn set_sampler(&mut self, index: usize) {
        let Running { id, ref tokens, n_prompt, ref spec, .. } = self.running[index];
        let (prompt, output) = tokens.split_at(n_prompt);
        self.context.set_sampler(id, spec.clone(), prompt, output).unwrap();
    }

    /// A new request: of its own, on another's first cells, or on a segment's.
    fn admit(&mut self) {
        let stream = self.draw.below(2) as u32;
        let Ok(id) = self.context.seq_acquire(stream) else { return };
        let (mut tokens, mut n_done) = (Vec::new(), 0);
        if let Some(parent) = self.running.first().filter(|_| self.draw.below(2) == 0).cloned() {
            n_done = self.draw.below(parent.n_done + 1);
            tokens.extend(&parent.tokens[..n_done]);
            // In the other arena it gets copies, if there is room.
            if self.context.kv_seq_cp(parent.id, id, 0, n_done as i32).is_err() {
                (tokens, n_done) = (Vec::new(), 0);
            }
        }
        let n_own = 1 + self.draw.below(7);
        tokens.extend((0..n_own).map(|_| self.draw.below(VOCAB) as i32));
        let (n_prompt, spec, request) = (tokens.len(), self.spec(), self.n_requests);
        self.n_requests += 1;
        self.running.push(Running { request, id, stream, tokens, n_prompt, n_done, spec });
        self.set_sampler(self.running.len() - 1);
    }

    fn release(&mut self, index: usize) {
        let gone = self.running.swap_remove(index);
        if self.draw.below(2) == 0 && gone.n_done > 2 {
            // Its cells stay for a while, as in a prefix cache.
            self.n_segments += 1;
            let held = self.context.kv_retain(self.n_segments, gone.id, 0, 2).is_ok();
            if held && self.draw.below(2) == 0 {
                self.context.kv_segment_trim(self.n_segments, 0).unwrap();
            }
        }
        self.context.seq_release(gone.id).unwrap();
    }

    /// The newest tokens are taken back.
    fn roll_back(&mut self, index: usize) {
        let running = &mut self.running[index];
        let n = running.n_prompt + (running.tokens.len() - running.n_prompt) / 2;
        if running.n_done >= n {
            running.tokens.truncate(n);
            running.n_done = n - 1;
            self.context.kv_seq_rm(running.id, n as i32 - 1, -1).unwrap();
            self.set_sampler(index);
        }
    }

    fn step(&mut self) {
        if self.draw.below(3) == 0 {
            self.admit();
        }
        match self.draw.below(12) {
            0 if self.running.len() > 1 => {
                let index = self.draw.below(self.running.len());
                self.release(index);
            }
            1 if !self.running.is_empty() => {
                let index = self.draw.below(self.running.len());
                self.roll_back(index);
            }
            _ => {}
        }
        if self.draw.below(3) == 0 {
            self.running.reverse();
        }
        let (mut rows, mut parts, mut masks) = (Rows::default(), Vec::new(), Vec::new());
        let sits_out = self.draw.below(8);
        for (index, running) in self.running.iter().enumerate().filter(|(index, _)| *index != sits_out) {
            let end = running.tokens.len().min(running.n_done + 4);
            for position in running.n_done..end {
                let is_last = position + 1 == running.tokens.len();
                if is_last && self.draw.below(10) == 0 {
                    masks.push((rows.tokens.len() as i32, [self.draw.bits() as u32 | 1, 7, 0]));
                }
                let wants = if is_last { output::LOGITS } else { output::NONE };
                rows = rows.row(running.tokens[position], position as i32, &[running.id], wants);
            }
            parts.push((index, end));
        }
        if parts.is_empty() {
            return;
        }
        match self.decode(&rows, &masks) {
            Ok(result) => {
                assert!(result.faults.is_empty(), "{:?}", result.faults);
                for (&row, &token) in result.rows.iter().zip(&result.token_ids) {
                    let id = SeqId::from_raw(rows.seq_ids[row as usize]);
                    let running = self.running.iter_mut().find(|running| running.id == id).unwrap();
                    running.tokens.push(token);
                    let answer = running.tokens[running.n_prompt..].to_vec();
                    self.answers.insert(running.request, answer);
                }
                parts.iter().for_each(|&(index, end)| self.running[index].n_done = end);
            }
            Err(Error::Exhausted(Exhausted::Cells { .. })) => {
                self.n_exhausted += 1;
                self.release(0);
            }
            Err(error) => panic!("{error}"),
        }
        self.running.iter().for_each(|running| assert!(running.stream < 2));
        self.digests.push(self.context.digest());
    }

    fn decode(&mut self, rows: &Rows, masks: &[(i32, [u32; 3])]) -> Result<DecodeResult, Error> {
        let (of, bits): (Vec<i32>, Vec<[u32; 3]>) = masks.iter().copied().unzip();
        let masks = (!of.is_empty()).then(|| RowMasks { rows: &of, bits: bits.as_flattened() });
        let return_logits = self.how == How::ByPasses;
        let result = self.context.decode(&DecodeRequest { arrays: rows.arrays(), masks, return_logits });
        self.context.check_integrity();
        result
    }
}

/// Requests of their own and on others' cells, chunks of prompts beside decode rows, sequences that end, are taken back,
/// sit out, are masked or find no cell: the tokens and the books are those of passes that the host samples.
#[test]
fn tokens_and_books_are_those_of_passes_whatever_happens_to_sequences() {
    let model = Tiny::for_gpu("Qwen2ForCausalLM", true);
    let run = |how, seed| {
        let mut host = Host::new(&model, how, seed);
        (0..40).for_each(|_| host.step());
        (host.answers, host.digests, host.n_exhausted)
    };
    for seed in [1, 2] {
        let want = run(How::ByPasses, seed);
        let n_tokens: usize = want.0.values().map(Vec::len).sum();
        assert!(n_tokens > 60 && want.2 > 0, "{n_tokens} tokens, {} times no cells", want.2);
        for how in [How::Synchronous, How::Ahead] {
            assert!(run(how, seed) == want, "{how:?}, seed {seed}");
        }
    }
}

/// A context with two sequences of three tokens, one of them sampled with penalties, that were decoded `n` times.
fn started(device: Box<dyn Device>, how: How, n: usize) -> (Context, Vec<(SeqId, Vec<i32>)>) {
    let mut context = open(&Tiny::for_gpu("Qwen2ForCausalLM", true), device, how);
    let penalised = SamplerSpec { repetition_penalty: 1.4, temperature: 0.0, ..SamplerSpec::default() };
    let mut seqs = Vec::new();
    for (i, spec) in [penalised, SamplerSpec { seed: 9, ..SamplerSpec::default() }].into_iter().enumerate() {
        let id = context.seq_acquire(0).unwrap();
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
            context.kv_import(1, 0, 0, &data).unwrap();
            context.kv_segment_trim(1, 0).unwrap();
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
