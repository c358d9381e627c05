//! Decodes of a context: the same bits for any split of the rows, rejected calls without side effects, and shared,
//! forked, trimmed and shifted sequences.

use crate::common::{Loaded, Outputs, Rows, Tiny, feed, load, settings};
use llaisys_core::Error;
use llaisys_core::batch::{BatchArrays, BatchError, output};
use llaisys_core::context::{Context, ContextConfig, DecodeRequest, RowMasks};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::error::{Exhausted, Rejected, Unsupported};
use llaisys_core::ops::dispatch::IsaName;
use llaisys_core::sample::SamplerSpec;
use llaisys_core::seq::SeqId;

const MODES: [ComputeMode; 2] = [ComputeMode::Float32, ComputeMode::Bfloat16];

fn model() -> Tiny {
    Tiny::odd("Qwen2ForCausalLM", true)
}

/// Decodes `tokens` as one sequence in one batch.
fn alone(config: ContextConfig, tokens: &[i32]) -> Outputs {
    let mut loaded = load(&model(), config);
    let seq = loaded.context.seq_acquire(0).unwrap();
    feed(&mut loaded.context, seq, tokens, tokens.len())
}

/// Appends to two other sequences in turn and releases one of them, so that free cells are scattered.
fn fragment(context: &mut Context) {
    let seqs = [context.seq_acquire(0).unwrap(), context.seq_acquire(0).unwrap()];
    for position in 0..60 {
        let rows = seqs.iter().fold(Rows::default(), |rows, &seq| rows.row(position, position, &[seq], 0));
        rows.decode(context).unwrap();
    }
    context.kv_seq_rm(seqs[1], 7, 31).unwrap();
    context.kv_seq_rm(seqs[1], 0, 3).unwrap();
    context.seq_release(seqs[0]).unwrap();
    context.check_integrity();
}

#[test]
fn bits_do_not_depend_on_chunks_passes_threads_or_cells() {
    let tokens = model().tokens(1, 70);
    for mode in MODES {
        let want = alone(ContextConfig { mode, n_batch: 70, n_threads: 1, ..settings() }, &tokens);
        for (n_batch, n_threads, chunk) in
            [(70, 2, 70), (1, 1, 70), (7, 2, 70), (64, 3, 1), (64, 2, 9), (16, 2, 33)]
        {
            let mut loaded = load(&model(), ContextConfig { mode, n_batch, n_threads, ..settings() });
            fragment(&mut loaded.context);
            let seq = loaded.context.seq_acquire(0).unwrap();
            let got = feed(&mut loaded.context, seq, &tokens, chunk);
            assert!(got == want, "{mode:?}, passes of {n_batch}, {n_threads} threads, chunks of {chunk}");
        }
    }
}

#[test]
fn bits_of_every_instruction_set_do_not_depend_on_the_batch() {
    let tokens = model().tokens(2, 40);
    for isa in IsaName::available() {
        for mode in MODES {
            let config = ContextConfig { mode, isa: Some(isa), ..settings() };
            let want = alone(config, &tokens);
            let mut loaded = load(&model(), config);
            assert_eq!(loaded.context.computes_on(), isa.name());
            let seq = loaded.context.seq_acquire(0).unwrap();
            assert!(feed(&mut loaded.context, seq, &tokens, 3) == want, "{isa:?} {mode:?}");
        }
    }
}

