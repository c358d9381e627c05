//! `lora` on every instruction set: compared with its reference, and bit for bit the same whatever shares the pass; and
//! `gate`, which has the bits of `linear_gated`.

use crate::parity::{assert_close, contexts, name};
use llaisys_core::ops::cases::{ROUNDING, Size, SplitMix64};
use llaisys_core::ops::lora::{
    LoraGroup, LoraPanels, LoraPart, LoraProduct, LoraRows, OUT_BLOCK, PanelSizes, RANK_BLOCK,
};
use llaisys_core::ops::packed::{PackedFormat, PackedMatrix};
use llaisys_core::ops::reference::lora::{Lora, lora as reference};
use llaisys_core::ops::{
    self, Gate, GateBias, GatedPart, GatedSums, LoraInput, LoraOutputs, OpContext, gate_up_row, gate_up_rows,
};

/// One adapter of one input with two projections, of which the first has no matrices if `only_second`.
struct Adapter {
    n_in: usize,
    scale: f32,
    /// A and B of each projection.
    pairs: Vec<(usize, Vec<f32>, Vec<f32>)>,
    product: LoraProduct,
}

impl Adapter {
    /// Random numbers that bf16 has exactly.
    fn new(draw: &mut SplitMix64, n_in: usize, parts: &[(usize, usize, usize)], is_bf16: bool) -> Self {
        let mut exact = |n: usize| -> Vec<f32> {
            draw.values(Size::Unit, n).iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect()
        };
        let n_ranks: usize = parts.iter().map(|(_, rank, _)| rank).sum();
        let sizes = PanelSizes { width: RANK_BLOCK, n_inner: n_in, n_columns: n_ranks };
        let mut a = LoraPanels::zeroed(sizes, is_bf16).unwrap();
        let scale = 0.75;
        let (mut pairs, mut made, mut first_rank) = (Vec::new(), Vec::new(), 0);
        for &(target, rank, n_out) in parts {
            let (of_a, of_b) = (exact(rank * n_in), exact(n_out * rank));
            of_a.chunks_exact(n_in).enumerate().for_each(|(j, row)| a.set_column(first_rank + j, row));
            let sizes = PanelSizes { width: OUT_BLOCK, n_inner: rank, n_columns: n_out };
            let mut b = LoraPanels::zeroed(sizes, is_bf16).unwrap();
            of_b.chunks_exact(rank).enumerate().for_each(|(n, row)| b.set_column(n, row));
            made.push(LoraPart { target, first_rank, b });
            pairs.push((target, of_a, of_b));
            first_rank += rank;
        }
        let scales = vec![scale; n_ranks.next_multiple_of(RANK_BLOCK)];
        Self { n_in, scale, pairs, product: LoraProduct { a, scales, parts: made } }
    }

    /// The outputs of projection `target` for one row, with the sizes of the terms.
    fn reference(&self, target: usize, x: &[f32], y: &[f32]) -> Option<(Vec<f64>, Vec<f64>)> {
        let (_, a, b) = self.pairs.iter().find(|(of, ..)| *of == target)?;
        Some(reference(x, Lora { a, b, n_in: self.n_in, scale: self.scale }, y))
    }
}

/// Runs `lora` on rows whose adapters are `of_row`.
fn run(cx: &OpContext, adapters: &[Adapter], x: &[f32], of_row: &[Option<u32>], outs: [&mut [f32]; 2]) {
    let (mut groups, mut rows) = (Vec::new(), Vec::new());
    for slot in 0..adapters.len() as u32 {
        let start = rows.len();
        rows.extend((0..of_row.len() as u32).filter(|&row| of_row[row as usize] == Some(slot)));
        if rows.len() > start {
            groups.push(LoraGroup { slot, start, n: rows.len() - start });
        }
    }
    let width = adapters.iter().map(|adapter| adapter.product.width()).max().unwrap();
    let mut scratch = vec![f32::NAN; of_row.len() * width];
    let product = &|slot: u32| adapters.get(slot as usize).map(|adapter| &adapter.product);
    let input = LoraInput { x, rows: LoraRows { groups: &groups, rows: &rows }, product };
    let mut outs = outs;
    ops::lora(cx, input, &mut scratch, LoraOutputs::Separate(&mut outs));
}

