//! A context on the emulator passes the tests that `tests/context` has for a CPU context. With debug assertions, every
//! free or reserved cell is NaN.

use crate::common::{Loaded, Outputs, Rows, Tiny, feed, load};
use crate::emulator::Emulator;
use llaisys_core::Error;
use llaisys_core::batch::output;
use llaisys_core::context::{Context, ContextConfig, DecodeRequest, RowMasks};
use llaisys_core::cuda::Gpu;
use llaisys_core::dtype::{ComputeMode, KvDType};
use llaisys_core::error::Exhausted;
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::sample::{Outcome, RowFault, Sampler, SamplerSpec, Scratch, sample};
use llaisys_core::seq::SeqId;

/// Two streams of 64 cells, passes of 16 rows.
fn settings() -> ContextConfig {
    ContextConfig { mode: ComputeMode::Auto, n_cells: 128, n_streams: 2, ..crate::common::settings() }
}

fn model() -> Tiny {
    Tiny::for_gpu("Qwen2ForCausalLM", true)
}

fn on_emulator(model: &Tiny, config: ContextConfig) -> Context {
    let folder = model.write();
    let gpu = Gpu { device: Box::new(Emulator::new()), memory_share: None, graphs: true, overlap: false };
    let context = Context::on_gpu(Checkpoint::open(&folder).unwrap(), config, gpu).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    context
}

/// Returns a context with a sequence of `tokens` in stream 0.
fn started(tokens: &[i32]) -> (Context, SeqId) {
    let mut context = on_emulator(&model(), settings());
    let seq = context.seq_acquire(0).unwrap();
    feed(&mut context, seq, tokens, tokens.len());
    (context, seq)
}

/// Decodes `tokens` as one batch behind the first `start` positions of a sequence, and returns the outputs.
fn continue_from(context: &mut Context, seq: SeqId, start: usize, tokens: &[i32]) -> Outputs {
    let mut outputs = Outputs::default();
    outputs.push(&Rows::default().run(seq, start, tokens).decode(context).unwrap());
    outputs
}

