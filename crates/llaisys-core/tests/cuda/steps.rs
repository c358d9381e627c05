//! Decode steps whose state is on the device, on the emulator. They have the bits of the eager pass and the tokens of
//! the host's sampler, with and without overlap. Other tests check the calls of the device.

use crate::common::Tiny;
use crate::steps_rig::{Call, MAX_LEN, Refuses, Rig, Seq, slot_of};
use half::bf16;
use llaisys_core::cuda::forward::steps::StepSettings;
use llaisys_core::ops::cases::SplitMix64;
use llaisys_core::sample::{Outcome, RowFault, SamplerSpec};
use std::path::PathBuf;

const VOCAB: usize = 75;
const OFF: StepSettings = StepSettings { overlap: false, graphs: true };
const ON: StepSettings = StepSettings { overlap: true, graphs: true };
const EAGER: StepSettings = StepSettings { overlap: false, graphs: false };

/// A folder that is removed on drop.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns a tiny model with heads of 64, whose numbers are exact in bf16.
fn tiny(architecture: &'static str, more_keys: &str) -> Tiny {
    let mut model = Tiny::sized(architecture, false, |model| {
        (model.d_model, model.d_ff, model.vocab_size) = (72, 104, VOCAB);
        (model.n_heads, model.n_kv_heads, model.d_head) = (6, 2, 64);
        model.more_keys = more_keys.to_owned();
    });
    for (_, values) in model.tensors.values_mut() {
        values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
    }
    model
}

fn model(architecture: &'static str, more_keys: &str) -> Folder {
    Folder(tiny(architecture, more_keys).write())
}

fn llama() -> Folder {
    model("LlamaForCausalLM", "")
}

/// A model whose second layer has a window of 10 positions.
fn half_windowed() -> Folder {
    let keys = r#", "use_sliding_window": true, "max_window_layers": 1, "sliding_window": 10"#;
    model("Qwen2ForCausalLM", keys)
}

fn greedy() -> SamplerSpec {
    SamplerSpec { temperature: 0.0, ..SamplerSpec::default() }
}

fn tokens(draw: &mut SplitMix64, n: usize) -> Vec<i32> {
    (0..n).map(|_| draw.below(VOCAB) as i32).collect()
}

fn step(rig: &mut Rig, seqs: &mut [Seq]) -> Vec<Outcome> {
    rig.step(&mut seqs.iter_mut().collect::<Vec<_>>())
}

/// The first step of a bucket runs kernel by kernel, the second is captured and replayed, and the others are replayed.
/// The rig compares each with the eager pass.
#[test]
fn steps_of_every_bucket_have_the_bits_of_the_eager_pass() {
    for folder in [llama(), half_windowed()] {
        let mut rig = Rig::new(&folder.0, OFF);
        let draw = &mut SplitMix64::new(1);
        for (n_graphs, n) in [1, 2, 3, 5, 9].into_iter().enumerate() {
            let mut seqs: Vec<Seq> = (0..n)
                .map(|i| {
                    let tokens = tokens(draw, 1 + (i * 7 + n) % 23);
                    rig.add(&tokens, tokens.len(), &greedy(), None)
                })
                .collect();
            for _ in 0..3 {
                step(&mut rig, &mut seqs);
            }
            assert_eq!(rig.steps.n_graphs(), n_graphs + 1);
            seqs.iter().for_each(|seq| rig.remove(seq));
        }
    }
}

fn specs() -> Vec<SamplerSpec> {
    let sampled = SamplerSpec { temperature: 0.8, seed: 7, ..SamplerSpec::default() };
    vec![
        greedy(),
        sampled.clone(),
        SamplerSpec { top_k: 20, top_p: 0.9, min_p: 0.01, seed: 8, ..sampled.clone() },
        SamplerSpec { repetition_penalty: 1.3, presence_penalty: 0.5, frequency_penalty: 0.4, ..greedy() },
        SamplerSpec {
            logit_bias: vec![(3, 6.0), (4, 5.5), (9, -20.0)],
            min_tokens: 9,
            stop_ids: vec![3, 17],
            bad_words: vec![vec![4, 4], vec![11]],
            ..sampled.clone()
        },
        SamplerSpec { top_logprobs: Some(3), allowed_ids: (5..40).collect(), ..sampled },
    ]
}