#[test]
fn lora_agrees_with_the_reference_and_rows_do_not_depend_on_each_other() {
    for cx in contexts() {
        for (case, (n, n_in, n_out)) in
            [(1, 5, 3), (3, 64, 64), (7, 33, 130), (21, 96, 65), (40, 300, 200)].into_iter().enumerate()
        {
            let draw = &mut SplitMix64::new(case as u64);
            let sizes = [[(0, 4, n_out), (1, 16, n_out + 9)], [(0, 1, n_out), (1, 40, n_out + 9)]];
            let mut adapters: Vec<Adapter> =
                sizes.iter().map(|parts| Adapter::new(draw, n_in, parts, case % 2 == 0)).collect();
            adapters.push(Adapter::new(draw, n_in, &[(1, 17, n_out + 9)], case % 2 == 1));
            let of_row: Vec<Option<u32>> =
                (0..n).map(|_| Some(draw.below(4) as u32).filter(|&slot| slot < 3)).collect();
            let x = draw.values(Size::Unit, n * n_in);
            let before = [draw.values(Size::Unit, n * n_out), draw.values(Size::Unit, n * (n_out + 9))];
            let mut outs = before.clone();
            let [first, second] = &mut outs;
            run(&cx, &adapters, &x, &of_row, [first, second]);
            for (row, slot) in of_row.iter().enumerate() {
                let x = &x[row * n_in..][..n_in];
                for (target, (before, after)) in before.iter().zip(&outs).enumerate() {
                    let width = n_out + 9 * target;
                    let (before, after) = (&before[row * width..][..width], &after[row * width..][..width]);
                    let adapter = slot.map(|slot| &adapters[slot as usize]);
                    let Some((want, sizes)) = adapter.and_then(|a| a.reference(target, x, before)) else {
                        assert_eq!(before, after, "a row or a projection without an adapter");
                        continue;
                    };
                    // Sums of n_in / 4 + 5 and of at most 40 terms, a scale, and the sum with y.
                    let n_roundings = n_in as f64 / 4.0 + 5.0 + 40.0 + 3.0;
                    assert_close(after, &want, |i, _| n_roundings * ROUNDING * sizes[i], &name(&cx));
                }
                // Alone.
                let mut alone = [0, 1].map(|target| {
                    let width = n_out + 9 * target;
                    before[target][row * width..][..width].to_vec()
                });
                let [first, second] = &mut alone;
                run(&cx, &adapters, x, &of_row[row..=row], [first, second]);
                for (target, alone) in alone.iter().enumerate() {
                    let width = n_out + 9 * target;
                    assert_eq!(alone[..], outs[target][row * width..][..width], "row {row}");
                }
            }
        }
    }
}

#[test]
fn gate_and_up_are_interleaved_and_have_the_bits_of_the_fused_product() {
    for mut cx in contexts() {
        for (n, d_model, d_ff) in [(1, 32, 16), (5, 40, 33), (9, 64, 100)] {
            let draw = &mut SplitMix64::new(d_ff as u64);
            let weights = draw.values(Size::Unit, 2 * d_ff * d_model);
            let mut gate_up = PackedMatrix::zeroed(PackedFormat::F32, gate_up_rows(d_ff), d_model).unwrap();
            let zeros = vec![0.0; d_model];
            let rows: Vec<f32> = (0..gate_up_rows(d_ff))
                .flat_map(|n| match gate_up_row(d_ff, n) {
                    Some((is_up, row)) => &weights[(usize::from(is_up) * d_ff + row) * d_model..][..d_model],
                    None => &zeros,
                })
                .copied()
                .collect();
            gate_up.repack_rows(&(0..gate_up_rows(d_ff)).collect::<Vec<_>>(), &rows);
            let (x, biases) = (draw.values(Size::Unit, n * d_model), draw.values(Size::Unit, 2 * d_ff));
            let bias = Some(GateBias { gate: &biases[..d_ff], up: &biases[d_ff..] });
            for bias in [None, bias] {
                for gate in [Gate::Silu, Gate::GeluTanh, Gate::Gelu] {
                    let mut fused = vec![0.0; n * d_ff];
                    ops::linear_gated(&mut cx, &x, GatedPart { gate_up: &gate_up, bias, gate }, &mut fused);
                    let mut sums = vec![0.0; n * gate_up_rows(d_ff)];
                    let part = ops::LinearPart { weight: &gate_up, bias: None };
                    ops::linear(&mut cx, &x, &[part], &mut [&mut sums]);
                    let mut inner = vec![0.0; n * d_ff];
                    ops::gate(&cx, GatedSums { gate_up: &sums, bias, gate }, d_ff, &mut inner);
                    assert_eq!(fused, inner, "{gate:?} {}", name(&cx));
                }
            }
            // Adapters of gate and of up add to their own columns.
            let adapter = [Adapter::new(draw, d_model, &[(0, 3, d_ff), (1, 5, d_ff)], false)];
            let rows: Vec<u32> = (0..n as u32).collect();
            let groups = [LoraGroup { slot: 0, start: 0, n }];
            let mut sums = vec![0.0; n * gate_up_rows(d_ff)];
            let product = &|_| Some(&adapter[0].product);
            let input = LoraInput { x: &x, rows: LoraRows { groups: &groups, rows: &rows }, product };
            let mut scratch = vec![0.0; n * RANK_BLOCK];
            ops::lora(&cx, input, &mut scratch, LoraOutputs::GateUp(&mut sums));
            for (row, sums) in sums.chunks_exact(gate_up_rows(d_ff)).enumerate() {
                let x = &x[row * d_model..][..d_model];
                let parts = [0, 1].map(|target| adapter[0].reference(target, x, &vec![0.0; d_ff]).unwrap());
                let of = |n| gate_up_row(d_ff, n).map(|(is_up, row)| (&parts[usize::from(is_up)], row));
                let want: Vec<f64> =
                    (0..sums.len()).map(|n| of(n).map_or(0.0, |((values, _), row)| values[row])).collect();
                let size = |n| of(n).map_or(0.0, |((_, sizes), row)| sizes[row]);
                assert_close(sums, &want, |n, _| 40.0 * ROUNDING * size(n), &name(&cx));
            }
        }
    }
}
