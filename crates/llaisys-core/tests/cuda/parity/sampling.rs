//! Sampling on a device (the emulator, or a GPU), compared with the CPU's sampler and with a direct model of the rules.

use crate::emulator::arrays::Arrays;
use crate::emulator::pick::{case, gpu_only, test_device};
use crate::sampling_model::{Row, between, logits, row};
use llaisys_core::cuda::device::{Device, DevicePtr, Element};
use llaisys_core::cuda::ops::sample::{self, RESULT_BYTES, Sample, TOP_BYTES};
use llaisys_core::cuda::ops::sample_tables::{Attach, SampleTables};
use llaisys_core::error::{Error, Unsupported};
use llaisys_core::ops::cases::SplitMix64;
use llaisys_core::sample::{Logprobs, Outcome, RowFault, Sampler, SamplerSpec, Scratch};
use std::rc::Rc;

const MAX_LEN: usize = 64;

/// A device with a slot for each row, and the arrays of a launch.
struct Rig {
    device: Rc<dyn Device>,
    tables: SampleTables,
    positions: DevicePtr,
    results: DevicePtr,
    last_tokens: DevicePtr,
    tops: DevicePtr,
    slots: DevicePtr,
    slot_stride: usize,
    logits: DevicePtr,
    edited: DevicePtr,
    stats: DevicePtr,
    n_rows: usize,
}

impl Rig {
    fn new(rows: &[Row]) -> Self {
        Self::on(test_device(), rows)
    }

    fn on(device: Rc<dyn Device>, rows: &[Row]) -> Self {
        let (vocab, n_rows) = (rows[0].logits.len(), rows.len());
        case("sample", Element::F32, format!("{n_rows} rows of {vocab}"));
        // Slot 0 stays idle, and rows have the slots in descending order.
        let tables = SampleTables::new(&*device, n_rows + 1, vocab, MAX_LEN).expect("the device has memory");
        let slot_of = |row: usize| n_rows - row;
        for (i, row) in rows.iter().enumerate() {
            let (prompt, output) = (&row.prompt, &row.output);
            let attach = Attach { spec: &row.spec, prompt, output, masked: row.mask.is_some() };
            tables.attach(&*device, slot_of(i), &attach).expect("it fits the tables");
            if let Some(mask) = &row.mask {
                tables.set_mask(&*device, slot_of(i), Some(mask)).expect("the slot exists");
            }
        }
        // Only the slots, or pairs as in the plan of a step.
        let slot_stride = 1 + n_rows % 2;
        let slots: Vec<u32> = (0..n_rows)
            .flat_map(|row| [slot_of(row) as u32, u32::MAX].into_iter().take(slot_stride))
            .collect();
        let positions: Vec<i32> = rows.iter().map(|row| row.n_before() as i32 - 1).collect();
        let logits: Vec<f32> = rows.iter().flat_map(|row| row.logits.clone()).collect();
        let alloc = |what, n_bytes| device.alloc(what, n_bytes).expect("the device has memory");
        Self {
            positions: device.i32s("positions", &positions),
            slots: device.u32s("slots", &slots),
            slot_stride,
            logits: device.elements("logits", Element::F32, &logits),
            edited: alloc("edited", logits.len() * 4),
            stats: alloc("stats", sample::stats_bytes(n_rows, vocab)),
            results: alloc("results", n_rows * RESULT_BYTES),
            tops: alloc("tops", n_rows * TOP_BYTES),
            last_tokens: device.i32s("last tokens", &vec![-1; n_rows + 1]),
            tables,
            device,
            n_rows,
        }
    }

    fn launch(&self, tops: DevicePtr) {
        let sample = Sample {
            tables: &self.tables,
            logits: self.logits,
            edited: self.edited,
            slots: self.slots,
            slot_stride: self.slot_stride,
            positions: self.positions,
            stats: self.stats,
            last_tokens: self.last_tokens,
            results: self.results,
            tops,
            n_rows: self.n_rows,
        };
        // SAFETY: every row has its own slot of the tables, and positions are below `MAX_LEN`.
        unsafe { sample.launch(&*self.device) }.expect("the kernels run");
    }

