//! A context with pruned argmax agrees with one without: for greedy rows, for other rows of the batch, and after the
//! head is replaced.

use crate::common::{Loaded, Random, Rows, Tiny, load, settings};
use llaisys_core::batch::output;
use llaisys_core::context::{ContextConfig, DecodeRequest, DecodeResult, RowMasks};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::sample::{RowFault, SamplerSpec};
use llaisys_core::seq::SeqId;

const VOCAB: usize = 1500;

/// A model whose head can have argmax bounds.
fn model(tied_head: bool) -> Tiny {
    Tiny::sized("LlamaForCausalLM", tied_head, |model| (model.d_model, model.vocab_size) = (64, VOCAB))
}

fn greedy() -> SamplerSpec {
    SamplerSpec { temperature: 0.0, ..SamplerSpec::default() }
}

/// The model with and without pruned argmax.
fn both(model: &Tiny, mode: ComputeMode) -> [Loaded; 2] {
    [true, false].map(|prune_argmax| load(model, ContextConfig { mode, prune_argmax, ..settings() }))
}

fn argmax_pruning(loaded: &Loaded) -> (u64, u64) {
    loaded.context.progress().argmax_pruning()
}

/// Generates `n_steps` tokens of a sequence for each of `specs` from the same prompt.
fn generate(loaded: &mut Loaded, specs: &[SamplerSpec], n_steps: i32) -> Vec<Vec<i32>> {
    let context = &mut loaded.context;
    let seqs: Vec<SeqId> = specs.iter().map(|_| context.seq_acquire(0).unwrap()).collect();
    for (&seq, spec) in seqs.iter().zip(specs) {
        context.set_sampler(seq, spec.clone(), &[1], &[]).unwrap();
    }
    let mut tokens = vec![1; seqs.len()];
    let mut all = vec![Vec::new(); seqs.len()];
    for position in 0..n_steps {
        let row = |rows: Rows, i: usize| rows.row(tokens[i], position, &[seqs[i]], output::LOGITS);
        let rows = (0..seqs.len()).fold(Rows::default(), row);
        let request = DecodeRequest { arrays: rows.arrays(), masks: None, return_logits: false };
        let result = context.decode(&request).unwrap();
        assert!(result.faults.is_empty());
        tokens.clone_from(&result.token_ids);
        all.iter_mut().zip(&tokens).for_each(|(all, token)| all.push(*token));
    }
    for seq in seqs {
        context.seq_release(seq).unwrap();
    }
    all
}

#[test]
fn pruned_argmax_finds_the_same_greedy_tokens() {
    for (tied, mode) in
        [(true, ComputeMode::Bfloat16), (false, ComputeMode::Bfloat16), (false, ComputeMode::Float32)]
    {
        let [mut on, mut off] = both(&model(tied), mode);
        assert_eq!(generate(&mut on, &[greedy()], 60), generate(&mut off, &[greedy()], 60));
        let (n_rows, n_pruned) = argmax_pruning(&on);
        assert!(n_rows == 60 && 2 * n_pruned >= 60, "{n_pruned} of {n_rows}");
        assert_eq!(argmax_pruning(&off), (0, 0));
    }
}

#[test]
fn rows_that_need_more_than_the_largest_logit_are_not_pruned() {
    let other = |change: &dyn Fn(&mut SamplerSpec)| {
        let mut spec = greedy();
        change(&mut spec);
        spec
    };
    let others = [
        other(&|spec| spec.temperature = 1.0),
        other(&|spec| spec.logit_bias = vec![(3, 5.0)]),
        other(&|spec| spec.repetition_penalty = 1.5),
        other(&|spec| spec.frequency_penalty = 1.0),
        other(&|spec| spec.allowed_ids = vec![3, 700, 701]),
        other(&|spec| spec.bad_words = vec![vec![3]]),
        other(&|spec| spec.top_logprobs = Some(2)),
        other(&|spec| spec.logprob_ids = vec![3]),
    ];
    let [mut on, mut off] = both(&model(false), ComputeMode::Bfloat16);
    for spec in others {
        let specs = [greedy(), spec.clone(), greedy()];
        let before = argmax_pruning(&on).0;
        assert_eq!(generate(&mut on, &specs, 20), generate(&mut off, &specs, 20), "{spec:?}");
        assert_eq!(argmax_pruning(&on).0 - before, 40, "{spec:?}");
    }
    let held_back = other(&|spec| (spec.min_tokens, spec.stop_ids) = (5, (0..750).collect()));
    let before = argmax_pruning(&on).0;
    let tokens = generate(&mut on, std::slice::from_ref(&held_back), 20);
    assert!(tokens[0][..5].iter().all(|token| *token >= 750));
    assert_eq!(tokens, generate(&mut off, &[held_back], 20));
    assert_eq!(argmax_pruning(&on).0 - before, 15, "min_tokens no longer applies after enough tokens");
}

