//! Models with recurrent layers: a sequence has the same bits wherever its decodes begin and whatever else they compute,
//! and a rejected decode or a faulty row leaves its state as it was.

use crate::common::{Outputs, Rows, feed, settings};
use crate::model_files::golden;
use llaisys_core::batch::output;
use llaisys_core::context::{Context, ContextConfig, DecodeRequest, RowMasks};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::error::Error;

const NAMES: [&str; 5] =
    ["qwen3_5_bf16", "qwen3_5_moe_bf16", "qwen3_next_bf16", "lfm2_bf16", "lfm2_moe_bf16"];
const VOCAB: usize = 600;

fn open(name: &str, config: ContextConfig) -> Context {
    Context::load(&golden(name), config).unwrap()
}

fn tokens(seed: i32, n: i32) -> Vec<i32> {
    (0..n).map(|i| (i * 37 + seed * 101 + i * i) % VOCAB as i32).collect()
}

#[test]
fn bits_do_not_depend_on_where_decodes_begin() {
    for name in NAMES {
        for mode in [ComputeMode::Float32, ComputeMode::Auto, ComputeMode::Int8] {
            for n_threads in [1, 3] {
                let mut context = open(name, ContextConfig { mode, n_threads, n_batch: 16, ..settings() });
                let tokens = tokens(1, 40);
                let whole = context.seq_acquire(0).unwrap();
                let want = feed(&mut context, whole, &tokens, 40);
                // Passes of 16 rows, decodes of other lengths, single rows.
                for chunk in [1, 7, 16] {
                    let seq = context.seq_acquire(0).unwrap();
                    let got = feed(&mut context, seq, &tokens, chunk);
                    assert!(got == want, "{name} {mode:?}: decodes of {chunk}");
                    context.seq_release(seq).unwrap();
                }
                context.check_integrity();
            }
        }
    }
}

#[test]
fn rows_of_several_sequences_may_be_interleaved() {
    let mut context = open("qwen3_5_bf16", settings());
    let all = [tokens(1, 12), tokens(2, 12)];
    let want = all.clone().map(|tokens| {
        let seq = context.seq_acquire(0).unwrap();
        let outputs = feed(&mut context, seq, &tokens, 12);
        context.seq_release(seq).unwrap();
        outputs.logits
    });
    let seqs = [(); 2].map(|()| context.seq_acquire(0).unwrap());
    let mut rows = Rows::default();
    for t in 0..12 {
        for (seq, tokens) in seqs.iter().zip(&all) {
            rows = rows.row(tokens[t], t as i32, &[*seq], output::LOGITS | output::HIDDEN);
        }
    }
    let mut got = Outputs::default();
    got.push(&rows.decode(&mut context).unwrap());
    for (i, want) in want.iter().enumerate() {
        let own: Vec<u32> = got.logits.chunks_exact(VOCAB).skip(i).step_by(2).flatten().copied().collect();
        assert!(own == *want, "sequence {i}");
    }
}

#[test]
fn forks_continue_from_a_copy_of_the_state() {
    let mut context = open("qwen3_5_bf16", settings());
    let tokens = tokens(3, 30);
    let [a, b, whole] = [(); 3].map(|()| context.seq_acquire(0).unwrap());
    let want = feed(&mut context, whole, &tokens, 30);
    feed(&mut context, a, &tokens[..20], 20);
    context.kv_seq_cp(a, b, -1, -1).unwrap();
    let other = Rows::default().row(5, 20, &[a], output::LOGITS);
    other.decode(&mut context).unwrap();
    context.seq_release(a).unwrap();
    let mut got = Outputs::default();
    got.push(&Rows::default().run(b, 20, &tokens[20..]).decode(&mut context).unwrap());
    assert!(got.logits[..] == want.logits[20 * VOCAB..]);
    context.check_integrity();
}