    fn outcomes(&self, rows: &[Row]) -> Vec<Option<Outcome>> {
        let results = self.device.read_bytes(self.results, self.n_rows * RESULT_BYTES);
        let tops = self.device.read_bytes(self.tops, self.n_rows * TOP_BYTES);
        let each = results.chunks_exact(RESULT_BYTES).zip(tops.chunks_exact(TOP_BYTES)).zip(rows);
        each.map(|((result, top), row)| sample::outcome(result, top, n_top(row))).collect()
    }
}

fn n_top(row: &Row) -> Option<u32> {
    let scored = row.spec.prompt_logprobs.filter(|_| row.n_before() < row.prompt.len() as u32);
    scored.or(row.spec.top_logprobs)
}

fn run(rows: &[Row]) -> Vec<Outcome> {
    let rig = Rig::new(rows);
    rig.launch(rig.tops);
    rig.outcomes(rows).into_iter().map(|outcome| outcome.expect("no slot is idle")).collect()
}

/// Asserts that the device's outcomes follow the rules up to rounding, and equal the CPU's except for some draws on a
/// boundary.
fn check(rows: &[Row]) {
    let mut n_other = 0;
    for (row, got) in rows.iter().zip(run(rows)) {
        let want = row.on_cpu();
        let (Outcome::Token { id, logprobs }, Outcome::Token { id: want_id, logprobs: want_logprobs }) =
            (&got, &want)
        else {
            assert_eq!(got, want, "{:?}", row.spec);
            continue;
        };
        if row.inside.is_none() {
            row.check_draw(*id);
        }
        n_other += usize::from(id != want_id);
        assert_eq!(logprobs.is_some(), want_logprobs.is_some());
        if let (Some(logprobs), Some(want)) = (logprobs, want_logprobs) {
            check_logprobs(row, *id, logprobs, *want_id, want);
        }
    }
    // A draw is on a boundary by chance, about once in 1e5 rows of these.
    assert!(n_other <= rows.len() / 50, "{n_other} of {} rows are not the CPU's", rows.len());
}

fn check_logprobs(row: &Row, id: u32, got: &Logprobs, want_id: u32, want: &Logprobs) {
    // The normalizer is an f32 on both sides (1 ulp below 64: 4e-6), of sums that differ by 1e-6.
    let close = |a: f32, b: f32| (a - b).abs() < 6e-6;
    let own = want.logprob + (row.logits[id as usize] - row.logits[want_id as usize]);
    assert!(close(got.logprob, own), "{} and {own}", got.logprob);
    if id == want_id {
        assert_eq!(got.rank, want.rank);
    }
    assert_eq!(got.top.len(), want.top.len());
    for (got, want) in got.top.iter().zip(&want.top) {
        assert!(got.0 == want.0 && close(got.1, want.1), "{got:?} and {want:?}");
    }
}

#[test]
fn every_combination_of_parameters_matches_the_cpu() {
    for part in 0..4 {
        let (mut draw, vocab) = (SplitMix64::new(part), if part < 2 { 1000 } else { 6007 });
        let rows: Vec<Row> = (0..64).map(|i| row(&mut draw, vocab, part as usize * 64 + i)).collect();
        check(&rows);
    }
}

/// The last chunk is partial, and rows begin at unaligned addresses.
#[test]
fn large_vocabularies_match_the_cpu() {
    let few = [
        (32003, vec![0b1111111, 0, 0b0000011, 0b0001000, 0b0110110, 0b0100001]),
        (151_936, vec![0, 0b0000010, 0b1101001, 0b0010111, 0b0001010, 0b0000100]),
    ];
    let many =
        gpu_only("sample", [(151_936, (0..128).collect()), (152_064, (0..128).collect::<Vec<usize>>())]);
    for (vocab, combinations) in few.into_iter().chain(many) {
        let mut draw = SplitMix64::new(vocab as u64);
        let rows: Vec<Row> = combinations.iter().map(|&which| row(&mut draw, vocab, which)).collect();
        check(&rows);
    }
}

fn row_of(logits: Vec<f32>, spec: SamplerSpec) -> Row {
    Row { logits, spec, prompt: vec![1], ..Row::default() }
}

