//! The sampler compared with a naive f64 model, its distribution, and each rule by itself.
use llaisys_core::sample::philox::uniform;
use llaisys_core::sample::{Outcome, RowFault, Sampler, SamplerSpec, Scratch, sample};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const VOCAB: usize = 97;

fn logits(seed: u64) -> Vec<f32> {
    (0..VOCAB).map(|i| (uniform(seed, 9, i as u32) * 12.0 - 6.0) as f32).collect()
}

fn sampler(spec: SamplerSpec, prompt: &[i32], output: &[i32]) -> Sampler {
    Sampler::new(spec, VOCAB, prompt, output).unwrap()
}

fn token(row: &[f32], sampler: &Sampler, position: u32) -> u32 {
    match sample(&mut Scratch::default(), &mut row.to_vec(), Some(sampler), position, None) {
        Outcome::Token { id, .. } => id,
        fault => panic!("{fault:?}"),
    }
}

/// The distribution after the rules, computed by sorting everything: id -> probability.
fn distribution(row: &[f32], spec: &SamplerSpec) -> BTreeMap<u32, f64> {
    let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut kept: Vec<(u32, f64)> = row
        .iter()
        .enumerate()
        .map(|(i, &l)| (i as u32, ((f64::from(l) - f64::from(best)) / f64::from(spec.temperature)).exp()))
        .filter(|&(_, w)| w >= f64::from(spec.min_p))
        .collect();
    kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if spec.top_k > 0 {
        kept.truncate(spec.top_k as usize);
    }
    cut(&mut kept, spec.top_p);
    if spec.typical_p < 1.0 {
        let sum: f64 = kept.iter().map(|c| c.1).sum();
        let entropy: f64 = kept.iter().map(|c| -(c.1 / sum) * (c.1 / sum).ln()).sum();
        let away = |w: f64| (-(w / sum).ln() - entropy).abs();
        kept.sort_by(|a, b| away(a.1).total_cmp(&away(b.1)).then(a.0.cmp(&b.0)));
        cut(&mut kept, spec.typical_p);
    }
    let sum: f64 = kept.iter().map(|c| c.1).sum();
    kept.into_iter().map(|(id, w)| (id, w / sum)).collect()
}

fn cut(kept: &mut Vec<(u32, f64)>, p: f32) {
    if p >= 1.0 {
        return;
    }
    let sum: f64 = kept.iter().map(|c| c.1).sum();
    let mut reached = 0.0;
    let end = kept.iter().position(|c| {
        reached += c.1;
        reached >= sum * f64::from(p)
    });
    kept.truncate(end.map_or(kept.len(), |i| i + 1));
}

prop_compose! {
    fn any_spec()(
        temperature in 0.1_f32..2.0,
        top_k in prop_oneof![Just(0_u32), 1_u32..20],
        top_p in prop_oneof![Just(1.0_f32), 0.05_f32..1.0],
        min_p in prop_oneof![Just(0.0_f32), 0.0_f32..0.5],
        typical_p in prop_oneof![Just(1.0_f32), 0.2_f32..1.0],
        seed in any::<u64>(),
    ) -> SamplerSpec {
        SamplerSpec { temperature, top_k, top_p, min_p, typical_p, seed, ..SamplerSpec::default() }
    }
}

proptest! {
    /// The draw agrees with the naive distribution for the same uniform number.
    #[test]
    fn draws_agree_with_the_model(spec in any_spec(), row_seed in 0_u64..1000, position in 0_u32..1000) {
        let row = logits(row_seed);
        let model = distribution(&row, &spec);
        let u = uniform(spec.seed, spec.choice, position);
        let got = token(&row, &sampler(spec, &[], &[]), position);
        let below: f64 = model.iter().filter(|&(&id, _)| id < got).map(|(_, p)| p).sum();
        let own = model.get(&got).copied();
        prop_assert!(own.is_some(), "drew {got}, which the rules exclude: {model:?}");
        // Two summation orders of at most 97 f64 terms differ by less than 1e-12.
        prop_assert!(below - 1e-12 <= u && u <= below + own.unwrap() + 1e-12);
    }

    /// Penalties, bias and min_tokens, compared with the formulas.
    #[test]
    fn adjustments_agree_with_the_formulas(
        penalties in (0.5_f32..2.0, -2.0_f32..2.0, -2.0_f32..2.0),
        prompt in prop::collection::vec(0..VOCAB as i32, 0..20),
        output in prop::collection::vec(0..VOCAB as i32, 0..20),
        bias in -5.0_f32..5.0, row_seed in 0_u64..1000,
    ) {
        let (repetition, presence, frequency) = penalties;
        let spec = SamplerSpec {
            temperature: 0.0, repetition_penalty: repetition, presence_penalty: presence,
            frequency_penalty: frequency, logit_bias: vec![(3, bias)], min_tokens: 10, stop_ids: vec![4],
            ..SamplerSpec::default()
        };
        let row = logits(row_seed);
        let mut want: Vec<f32> = row.clone();
        want[3] += bias;
        if output.len() < 10 { want[4] = f32::NEG_INFINITY; }
        for (id, logit) in want.iter_mut().enumerate() {
            let id = id as i32;
            let count = output.iter().filter(|&&t| t == id).count();
            if count > 0 || prompt.contains(&id) {
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            }
            if count > 0 { *logit = *logit - presence - frequency * count as f32; }
        }
        let best = want.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let got = token(&row, &sampler(spec, &prompt, &output), 0);
        prop_assert_eq!(want[got as usize], best);
    }
}