#[test]
fn a_kept_state_continues_with_the_bits_of_a_whole_sequence() {
    for name in NAMES {
        let mut context = open(name, ContextConfig { n_streams: 2, nan_fill: true, ..settings() });
        let tokens = tokens(6, 40);
        let whole = context.seq_acquire(0).unwrap();
        let want = feed(&mut context, whole, &tokens, 40);
        context.seq_release(whole).unwrap();
        let seq = context.seq_acquire(0).unwrap();
        for (node, start, end) in [(1, 0, 15), (2, 15, 28_usize)] {
            Rows::default().run(seq, start, &tokens[start..end]).decode(&mut context).unwrap();
            context.kv_node_cache(node, seq, start as i32, end as i32).unwrap();
            context.kv_node_keep_state(node, seq).unwrap();
        }
        // It goes on elsewhere and ends; then twice from each node, in its stream and in the other one.
        Rows::default().run(seq, 28, &[1, 2, 3]).decode(&mut context).unwrap();
        context.seq_release(seq).unwrap();
        for stream in [0, 1, 0] {
            for n_nodes in [1, 2] {
                let seq = context.seq_acquire(stream).unwrap();
                context.kv_node_attach(1, seq, 0, 15).unwrap();
                if n_nodes == 2 {
                    context.kv_node_attach(2, seq, 15, 28).unwrap();
                }
                let end = [15, 28_usize][n_nodes - 1];
                let mut got = Outputs::default();
                got.push(&Rows::default().run(seq, end, &tokens[end..]).decode(&mut context).unwrap());
                assert!(got.logits[..] == want.logits[end * VOCAB..], "{name}: from {end}");
                context.seq_release(seq).unwrap();
                context.check_integrity();
            }
        }
        // And in another context, from exported cells and state.
        let mut target = open(name, settings());
        assert_eq!(target.fingerprint(), context.fingerprint());
        let cells =
            [(1, 0, 15), (2, 15, 28)].map(|(node, p0, p1)| context.kv_node_export(node, p0, p1).unwrap());
        let state = context.kv_node_export_state(2).unwrap();
        target.kv_node_import(1, 0, 0, &cells[0]).unwrap();
        target.kv_node_import(2, 0, 15, &cells[1]).unwrap();
        let digest = target.digest();
        for (node, data) in [(2, &state[1..]), (2, &[]), (7, &state[..])] {
            assert!(target.kv_node_import_state(node, data).is_err());
        }
        assert!(target.kv_node_export_state(2).is_err());
        assert_eq!(target.digest(), digest);
        target.kv_node_import_state(2, &state).unwrap();
        assert!(target.kv_node_import_state(2, &state).is_err(), "it has a state");
        assert_eq!(target.kv_node_export_state(2).unwrap(), state);
        let seq = target.seq_acquire(0).unwrap();
        target.kv_node_attach(1, seq, 0, 15).unwrap();
        target.kv_node_attach(2, seq, 15, 28).unwrap();
        let mut got = Outputs::default();
        got.push(&Rows::default().run(seq, 28, &tokens[28..]).decode(&mut target).unwrap());
        assert!(got.logits[..] == want.logits[28 * VOCAB..], "{name}: imported");
        target.check_integrity();
        context.kv_node_trim(2, 15).unwrap();
        context.kv_node_trim(1, 0).unwrap();
        assert_eq!((context.n_states_kept(), context.n_cells_free()), (0, 256));
    }
}