/// Equal weights are exact on both sides, so the draws are equal.
#[test]
fn ties_are_kept_in_the_order_of_ids() {
    let levels = |counts: [usize; 3]| -> Vec<f32> {
        let mut draw = SplitMix64::new(3);
        let mut logits: Vec<f32> =
            counts.iter().zip([3.0, 2.0, -1.0]).flat_map(|(&n, level)| vec![level; n]).collect();
        for i in (1..logits.len()).rev() {
            logits.swap(i, draw.below(i + 1));
        }
        logits
    };
    let specs = [
        SamplerSpec { top_k: 5, ..SamplerSpec::default() },
        SamplerSpec { top_k: 700, ..SamplerSpec::default() },
        SamplerSpec { top_p: 0.3, ..SamplerSpec::default() },
        SamplerSpec { top_k: 4000, top_p: 0.5, ..SamplerSpec::default() },
        // top_p keeps every tie that top_k left, and none that it dropped.
        SamplerSpec { top_k: 50, top_p: 0.999, ..SamplerSpec::default() },
        SamplerSpec { typical_p: 0.4, ..SamplerSpec::default() },
        SamplerSpec { top_k: 900, typical_p: 0.7, ..SamplerSpec::default() },
    ];
    let mut rows = Vec::new();
    for counts in [[5000, 0, 0], [40, 4500, 460]] {
        for (i, spec) in specs.iter().enumerate() {
            for seed in 0..4 {
                rows.push(row_of(levels(counts), SamplerSpec { seed: seed * 10 + i as u64, ..spec.clone() }));
            }
        }
    }
    for (row, got) in rows.iter().zip(run(&rows)) {
        assert_eq!(got, row.on_cpu(), "{:?}", row.spec);
    }
}

#[test]
fn a_single_candidate_is_the_best_token_with_the_lowest_id() {
    let mut draw = SplitMix64::new(11);
    let mut rows = Vec::new();
    for best in [[4999, 5000], [700, 8100], [8198, 8199]] {
        let mut row = logits(&mut draw, 8200);
        for id in best {
            row[id] = 90.0;
        }
        for (temperature, top_k, top_p) in [(0.0, 0, 1.0), (2.0, 1, 1.0), (1.0, 0, 1e-9), (1e-4, 0, 0.4)] {
            let spec = SamplerSpec { temperature, top_k, top_p, ..SamplerSpec::default() };
            rows.push(row_of(row.clone(), spec));
        }
    }
    // Both zeros are equal.
    let mut zeros = vec![-1.0; 8200];
    (zeros[4000], zeros[5000]) = (-0.0, 0.0);
    rows.push(row_of(zeros, SamplerSpec { top_k: 1, ..SamplerSpec::default() }));
    let got: Vec<Outcome> = run(&rows);
    let ids = [[4999; 4], [700; 4], [8198; 4]].concat().into_iter().chain([4000]);
    let want: Vec<Outcome> = ids.map(|id| Outcome::Token { id, logprobs: None }).collect();
    assert_eq!(got, want);
}

#[test]
fn faults_are_reported_by_row_and_affect_no_other_row() {
    let plain = || {
        row_of(logits(&mut SplitMix64::new(5), 5000), SamplerSpec { top_p: 0.9, ..SamplerSpec::default() })
    };
    let with = |id: usize, logit: f32| {
        let mut row = plain();
        row.logits[id] = logit;
        row
    };
    let mut masked = plain();
    masked.mask = Some(vec![0; 5000_usize.div_ceil(32)]);
    let mut disjoint = plain();
    disjoint.mask = Some(vec![0x5555_5555; 5000_usize.div_ceil(32)]);
    disjoint.spec.allowed_ids = vec![1, 3, 4999];
    let mut overflow = with(4500, 3e38);
    overflow.spec.repetition_penalty = 0.01;
    overflow.output = vec![4500];
    let mut greedy = with(17, f32::NAN);
    greedy.spec = SamplerSpec { temperature: 0.0, top_logprobs: Some(2), ..SamplerSpec::default() };
    let rows = [
        plain(),
        with(0, f32::NAN),
        with(4999, f32::INFINITY),
        with(4096, f32::NEG_INFINITY),
        greedy,
        overflow,
        masked,
        disjoint,
        plain(),
    ];
    let got = run(&rows);
    let (non_finite, all_masked) = (Outcome::Fault(RowFault::NonFinite), Outcome::Fault(RowFault::AllMasked));
    assert_eq!(got[1..6], vec![non_finite; 5]);
    assert_eq!(got[6..8], vec![all_masked; 2]);
    assert_eq!(got[0], plain().on_cpu());
    assert_eq!(got[8], got[0]);
    for (row, got) in rows.iter().zip(got) {
        assert_eq!(got, row.on_cpu());
    }
}

