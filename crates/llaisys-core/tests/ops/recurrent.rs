//! The ops of recurrent layers on every instruction set: compared with their references, and bit for bit the same
//! wherever a pass begins and whatever else is in it.

use crate::parity::{assert_close, contexts, name};
use llaisys_core::ops::cases::{ROUNDING, Size, SplitMix64};
use llaisys_core::ops::{
    self, Convolution, DeltaHeads, DeltaInputs, OpContext, Recurrence, RecurrentRows, SequenceRows,
    StatesMut, ValueOrder, reference,
};

/// Sequences of these lengths, their rows interleaved in the pass.
const LENGTHS: [usize; 3] = [9, 1, 4];
const N_STATES: usize = 7;

/// The sequences of a pass with `lengths` rows, which read the states `before` and write those from 3 on.
fn sequences(lengths: &[usize], before: &[Option<u32>]) -> (Vec<SequenceRows>, Vec<u32>) {
    let (mut start, mut made) = (0, Vec::new());
    for (i, (&n_rows, &before)) in lengths.iter().zip(before).enumerate() {
        made.push(SequenceRows { before, after: 3 + i as u32, start, n_rows });
        start += n_rows;
    }
    // Row t of the pass: one of each sequence in turn.
    let mut order = vec![0; start];
    let (mut taken, mut row) = (vec![0; lengths.len()], 0);
    while row < start as u32 {
        for (sequence, taken) in made.iter().zip(&mut taken).filter(|(s, taken)| **taken < s.n_rows) {
            order[sequence.start + *taken] = row;
            (*taken, row) = (*taken + 1, row + 1);
        }
    }
    (made, order)
}

/// The rows of a pass, one after the other, as rows of the whole input.
fn gather(x: &[f32], rows: &[u32], width: usize) -> Vec<f32> {
    rows.iter().flat_map(|&row| &x[row as usize * width..][..width]).copied().collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

const BEFORE: [Option<u32>; 3] = [Some(0), None, Some(0)];

#[test]
fn causal_conv_agrees_with_the_reference_wherever_a_pass_begins() {
    let n: usize = LENGTHS.iter().sum();
    for cx in contexts() {
        for (width, n_taps, silu) in [
            (1, 2, true),
            (17, 4, true),
            (64, 4, true),
            (130, 3, true),
            (33, 6, true),
            (48, 3, false),
            (65, 3, false),
        ] {
            let draw = &mut SplitMix64::new(width as u64);
            let (x, taps) = (draw.values(Size::Unit, n * width), draw.values(Size::Unit, n_taps * width));
            let len = (n_taps - 1) * width;
            let stride = len + 5;
            let states = draw.values(Size::Unit, N_STATES * stride);
            let (made, order) = sequences(&LENGTHS, &BEFORE);
            let run = |x: &[f32], rows: RecurrentRows<'_>, data: &mut [f32]| {
                let mut out = vec![f32::NAN; x.len()];
                let windows = StatesMut { data, stride, offset: 5, len };
                ops::causal_conv(&cx, x, Convolution { taps: &taps, silu, rows, windows }, &mut out);
                out
            };
            let mut whole = states.clone();
            let rows = RecurrentRows { sequences: &made, order: &order };
            let got = run(&x, rows, &mut whole);
            for sequence in &made {
                let part = |data: &[f32], state: u32| data[state as usize * stride + 5..][..len].to_vec();
                let window = sequence.before.map_or(vec![0.0; len], |state| part(&states, state));
                let own = gather(&x, rows.of(sequence), width);
                let (want, after) = reference::causal_conv::causal_conv(&own, &taps, silu, &window, width);
                // Products and sums of `n_taps` terms, then the silu.
                let tolerance =
                    |_, want: f64| 4e-7 * want.abs() + (n_taps as f64 + 2.0) * ROUNDING * n_taps as f64;
                let what = format!("{} {width} {n_taps} {silu}", name(&cx));
                assert_close(&gather(&got, rows.of(sequence), width), &want, tolerance, &what);
                assert_eq!(part(&whole, sequence.after), after, "{what}");
                // Row by row, in place from the second row on.
                let mut data = states.clone();
                for (t, row) in own.chunks_exact(width).enumerate() {
                    let before = if t == 0 { sequence.before } else { Some(sequence.after) };
                    let one = [SequenceRows { before, start: 0, n_rows: 1, ..*sequence }];
                    let out = run(row, RecurrentRows { sequences: &one, order: &[0] }, &mut data);
                    let want = &got[rows.of(sequence)[t] as usize * width..][..width];
                    assert_eq!(bits(&out), bits(want), "{what} row {t}");
                }
                assert_eq!(bits(&part(&data, sequence.after)), bits(&part(&whole, sequence.after)), "{what}");
            }
            assert_eq!(whole[..3 * stride], states[..3 * stride], "states that are read do not change");
        }
    }
}