#[test]
fn draws_follow_the_softmax_distribution() {
    let row = [1.0_f32, 0.0, 2.0, -1.0, 0.5];
    let spec = SamplerSpec { seed: 20261121, ..SamplerSpec::default() };
    let model = distribution(&row, &spec);
    let sampler = Sampler::new(spec, row.len(), &[], &[]).unwrap();
    let n = 20_000;
    let mut counts = [0_f64; 5];
    for position in 0..n {
        counts[token(&row, &sampler, position) as usize] += 1.0;
    }
    // Chi-square with 4 degrees of freedom: 23.5 is exceeded once in 10,000 seeds; this seed is fixed.
    let expected = |id: usize| f64::from(n) * model[&(id as u32)];
    let chi: f64 = (0..5).map(|id| (counts[id] - expected(id)).powi(2) / expected(id)).sum();
    assert!(chi < 23.5, "chi-square {chi}, counts {counts:?}");
}

#[test]
fn draw_depends_only_on_seed_choice_and_position() {
    let row = logits(5);
    let run = |seed, choice| -> Vec<u32> {
        let s = sampler(SamplerSpec { seed, choice, ..SamplerSpec::default() }, &[], &[]);
        (0..50).map(|p| token(&row, &s, p)).collect()
    };
    assert_eq!(run(1, 0), run(1, 0));
    assert_ne!(run(1, 0), run(2, 0));
    assert_ne!(run(1, 0), run(1, 1));
    let (mut scratch, s) =
        (Scratch::default(), sampler(SamplerSpec { seed: 1, ..SamplerSpec::default() }, &[], &[]));
    let reused: Vec<Outcome> =
        (0..50).map(|p| sample(&mut scratch, &mut row.clone(), Some(&s), p, None)).collect();
    let fresh: Vec<Outcome> = run(1, 0).into_iter().map(|id| Outcome::Token { id, logprobs: None }).collect();
    assert_eq!(reused, fresh);
}

#[test]
fn greedy_returns_the_lowest_id_of_a_tie() {
    let mut row = vec![0.0_f32; VOCAB];
    row[40] = 3.0;
    row[60] = 3.0;
    let outcome = sample(&mut Scratch::default(), &mut row, None, 0, None);
    assert_eq!(outcome, Outcome::Token { id: 40, logprobs: None });
}

#[test]
fn faults_are_named() {
    let fault =
        |mut row: Vec<f32>, mask: Option<&[u32]>| sample(&mut Scratch::default(), &mut row, None, 0, mask);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut row = logits(1);
        row[96] = bad;
        assert_eq!(fault(row, None), Outcome::Fault(RowFault::NonFinite));
    }
    assert_eq!(fault(logits(1), Some(&[0; 4])), Outcome::Fault(RowFault::AllMasked));
}

/// Rows are scanned in parts of 1024 and lanes of 16. A bad logit is found in each of them and in the tail.
#[test]
fn non_finite_logit_is_found_at_any_index() {
    let places = (0..17).chain(1008..1041).chain(2030..2061);
    for (place, bad) in places.flat_map(|i| [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|bad| (i, bad)))
    {
        let mut row = vec![0.5; 2061];
        row[place] = bad;
        let outcome = sample(&mut Scratch::default(), &mut row, None, 0, None);
        assert_eq!(outcome, Outcome::Fault(RowFault::NonFinite), "{bad} at {place}");
    }
}