#[test]
fn sequences_in_one_batch_equal_sequences_decoded_alone() {
    let prompts: Vec<Vec<i32>> = (0..5).map(|i| model().tokens(10 + i, 11 + 6 * i as usize)).collect();
    for mode in MODES {
        let config = ContextConfig { mode, ..settings() };
        let want: Vec<Outputs> = prompts.iter().map(|prompt| alone(config, prompt)).collect();
        let mut loaded = load(&model(), config);
        let seqs: Vec<SeqId> = prompts.iter().map(|_| loaded.context.seq_acquire(0).unwrap()).collect();
        let mut got = vec![Outputs::default(); prompts.len()];
        // Rows of all sequences interleaved, in steps of three tokens each.
        for start in (0..35).step_by(3) {
            let mut rows = Rows::default();
            let mut owners = Vec::new();
            for position in start..start + 3 {
                for (i, prompt) in prompts.iter().enumerate().filter(|(_, prompt)| position < prompt.len()) {
                    rows = rows.run(seqs[i], position, &prompt[position..=position]);
                    owners.push(i);
                }
            }
            let result = rows.decode(&mut loaded.context).unwrap();
            let (logits, hidden) = (result.logits.unwrap(), result.hidden.unwrap());
            for (row, &i) in owners.iter().enumerate() {
                let (v, d) = (logits.len() / owners.len(), hidden.len() / owners.len());
                got[i].logits.extend(logits[row * v..(row + 1) * v].iter().map(|x| x.to_bits()));
                got[i].hidden.extend(hidden[row * d..(row + 1) * d].iter().map(|x| x.to_bits()));
            }
        }
        assert!(got == want, "{mode:?}");
    }
}

/// A context with a sequence of `tokens`.
fn started(config: ContextConfig, tokens: &[i32]) -> (Loaded, SeqId) {
    let mut loaded = load(&model(), config);
    let seq = loaded.context.seq_acquire(0).unwrap();
    feed(&mut loaded.context, seq, tokens, tokens.len());
    (loaded, seq)
}

#[test]
fn rejected_decode_has_no_side_effects() {
    let tokens = model().tokens(3, 30);
    let config = ContextConfig { n_cells: 40, n_batch: 4, ..settings() };
    let want = alone(config, &tokens);
    let (mut loaded, seq) = started(config, &tokens[..20]);
    let context = &mut loaded.context;
    let stale = context.seq_acquire(0).unwrap();
    context.seq_release(stale).unwrap();
    let before = context.digest();
    let good = Rows::default().run(seq, 20, &tokens[20..25]);
    let rejected = [
        good.clone().row(71, 25, &[seq], 0),
        good.clone().row(0, 128, &[seq], 0),
        good.clone().row(0, 27, &[seq], 0),
        good.clone().row(0, 24, &[seq], 0),
        good.clone().row(0, 25, &[stale], 0),
        good.clone().row(0, 25, &[seq, seq], 0),
        good.clone().row(0, 25, &[], 0),
        good.clone().row(0, 25, &[seq], 4),
        good.clone().run(seq, 25, &[0; 16]),
    ];
    for rows in &rejected {
        assert!(rows.decode(context).is_err(), "{rows:?}");
        assert_eq!(context.digest(), before, "{rows:?}");
    }
    assert!(matches!(
        rejected[8].decode(context),
        Err(Error::Exhausted(Exhausted::Cells { needed: 21, free: 20, capacity: 40 }))
    ));
    let got = good.run(seq, 25, &tokens[25..]).decode(context).unwrap();
    let mut tail = Outputs::default();
    tail.push(&got);
    assert_eq!(tail.logits, want.logits[want.logits.len() - tail.logits.len()..]);
}

#[test]
fn ragged_arrays_and_unknown_streams_are_rejected() {
    let (mut loaded, seq) = started(settings(), &[1, 2, 3]);
    let rows = Rows::default().row(4, 3, &[seq], output::LOGITS);
    let whole = rows.arrays();
    let wrong = [
        BatchArrays { tokens: &[], ..whole },
        BatchArrays { positions: &[3, 4], ..whole },
        BatchArrays { n_seq_id: &[2], ..whole },
        BatchArrays { n_seq_id: &[1, 1], ..whole },
        BatchArrays { wants_output: &[], ..whole },
        BatchArrays { stream: &[1], ..whole },
    ];
    let before = loaded.context.digest();
    for arrays in wrong {
        let request = DecodeRequest { arrays, masks: None, return_logits: false };
        assert!(matches!(loaded.context.decode(&request), Err(Error::Rejected(_))));
        assert_eq!(loaded.context.digest(), before);
    }
}