#[test]
fn a_rejected_decode_and_a_faulty_row_leave_the_state_as_it_was() {
    let mut context = open("qwen3_5_moe_bf16", ContextConfig { n_cells: 64, ..settings() });
    let tokens = tokens(4, 30);
    let [seq, other, whole] = [(); 3].map(|()| context.seq_acquire(0).unwrap());
    let want = feed(&mut context, whole, &tokens, 30);
    context.kv_seq_rm(whole, -1, -1).unwrap();
    feed(&mut context, seq, &tokens[..20], 20);
    let digest = context.digest();
    // Too few cells.
    let long: Vec<i32> = vec![1; 60];
    assert!(matches!(Rows::default().run(seq, 20, &long).decode(&mut context), Err(Error::Exhausted(_))));
    assert_eq!(context.digest(), digest);
    // The third row of the sequence allows no token: none of its rows is kept, those of the other are.
    let rows = Rows::default().run(seq, 20, &tokens[20..24]).run(other, 0, &tokens[..2]);
    let bits = vec![0; VOCAB.div_ceil(32)];
    let masks = Some(RowMasks { rows: &[2], bits: &bits });
    let result =
        context.decode(&DecodeRequest { arrays: rows.arrays(), masks, return_logits: false }).unwrap();
    assert_eq!(result.faults.iter().map(|(row, _)| *row).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let sampled: Vec<bool> = result.token_ids.iter().map(|id| *id >= 0).collect();
    assert_eq!(sampled, [false, false, false, false, true, true]);
    let ends = [seq, other].map(|seq| context.kv_seq_pos_max(seq).unwrap());
    assert_eq!(ends, [Some(19), Some(1)]);
    context.check_integrity();
    let both = Rows::default().run(other, 2, &tokens[2..5]).run(seq, 20, &tokens[20..]);
    let mut got = Outputs::default();
    got.push(&both.decode(&mut context).unwrap());
    assert!(got.logits[..3 * VOCAB] == want.logits[2 * VOCAB..5 * VOCAB]);
    assert!(got.logits[3 * VOCAB..] == want.logits[20 * VOCAB..]);
}

/// Greedy ids of one decode per token, from position `tokens.len()` on.
fn greedy(context: &mut Context, tokens: &[i32], n: usize) -> Vec<i32> {
    let seq = context.seq_acquire(0).unwrap();
    let whole = Rows::default().run(seq, 0, tokens).decode(context).unwrap();
    let mut ids = vec![*whole.token_ids.last().unwrap()];
    while ids.len() < n {
        let at = (tokens.len() + ids.len() - 1) as i32;
        let row = Rows::default().row(*ids.last().unwrap(), at, &[seq], output::LOGITS);
        ids.push(row.decode(context).unwrap().token_ids[0]);
    }
    context.seq_release(seq).unwrap();
    ids
}

#[test]
fn verified_drafts_leave_the_state_after_the_rows_that_are_kept() {
    let draft = output::LOGITS | output::DRAFT;
    for name in NAMES {
        for n_batch in [64, 3] {
            let mut context = open(name, ContextConfig { n_batch, nan_fill: true, ..settings() });
            let prompts = [tokens(7, 12), tokens(8, 9), tokens(9, 15), tokens(10, 5)];
            let want = prompts.clone().map(|prompt| greedy(&mut context, &prompt, 12));
            let seqs = [(); 4].map(|()| context.seq_acquire(0).unwrap());
            for (seq, prompt) in seqs.iter().zip(&prompts) {
                Rows::default().run(*seq, 0, prompt).decode(&mut context).unwrap();
            }
            // Five drafts each, of which the first 5, 0 and 3 are right; the last sequence has none.
            let mut rows = Rows::default();
            for ((seq, prompt), (want, n_right)) in
                seqs.iter().zip(&prompts).zip(want.iter().zip([Some(5), Some(0), Some(3), None]))
            {
                let at = prompt.len() as i32;
                rows = rows.row(want[0], at, &[*seq], output::LOGITS);
                for i in 0..n_right.map_or(0, |_| 5) {
                    let token =
                        if Some(i) < n_right { want[i + 1] } else { (want[i + 1] + 1) % VOCAB as i32 };
                    rows = rows.row(token, at + 1 + i as i32, &[*seq], draft);
                }
            }
            let result = rows.decode(&mut context).unwrap();
            context.check_integrity();
            let (first, rest) = result.token_ids.split_at(6);
            assert_eq!(first, &want[0][1..7], "{name}: all right");
            assert_eq!(rest[..6], [want[1][1], -1, -1, -1, -1, -1], "{name}: none right");
            assert_eq!(
                rest[6..12],
                [want[2][1], want[2][2], want[2][3], want[2][4], -1, -1],
                "{name}: three"
            );
            assert_eq!(rest[12..], want[3][1..2]);
            // Each continues with the bits that it has alone.
            for ((seq, prompt), (want, n)) in seqs.iter().zip(&prompts).zip(want.iter().zip([6, 1, 4, 1])) {
                let at = prompt.len() + n;
                assert_eq!(context.kv_seq_pos_max(*seq).unwrap(), Some(at as i32 - 1), "{name}");
                let tail = &want[n..n + 3];
                let mut got = Outputs::default();
                got.push(&Rows::default().run(*seq, at, tail).decode(&mut context).unwrap());
                let alone = context.seq_acquire(0).unwrap();
                let all: Vec<i32> = prompt.iter().chain(&want[..n + 3]).copied().collect();
                let expected = feed(&mut context, alone, &all, all.len());
                assert!(got.logits[..] == expected.logits[at * VOCAB..], "{name}, {n_batch} rows: after {n}");
                context.seq_release(alone).unwrap();
            }
        }
    }
}

#[test]
fn what_needs_a_state_at_another_position_is_refused_by_name() {
    let mut context = open("qwen3_next_bf16", settings());
    let [a, b] = [(); 2].map(|()| context.seq_acquire(0).unwrap());
    feed(&mut context, a, &tokens(5, 10), 10);
    let digest = context.digest();
    let errors = [
        context.kv_seq_rm(a, 8, -1).unwrap_err(),
        context.kv_seq_cp(a, b, 0, 9).unwrap_err(),
        context.kv_seq_add(a, 0, -1, 1).unwrap_err(),
        Rows::default().row(1, 0, &[b, a], output::LOGITS).decode(&mut context).unwrap_err(),
    ];
    for error in errors {
        assert!(error.to_string().contains("recurrent layers"), "{error}");
    }
    let weight = context.replace_weight("model.norm.weight", &[48], &[1.0; 48]).unwrap_err().to_string();
    assert!(weight.contains("recurrent layers"), "{weight}");
    assert_eq!(context.digest(), digest);
}
