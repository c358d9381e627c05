//! `lora` on every instruction set and number of threads: bit for bit the order of arithmetic that decision 0022 states,
//! which is compared with the reference. In that order a row's outputs depend on its own inputs and adapter only.

use crate::parity::assert_close;
use crate::stored::{Rng, Stored};
use llaisys_core::ops::cases::{ROUNDING, Size, SplitMix64};
use llaisys_core::ops::dispatch::{IsaName, Kernels};
use llaisys_core::ops::lora::{LoraA, LoraB, LoraGrouping, LoraPart, LoraProduct, RANK_BLOCK};
use llaisys_core::ops::packed::{PackedFormat, PackedMatrix};
use llaisys_core::ops::reference::lora::{Lora, lora as reference};
use llaisys_core::ops::{
    self, Gate, GateBias, GatedPart, LinearPart, LoraHidden, LoraInput, OpContext, gate_up_row, gate_up_rows,
};
use llaisys_core::threads::Pool;

const SCALE: f32 = 0.75;
/// Floats, and grouped formats with and without minima.
const FORMATS: [PackedFormat; 4] =
    [PackedFormat::F32, PackedFormat::BF16, PackedFormat::Q8_0, PackedFormat::Q4_1];
/// Rows of one tile, of several, of dynamic chunks, and of threads with their own rows.
const N_ROWS: [usize; 5] = [1, 5, 13, 40, 70];

fn contexts() -> Vec<OpContext> {
    let context = |isa, n_threads| {
        let (kernels, pool) = (Kernels::select(Some(isa)).unwrap(), Pool::new(n_threads).unwrap());
        OpContext::new(kernels, pool, 100, 256).unwrap()
    };
    IsaName::available().into_iter().flat_map(|isa| [1, 3].map(|n| context(isa, n))).collect()
}

fn name(cx: &OpContext, format: PackedFormat, n: usize) -> String {
    format!("{:?} on {} threads, {format:?}, {n} rows", cx.kernels.isa(), cx.pool.n_threads())
}

/// A and B of one projection.
struct Pair {
    rank: usize,
    /// `[rank, n_in]`
    a: Vec<f32>,
    /// `[n_out, rank]`
    b: Vec<f32>,
}

impl Pair {
    /// Random numbers that bf16 has exactly.
    fn new(draw: &mut SplitMix64, rank: usize, n_in: usize, n_out: usize) -> Self {
        let mut exact = |n: usize| -> Vec<f32> {
            draw.values(Size::Unit, n).iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect()
        };
        Self { rank, a: exact(rank * n_in), b: exact(n_out * rank) }
    }

    /// What the pair adds to the outputs of a row, in the order of decision 0022.
    fn term(&self, isa: IsaName, x: &[f32]) -> Vec<f32> {
        // Scalar code does not fuse.
        let mul_add =
            |a: f32, b: f32, c: f32| if isa == IsaName::Scalar { a * b + c } else { a.mul_add(b, c) };
        let n_whole = x.len() / 4 * 4;
        let hidden = |a: &[f32]| {
            let mut sums = [0.0_f32; 4];
            for (k, (&a, &x)) in a.iter().zip(x).enumerate() {
                let part = if k < n_whole { k % 4 } else { 0 };
                sums[part] = mul_add(x, a, sums[part]);
            }
            ((sums[0] + sums[1]) + (sums[2] + sums[3])) * SCALE
        };
        let hidden: Vec<f32> = self.a.chunks_exact(x.len()).map(hidden).collect();
        let output = |b: &[f32]| b.iter().zip(&hidden).fold(0.0, |sum, (&b, &h)| mul_add(h, b, sum));
        self.b.chunks_exact(self.rank).map(output).collect()
    }

    fn lora<'a>(&'a self, x: &[f32]) -> Lora<'a> {
        Lora { a: &self.a, b: &self.b, n_in: x.len(), scale: SCALE }
    }
}

/// The inputs of a pass, and the slot of each row's adapter.
#[derive(Clone, Copy)]
struct Batch<'a> {
    x: &'a [f32],
    of_row: &'a [Option<u32>],
}

/// Packs B of pairs, of which the first ranks are given, in bf16 or f32.
type PackParts<'a> = &'a dyn Fn(&[Option<Pair>], &[usize], bool) -> Vec<LoraPart>;

/// Adapters of one input by slot, each with a pair for some of its projections.
#[derive(Default)]
struct Adapters {
    pairs: Vec<Vec<Option<Pair>>>,
    products: Vec<Option<Box<LoraProduct>>>,
}