/// Returns the relative L2 distance of numbers that are given by their bits.
fn distance(got: &[u32], want: &[u32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let value = |bits: &u32| f64::from(f32::from_bits(*bits));
    let error: f64 = got.iter().zip(want).map(|(a, b)| (value(a) - value(b)).powi(2)).sum();
    (error / want.iter().map(|b| value(b).powi(2)).sum::<f64>()).sqrt()
}

/// Compares a model with the CPU. The device has about twice as many roundings as the CPU with bf16 weights, so its
/// distance to f32 may be twice as large (`parity/decoder.rs`).
fn assert_agrees(model: &Tiny, config: ContextConfig, chunk: usize) {
    let tokens = model.tokens(1, 70);
    let alone = |context: &mut Context| {
        let seq = context.seq_acquire(0).unwrap();
        feed(context, seq, &tokens, chunk)
    };
    let on_cpu = |mode| alone(&mut load(model, ContextConfig { mode, ..config }).context);
    let (exact, rounded) = (on_cpu(ComputeMode::Float32), on_cpu(ComputeMode::Bfloat16));
    let device = alone(&mut on_emulator(model, config));
    for of in [|outputs: &Outputs| outputs.logits.clone(), |outputs: &Outputs| outputs.hidden.clone()] {
        let (ours, cpu) = (distance(&of(&device), &of(&exact)), distance(&of(&rounded), &of(&exact)));
        println!("{}: relative L2 to f32 {ours:e} on the device, {cpu:e} on the CPU", model.architecture);
        assert!(ours <= 2.0 * cpu, "{ours:e} and {cpu:e}");
    }
}

#[test]
fn passes_of_many_outputs_agree_with_the_cpu() {
    // 70 outputs are more than one call computes.
    assert_agrees(&model(), ContextConfig { n_batch: 70, n_cells: 256, ..settings() }, 70);
}

#[test]
fn batches_over_several_passes_and_windows_agree_with_the_cpu() {
    let mut model = Tiny::for_gpu("MistralForCausalLM", true);
    model.more_keys = r#", "sliding_window": 24"#.to_owned();
    let config = ContextConfig { n_cells: 256, ..settings() };
    assert_agrees(&model, config, 41);
    assert_eq!(on_emulator(&model, config).attention_window(), Some(24));
}

#[test]
fn linked_copied_and_computed_prefixes_give_the_same_bits() {
    let tokens = model().tokens(2, 30);
    let (mut context, seq) = started(&tokens[..20]);
    context.kv_node_cache(1, seq, 0, 20).unwrap();
    let [linked, copied] = [0, 1].map(|stream| context.seq_acquire(stream).unwrap());
    let [forked, far] = [0, 1].map(|stream| context.seq_acquire(stream).unwrap());
    let free = context.n_cells_free();
    context.kv_node_attach(1, linked, 0, 20).unwrap();
    context.kv_seq_cp(seq, forked, -1, -1).unwrap();
    assert_eq!(context.n_cells_free(), free);
    context.kv_node_attach(1, copied, 0, 20).unwrap();
    context.kv_seq_cp(seq, far, -1, -1).unwrap();
    assert_eq!(context.n_cells_free(), free - 40);
    let want = continue_from(&mut context, seq, 20, &tokens[20..]);
    for other in [linked, copied, forked, far] {
        assert!(continue_from(&mut context, other, 20, &tokens[20..]) == want);
    }
    // A removed end is computed again, in cells that are NaN.
    context.kv_seq_rm(seq, 20, -1).unwrap();
    assert!(continue_from(&mut context, seq, 20, &tokens[20..]) == want);
    context.seq_release(seq).unwrap();
    assert_eq!(context.kv_seq_pos_max(forked).unwrap(), Some(29));
}

#[test]
fn a_sequence_gives_the_same_bits_in_any_cells() {
    let tokens = model().tokens(3, 40);
    let (mut context, seq) = started(&tokens[..30]);
    let want = continue_from(&mut context, seq, 30, &tokens[30..]);
    // Free cells are scattered, and NaN cells are between the visible ones.
    let [odd, even] = [(); 2].map(|()| context.seq_acquire(1).unwrap());
    for position in 0..20 {
        let rows = Rows::default().row(position, position, &[odd], 0).row(position, position, &[even], 0);
        rows.decode(&mut context).unwrap();
    }
    context.seq_release(even).unwrap();
    let scattered = context.seq_acquire(1).unwrap();
    feed(&mut context, scattered, &tokens[..30], 30);
    assert!(continue_from(&mut context, scattered, 30, &tokens[30..]) == want);
}

#[test]
fn another_context_continues_from_exported_cells_with_the_same_bits() {
    let tokens = model().tokens(4, 40);
    let (mut source, seq) = started(&tokens[..27]);
    source.kv_node_cache(1, seq, 0, 27).unwrap();
    let data = source.kv_node_export(1, 3, 27).unwrap();
    // Two layers, K and V, two heads of 64 in 16 bits.
    assert_eq!(data.len(), 24 * 2 * 2 * 2 * 64 * 2);
    let want = continue_from(&mut source, seq, 27, &tokens[27..]);

    let (mut target, seq) = started(&tokens[..3]);
    assert_eq!(target.fingerprint(), source.fingerprint());
    target.kv_node_import(7, 1, 3, &data).unwrap();
    assert_eq!(target.kv_node_export(7, 3, 27).unwrap(), data);
    target.kv_node_attach(7, seq, 3, 27).unwrap();
    assert!(continue_from(&mut target, seq, 27, &tokens[27..]) == want);
    let (mode, kv_dtype) = (ComputeMode::Bfloat16, Some(KvDType::Bfloat16));
    let cpu = load(&model(), ContextConfig { mode, kv_dtype, ..settings() });
    assert_ne!(cpu.context.fingerprint(), source.fingerprint());
}

/// Compares the exported keys of a shifted sequence with those that the CPU computes from the same keys.
#[test]
fn a_shift_rotates_keys_as_the_cpu_does() {
    fn numbers(data: &[u8]) -> Vec<u16> {
        data.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect()
    }
    fn shifted(context: &mut Context, seq: SeqId) -> Vec<u16> {
        context.kv_seq_add(seq, 5, -1, 11).unwrap();
        context.check_integrity();
        context.kv_node_cache(2, seq, 16, 31).unwrap();
        numbers(&context.kv_node_export(2, 16, 31).unwrap())
    }
    let tokens = model().tokens(5, 20);
    let (mut context, seq) = started(&tokens);
    context.kv_node_cache(1, seq, 0, 20).unwrap();
    let data = context.kv_node_export(1, 0, 20).unwrap();
    let unmoved = context.kv_node_export(1, 5, 20).unwrap();
    context.kv_node_trim(1, 0).unwrap();
    let (mode, kv_dtype) = (ComputeMode::Bfloat16, Some(KvDType::Bfloat16));
    let Loaded { context: cpu, .. } = &mut load(&model(), ContextConfig { mode, kv_dtype, ..settings() });
    let there = cpu.seq_acquire(0).unwrap();
    cpu.kv_node_import(1, 0, 0, &data).unwrap();
    cpu.kv_node_attach(1, there, 0, 20).unwrap();
    cpu.kv_node_trim(1, 0).unwrap();
    let (got, want) = (shifted(&mut context, seq), shifted(cpu, there));
    // Both round products of f32 to bf16; one may fuse what the other rounds twice.
    let far = |(a, b): (&u16, &u16)| (a & 0x8000) != (b & 0x8000) || a.abs_diff(*b) > 1;
    assert_eq!(got.iter().zip(&want).filter(|&pair| far(pair)).count(), 0);
    assert!(got != numbers(&unmoved));
}

#[test]
fn rows_return_exactly_the_outputs_that_they_request() {
    let tokens = model().tokens(6, 7);
    let (logits, hidden) = (output::LOGITS, output::HIDDEN);
    let wants = [hidden, logits, 0, logits | hidden, hidden, 0, logits];
    let run = |wants: &dyn Fn(usize) -> u8| {
        let mut context = on_emulator(&model(), settings());
        let seq = context.seq_acquire(0).unwrap();
        let row = |rows: Rows, i: usize| rows.row(tokens[i], i as i32, &[seq], wants(i));
        (0..7).fold(Rows::default(), row).decode(&mut context).unwrap()
    };
    let (all, some) = (run(&|_| logits | hidden), run(&|i| wants[i]));
    assert_eq!(some.rows, [0, 1, 3, 4, 6]);
    let widths = [(75, some.logits, all.logits, logits), (72, some.hidden, all.hidden, hidden)];
    for (width, some, all, flag) in widths {
        let (some, all) = (some.unwrap(), all.unwrap());
        for (out, row) in [0_usize, 1, 3, 4, 6].into_iter().enumerate() {
            let zeros = vec![0.0; width];
            let want = if wants[row] & flag != 0 { &all[row * width..][..width] } else { &zeros };
            assert_eq!(&some[out * width..][..width], want, "row {row}, flag {flag}");
        }
    }
}

#[test]
fn every_sampler_draws_from_the_devices_logits() {
    let tokens = model().tokens(7, 12);
    let specs = [
        SamplerSpec { temperature: 0.0, repetition_penalty: 1.9, ..SamplerSpec::default() },
        SamplerSpec { seed: 3, top_k: 20, top_p: 0.9, top_logprobs: Some(4), ..SamplerSpec::default() },
        SamplerSpec { seed: 4, presence_penalty: 1.0, logit_bias: vec![(7, 3.0)], ..SamplerSpec::default() },
    ];
    let mut context = on_emulator(&model(), settings());
    let seqs = specs.each_ref().map(|spec| {
        let seq = context.seq_acquire(0).unwrap();
        context.set_sampler(seq, spec.clone(), &tokens, &[]).unwrap();
        seq
    });
    let mut rows = Rows::default();
    for seq in seqs {
        rows = rows.run(seq, 0, &tokens[..11]);
    }
    for seq in seqs {
        rows = rows.row(tokens[11], 11, &[seq], output::LOGITS);
    }
    // The last rows of the sequences. The mask of the middle one allows half of the vocabulary.
    let masked = [34];
    let bits = [0xffff_ffff, 0x3f, 0];
    let masks = Some(RowMasks { rows: &masked, bits: &bits });
    let request = DecodeRequest { arrays: rows.arrays(), masks, return_logits: true };
    let result = context.decode(&request).unwrap();
    let logits = result.logits.as_ref().unwrap();
    for (i, spec) in specs.into_iter().enumerate() {
        let (row, mask) = (33 + i, (33 + i == 34).then_some(&bits[..]));
        let sampler = Sampler::new(spec, 75, &tokens, &[]).unwrap();
        let mut own = logits[row * 75..][..75].to_vec();
        let want = sample(&mut Scratch::default(), &mut own, Some(&sampler), 12, mask);
        let Outcome::Token { id, logprobs } = want else { panic!("{want:?}") };
        assert_eq!(result.token_ids[row], id as i32, "sampler {i}");
        let got = result.logprobs.iter().find(|(out, _)| *out == row).map(|(_, logprobs)| logprobs);
        assert_eq!(format!("{got:?}"), format!("{:?}", logprobs.as_ref()), "sampler {i}");
    }
}

#[test]
fn a_row_with_a_fault_affects_only_its_sequence() {
    let tokens = model().tokens(8, 9);
    let (mut context, seq) = started(&tokens[..8]);
    let other = context.seq_acquire(1).unwrap();
    let rows = Rows::default()
        .row(tokens[8], 8, &[seq], output::LOGITS)
        .row(tokens[0], 0, &[other], output::LOGITS)
        .row(tokens[1], 1, &[other], output::LOGITS);
    let masks = Some(RowMasks { rows: &[1], bits: &[0; 3] });
    let result =
        context.decode(&DecodeRequest { arrays: rows.arrays(), masks, return_logits: false }).unwrap();
    context.check_integrity();
    assert_eq!(result.faults, [(1, RowFault::AllMasked), (2, RowFault::AllMasked)]);
    let ends = [seq, other].map(|seq| context.kv_seq_pos_max(seq).unwrap());
    assert_eq!(ends, [Some(8), None]);
}

#[test]
fn a_refused_decode_changes_nothing() {
    let tokens = model().tokens(9, 60);
    let (mut context, seq) = started(&tokens[..30]);
    let before = context.digest();
    let full = Rows::default().run(seq, 30, &[0; 40]).decode(&mut context);
    assert!(matches!(full, Err(Error::Exhausted(Exhausted::Cells { needed: 40, free: 34, capacity: 64 }))));
    assert!(Rows::default().row(75, 30, &[seq], 0).decode(&mut context).is_err());
    assert_eq!(context.digest(), before);
    assert!(!context.is_broken());
}

#[test]
fn layers_and_rows_count_as_progress() {
    let (mut context, seq) = started(&[1, 2, 3]);
    let before = context.progress().sample();
    // 20 rows are two passes of two layers.
    continue_from(&mut context, seq, 3, &[4; 20]);
    let after = context.progress().sample();
    assert_eq!(after.n_layers_begun - before.n_layers_begun, 4);
    assert_eq!(after.n_rows_committed - before.n_rows_committed, 20);
    assert_eq!((after.n_steps_begun, after.n_steps_ended), (2, 2));
}