/// One decode of three rows, the first with `flags`.
fn three_rows(
    loaded: &mut Loaded,
    flags: u8,
    masks: Option<RowMasks<'_>>,
    return_logits: bool,
) -> DecodeResult {
    let context = &mut loaded.context;
    let seqs = [(); 3].map(|()| context.seq_acquire(0).unwrap());
    let flags = [flags, output::LOGITS, output::LOGITS];
    let row = |rows: Rows, i: usize| rows.row(i as i32, 0, &[seqs[i]], flags[i]);
    let rows = (0..3).fold(Rows::default(), row);
    let result = context.decode(&DecodeRequest { arrays: rows.arrays(), masks, return_logits }).unwrap();
    seqs.iter().for_each(|seq| context.seq_release(*seq).unwrap());
    result
}

#[test]
fn masks_hidden_states_and_returned_logits_are_not_affected() {
    let [mut on, mut off] = both(&model(true), ComputeMode::Bfloat16);
    let mut few = vec![0_u32; VOCAB.div_ceil(32)];
    few[20] = 0b1010;
    let masks = Some(RowMasks { rows: &[0], bits: &few });
    let both = output::LOGITS | output::HIDDEN;
    let cases = [
        (output::LOGITS, masks, false),
        (both, None, false),
        (output::HIDDEN, None, false),
        (both, None, true),
    ];
    for (flags, masks, return_logits) in cases {
        let before = argmax_pruning(&on).0;
        let [got, want] = [&mut on, &mut off].map(|loaded| three_rows(loaded, flags, masks, return_logits));
        assert_eq!(got.token_ids, want.token_ids);
        assert_eq!((got.logits, got.hidden), (want.logits, want.hidden));
        assert_eq!(argmax_pruning(&on).0 - before, if return_logits { 0 } else { 2 });
    }
}

#[test]
fn replaced_head_has_new_bounds() {
    for tied in [true, false] {
        let model = model(tied);
        let name = if tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
        let [mut on, mut off] = both(&model, ComputeMode::Bfloat16);
        let before = generate(&mut on, &[greedy()], 30);
        let bytes = on.context.weight_bytes();
        let random = &mut Random(43);
        let values: Vec<f32> = (0..VOCAB * 64).map(|_| random.unit()).collect();
        for loaded in [&mut on, &mut off] {
            loaded.context.replace_weight(name, &[VOCAB, 64], &values).unwrap();
        }
        let (after, settled) = (generate(&mut on, &[greedy()], 30), argmax_pruning(&on).1);
        assert_eq!(after, generate(&mut off, &[greedy()], 30), "{name}");
        assert_ne!(before, after);
        assert!(settled >= 30, "{settled} rows found");
        assert_eq!(on.context.weight_bytes(), bytes);
        // Non-finite weights are reported as without bounds, and the next replacement repairs them.
        let mut faulty = values.clone();
        faulty[VOCAB * 64 - 1] = f32::NAN;
        for loaded in [&mut on, &mut off] {
            loaded.context.replace_weight(name, &[VOCAB, 64], &faulty).unwrap();
            let result = three_rows(loaded, output::LOGITS, None, false);
            assert_eq!(result.faults, [0, 1, 2].map(|row| (row, RowFault::NonFinite)));
            loaded.context.replace_weight(name, &[VOCAB, 64], &values).unwrap();
        }
        assert_eq!(generate(&mut on, &[greedy()], 30), after);
        assert!(argmax_pruning(&on).1 > settled);
    }
}

#[test]
fn bytes_of_the_bounds_are_predicted_and_counted() {
    let model = model(false);
    for mode in [ComputeMode::Float32, ComputeMode::Bfloat16, ComputeMode::Int8, ComputeMode::Int4] {
        let [on, off] = both(&model, mode);
        let folder = model.write();
        let info = llaisys_core::load::checkpoint::Checkpoint::open(&folder).unwrap().info().clone();
        std::fs::remove_dir_all(folder).unwrap();
        let bytes = info.screen_bytes.of(mode);
        assert_eq!(on.context.weight_bytes() - off.context.weight_bytes(), bytes, "{mode:?}");
        assert_eq!(bytes > 0, matches!(mode, ComputeMode::Float32 | ComputeMode::Bfloat16), "{mode:?}");
    }
}

#[test]
fn ranks_have_no_bounds() {
    let config = ContextConfig { n_ranks: 2, mode: ComputeMode::Bfloat16, ..settings() };
    let model = Tiny::sized("LlamaForCausalLM", false, |model| {
        (model.d_model, model.d_ff, model.vocab_size) = (64, 64, VOCAB);
        (model.n_heads, model.n_kv_heads) = (4, 2);
    });
    let mut loaded = load(&model, config);
    generate(&mut loaded, &[greedy()], 5);
    assert_eq!(argmax_pruning(&loaded), (0, 0));
}

/// Scaled or capped logits can tie where the products do not.
#[test]
fn scaled_logits_are_not_pruned() {
    let mut model =
        Tiny::sized("GraniteForCausalLM", false, |model| (model.d_model, model.vocab_size) = (64, VOCAB));
    model.more_keys = r#", "logits_scaling": 8.0"#.into();
    let [mut on, mut off] = both(&model, ComputeMode::Bfloat16);
    assert_eq!(generate(&mut on, &[greedy()], 10), generate(&mut off, &[greedy()], 10));
    assert_eq!(argmax_pruning(&on), (0, 0));
}