/// All sampling parameters over many steps, each of which depends on the tokens of the previous steps. The rig compares
/// each step with the host's sampler on the logits of the eager pass. Steps without graphs and with overlap give the
/// same tokens.
#[test]
fn every_sampling_parameter_gives_the_hosts_tokens_with_and_without_overlap() {
    let folder = half_windowed();
    let completions = |settings| {
        let mut rig = Rig::new(&folder.0, settings);
        let draw = &mut SplitMix64::new(5);
        let mut seqs: Vec<Seq> = specs()
            .iter()
            .enumerate()
            .map(|(i, spec)| {
                let tokens = tokens(draw, 4 + i * 3);
                rig.add(&tokens, tokens.len().min(6), spec, None)
            })
            .collect();
        let outcomes: Vec<Vec<Outcome>> = (0..16).map(|_| step(&mut rig, &mut seqs)).collect();
        (seqs.iter().map(|seq| seq.tokens.clone()).collect::<Vec<_>>(), outcomes)
    };
    let off = completions(OFF);
    assert!(
        off.1
            .iter()
            .all(|step| matches!(&step[5], Outcome::Token { logprobs: Some(l), .. } if l.top.len() == 3))
    );
    assert_eq!(completions(EAGER), off);
    assert_eq!(completions(ON), off);
}

/// The completions of a run, by request.
type Completions = Vec<Vec<i32>>;

/// Runs a small scheduler and returns the completions. Requests start and end, share prefixes, are preempted and
/// resumed, skip steps, and have masks. The `seed` determines all of it, independently of the tokens.
fn run_scheduler(folder: &Folder, settings: StepSettings, seed: u64) -> Completions {
    let mut rig = Rig::new(&folder.0, settings);
    // Another test compares the host's sampler.
    rig.checked = false;
    let (draw, specs) = (&mut SplitMix64::new(seed), specs());
    let prefix = tokens(draw, 9);
    let mut running: Vec<(usize, Seq)> = Vec::new();
    let mut completions: Completions = Vec::new();
    for _ in 0..30 {
        if running.len() < 5 && draw.below(3) > 0 {
            let n_own = 1 + draw.below(6);
            let prompt = [prefix.clone(), tokens(draw, n_own)].concat();
            let shared = running.first().map(|(_, seq)| (seq.id, draw.below(prefix.len() + 1)));
            let spec = SamplerSpec { seed: draw.bits(), ..specs[draw.below(specs.len())].clone() };
            running.push((completions.len(), rig.add(&prompt, prompt.len(), &spec, shared)));
            completions.push(Vec::new());
        }
        if running.len() > 1 && draw.below(4) == 0 {
            let (index, seq) = running.swap_remove(draw.below(running.len()));
            rig.remove(&seq);
            if draw.below(2) == 0 {
                // Preempted: it is resumed with its tokens.
                running.push((index, rig.add(&seq.tokens, seq.n_prompt, &seq.spec, None)));
            }
        }
        if let Some((_, seq)) = running.first_mut() {
            let allowed = |bits: u64| Some(vec![bits as u32 | 1, (bits >> 32) as u32, 0]);
            seq.mask = if draw.below(3) == 0 { allowed(draw.bits()) } else { None };
        }
        let skipped = draw.below(6);
        let rows = running.iter_mut().enumerate().filter(|(i, _)| *i != skipped);
        let mut rows: Vec<&mut Seq> = rows.map(|(_, (_, seq))| seq).collect();
        if rows.is_empty() {
            continue;
        }
        rig.step(&mut rows);
        running.iter().for_each(|(index, seq)| completions[*index] = seq.completion().to_vec());
        running.retain(|(_, seq)| seq.tokens.len() < MAX_LEN - 1);
    }
    completions
}