/// Inputs of `delta_rule` for `n` rows.
struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    beta: Vec<f32>,
    decay: Vec<f32>,
}

impl Inputs {
    fn random(draw: &mut SplitMix64, heads: DeltaHeads, n: usize) -> Self {
        let positive = |values: Vec<f32>| values.into_iter().map(f32::abs).collect();
        // Keys of a length below 1, as after their norm.
        let scale = 1.0 / (heads.d_key as f32).sqrt();
        let scaled = |values: Vec<f32>| values.into_iter().map(|x| x * scale).collect();
        Self {
            q: scaled(draw.values(Size::Unit, n * heads.key_width())),
            k: scaled(draw.values(Size::Unit, n * heads.key_width())),
            v: draw.values(Size::Unit, n * heads.value_width()),
            beta: positive(draw.values(Size::Unit, n * heads.n_values)),
            decay: positive(draw.values(Size::Unit, n * heads.n_values)),
        }
    }

    fn rows(&self, rows: &[u32], heads: DeltaHeads) -> Self {
        Self {
            q: gather(&self.q, rows, heads.key_width()),
            k: gather(&self.k, rows, heads.key_width()),
            v: gather(&self.v, rows, heads.value_width()),
            beta: gather(&self.beta, rows, heads.n_values),
            decay: gather(&self.decay, rows, heads.n_values),
        }
    }

    fn view(&self) -> DeltaInputs<'_> {
        DeltaInputs { q: &self.q, k: &self.k, v: &self.v, beta: &self.beta, decay: &self.decay }
    }
}

fn delta_rule(
    cx: &OpContext,
    inputs: &Inputs,
    heads: DeltaHeads,
    rows: RecurrentRows<'_>,
    data: &mut [f32],
) -> Vec<f32> {
    let (mut scratch, mut out) = (vec![f32::NAN; inputs.v.len()], vec![f32::NAN; inputs.v.len()]);
    let len = heads.matrices_len();
    let states = StatesMut { data, stride: 3 + len, offset: 3, len };
    ops::delta_rule(cx, inputs.view(), Recurrence { heads, rows, states }, &mut scratch, &mut out);
    out
}

#[test]
fn delta_rule_agrees_with_the_reference_wherever_a_pass_begins() {
    let n: usize = LENGTHS.iter().sum();
    let shapes = [(1, 1, 1, 1), (2, 4, 16, 16), (2, 6, 24, 40), (1, 3, 33, 70), (2, 4, 128, 128)];
    for cx in contexts() {
        for (n_keys, n_values, d_key, d_value) in shapes {
            let order = if d_value == 40 { ValueOrder::Grouped } else { ValueOrder::Alternating };
            let heads = DeltaHeads { n_keys, n_values, d_key, d_value, order };
            let (len, width) = (heads.matrices_len(), heads.value_width());
            let draw = &mut SplitMix64::new(len as u64);
            let inputs = Inputs::random(draw, heads, n);
            let states = draw.values(Size::Unit, N_STATES * (3 + len));
            let (made, order) = sequences(&LENGTHS, &BEFORE);
            let rows = RecurrentRows { sequences: &made, order: &order };
            let mut whole = states.clone();
            let got = delta_rule(&cx, &inputs, heads, rows, &mut whole);
            for sequence in &made {
                let part = |data: &[f32], state: u32| data[state as usize * (3 + len) + 3..][..len].to_vec();
                let own = inputs.rows(rows.of(sequence), heads);
                let mut state: Vec<f64> = match sequence.before {
                    Some(before) => part(&states, before).into_iter().map(f64::from).collect(),
                    None => vec![0.0; len],
                };
                let want = reference::delta_rule::delta_rule(own.view(), heads, &mut state);
                // Matrices stay below 2 in size, and keys below 1 in length: sums of `d_key` such terms, over 9 rows.
                let error = 9.0 * (d_key as f64 + 8.0) * ROUNDING * 4.0;
                let what = format!("{} {heads:?}", name(&cx));
                assert_close(&gather(&got, rows.of(sequence), width), &want, |_, _| error, &what);
                assert_close(&part(&whole, sequence.after), &state, |_, _| error, &what);
                let mut data = states.clone();
                for (t, &row) in rows.of(sequence).iter().enumerate() {
                    let before = if t == 0 { sequence.before } else { Some(sequence.after) };
                    let one = [SequenceRows { before, start: 0, n_rows: 1, ..*sequence }];
                    let single = RecurrentRows { sequences: &one, order: &[0] };
                    let out = delta_rule(&cx, &inputs.rows(&[row], heads), heads, single, &mut data);
                    let want = &got[row as usize * width..][..width];
                    assert_eq!(bits(&out), bits(want), "{what} row {t}");
                }
                assert_eq!(bits(&part(&data, sequence.after)), bits(&part(&whole, sequence.after)), "{what}");
            }
            assert_eq!(whole[..3 * (3 + len)], states[..3 * (3 + len)], "states that are read do not change");
        }
    }
}