impl Adapters {
    /// Adds an adapter with pairs of rank and outputs; a rank of 0 stands for none.
    fn add(&mut self, draw: &mut SplitMix64, n_in: usize, sizes: &[(usize, usize)], parts: PackParts<'_>) {
        let is_bf16 = self.products.len().is_multiple_of(2);
        let pairs: Vec<Option<Pair>> = sizes
            .iter()
            .map(|&(rank, n_out)| (rank > 0).then(|| Pair::new(draw, rank, n_in, n_out)))
            .collect();
        let ranks_before = |i: usize| sizes[..i].iter().map(|(rank, _)| rank).sum::<usize>();
        let first_ranks: Vec<usize> = (0..sizes.len()).map(ranks_before).collect();
        let n_ranks = ranks_before(sizes.len());
        let mut a = LoraA::zeroed(n_ranks, n_in, is_bf16).unwrap();
        for (pair, first_rank) in pairs.iter().zip(&first_ranks) {
            let rows = pair.iter().flat_map(|pair| pair.a.chunks_exact(n_in)).enumerate();
            rows.for_each(|(j, row)| a.set_rank(first_rank + j, row));
        }
        let parts = parts(&pairs, &first_ranks, is_bf16);
        let scales = vec![SCALE; n_ranks.next_multiple_of(RANK_BLOCK)];
        self.products.push(Some(Box::new(LoraProduct { a, scales, parts })));
        self.pairs.push(pairs);
    }

    /// Adds an adapter of separate projections.
    fn add_separate(&mut self, draw: &mut SplitMix64, n_in: usize, sizes: &[(usize, usize)]) {
        self.add(draw, n_in, sizes, &|pairs, first_ranks, is_bf16| {
            let made = pairs.iter().zip(first_ranks).enumerate().filter_map(|(target, (pair, &first))| {
                let Pair { rank, b: rows, .. } = pair.as_ref()?;
                let ranks = first..first + rank;
                let mut b = LoraB::zeroed(rows.len() / rank, [ranks.clone(), ranks], is_bf16).unwrap();
                rows.chunks_exact(*rank).enumerate().for_each(|(n, row)| b.set_row(n, row));
                Some(LoraPart { target, b })
            });
            made.collect()
        });
    }

    /// Adds an adapter of gate and up.
    fn add_gated(&mut self, draw: &mut SplitMix64, n_in: usize, ranks: [usize; 2], d_ff: usize) {
        self.add(draw, n_in, &ranks.map(|rank| (rank, d_ff)), &|pairs, first_ranks, is_bf16| {
            let halves = [0, 1].map(|half| first_ranks[half]..first_ranks[half] + ranks[half]);
            let mut b = LoraB::zeroed(gate_up_rows(d_ff), halves, is_bf16).unwrap();
            for n in 0..gate_up_rows(d_ff) {
                let Some((is_up, row)) = gate_up_row(d_ff, n) else { continue };
                if let Some(Pair { rank, b: rows, .. }) = &pairs[usize::from(is_up)] {
                    b.set_row(n, &rows[row * rank..][..*rank]);
                }
            }
            vec![LoraPart { target: 0, b }]
        });
    }

    fn pair(&self, slot: Option<u32>, target: usize) -> Option<&Pair> {
        self.pairs[slot? as usize][target].as_ref()
    }

    /// Runs `lora`, then `product` with its result.
    fn run(
        &self,
        cx: &mut OpContext,
        batch: Batch<'_>,
        product: impl FnOnce(&mut OpContext, Option<LoraHidden<'_>>),
    ) {
        let Batch { x, of_row } = batch;
        let mut grouping = LoraGrouping::default();
        let Some(rows) = grouping.group(of_row.iter().copied()) else { return product(cx, None) };
        let width = self.products.iter().flatten().map(|product| product.width()).max().unwrap();
        let mut scratch = vec![f32::NAN; of_row.len() * width];
        let hidden = ops::lora(cx, LoraInput { x, rows, products: &self.products }, &mut scratch);
        product(cx, hidden);
    }

    /// Adds the terms of projection `target` to its outputs `y`.
    fn add_terms(&self, isa: IsaName, batch: Batch<'_>, target: usize, y: &mut [f32]) {
        let Batch { x, of_row } = batch;
        let (n_in, n_out) = (x.len() / of_row.len(), y.len() / of_row.len());
        let rows = x.chunks_exact(n_in).zip(y.chunks_exact_mut(n_out)).zip(of_row);
        for ((x, y), &slot) in rows {
            let Some(pair) = self.pair(slot, target) else { continue };
            y.iter_mut().zip(pair.term(isa, x)).for_each(|(y, term)| *y += term);
        }
    }
}

/// Random slots of rows, none for one in `n_slots + 1`.
fn slots(draw: &mut SplitMix64, n: usize, n_slots: usize) -> Vec<Option<u32>> {
    (0..n)
        .map(|_| Some(draw.below(n_slots + 1)).filter(|&slot| slot < n_slots).map(|slot| slot as u32))
        .collect()
}

fn assert_same(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.to_bits(), want.to_bits(), "{what}, output {i}: {got} instead of {want}");
    }
}