#[test]
fn tokens_are_equal_with_and_without_overlap_while_sequences_join_end_and_are_preempted() {
    let folder = llama();
    for seed in 0..2 {
        let off = run_scheduler(&folder, OFF, seed);
        let on = run_scheduler(&folder, ON, seed);
        assert_eq!(on, off, "seed {seed}");
        assert!(off.iter().filter(|completion| completion.len() > 4).count() > 3, "{off:?}");
    }
}

/// A repeated decode uploads only the plan and launches only the graph. With overlap the next step is launched before
/// the host waits.
#[test]
fn a_repeated_step_is_one_small_upload_and_one_replay() {
    let folder = llama();
    for (settings, want) in [
        (OFF, [Call::Upload(8 * 4), Call::Replay, Call::ReadBack, Call::Collect]),
        (ON, [Call::Upload(8 * 4), Call::Replay, Call::ReadBack, Call::Collect]),
    ] {
        let mut rig = Rig::new(&folder.0, settings);
        rig.checked = false;
        let mut seqs: Vec<Seq> = (0..3).map(|i| rig.add(&[i, i + 1, 5], 3, &specs()[3], None)).collect();
        for _ in 0..4 {
            step(&mut rig, &mut seqs);
        }
        for _ in 0..3 {
            rig.device.take_calls();
            step(&mut rig, &mut seqs);
            assert_eq!(rig.device.take_calls(), want, "{settings:?}");
        }
        // A mask is 12 bytes here. Its row is not launched early, so it is a separate step.
        seqs[1].mask = Some(vec![u32::MAX, 1, 0]);
        step(&mut rig, &mut seqs);
        rig.device.take_calls();
        step(&mut rig, &mut seqs);
        let uploads = rig.device.take_calls().into_iter().filter(|call| matches!(call, Call::Upload(_)));
        assert!(uploads.clone().all(|call| matches!(call, Call::Upload(8..=32))), "{uploads:?}");
    }
}

#[test]
fn a_fault_of_one_row_does_not_affect_the_others() {
    // The embedding of the last token is not finite, and bad_words forbids the token.
    let mut model = tiny("LlamaForCausalLM", "");
    let (_, embed) = model.tensors.get_mut("model.embed_tokens.weight").expect("each model has it");
    embed[(VOCAB - 1) * 72..].fill(f32::NAN);
    let folder = Folder(model.write());
    let forbids = |spec: SamplerSpec| SamplerSpec { bad_words: vec![vec![VOCAB as u32 - 1]], ..spec };
    let run = |settings: StepSettings, with_faults: bool| {
        let mut rig = Rig::new(&folder.0, settings);
        rig.checked = false;
        let mut sound: Vec<Seq> =
            (0..2).map(|i| rig.add(&[i, 30, 2], 3, &forbids(specs()[1].clone()), None)).collect();
        let mut bad = rig.add(&[1, 2], 2, &forbids(greedy()), None);
        let mut masked = rig.add(&[3, 2], 2, &forbids(greedy()), None);
        for i in 0..8 {
            let mut rows: Vec<&mut Seq> = sound.iter_mut().collect();
            if i < 3 {
                rows.extend([&mut bad, &mut masked]);
            }
            if with_faults && i == 2 {
                // A token that the device did not sample.
                *rows[2].tokens.last_mut().expect("it has a prompt") = VOCAB as i32 - 1;
                rows[3].mask = Some(vec![0; 3]);
            }
            let outcomes = rig.step(&mut rows);
            if with_faults && i == 2 {
                assert_eq!(
                    outcomes[2..],
                    [Outcome::Fault(RowFault::NonFinite), Outcome::Fault(RowFault::AllMasked)]
                );
            }
            if i == 2 {
                rig.remove(&bad);
                rig.remove(&masked);
            }
        }
        sound.into_iter().map(|seq| seq.tokens).collect::<Vec<_>>()
    };
    let want = run(OFF, false);
    assert_eq!(run(OFF, true), want);
    assert_eq!(run(ON, true), want);
}

