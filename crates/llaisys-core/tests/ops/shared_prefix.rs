//! Attention of sequences whose lists begin with the same cells: the bits of each row alone.

use crate::attention::{assert_same_bits, contexts};
use llaisys_core::dtype::KvDType;
use llaisys_core::ops::cases::attention::{AttentionCase, AttentionInput, Placement, Sequence};
use llaisys_core::ops::{AttentionRow, AttentionRows, OpContext, attention};

/// Lists of sequences with a common prefix.
struct Lists {
    cells: Vec<u32>,
    rows: Vec<AttentionRow>,
    n_shared: Vec<u32>,
}

impl Lists {
    /// `input` has the prefix as its first sequence, which has no rows, then the `tails`.
    fn new(input: &AttentionInput, prefix: usize, tails: &[Sequence]) -> Self {
        let (common, mut rest) = input.rows().cells.split_at(prefix);
        let mut lists = Self { cells: Vec::new(), rows: Vec::new(), n_shared: Vec::new() };
        for tail in tails {
            let (own, later) = rest.split_at(tail.len);
            rest = later;
            let start = lists.cells.len() as u32;
            lists.cells.extend(common.iter().chain(own));
            for n in prefix + tail.len - tail.n_rows + 1..=prefix + tail.len {
                // Known in pieces, and not of the first row.
                lists.n_shared.push(if lists.rows.is_empty() { 0 } else { prefix as u32 / 16 * 16 });
                lists.rows.push(AttentionRow { start, n_hidden: 0, n_visible: n as u32 });
            }
        }
        lists
    }

    fn compute(&self, cx: &mut OpContext, input: &AttentionInput) -> Vec<f32> {
        let rows =
            AttentionRows { cells: &self.cells, rows: &self.rows, window: None, n_shared: &self.n_shared };
        let mut out = vec![f32::NAN; input.q.len()];
        attention(cx, input.queries_of(&input.q), input.layer(), rows, &mut out);
        out
    }

    fn compute_alone(&self, cx: &mut OpContext, input: &AttentionInput) -> Vec<f32> {
        let row_len = input.q.len() / self.rows.len();
        let mut out = vec![f32::NAN; input.q.len()];
        for (i, (out, q)) in out.chunks_mut(row_len).zip(input.q.chunks(row_len)).enumerate() {
            let rows =
                AttentionRows { cells: &self.cells, rows: &self.rows[i..=i], window: None, n_shared: &[] };
            attention(cx, input.queries_of(q), input.layer(), rows, out);
        }
        out
    }
}

#[test]
fn a_row_has_the_same_bits_with_a_prefix_that_others_share() {
    let mut contexts = contexts();
    let one = |len| Sequence { len, n_rows: 1 };
    let crowd: Vec<Sequence> = (0..20).map(|i| one(1 + i * 37 % 300)).collect();
    // Drafts and prompts next to single rows; a long tail, which shares less than half; the whole list shared.
    let mixed =
        vec![one(5), Sequence { len: 9, n_rows: 4 }, one(1), one(3000), Sequence { len: 60, n_rows: 50 }];
    let pair = vec![one(1), one(130)];
    for (number, (prefix, tails)) in
        [(1024, crowd.clone()), (2500, crowd), (640, mixed.clone()), (130, mixed), (4096, pair)]
            .into_iter()
            .enumerate()
    {
        for (heads, sinks) in [((6, 2), None), ((4, 4), Some(4.0)), ((40, 1), None)] {
            let dtype = KvDType::ALL[(number + heads.0) % 4];
            let mut sequences = vec![Sequence { len: prefix, n_rows: 0 }];
            sequences.extend(&tails);
            let case = AttentionCase { heads, d_head: 16, dtype, sinks, sequences, ..AttentionCase::plain() };
            let input = case.build(Placement::Shuffled(number as u64)).unwrap();
            let lists = Lists::new(&input, prefix, &tails);
            for (isa, contexts) in &mut contexts {
                let alone = lists.compute_alone(&mut contexts[0], &input);
                assert!(alone.iter().all(|value| value.is_finite()));
                for (i, cx) in contexts.iter_mut().enumerate() {
                    let what = format!("{isa:?} on {} threads, prefix {prefix}, {heads:?} {dtype:?}", i + 1);
                    assert_same_bits(&lists.compute(cx, &input), &alone, &what);
                }
            }
        }
    }
}