#[test]
#[should_panic(expected = "each state is written once")]
fn a_state_is_not_written_for_two_sequences() {
    let order = ValueOrder::Grouped;
    let heads = DeltaHeads { n_keys: 1, n_values: 1, d_key: 4, d_value: 4, order };
    let inputs = Inputs::random(&mut SplitMix64::new(1), heads, 2);
    let sequence = SequenceRows { before: None, after: 1, start: 0, n_rows: 1 };
    let sequences = [sequence, SequenceRows { start: 1, ..sequence }];
    let rows = RecurrentRows { sequences: &sequences, order: &[0, 1] };
    delta_rule(&contexts()[0], &inputs, heads, rows, &mut [0.0; 4 * 19]);
}

#[test]
fn gates_agree_with_their_references() {
    let draw = &mut SplitMix64::new(3);
    let (rate, bias): (Vec<f32>, _) = (draw.values(Size::Unit, 6), draw.values(Size::Unit, 6));
    let rate: Vec<f32> = rate.into_iter().map(|rate| rate.exp()).collect();
    let mut a: Vec<f32> = draw.values(Size::Unit, 60).into_iter().map(|a| a * 20.0).collect();
    a[..3].copy_from_slice(&[1e4, -1e4, 0.0]);
    let mut b = a.clone();
    let (strengths, decays) = reference::delta_gates::delta_gates(&b, &a, &rate, &bias);
    ops::delta_gates(&mut b, &mut a, &rate, &bias);
    assert_close(&b, &strengths, |_, want| 4.0 * ROUNDING * want + 1e-37, "write strengths");
    // The exponent, up to 87 where the result is normal, rounds a few times.
    assert_close(&a, &decays, |_, want| 400.0 * ROUNDING * want + 1e-37, "decays");
    for cx in contexts() {
        for (n, width) in [(1, 1), (3, 17), (5, 64), (200, 130)] {
            let draw = &mut SplitMix64::new(width as u64);
            let (x, z) = (draw.values(Size::Unit, n * width), draw.values(Size::Unit, n * width));
            let weight = draw.values(Size::Unit, width);
            let what = format!("{} {n} {width}", name(&cx));
            let mut got = x.clone();
            ops::gated_norm(&cx, &mut got, &z, &weight, 1e-6);
            let want = reference::gated_norm::gated_norm(&x, &z, &weight, 1e-6);
            assert_close(&got, &want, |_, want| 40.0 * ROUNDING * want.abs() + 1e-37, &what);
            let mut got = x.clone();
            ops::sigmoid_gate(&cx, &mut got, &z);
            let want = reference::sigmoid_gate::sigmoid_gate(&x, &z);
            assert_close(&got, &want, |_, want| 8.0 * ROUNDING * want.abs() + 1e-37, &what);
            let mut got = x.clone();
            ops::multiply(&cx, &mut got, &z);
            let want = reference::multiply::multiply(&x, &z);
            assert_close(&got, &want, |_, want| ROUNDING * want.abs() + 1e-37, &what);
        }
    }
}
