//! A row that cannot be sampled affects only its own sequences; a row that scores the prompt is not sampled.

use crate::common::{Outputs, Rows, Tiny, feed, load, settings};
use llaisys_core::batch::output;
use llaisys_core::context::{DecodeRequest, RowMasks};
use llaisys_core::sample::{Logprobs, RowFault, SamplerSpec};

fn model() -> Tiny {
    Tiny::odd("Qwen2ForCausalLM", true)
}

fn greedy() -> SamplerSpec {
    SamplerSpec { temperature: 0.0, ..SamplerSpec::default() }
}

/// Three sequences in one decode, with no token allowed in row 2 (the second sequence's second row).
#[test]
fn faulty_row_removes_only_later_rows_of_its_sequences() {
    let tokens = model().tokens(17, 12);
    let mut loaded = load(&model(), settings());
    let context = &mut loaded.context;
    let [alone, a, b, c] = [(); 4].map(|()| context.seq_acquire(0).unwrap());
    let want = feed(context, alone, &tokens, 12);
    feed(context, a, &tokens[..5], 5);
    let spec = SamplerSpec { top_logprobs: Some(0), ..greedy() };
    for seq in [a, b] {
        context.set_sampler(seq, spec.clone(), &tokens, &[]).unwrap();
    }
    let free = context.n_cells_free();
    let all = output::LOGITS;
    let rows = Rows::default()
        .row(tokens[0], 0, &[b], all)
        .row(tokens[5], 5, &[a], all)
        .row(tokens[1], 1, &[b], all)
        .row(tokens[2], 2, &[b], 0)
        .row(tokens[3], 3, &[b], all)
        .row(tokens[6], 6, &[a], all)
        .row(tokens[0], 0, &[c], all);
    let masks = Some(RowMasks { rows: &[2], bits: &[0; 3] });
    let request = DecodeRequest { arrays: rows.arrays(), masks, return_logits: false };
    let result = context.decode(&request).unwrap();
    context.check_integrity();
    assert_eq!(result.faults, [(2, RowFault::AllMasked), (4, RowFault::AllMasked)]);
    assert_eq!(result.rows, [0, 1, 2, 4, 5, 6]);
    let sampled: Vec<bool> = result.token_ids.iter().map(|id| *id >= 0).collect();
    assert_eq!(sampled, [true, true, false, false, true, true]);
    assert_eq!(result.logprobs.iter().map(|(out, _)| *out).collect::<Vec<_>>(), [0, 1, 4]);
    let ends = [a, b, c].map(|seq| context.kv_seq_pos_max(seq).unwrap());
    assert_eq!(ends, [Some(6), Some(0), Some(0)]);
    assert_eq!(free - context.n_cells_free(), 4);
    // Both continue with the bits of an undisturbed decode.
    let both = Rows::default().run(a, 7, &tokens[7..]).run(b, 1, &tokens[1..]);
    let mut got = Outputs::default();
    got.push(&both.decode(context).unwrap());
    let after = |n: usize| want.logits[want.logits.len() / 12 * n..].to_vec();
    assert_eq!(got.logits, [after(7), after(1)].concat());
}

#[test]
fn removed_row_is_not_counted_as_output() {
    let prompt = model().tokens(18, 4);
    let mut loaded = load(&model(), settings());
    let context = &mut loaded.context;
    let seq = context.seq_acquire(0).unwrap();
    let spec = SamplerSpec { frequency_penalty: 2.0, logit_bias: vec![(3, 50.0), (4, 49.0)], ..greedy() };
    context.set_sampler(seq, spec, &prompt, &[]).unwrap();
    let rows = Rows::default().run(seq, 0, &prompt);
    let masks = Some(RowMasks { rows: &[0], bits: &[0; 3] });
    let lost = context.decode(&DecodeRequest { arrays: rows.arrays(), masks, return_logits: false }).unwrap();
    assert_eq!((lost.faults.len(), context.kv_seq_pos_max(seq).unwrap()), (4, None));
    // If token 3 of the removed rows had been counted, the penalty would lead to token 4.
    assert_eq!(rows.decode(context).unwrap().token_ids[3], 3);
}

/// A prompt in two chunks, of which each row scores the token after it; then its first completion token.
#[test]
fn rows_of_the_prompt_score_its_tokens_and_do_not_count_as_output() {
    let prompt = model().tokens(19, 6);
    let mut loaded = load(&model(), settings());
    let context = &mut loaded.context;
    let (plain, seq) = (context.seq_acquire(0).unwrap(), context.seq_acquire(0).unwrap());
    let last = Rows::default().run(plain, 0, &prompt).decode(context).unwrap().logits.unwrap();
    let last = &last[last.len() / 6 * 5..];
    // If the scored `prompt[4]` were counted, the penalties (4 in total) would lead to the other token.
    let (first, other) = (prompt[4] as usize, (0..60).find(|id| !prompt.contains(id)).unwrap() as usize);
    let logit_bias = vec![(first as u32, 60.0 - last[first]), (other as u32, 58.0 - last[other])];
    let (frequency_penalty, presence_penalty) = (2.0, 2.0);
    let spec = SamplerSpec { frequency_penalty, presence_penalty, logit_bias, ..greedy() };
    let spec = SamplerSpec { prompt_logprobs: Some(2), ..spec };
    context.set_sampler(seq, spec, &prompt, &[]).unwrap();
    let (mut ids, mut logprobs, mut logits) = (Vec::<i32>::new(), Vec::<Logprobs>::new(), Vec::<f32>::new());
    for (start, end) in [(0, 4), (4, 6)] {
        let result = Rows::default().run(seq, start, &prompt[start..end]).decode(context).unwrap();
        ids.extend(&result.token_ids);
        logprobs.extend(result.logprobs.into_iter().map(|(_, entry)| entry));
        logits.extend(result.logits.unwrap());
    }
    assert_eq!(ids[..5], prompt[1..]);
    assert_eq!(ids[5], prompt[4]);
    assert_eq!((logprobs.len(), logprobs[0].top.len()), (5, 2));
    for (row, entry) in logprobs.iter().enumerate() {
        let logits = &logits[row * logits.len() / 6..][..logits.len() / 6];
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let wanted = f64::from(logits[prompt[row + 1] as usize]) - sum.ln();
        // A few roundings to f32 of numbers below 16, 2^-20 each.
        assert!((f64::from(entry.logprob) - wanted).abs() < 4e-6);
    }
}