/// If any rule excludes the best token, the greedy choice is the next one.
#[test]
fn greedy_choice_is_made_after_every_rule() {
    let mut row = vec![0.0; VOCAB];
    (row[40], row[60]) = (3.0, 2.0);
    let plain = || SamplerSpec { temperature: 0.0, ..SamplerSpec::default() };
    let rules = [
        SamplerSpec { allowed_ids: vec![3, 60], ..plain() },
        SamplerSpec { bad_words: vec![vec![40]], ..plain() },
        SamplerSpec { logit_bias: vec![(40, -2.0)], ..plain() },
        SamplerSpec { min_tokens: 3, stop_ids: vec![40], ..plain() },
        SamplerSpec { repetition_penalty: 2.0, ..plain() },
        SamplerSpec { presence_penalty: 1.5, ..plain() },
        SamplerSpec { frequency_penalty: 1.5, ..plain() },
    ];
    assert_eq!(token(&row, &sampler(plain(), &[], &[40]), 1), 40);
    for rule in rules {
        assert_eq!(token(&row, &sampler(rule.clone(), &[], &[40]), 1), 60, "{rule:?}");
    }
}

#[test]
fn mask_allows_only_its_bits() {
    let mut mask = [0_u32; 4];
    mask[2] = 1 << 5 | 1 << 9;
    let s = sampler(SamplerSpec { seed: 3, temperature: 2.0, ..SamplerSpec::default() }, &[], &[]);
    for position in 0..200 {
        let outcome = sample(&mut Scratch::default(), &mut logits(2), Some(&s), position, Some(&mask));
        assert!(matches!(outcome, Outcome::Token { id: 69 | 73, .. }), "{outcome:?}");
    }
}

#[test]
fn logprobs_are_of_the_unmodified_distribution() {
    let row = logits(8);
    let spec = SamplerSpec {
        temperature: 0.0,
        logit_bias: vec![(11, 100.0)],
        top_logprobs: Some(4),
        ..SamplerSpec::default()
    };
    let outcome = sample(&mut Scratch::default(), &mut row.clone(), Some(&sampler(spec, &[], &[])), 0, None);
    let Outcome::Token { id, logprobs: Some(logprobs) } = outcome else { panic!("{outcome:?}") };
    assert_eq!(id, 11);
    let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
    let want = |id: usize| f64::from(row[id]) - sum.ln();
    // Roundings to f32 of numbers below 16: 2^-20 each, a few of them.
    assert!((f64::from(logprobs.logprob) - want(11)).abs() < 4e-6);
    assert_eq!(logprobs.rank as usize, 1 + row.iter().filter(|&&l| l > row[11]).count());
    let mut order: Vec<usize> = (0..VOCAB).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    assert_eq!(logprobs.top.iter().map(|t| t.0 as usize).collect::<Vec<_>>(), order[..4]);
    assert!(logprobs.top.iter().all(|&(id, l)| (f64::from(l) - want(id as usize)).abs() < 4e-6));
}

/// More candidates are found by a sort, up to the whole vocabulary; the order is that of fewer candidates.
#[test]
fn any_number_of_logprobs_has_one_order() {
    let mut row: Vec<f32> = (0..500).map(|id| ((id * 37) % 101) as f32 * 0.25 - 3.0).collect();
    row[7] = 0.0;
    row[401] = -0.0;
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap().then(a.cmp(&b)));
    for n in [1, 64, 65, 100, 499, 500, 9000] {
        let spec = SamplerSpec { temperature: 0.0, top_logprobs: Some(n), ..SamplerSpec::default() };
        let sampler = Sampler::new(spec, row.len(), &[], &[]).unwrap();
        let outcome = sample(&mut Scratch::default(), &mut row.clone(), Some(&sampler), 0, None);
        let Outcome::Token { logprobs: Some(logprobs), .. } = outcome else { panic!("{outcome:?}") };
        let top: Vec<usize> = logprobs.top.iter().map(|t| t.0 as usize).collect();
        assert_eq!(top, order[..row.len().min(n as usize)], "{n} logprobs");
    }
}