/// Two matrices of an input, the first with a bias, and their adapters.
struct Case {
    weights: [PackedMatrix; 2],
    bias: Vec<f32>,
    adapters: Adapters,
    n_in: usize,
}

impl Case {
    fn new(format: PackedFormat, n_in: usize, n_out: [usize; 2]) -> Self {
        let (rng, draw) = (&mut Rng(n_in as u64), &mut SplitMix64::new(n_out[0] as u64));
        let pool = Pool::new(1).unwrap();
        let weights = n_out.map(|n| Stored::of(rng, format, n, n_in).pack(&pool, format));
        let mut adapters = Adapters::default();
        for ranks in [[4, 16], [1, 40], [0, 17], [16, 16]] {
            adapters.add_separate(draw, n_in, &[(ranks[0], n_out[0]), (ranks[1], n_out[1])]);
        }
        Self { weights, bias: rng.units(n_out[0]), adapters, n_in }
    }

    fn parts(&self) -> [LinearPart<'_>; 2] {
        let [first, second] = &self.weights;
        [LinearPart { weight: first, bias: Some(&self.bias) }, LinearPart { weight: second, bias: None }]
    }

    fn n_out(&self) -> [usize; 2] {
        [0, 1].map(|target| self.weights[target].n_rows())
    }

    /// Both products, with the adapters of the batch.
    fn linear(&self, cx: &mut OpContext, batch: Batch<'_>) -> [Vec<f32>; 2] {
        let mut outs = self.n_out().map(|n| vec![f32::NAN; batch.of_row.len() * n]);
        let [first, second] = &mut outs;
        self.adapters.run(cx, batch, |cx, lora| {
            ops::linear_lora(cx, batch.x, &self.parts(), lora, &mut [first, second]);
        });
        outs
    }

    /// Checks `linear_lora`, and each of its rows alone.
    fn check_linear(&self, cx: &mut OpContext, batch: Batch<'_>, what: &str) {
        let (Batch { x, of_row }, n_in) = (batch, self.n_in);
        let base = self.linear(cx, Batch { x, of_row: &vec![None; of_row.len()] });
        let got = self.linear(cx, batch);
        for (target, (base, got)) in base.iter().zip(&got).enumerate() {
            let mut want = base.clone();
            self.adapters.add_terms(cx.kernels.isa(), batch, target, &mut want);
            assert_same(got, &want, what);
            let n_out = self.n_out()[target];
            for (row, x) in x.chunks_exact(n_in).enumerate() {
                let Some(pair) = self.adapters.pair(of_row[row], target) else { continue };
                let range = row * n_out..(row + 1) * n_out;
                let (want, sizes) = reference(x, pair.lora(x), &base[range.clone()]);
                // Sums of n_in / 4 + 5 and of at most 40 terms, a scale, and the sum with the output of the base.
                let n_roundings = n_in as f64 / 4.0 + 5.0 + 40.0 + 3.0;
                assert_close(&got[range], &want, |i, _| n_roundings * ROUNDING * sizes[i], what);
            }
        }
        for (row, x) in x.chunks_exact(n_in).enumerate().take(13) {
            let alone = self.linear(cx, Batch { x, of_row: &of_row[row..=row] });
            for (alone, all) in alone.iter().zip(&got) {
                assert_same(alone, &all[row * alone.len()..][..alone.len()], what);
            }
        }
    }

    /// Checks `linear_add_lora`, and a product of the second matrix only.
    fn check_others(&self, cx: &mut OpContext, batch: Batch<'_>, what: &str) {
        let (x, n, n_out) = (batch.x, batch.of_row.len(), self.n_out());
        let before = SplitMix64::new(3).values(Size::Unit, n * n_out[0]);
        let (mut want, mut got) = (before.clone(), before);
        ops::linear_add(cx, x, &self.weights[0], &mut want);
        self.adapters.add_terms(cx.kernels.isa(), batch, 0, &mut want);
        self.adapters.run(cx, batch, |cx, lora| {
            ops::linear_add_lora(cx, x, &self.weights[0], lora, &mut got);
        });
        assert_same(&got, &want, what);
        let all = self.linear(cx, batch);
        let mut got = vec![f32::NAN; n * n_out[1]];
        self.adapters.run(cx, batch, |cx, lora| {
            let lora = lora.map(|lora| lora.after(1));
            ops::linear_lora(cx, x, &self.parts()[1..], lora, &mut [&mut got]);
        });
        assert_same(&got, &all[1], what);
    }
}