#[test]
fn fork_shares_its_prefix_and_both_continue_independently() {
    let (prompt, left, right) = (model().tokens(4, 33), model().tokens(5, 6), model().tokens(6, 6));
    let (mut loaded, parent) = started(settings(), &prompt);
    let context = &mut loaded.context;
    let child = context.seq_acquire(0).unwrap();
    let free = context.n_cells_free();
    context.kv_seq_cp(parent, child, -1, -1).unwrap();
    assert_eq!(context.n_cells_free(), free);
    let both = Rows::default().run(parent, 33, &left).run(child, 33, &right).decode(context).unwrap();
    let logits = both.logits.unwrap();
    for (index, tail) in [&left, &right].into_iter().enumerate() {
        let whole = alone(settings(), &[prompt.clone(), tail.clone()].concat());
        let got: Vec<u32> = logits[index * logits.len() / 2..(index + 1) * logits.len() / 2]
            .iter()
            .map(|v| v.to_bits())
            .collect();
        assert_eq!(got, whole.logits[whole.logits.len() - got.len()..]);
    }
    context.seq_release(parent).unwrap();
    assert_eq!(context.kv_seq_pos_max(child).unwrap(), Some(38));
    context.seq_release(child).unwrap();
    assert_eq!(context.n_cells_free(), context.n_cells());
}

#[test]
fn trimmed_end_can_be_decoded_again() {
    let (prompt, other) = (model().tokens(7, 30), model().tokens(8, 10));
    let (mut loaded, seq) = started(settings(), &prompt);
    let context = &mut loaded.context;
    context.kv_seq_rm(seq, 20, -1).unwrap();
    assert_eq!(
        (context.kv_seq_pos_min(seq).unwrap(), context.kv_seq_pos_max(seq).unwrap()),
        (Some(0), Some(19))
    );
    let mut got = Outputs::default();
    got.push(&Rows::default().run(seq, 20, &other).decode(context).unwrap());
    let want = alone(settings(), &[&prompt[..20], &other].concat());
    assert_eq!(got.logits, want.logits[want.logits.len() - got.logits.len()..]);
}

#[test]
fn keep_removes_the_cells_of_others_and_keeps_their_ids() {
    let (mut loaded, seq) = started(settings(), &[1, 2, 3]);
    let context = &mut loaded.context;
    let other = context.seq_acquire(0).unwrap();
    Rows::default().run(other, 0, &[4, 5]).decode(context).unwrap();
    context.kv_seq_keep(seq).unwrap();
    assert_eq!(
        (context.kv_seq_pos_max(seq).unwrap(), context.kv_seq_pos_max(other).unwrap()),
        (Some(2), None)
    );
    assert_eq!(context.n_cells_free(), context.n_cells() - 3);
    context.seq_release(other).unwrap();
}

#[test]
fn shifted_keys_are_rotated() {
    let prompt = model().tokens(9, 20);
    let (mut loaded, there) = started(settings(), &prompt);
    let context = &mut loaded.context;
    let here = context.seq_acquire(0).unwrap();
    Rows::default().run(here, 11, &prompt).decode(context).unwrap();
    context.kv_seq_add(here, 0, -1, -11).unwrap();
    context.check_integrity();
    let result = Rows::default().run(there, 20, &[7]).run(here, 20, &[7]).decode(context).unwrap();
    let logits = result.logits.unwrap();
    let (want, got) = logits.split_at(logits.len() / 2);
    let largest = want.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    // Rotating twice instead of once changes only f32 roundings.
    assert!(want.iter().zip(got).all(|(w, g)| (w - g).abs() <= 1e-5 * largest));
    let before = context.digest();
    assert!(context.kv_seq_add(here, 0, -1, 108).is_err(), "21 positions shifted by 108 end past 127");
    assert!(context.kv_seq_add(here, 0, -1, -1).is_err(), "position -1");
    assert_eq!(context.digest(), before);
    context.kv_seq_add(here, 0, -1, 107).unwrap();
    assert_eq!(context.kv_seq_pos_max(here).unwrap(), Some(127));
}