/// Each device has its own order of blocks and threads.
#[test]
fn results_are_the_same_bits_in_every_order_of_threads() {
    let mut draw = SplitMix64::new(77);
    let rows: Vec<Row> = (0..12).map(|i| row(&mut draw, 9000, i * 11)).collect();
    let bits = || {
        let rig = Rig::new(&rows);
        rig.launch(rig.tops);
        let read = |from, n| rig.device.read_bytes(from, n);
        (read(rig.results, 12 * RESULT_BYTES), rig.outcomes(&rows), read(rig.last_tokens, 13 * 4))
    };
    let first = bits();
    for _ in 0..2 {
        assert_eq!(bits(), first);
    }
}

#[test]
fn prompt_tokens_are_scored_and_not_sampled() {
    let mut draw = SplitMix64::new(21);
    let prompt: Vec<i32> = vec![5, 2999, 0, 5, 1234, 7];
    let spec = SamplerSpec {
        prompt_logprobs: Some(3),
        top_logprobs: Some(1),
        repetition_penalty: 1.5,
        logit_bias: vec![(9, 50.0)],
        ..SamplerSpec::default()
    };
    let rows: Vec<Row> = (1..=6)
        .map(|n_before| Row {
            logits: logits(&mut draw, 3000),
            spec: spec.clone(),
            prompt: prompt.clone(),
            inside: Some(n_before),
            ..Row::default()
        })
        .collect();
    let rig = Rig::new(&rows);
    rig.launch(rig.tops);
    let got = rig.outcomes(&rows);
    for (row, got) in rows.iter().zip(&got) {
        let (
            Some(Outcome::Token { id, logprobs: Some(logprobs) }),
            Outcome::Token { id: want_id, logprobs: Some(want) },
        ) = (got, row.on_cpu())
        else {
            panic!("{got:?}")
        };
        assert_eq!((*id, logprobs.top.len()), (want_id, want.top.len()));
        check_logprobs(row, *id, logprobs, want_id, &want);
    }
    // Only the row behind the prompt sampled a new token. Rows have the slots in descending order.
    let last = rig.device.read_i32s(rig.last_tokens, 7);
    let Some(Outcome::Token { id, .. }) = &got[5] else { panic!("{got:?}") };
    assert_eq!(last, [-1, *id as i32, -1, -1, -1, -1, -1]);
}

/// One captured launch is replayed for each step. Each step sees the tokens of the previous steps; the host uploads
/// only the positions.
#[test]
fn a_replayed_launch_continues_from_its_own_tokens() {
    const STEPS: usize = 12;
    let mut draw = SplitMix64::new(99);
    let spec = |seed| SamplerSpec {
        temperature: 0.7,
        seed,
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.3,
        min_tokens: 6,
        stop_ids: vec![3, 4],
        ..SamplerSpec::default()
    };
    let few = |draw: &mut SplitMix64| {
        (0..33).map(|i| between(draw, 0.0, 2.0) - (i / 12) as f32 * 8.0).collect::<Vec<f32>>()
    };
    let mut rows: Vec<Row> = (0..4)
        .map(|i| Row { logits: few(&mut draw), spec: spec(i), prompt: vec![1, 2, 3], ..Row::default() })
        .collect();
    rows[2].spec.bad_words = (0..11).map(|id| vec![id, id + 1]).collect();
    rows[3].spec =
        SamplerSpec { temperature: 0.0, bad_words: vec![vec![7, 7], vec![5]], ..SamplerSpec::default() };
    let mut samplers: Vec<Sampler> = rows
        .iter()
        .map(|row| Sampler::new(row.spec.clone(), 33, &row.prompt, &[]).expect("a checked spec"))
        .collect();
    // A capture cannot load kernels. A launch also counts its tokens, so the warm-up has tables of its own.
    let warm_up = Rig::new(&rows);
    warm_up.launch(DevicePtr::NULL);
    let rig = Rig::on(warm_up.device, &rows);
    rig.device.begin_capture().expect("no capture is open");
    rig.launch(DevicePtr::NULL);
    let graph = rig.device.end_capture().expect("a capture is open");
    for step in 0..STEPS {
        let positions = [(2 + step) as u32; 4].map(u32::to_le_bytes).concat();
        rig.device.upload(rig.positions, &positions).expect("the array is inside the allocation");
        rig.device.replay(graph).expect("the kernels run");
        for ((row, sampler), got) in rows.iter().zip(&mut samplers).zip(rig.outcomes(&rows)) {
            let n_before = 3 + step as u32;
            let mut logits = row.logits.clone();
            let want = sample_on_cpu(&mut logits, sampler, n_before);
            assert_eq!(got.as_ref(), Some(&want), "step {step}, {:?}", row.spec);
            let Outcome::Token { id, .. } = want else { panic!("{want:?}") };
            sampler.accept(id);
        }
    }
}