#[test]
fn products_with_adapters_have_the_bits_of_the_stated_order_in_any_batch() {
    let mut contexts = contexts();
    for format in FORMATS {
        let shapes: &[(usize, [usize; 2])] = match format.is_grouped() {
            true => &[(96, [130, 33])],
            false => &[(5, [3, 32]), (97, [130, 33])],
        };
        for &(n_in, n_out) in shapes {
            let case = Case::new(format, n_in, n_out);
            for n in N_ROWS {
                let draw = &mut SplitMix64::new(n as u64);
                let (x, of_row) = (draw.values(Size::Unit, n * n_in), slots(draw, n, 4));
                for cx in &mut contexts {
                    let (batch, what) = (Batch { x: &x, of_row: &of_row }, name(cx, format, n));
                    case.check_linear(cx, batch, &what);
                    case.check_others(cx, batch, &what);
                    // All rows with one adapter, as those of a long prompt.
                    case.check_linear(cx, Batch { of_row: &vec![Some(3); n], ..batch }, &what);
                }
            }
        }
    }
}

/// Applies biases and gate to sums of gate and up, by a product with the identity.
fn gated(cx: &mut OpContext, sums: &[f32], d_ff: usize, bias: Option<GateBias<'_>>, gate: Gate) -> Vec<f32> {
    let n = gate_up_rows(d_ff);
    let mut identity = PackedMatrix::zeroed(PackedFormat::F32, n, n).unwrap();
    let ones: Vec<f32> = (0..n * n).map(|i| if i % (n + 1) == 0 { 1.0 } else { 0.0 }).collect();
    identity.repack_rows(&(0..n).collect::<Vec<_>>(), &ones);
    let mut inner = vec![f32::NAN; sums.len() / n * d_ff];
    ops::linear_gated(cx, sums, GatedPart { gate_up: &identity, bias, gate }, &mut inner);
    inner
}

#[test]
fn adapters_of_gate_and_up_add_to_their_sums_before_biases_and_gate() {
    let (n_in, mut contexts) = (64, contexts());
    for (format, d_ff) in FORMATS.into_iter().zip([16, 33, 100, 40]) {
        let (rng, draw) = (&mut Rng(d_ff as u64), &mut SplitMix64::new(d_ff as u64));
        let gate_up = Stored::of(rng, format, gate_up_rows(d_ff), n_in).pack(&contexts[0].pool, format);
        let mut adapters = Adapters::default();
        for ranks in [[3, 5], [16, 16], [20, 7], [0, 4], [6, 0]] {
            adapters.add_gated(draw, n_in, ranks, d_ff);
        }
        let biases = rng.units(2 * d_ff);
        let bias = Some(GateBias { gate: &biases[..d_ff], up: &biases[d_ff..] });
        for n in N_ROWS {
            let (x, of_row) = (draw.values(Size::Unit, n * n_in), slots(draw, n, 5));
            for cx in &mut contexts {
                let mut sums = vec![0.0; n * gate_up_rows(d_ff)];
                ops::linear(cx, &x, &[LinearPart { weight: &gate_up, bias: None }], &mut [&mut sums]);
                let rows = sums.chunks_exact_mut(gate_up_rows(d_ff)).zip(x.chunks_exact(n_in)).zip(&of_row);
                for ((sums, x), &slot) in rows {
                    let terms = [0, 1].map(|half| Some(adapters.pair(slot, half)?.term(cx.kernels.isa(), x)));
                    for (n, sum) in sums.iter_mut().enumerate() {
                        let Some((is_up, row)) = gate_up_row(d_ff, n) else { continue };
                        *sum += terms[usize::from(is_up)].as_ref().map_or(0.0, |terms| terms[row]);
                    }
                }
                for (bias, gate) in [(None, Gate::Silu), (bias, Gate::Silu), (bias, Gate::GeluTanh)] {
                    let want = gated(cx, &sums, d_ff, bias, gate);
                    let mut got = vec![f32::NAN; n * d_ff];
                    adapters.run(cx, Batch { x: &x, of_row: &of_row }, |cx, lora| {
                        let part = GatedPart { gate_up: &gate_up, bias, gate };
                        ops::linear_gated_lora(cx, &x, part, lora, &mut got);
                    });
                    assert_same(&got, &want, &name(cx, format, n));
                }
            }
        }
    }
}

#[test]
fn rows_are_grouped_by_adapter_in_ascending_order() {
    let mut grouping = LoraGrouping::default();
    assert!(grouping.group([None, None].into_iter()).is_none());
    let of_row = [Some(7), None, Some(2), Some(7), Some(2), Some(7), None];
    for _ in 0..2 {
        let rows = grouping.group(of_row.into_iter()).unwrap();
        assert_eq!(rows.n_rows(), of_row.len());
        let groups: Vec<_> = rows.groups().iter().map(|group| (group.slot, rows.of(group))).collect();
        assert_eq!(groups, [(7, &[0_u32, 3, 5][..]), (2, &[2, 4])]);
    }
}