#[test]
fn row_of_several_sequences_is_stored_once_and_seen_by_all() {
    let (prompt, tail) = (model().tokens(11, 12), model().tokens(12, 5));
    let mut loaded = load(&model(), settings());
    let context = &mut loaded.context;
    let seqs =
        [context.seq_acquire(0).unwrap(), context.seq_acquire(0).unwrap(), context.seq_acquire(0).unwrap()];
    let rows = prompt
        .iter()
        .enumerate()
        .fold(Rows::default(), |rows, (i, &t)| rows.row(t, i as i32, &seqs, output::LOGITS));
    let mut shared = Outputs::default();
    shared.push(&rows.decode(context).unwrap());
    assert_eq!(context.n_cells_free(), context.n_cells() - 12);
    let want = alone(settings(), &[prompt.clone(), tail.clone()].concat());
    assert_eq!(shared.logits, want.logits[..shared.logits.len()]);
    for seq in seqs {
        let mut got = Outputs::default();
        got.push(&Rows::default().run(seq, 12, &tail).decode(context).unwrap());
        assert_eq!(got.logits, want.logits[want.logits.len() - got.logits.len()..]);
    }
    // The sequences differ now, so one row of two of them would need two lists of cells.
    let before = context.digest();
    assert!(Rows::default().row(1, 17, &seqs[..2], 0).decode(context).is_err());
    assert_eq!(context.digest(), before);
}

#[test]
fn stale_ids_are_rejected_everywhere_without_side_effects() {
    let (mut loaded, seq) = started(settings(), &[1, 2, 3]);
    let context = &mut loaded.context;
    let stale = context.seq_acquire(0).unwrap();
    context.seq_release(stale).unwrap();
    let before = context.digest();
    let rejections = [
        context.seq_release(stale),
        context.set_sampler(stale, greedy(), &[], &[]),
        context.kv_seq_rm(stale, -1, -1),
        context.kv_seq_cp(stale, seq, -1, -1),
        context.kv_seq_cp(seq, stale, -1, -1),
        context.kv_seq_keep(stale),
        context.kv_seq_add(stale, -1, -1, 1),
        context.kv_seq_pos_min(stale).map(|_| ()),
        context.kv_seq_pos_max(stale).map(|_| ()),
        Rows::default().row(1, 0, &[stale], 0).decode(context).map(|_| ()),
        context.seq_release(SeqId::from_raw(1 << 20)),
        context.seq_release(SeqId::from_raw(-1)),
    ];
    for rejection in rejections {
        assert!(matches!(rejection, Err(Error::Rejected(Rejected::StaleSequence { .. }))), "{rejection:?}");
    }
    assert_eq!(context.digest(), before);
    assert_eq!(context.n_seq_free(), 7);
}

fn greedy() -> SamplerSpec {
    SamplerSpec { temperature: 0.0, ..SamplerSpec::default() }
}

#[test]
fn samplers_count_only_committed_tokens() {
    let prompt = model().tokens(13, 10);
    // A frequency penalty that no logit outweighs: no token occurs twice.
    let spec =
        SamplerSpec { frequency_penalty: 2.0, logit_bias: vec![(3, 50.0), (4, 49.5), (5, 49.0)], ..greedy() };
    let mut loaded = load(&model(), ContextConfig { n_cells: 14, ..settings() });
    let context = &mut loaded.context;
    let seq = context.seq_acquire(0).unwrap();
    context.set_sampler(seq, spec, &prompt, &[]).unwrap();
    let rows = prompt.iter().enumerate().fold(Rows::default(), |rows, (i, &t)| {
        rows.row(t, i as i32, &[seq], if i == 9 { output::LOGITS } else { output::NONE })
    });
    let mut token = rows.decode(context).unwrap().token_ids[0];
    let mut tokens = vec![token];
    for position in 10..14 {
        assert!(
            Rows::default().run(seq, position, &[token; 9]).decode(context).is_err(),
            "too few cells for nine rows"
        );
        token = Rows::default().run(seq, position, &[token]).decode(context).unwrap().token_ids[0];
        tokens.push(token);
    }
    assert_eq!(tokens[0], 3);
    // Biases of 50, 49.5 and 49, and 2 less for each occurrence: a rejected decode that counted would show.
    let again = replay(&tokens);
    assert_eq!(tokens, again);
}

