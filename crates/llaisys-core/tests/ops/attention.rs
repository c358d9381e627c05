//! Attention on every instruction set of the machine: compared with the f64 reference, and with the same bits for any
//! batch, number of threads and placement of cells.

use llaisys_core::dtype::KvDType;
use llaisys_core::ops::cases::attention::{AttentionCase, AttentionInput, Placement, Sequence};
use llaisys_core::ops::dispatch::{IsaName, Kernels};
use llaisys_core::ops::{AttentionRow, AttentionRows, OpContext, Queries, attention, reference, window_span};
use llaisys_core::threads::Pool;
use std::borrow::Cow;

fn context(isa: IsaName, n_threads: usize) -> OpContext {
    let kernels = Kernels::select(Some(isa)).expect("the machine has the instruction set");
    let pool = Pool::new(n_threads).expect("threads start");
    OpContext::new(kernels, pool, 256, 6 * 512).expect("memory for the scratch")
}

/// Contexts with 1, 2 and 3 threads for each instruction set. Each has much scratch memory, so tests use it again.
pub(crate) fn contexts() -> Vec<(IsaName, [OpContext; 3])> {
    IsaName::available().into_iter().map(|isa| (isa, [1, 2, 3].map(|n| context(isa, n)))).collect()
}

fn compute(cx: &mut OpContext, input: &AttentionInput) -> Vec<f32> {
    let mut out = vec![f32::NAN; input.q.len()];
    attention(cx, input.queries_of(&input.q), input.layer(), input.rows(), &mut out);
    out
}

/// Computes each row in a separate call. With a window, the list begins at the last boundary before the visible cells,
/// and has the number of a visible cell for hidden ones.
fn compute_alone(cx: &mut OpContext, input: &AttentionInput) -> Vec<f32> {
    let AttentionRows { cells, rows, window, .. } = input.rows();
    let row_len = input.q.len() / rows.len().max(1);
    let mut out = vec![f32::NAN; input.q.len()];
    for (i, row) in rows.iter().enumerate() {
        let place = i * row_len..(i + 1) * row_len;
        let (mut row, mut own) = (*row, Cow::Borrowed(cells));
        if let Some(window) = window {
            let cut = row.n_hidden / window_span(window) as u32 * window_span(window) as u32;
            let AttentionRow { start, n_hidden, n_visible } = row;
            own.to_mut()[start as usize..][..n_hidden as usize].fill(cells[(start + n_hidden) as usize]);
            let (n_hidden, n_visible) = (n_hidden - cut, n_visible - cut);
            row = AttentionRow { start: start + cut, n_hidden, n_visible };
        }
        let rows = AttentionRows { cells: &own, rows: std::slice::from_ref(&row), window, n_shared: &[] };
        let q = input.queries_of(&input.q[place.clone()]);
        attention(cx, q, input.layer(), rows, &mut out[place]);
    }
    out
}

pub(crate) fn assert_same_bits(got: &[f32], want: &[f32], what: &str) {
    let different = got.iter().zip(want).filter(|(got, want)| got.to_bits() != want.to_bits()).count();
    assert!(got.len() == want.len() && different == 0, "{what}: {different} of {} differ", want.len());
}

/// Cells that no sequence has are NaN, so this also verifies that none of them is read.
#[test]
fn attention_agrees_with_the_reference_within_rounding() {
    let mut contexts = contexts();
    for case in AttentionCase::all() {
        let input = case.build(Placement::Shuffled(1)).unwrap();
        if case.n_rows() == 0 {
            assert!(compute(&mut context(IsaName::Scalar, 1), &input).is_empty());
            continue;
        }
        let (q, scoring) = input.queries();
        let want = reference::attention::attention(
            Queries { scoring, ..input.queries_of(&q) },
            input.numbers(),
            input.rows(),
        );
        let bound = input.tolerance();
        for (isa, [_, two, _]) in &mut contexts {
            let got = compute(two, &input);
            for (i, (&got, &want)) in got.iter().zip(&want).enumerate() {
                let error = (f64::from(got) - want).abs();
                assert!(
                    error <= bound,
                    "{isa:?} {case:?}, number {i}: {got} for {want}, {error:e} > {bound:e}"
                );
            }
        }
    }
}

#[test]
fn bits_of_a_row_do_not_depend_on_batch_threads_or_cells() {
    let mut contexts = contexts();
    for case in AttentionCase::all() {
        let in_order = case.build(Placement::InOrder).unwrap();
        let shuffled = [1, 2, 3].map(|seed| case.build(Placement::Shuffled(seed)).unwrap());
        for (isa, contexts) in &mut contexts {
            let alone = compute_alone(&mut contexts[0], &in_order);
            for (i, cx) in contexts.iter_mut().enumerate() {
                let what = format!("{isa:?} on {} threads, {case:?}", i + 1);
                assert_same_bits(&compute(cx, &in_order), &alone, &what);
                assert_same_bits(&compute(cx, &shuffled[i]), &alone, &what);
            }
            let what = format!("{isa:?} {case:?}");
            assert_same_bits(&compute_alone(&mut contexts[2], &shuffled[2]), &alone, &what);
        }
    }
}