/// At each failing call, the decode changes nothing, and the next decode gives the same tokens as without the failure.
#[test]
fn a_step_can_be_repeated_after_any_failed_call() {
    let folder = llama();
    for settings in [OFF, ON] {
        let tokens_with = |fails_in: Option<usize>| {
            let mut rig = Rig::new(&folder.0, settings);
            rig.checked = false;
            let mut seqs: Vec<Seq> = (0..2).map(|i| rig.add(&[i, 30, 2], 3, &specs()[3], None)).collect();
            for _ in 0..3 {
                step(&mut rig, &mut seqs);
            }
            rig.device.fails_in.set(fails_in);
            let digest = rig.kv.digest();
            let failed = rig.try_step(&mut seqs.iter_mut().collect::<Vec<_>>()).is_err();
            assert_eq!(failed, fails_in.is_some());
            if failed {
                assert_eq!(rig.kv.digest(), digest);
                step(&mut rig, &mut seqs);
            }
            for _ in 0..2 {
                step(&mut rig, &mut seqs);
            }
            seqs.into_iter().map(|seq| seq.tokens).collect::<Vec<_>>()
        };
        let want = tokens_with(None);
        for call in 0..4 {
            assert_eq!(tokens_with(Some(call)), want, "{settings:?}, call {call}");
        }
    }
}

#[test]
fn a_bucket_whose_capture_fails_is_launched_kernel_by_kernel() {
    let folder = llama();
    let run = |refuses: Refuses| {
        let mut rig = Rig::new(&folder.0, OFF);
        rig.device.refuses.set(refuses);
        let mut seqs: Vec<Seq> = (0..2).map(|i| rig.add(&[i, 30, 2], 3, &greedy(), None)).collect();
        for _ in 0..4 {
            step(&mut rig, &mut seqs);
        }
        let refusal = rig.steps.take_graph_refusal();
        assert_eq!(rig.steps.take_graph_refusal(), None, "reported once");
        // Other buckets are captured.
        rig.device.refuses.set(Refuses::Nothing);
        for _ in 0..2 {
            rig.step(&mut [&mut seqs[0]]);
        }
        (seqs.into_iter().map(|seq| seq.tokens).collect::<Vec<_>>(), refusal, rig.steps.n_graphs())
    };
    let (want, none, n_graphs) = run(Refuses::Nothing);
    assert_eq!((none, n_graphs), (None, 2));
    for (refuses, status) in [(Refuses::Launch, "(900)"), (Refuses::End, "OUT_OF_MEMORY")] {
        let (got, refusal, n_graphs) = run(refuses);
        assert_eq!((got, n_graphs), (want.clone(), 1));
        let refusal = refusal.expect("a capture failed");
        assert!(refusal.contains(status) && refusal.contains("2 rows"), "{refusal}");
    }
}

#[test]
fn positions_continue_after_the_oldest_cells_were_removed() {
    let folder = model("MistralForCausalLM", r#", "sliding_window": 10"#);
    let run = |trims: bool, settings| {
        let mut rig = Rig::new(&folder.0, settings);
        rig.checked = false;
        let tokens = tokens(&mut SplitMix64::new(3), 24);
        let mut seq = rig.add(&tokens, 24, &specs()[3], None);
        for i in 0..10 {
            if trims && i % 4 == 0 {
                rig.steps.invalidate_sequence(slot_of(seq.id));
                rig.kv.seq_rm(seq.id, 0, seq.tokens.len() as i32 - 11).expect("the id is acquired");
            }
            rig.step(&mut [&mut seq]);
        }
        seq.tokens
    };
    let want = run(false, OFF);
    assert_eq!(run(true, OFF), want);
    assert_eq!(run(true, ON), want);
}