/// Samples the same ids with samplers that get the earlier output as an argument instead of sampling it.
fn replay(tokens: &[i32]) -> Vec<i32> {
    let prompt = model().tokens(13, 10);
    let spec =
        SamplerSpec { frequency_penalty: 2.0, logit_bias: vec![(3, 50.0), (4, 49.5), (5, 49.0)], ..greedy() };
    let mut got = Vec::new();
    for n in 0..tokens.len() {
        let mut loaded = load(&model(), settings());
        let seq = loaded.context.seq_acquire(0).unwrap();
        loaded.context.set_sampler(seq, spec.clone(), &prompt, &tokens[..n]).unwrap();
        let all = [&prompt, &tokens[..n]].concat();
        let rows = all.iter().enumerate().fold(Rows::default(), |rows, (i, &t)| {
            rows.row(t, i as i32, &[seq], if i + 1 == all.len() { output::LOGITS } else { output::NONE })
        });
        got.push(rows.decode(&mut loaded.context).unwrap().token_ids[0]);
    }
    got
}

#[test]
fn masks_apply_to_their_row_and_invalid_ones_are_rejected() {
    let (mut loaded, seq) = started(settings(), &[1, 2, 3]);
    let context = &mut loaded.context;
    let rows = Rows::default().row(4, 3, &[seq], output::LOGITS).row(5, 4, &[seq], 0).row(
        6,
        5,
        &[seq],
        output::LOGITS,
    );
    let mut decode = |mask_rows: &[i32], bits: &[u32]| {
        let masks = Some(RowMasks { rows: mask_rows, bits });
        context.decode(&DecodeRequest { arrays: rows.arrays(), masks, return_logits: false })
    };
    let only = |id: usize| (0..3).map(move |word| if word == id / 32 { 1_u32 << (id % 32) } else { 0 });
    for mask_rows in [[1], [3], [-1]] {
        let rejected = decode(&mask_rows, &only(40).collect::<Vec<_>>());
        assert!(
            matches!(rejected, Err(Error::Rejected(Rejected::Batch(BatchError::Mask { .. })))),
            "{mask_rows:?}"
        );
    }
    assert!(decode(&[0], &[1, 1]).is_err(), "71 ids need three words");
    assert!(decode(&[0, 0], &only(1).chain(only(2)).collect::<Vec<_>>()).is_err(), "one row, two masks");
    let result = decode(&[2, 0], &only(40).chain(only(13)).collect::<Vec<_>>()).unwrap();
    assert_eq!((result.rows, result.token_ids), (vec![0, 2], vec![13, 40]));
}

#[test]
fn each_row_has_the_outputs_of_its_flags() {
    let tokens = model().tokens(14, 8);
    let want = alone(settings(), &tokens);
    let mut loaded = load(&model(), ContextConfig { n_batch: 3, ..settings() });
    let seq = loaded.context.seq_acquire(0).unwrap();
    let flags = [0, 1, 2, 3, 0, 2, 1, 0];
    let rows = tokens
        .iter()
        .enumerate()
        .fold(Rows::default(), |rows, (i, &t)| rows.row(t, i as i32, &[seq], flags[i]));
    let result = rows.decode(&mut loaded.context).unwrap();
    assert_eq!(result.rows, [1, 2, 3, 5, 6]);
    let (logits, hidden) = (result.logits.unwrap(), result.hidden.unwrap());
    for (out, &row) in result.rows.iter().enumerate() {
        let row = row as usize;
        for (got, all, width, flag) in [(&logits, &want.logits, 71, 1), (&hidden, &want.hidden, 40, 2)] {
            let got: Vec<u32> = got[out * width..(out + 1) * width].iter().map(|v| v.to_bits()).collect();
            let has_flag = flags[row] & flag != 0;
            assert_eq!(
                got,
                if has_flag { all[row * width..(row + 1) * width].to_vec() } else { vec![0; width] }
            );
        }
        assert_eq!(result.token_ids[out] >= 0, flags[row] & 1 != 0);
    }
}