/// The bits of an id's logprob are those that it has among the best ones.
#[test]
fn requested_ids_replace_the_best_ones() {
    let row = logits(8);
    let logprobs = |spec: SamplerSpec| {
        let spec = SamplerSpec { temperature: 0.0, logit_bias: vec![(11, 100.0)], ..spec };
        let sampler = sampler(spec, &[], &[]);
        match sample(&mut Scratch::default(), &mut row.clone(), Some(&sampler), 0, None) {
            Outcome::Token { id: 11, logprobs: Some(logprobs) } => logprobs,
            other => panic!("{other:?}"),
        }
    };
    let all = logprobs(SamplerSpec { top_logprobs: Some(VOCAB as u32), ..SamplerSpec::default() });
    let bits: BTreeMap<u32, u32> = all.top.iter().map(|&(id, logprob)| (id, logprob.to_bits())).collect();
    for top_logprobs in [None, Some(0), Some(5)] {
        let ids = vec![96, 0, 11, 40];
        let some = logprobs(SamplerSpec { top_logprobs, logprob_ids: ids.clone(), ..SamplerSpec::default() });
        let expected: Vec<(u32, u32)> = ids.iter().map(|id| (*id, bits[id])).collect();
        let found: Vec<(u32, u32)> = some.top.iter().map(|&(id, logprob)| (id, logprob.to_bits())).collect();
        assert_eq!(found, expected, "{top_logprobs:?}");
        assert_eq!((some.logprob.to_bits(), some.rank), (all.logprob.to_bits(), all.rank));
    }
}

#[test]
fn zero_logprobs_return_only_the_drawn_token() {
    let spec = SamplerSpec { top_logprobs: Some(0), ..SamplerSpec::default() };
    let outcome = sample(&mut Scratch::default(), &mut logits(8), Some(&sampler(spec, &[], &[])), 0, None);
    assert!(
        matches!(outcome, Outcome::Token { logprobs: Some(ref l), .. } if l.top.is_empty()),
        "{outcome:?}"
    );
}

#[test]
fn out_of_bounds_parameters_are_named() {
    let reject = |spec: SamplerSpec| Sampler::new(spec, VOCAB, &[], &[]).unwrap_err().to_string();
    let base = SamplerSpec::default;
    assert!(reject(SamplerSpec { temperature: -1.0, ..base() }).contains("temperature"));
    assert!(reject(SamplerSpec { temperature: f32::NAN, ..base() }).contains("temperature"));
    assert!(reject(SamplerSpec { top_p: 0.0, ..base() }).contains("top_p"));
    assert!(reject(SamplerSpec { min_p: 1.5, ..base() }).contains("min_p"));
    assert!(reject(SamplerSpec { typical_p: 1.5, ..base() }).contains("typical_p"));
    assert!(reject(SamplerSpec { repetition_penalty: 0.0, ..base() }).contains("repetition_penalty"));
    assert!(reject(SamplerSpec { presence_penalty: 3.0, ..base() }).contains("presence_penalty"));
    assert!(reject(SamplerSpec { frequency_penalty: -3.0, ..base() }).contains("frequency_penalty"));
    assert!(reject(SamplerSpec { logit_bias: vec![(97, 0.0)], ..base() }).contains("97"));
    assert!(reject(SamplerSpec { stop_ids: vec![97], ..base() }).contains("97"));
    assert!(reject(SamplerSpec { allowed_ids: vec![97], ..base() }).contains("97"));
    assert!(reject(SamplerSpec { logprob_ids: vec![97], ..base() }).contains("logprob_ids"));
    assert!(reject(SamplerSpec { bad_words: vec![vec![1, 97]], ..base() }).contains("97"));
    assert!(reject(SamplerSpec { bad_words: vec![vec![]], ..base() }).contains("bad_words"));
    assert!(Sampler::new(base(), VOCAB, &[-1], &[]).is_err());
    assert!(Sampler::new(base(), VOCAB, &[], &[97]).is_err());
}

#[test]
fn overflow_by_a_penalty_is_a_fault() {
    // Every logit is finite; the division by the penalty overflows f32.
    for temperature in [0.0, 1.0] {
        let spec = SamplerSpec { temperature, repetition_penalty: 1e-3, ..SamplerSpec::default() };
        let sampler = sampler(spec, &[7], &[]);
        let mut row = logits(1);
        row[7] = f32::MAX;
        let outcome = sample(&mut Scratch::default(), &mut row, Some(&sampler), 0, None);
        assert_eq!(outcome, Outcome::Fault(RowFault::NonFinite));
    }
}