fn sample_on_cpu(logits: &mut [f32], sampler: &Sampler, n_before: u32) -> Outcome {
    llaisys_core::sample::sample(&mut Scratch::default(), logits, Some(sampler), n_before, None)
}

#[test]
fn rows_of_idle_slots_have_no_outcome() {
    let rows =
        [row_of(vec![0.0; 100], SamplerSpec::default()), row_of(vec![f32::NAN; 100], SamplerSpec::default())];
    let rig = Rig::new(&rows);
    // No sequence was attached to slot 0.
    rig.device.upload_words(rig.slots.at(4), [0]).expect("there are two rows");
    rig.launch(rig.tops);
    let got = rig.outcomes(&rows);
    assert!(matches!(got[..], [Some(Outcome::Token { .. }), None]), "{got:?}");
    assert_eq!(rig.device.read_i32s(rig.last_tokens, 2), [-1, -1]);
}

#[test]
fn a_mask_applies_to_one_step() {
    let mut row = row_of(
        logits(&mut SplitMix64::new(1), 70),
        SamplerSpec { temperature: 0.0, ..SamplerSpec::default() },
    );
    row.mask = Some(vec![0, 0, 1 << 2]);
    let rows = [row.clone()];
    let rig = Rig::new(&rows);
    rig.launch(rig.tops);
    assert_eq!(rig.outcomes(&rows), [Some(Outcome::Token { id: 66, logprobs: None })]);
    rig.tables.set_mask(&*rig.device, 1, None).expect("the slot exists");
    rig.launch(rig.tops);
    row.mask = None;
    assert_eq!(rig.outcomes(&rows), [Some(row.on_cpu())]);
}

#[test]
fn bad_words_match_only_in_the_completion() {
    let mut logits = vec![0.0; 50];
    logits[9] = 5.0;
    let bad_words = vec![vec![7, 8, 9]];
    let row = |prompt: &[i32], output: &[i32]| Row {
        logits: logits.clone(),
        spec: SamplerSpec { temperature: 0.0, bad_words: bad_words.clone(), ..SamplerSpec::default() },
        prompt: prompt.to_vec(),
        output: output.to_vec(),
        ..Row::default()
    };
    let rows = [row(&[7, 8], &[]), row(&[1, 7], &[8]), row(&[7, 8], &[7, 8]), row(&[1], &[7, 8, 8])];
    let token = |id| Outcome::Token { id, logprobs: None };
    assert_eq!(run(&rows), [token(9), token(9), token(0), token(9)]);
}

#[test]
fn parameters_that_do_not_fit_the_tables_are_refused_by_name() {
    let device = &*test_device();
    let tables = SampleTables::new(device, 2, 5000, MAX_LEN).expect("the device has memory");
    let many = |n: u32| (0..n).collect::<Vec<u32>>();
    for (what, spec) in [
        ("logprobs", SamplerSpec { top_logprobs: Some(21), ..SamplerSpec::default() }),
        ("prompt_logprobs", SamplerSpec { prompt_logprobs: Some(21), ..SamplerSpec::default() }),
        ("logprob_ids", SamplerSpec { logprob_ids: many(1), ..SamplerSpec::default() }),
        ("ids", SamplerSpec { min_tokens: 1, stop_ids: many(2049), ..SamplerSpec::default() }),
        ("bad_words", SamplerSpec { bad_words: vec![many(4098)], ..SamplerSpec::default() }),
    ] {
        let of = Attach { spec: &spec, prompt: &[1], output: &[], masked: false };
        match tables.attach(device, 1, &of) {
            Err(Error::Unsupported(Unsupported::Feature { what: named, .. })) => {
                assert!(named.contains(what), "{named}")
            }
            other => panic!("{what}: {other:?}"),
        }
    }
    assert!(SampleTables::new(device, 2, (1 << 19) + 1, MAX_LEN).is_err());
}