#[test]
fn replaced_weight_gives_the_bits_of_a_checkpoint_with_it() {
    let tokens = model().tokens(15, 9);
    for architecture in ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"] {
        let original = Tiny::odd(architecture, architecture == "Qwen2ForCausalLM");
        let names: Vec<String> = original.tensors.keys().cloned().collect();
        let mut changed = Tiny::odd(architecture, original.tied_head);
        for (_, values) in changed.tensors.values_mut() {
            values.rotate_right(3);
        }
        let mut want = load(&changed, settings());
        let seq = want.context.seq_acquire(0).unwrap();
        let want = feed(&mut want.context, seq, &tokens, 9);
        let mut swapped = load(&original, settings());
        for name in &names {
            let (shape, values) = &changed.tensors[name];
            swapped.context.replace_weight(name, shape, values).unwrap();
        }
        let seq = swapped.context.seq_acquire(0).unwrap();
        assert!(feed(&mut swapped.context, seq, &tokens, 9) == want, "{architecture}");
    }
}

#[test]
fn rejected_replacement_has_no_side_effects() {
    let tokens = model().tokens(16, 5);
    let want = alone(settings(), &tokens);
    let mut loaded = load(&model(), settings());
    let context = &mut loaded.context;
    let name = "model.layers.0.self_attn.q_proj.weight";
    assert!(matches!(
        context.replace_weight("model.layers.2.self_attn.q_proj.weight", &[48, 40], &[0.0; 1920]),
        Err(Error::Rejected(Rejected::NoSuchWeight { .. }))
    ));
    for (shape, n) in [(&[40, 48][..], 1920), (&[1920], 1920), (&[48, 40], 1919)] {
        let rejected = context.replace_weight(name, shape, &vec![0.0; n]);
        assert!(matches!(rejected, Err(Error::Rejected(Rejected::WeightShape { .. }))), "{rejected:?}");
    }
    let seq = context.seq_acquire(0).unwrap();
    assert!(feed(context, seq, &tokens, 5) == want);
}

#[test]
fn settings_out_of_their_bounds_are_rejected_by_name() {
    let model = model();
    let folder = model.write();
    let wrong = [
        (ContextConfig { n_cells: 0, ..settings() }, "n_cells"),
        (ContextConfig { n_seq_max: 257, ..settings() }, "n_seq_max"),
        (ContextConfig { n_batch: 0, ..settings() }, "n_batch"),
        (ContextConfig { max_model_len: 513, ..settings() }, "max_model_len"),
        (ContextConfig { n_threads: 0, ..settings() }, "n_threads"),
    ];
    for (config, name) in wrong {
        let rejected = Context::load(&folder, config).map(|_| ()).unwrap_err();
        assert!(
            matches!(rejected, Error::Rejected(Rejected::OutOfRange { what, .. }) if what == name),
            "{rejected}"
        );
    }
    let available = IsaName::available();
    for isa in IsaName::ALL.into_iter().filter(|isa| !available.contains(isa)) {
        let config = ContextConfig { isa: Some(isa), ..settings() };
        assert!(matches!(Context::load(&folder, config), Err(Error::Unsupported(Unsupported::Isa { .. }))));
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn heads_too_wide_for_the_kernels_are_rejected_by_name() {
    let folder = Tiny::sized("LlamaForCausalLM", true, |model| model.d_head = 514).write();
    let rejected = Context::load(&folder, settings()).map(|_| ()).unwrap_err();
    assert!(
        matches!(&rejected, Error::Unsupported(Unsupported::Feature { value, .. }) if value == "514"),
        "{rejected}"
    );
    std::fs::remove_dir_all(folder).unwrap();
}