#[test]
fn draws_from_a_large_vocabulary_agree_with_the_model() {
    // Flat and peaked rows of 20,000 ids with many exact ties. Nuclei have from a few ids to most of them, so that the
    // selection in doubling chunks reaches many chunks.
    let n_ids = 20_000;
    let mut scratch = Scratch::default();
    for (case, spread) in [0.5, 4.0, 16.0, 40.0].into_iter().enumerate() {
        let tied = |i: u32| (uniform(case as u64, 9, i) * 500.0).floor() / 500.0;
        let row: Vec<f32> = (0..n_ids).map(|i| (tied(i) * spread) as f32).collect();
        for (top_k, top_p, min_p) in
            [(0, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.99, 0.0), (3000, 0.9, 0.0), (50, 1.0, 0.0), (0, 1.0, 0.1)]
        {
            let spec = SamplerSpec { top_k, top_p, min_p, seed: 7, ..SamplerSpec::default() };
            let model = distribution(&row, &spec);
            let sampler = Sampler::new(spec, row.len(), &[], &[]).unwrap();
            for position in 0..5 {
                let outcome = sample(&mut scratch, &mut row.clone(), Some(&sampler), position, None);
                let Outcome::Token { id, .. } = outcome else { panic!("{outcome:?}") };
                let below: f64 = model.range(..id).map(|(_, p)| p).sum();
                let own = *model.get(&id).expect("an id that the rules keep");
                let u = uniform(7, 0, position);
                // Two summation orders of 20,000 f64 terms that sum to 1 differ by less than 20,000 * 2^-52.
                assert!(below - 5e-12 <= u && u <= below + own + 5e-12, "{id}: {below} + {own}, u {u}");
            }
        }
    }
}

#[test]
fn only_allowed_ids_are_drawn() {
    let allowed_ids = vec![96, 3, 40];
    let spec = SamplerSpec { temperature: 2.0, allowed_ids: allowed_ids.clone(), ..SamplerSpec::default() };
    let s = sampler(spec, &[], &[]);
    let drawn: BTreeSet<u32> = (0..300).map(|position| token(&logits(2), &s, position)).collect();
    assert_eq!(drawn, allowed_ids.into_iter().collect());
    let spec = SamplerSpec { allowed_ids: vec![3], bad_words: vec![vec![3]], ..SamplerSpec::default() };
    let outcome = sample(&mut Scratch::default(), &mut logits(2), Some(&sampler(spec, &[], &[])), 0, None);
    assert_eq!(outcome, Outcome::Fault(RowFault::AllMasked));
}

proptest! {
    /// Greedy completions never contain a bad word, and differ from the best token only where one would be completed.
    #[test]
    fn bad_word_is_never_completed(
        bad_words in prop::collection::vec(prop::collection::vec(0_u32..4, 1..4), 1..4),
        output in prop::collection::vec(0_i32..4, 0..6), row_seed in 0_u64..1000,
    ) {
        // Ids 0 to 3 are by far the best ones, so that bad words occur often.
        let mut row = logits(row_seed);
        row[..4].iter_mut().for_each(|l| *l += 20.0);
        let spec = SamplerSpec { temperature: 0.0, bad_words: bad_words.clone(), ..SamplerSpec::default() };
        let mut s = sampler(spec, &[1, 2, 3], &output);
        let mut so_far: Vec<u32> = output.iter().map(|&t| t as u32).collect();
        for position in 0..8 {
            let completes = |id: u32| {
                let grown: Vec<u32> = so_far.iter().copied().chain([id]).collect();
                bad_words.iter().any(|word| grown.ends_with(word))
            };
            let mut want = row.clone();
            (0..4).filter(|&id| completes(id)).for_each(|id| want[id as usize] = f32::NEG_INFINITY);
            let best = want.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let got = token(&row, &s, position);
            prop_assert_eq!(want[got as usize], best);
            s.accept(got);
            so_far.push(got);
        }
    }
}

#[test]
fn row_of_the_prompt_returns_its_next_token_with_logprobs() {
    let row = logits(8);
    let spec = SamplerSpec {
        prompt_logprobs: Some(3),
        logit_bias: vec![(11, 100.0)],
        allowed_ids: vec![11],
        ..SamplerSpec::default()
    };
    let s = sampler(spec, &[5, 6, 7], &[]);
    let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
    for (position, id) in [(1, 6), (2, 7)] {
        let outcome = sample(&mut Scratch::default(), &mut row.clone(), Some(&s), position, None);
        let Outcome::Token { id: got, logprobs: Some(logprobs) } = outcome else { panic!("{outcome:?}") };
        assert_eq!(got, id);
        // As above: roundings to f32 of numbers below 16.
        assert!((f64::from(logprobs.logprob) - (f64::from(row[id as usize]) - sum.ln())).abs() < 4e-6);
        assert_eq!(logprobs.rank as usize, 1 + row.iter().filter(|&&l| l > row[id as usize]).count());
        assert_eq!(logprobs.top.len(), 3);
    }
    let outcome = sample(&mut Scratch::default(), &mut row.clone(), Some(&s), 3, None);
    assert_eq!(outcome, Outcome::Token { id: 11, logprobs: None }, "after the prompt the id is drawn");
}