/// A long single row is split into spans only with enough threads. This test has more threads than work.
#[test]
fn more_threads_than_work_give_the_same_bits() {
    let one = |len| Sequence { len, n_rows: 1 };
    let lists = [vec![one(1)], vec![one(2500)], vec![one(700), one(129), one(3000)]];
    let lists = lists.into_iter().flat_map(|list| [(list.clone(), None), (list, Some(1100))]);
    for (i, (sequences, window)) in lists.enumerate() {
        let case = AttentionCase {
            heads: (3, 1),
            dtype: if i % 2 == 0 { KvDType::Bfloat16 } else { KvDType::Int8 },
            sequences,
            window,
            ..AttentionCase::plain()
        };
        let input = case.build(Placement::Shuffled(3)).unwrap();
        for isa in IsaName::available() {
            let alone = compute(&mut context(isa, 1), &input);
            assert_same_bits(&compute(&mut context(isa, 8), &input), &alone, &format!("{isa:?} {case:?}"));
        }
    }
}

/// A key or value that is not finite affects its own row and later ones, but no earlier row.
#[test]
fn non_finite_numbers_affect_only_the_rows_that_see_them() {
    let sequences = vec![Sequence { len: 40, n_rows: 9 }, Sequence { len: 3, n_rows: 3 }];
    for dtype in KvDType::ALL {
        let case = AttentionCase {
            heads: (4, 2),
            d_head: 32,
            dtype,
            sequences: sequences.clone(),
            ..AttentionCase::plain()
        };
        let sound = case.build(Placement::InOrder).unwrap();
        let mut damaged = case.build(Placement::InOrder).unwrap();
        // The cell of the sixth row is seen by it and the three after it.
        damaged.corrupt(36, f32::NAN);
        for isa in IsaName::available() {
            for n_threads in [1, 2] {
                let (want, got) = (
                    compute(&mut context(isa, n_threads), &sound),
                    compute(&mut context(isa, n_threads), &damaged),
                );
                for (i, (want, got)) in want.chunks(4 * 32).zip(got.chunks(4 * 32)).enumerate() {
                    if (5..9).contains(&i) {
                        assert!(got.iter().all(|x| x.is_nan()), "{isa:?} row {i}");
                    } else {
                        assert_same_bits(got, want, &format!("{isa:?} row {i}"));
                    }
                }
            }
        }
    }
}

/// An encoder's rows see cells after their own: all of their text, or a window to both sides.
#[test]
fn rows_that_see_later_cells_agree_with_the_reference() {
    let mut contexts = contexts();
    for len in [1_usize, 7, 130] {
        let sequences = vec![Sequence { len, n_rows: len.min(200) }, Sequence { len: 40, n_rows: 40 }];
        let case = AttentionCase {
            heads: (3, 3),
            d_head: 32,
            dtype: KvDType::Float32,
            sequences,
            ..AttentionCase::plain()
        };
        let input = case.build(Placement::Shuffled(len as u64)).unwrap();
        let bound = input.tolerance();
        // The op multiplies queries by the scale itself.
        let (q, scoring) = input.queries();
        let AttentionRows { cells, rows, .. } = input.rows();
        for window in [None, Some(1_u32), Some(8), Some(150)] {
            let rows: Vec<AttentionRow> = rows
                .iter()
                .map(|row| {
                    let own = row.n_visible - 1;
                    let len = if row.start == rows[0].start { len as u32 } else { 40 };
                    let (n_hidden, n_visible) = match window {
                        None => (0, len),
                        Some(window) => (own.saturating_sub(window), len.min(own + window + 1)),
                    };
                    AttentionRow { start: row.start, n_hidden, n_visible }
                })
                .collect();
            let all = AttentionRows { cells, rows: &rows, window: None, n_shared: &[] };
            let want = reference::attention::attention(
                Queries { scoring, ..input.queries_of(&q) },
                input.numbers(),
                all,
            );
            let row_len = input.q.len() / rows.len();
            for (isa, [one, two, _]) in &mut contexts {
                let mut got = vec![f32::NAN; input.q.len()];
                attention(two, input.queries_of(&input.q), input.layer(), all, &mut got);
                for (got, want) in got.iter().zip(&want) {
                    assert!((f64::from(*got) - want).abs() <= bound, "{isa:?} {len} {window:?}");
                }
                for (i, want) in got.chunks(row_len).enumerate().step_by(13) {
                    let rows = AttentionRows { cells, rows: &rows[i..=i], window: None, n_shared: &[] };
                    let mut alone = vec![f32::NAN; row_len];
                    let q = input.queries_of(&input.q[i * row_len..(i + 1) * row_len]);
                    attention(one, q, input.layer(), rows, &mut alone);
                    assert_same_bits(&alone, want, &format!("{isa:?} {len} {window:?} row {i}"));
                }
            }
        }
    }
}
