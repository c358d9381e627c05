//! `pruned_argmax`: for each row of inputs the index of its largest product, computing only few of the products.
//!
//! Reference: `ops/reference/argmax.rs` of [`linear`](super::linear), bit for bit, because the same kernel computes the
//! products that decide.
//!
//! Let `w` be an output's weights, `c` their copy in 8 bits, `x` the inputs as rounded for the matrix's kernel, and `y`
//! the inputs as rounded for the copy's kernel. In real numbers
//!
//! ```text
//! |w.x - c.y| = |(w - c).x + c.(x - y)| <= |w - c| |x| + |c| |x - y|          (Cauchy and Schwarz)
//! ```
//!
//! Both kernels round. If each term of a sum passes through m roundings of u = 2^-24, the error is at most
//! `m u / (1 - m u)` times the sum of the terms' magnitudes (Higham, Accuracy and Stability of Numerical Algorithms,
//! 3.1). That sum is at most `|w| |x|`, and `|c| |y|`. A term has at most k + 1 roundings in the matrix's kernels, and
//! k/32 + 4 in the copy's; the bounds below have a few. [`gamma`] covers more than all of them. With
//! `|w| <= |c| + |w - c|` and `|y| <= |x| + |x - y|`, the exact result differs from the approximate one by at most
//!
//! ```text
//! B = |w - c| (|x| + g) + |c| (|x - y| + g) + t        g = gamma (|x| + |x - y|)
//! ```
//!
//! where t covers what is lost below the normal numbers of f32 ([`BoundFactors::new`]). An output whose
//! `approximate + B` is below the largest `approximate - B` therefore cannot be the largest, nor equal to it. The whole
//! panels of the other outputs are computed by the ordinary kernel.

#[cfg(test)]
mod tests;

use super::{
    Epilogue, MAX_TILE_ROWS, Packed, Panel, Prefetch, Region, Rows, Target, Tile, form, rows_max, run_tile,
};
use crate::ops::OpContext;
use crate::ops::argmax_bounds::{ArgmaxBounds, Lengths, MAX_NORM, round_up};
use crate::ops::cpu::activations::{Activations, Form, Inputs, Packing, RowBlocks};
use crate::ops::cpu::argmax::argmax;
use crate::ops::cpu::isa::Isa;
use crate::ops::cpu::isa::lanes::{Kernel, Lanes};
use crate::ops::packed::{PANEL, PackedMatrix};
use crate::quant::BLOCK_LEN;
use crate::threads::Disjoint;
use std::ops::Range;

/// For a row at most one in this many panels is computed; with more, it is faster to compute all of them.
const CANDIDATES_SHARE: usize = 8;

/// Scratch memory of [`pruned_argmax`]; grows with use.
#[derive(Debug, Default)]
pub struct PrunedArgmaxScratch {
    factors: Vec<Option<BoundFactors>>,
    /// The largest `approximate - B` and the largest `approximate + B` of each panel, `[n][panels]`.
    ends: Vec<f32>,
    /// Panel and row of each product to compute; `found` has the best of each.
    candidates: Vec<(u32, u32)>,
    found: Vec<(f32, u32)>,
    best: Vec<Option<(f32, u32)>>,
}

/// The parts of B that do not depend on the output: `errors * |w - c| + copies * |c| + least`.
#[derive(Debug, Clone, Copy)]
struct BoundFactors {
    errors: f32,
    copies: f32,
    least: f32,
}

/// Inputs packed for both products.
struct PackedRows<'a> {
    activations: &'a Activations,
    n_columns: usize,
    /// The form that the matrix's own kernel reads, in blocks of one row.
    exact: Form,
    /// The form that the copy's kernel reads.
    rounded: Form,
    /// Blocks of the inputs of the copy's product.
    blocks: RowBlocks,
}

/// The epilogue of the copy's product: each row's sums of a panel become the two bounds of the panel.
#[derive(Clone, Copy)]
pub(super) struct Bounds<'a> {
    bounds: &'a ArgmaxBounds,
    factors: &'a [Option<BoundFactors>],
}

/// For each row of `x` `[n, K]`, the lowest index of the largest of its products with `matrix` `[N, K]`, whose `bounds`
/// are given. It equals `argmax` of `linear`, whose results are then all finite. `None` if too many outputs may be the
/// largest, or if the row is huge or not finite.
///
/// Panics if shapes disagree or `x` exceeds the context's scratch.
pub fn pruned_argmax<'r>(
    cx: &mut OpContext,
    x: &[f32],
    matrix: &PackedMatrix,
    bounds: &ArgmaxBounds,
    scratch: &'r mut PrunedArgmaxScratch,
) -> impl Iterator<Item = Option<u32>> + use<'r> {
    let isa = cx.kernels.proof();
    let x = Rows::new(x, matrix.n_columns());
    let forms = [form(isa, bounds.copy().format()), form(isa, matrix.format())];
    // Each row is a block of its own, because it is multiplied, or read here, by itself.
    let by_row = Packing { isa, pool: &cx.pool, form: forms[1], rows_max: 1 };
    cx.activations.pack(by_row, x, std::iter::once(0..x.n_rows));
    let by_block = Packing { form: forms[0], rows_max: rows_max(isa, forms[0]), ..by_row };
    cx.activations.pack(by_block, x, std::iter::once(0..x.n_rows));
    let packed = PackedRows {
        activations: &cx.activations,
        n_columns: x.n_columns,
        exact: forms[1],
        rounded: forms[0],
        blocks: RowBlocks::new(&(0..x.n_rows), rows_max(isa, forms[0])),
    };
    scratch.measure(&packed, bounds);
    scratch.approximate(cx, isa, x.n_rows, bounds);
    scratch.choose(x.n_rows, matrix.n_panels());
    scratch.compute(cx, isa, matrix);
    scratch.best.iter().map(|best| best.map(|(_, id)| id))
}

impl PrunedArgmaxScratch {
    /// Computes the factors of B for each row.
    fn measure(&mut self, x: &PackedRows<'_>, bounds: &ArgmaxBounds) {
        self.factors.clear();
        let (inputs, blocks) = (x.activations, x.blocks);
        for rows in (0..blocks.len()).map(|i| blocks.rows(i)) {
            let rounded = inputs.block(x.rounded, x.n_columns, &rows);
            for row in rows.clone() {
                let exact = inputs.block(x.exact, x.n_columns, &(row..row + 1));
                let [of_row, of_difference] = squares(exact, rounded, row - rows.start, rows.len());
                self.factors.push(BoundFactors::new(
                    of_row.sqrt(),
                    of_difference.sqrt(),
                    x.n_columns,
                    bounds,
                ));
            }
        }
    }

    /// Computes the two bounds of every panel from the copy.
    fn approximate(&mut self, cx: &OpContext, isa: Isa, n_rows: usize, bounds: &ArgmaxBounds) {
        let n_columns = 2 * bounds.copy().n_panels();
        self.ends.resize(n_rows * n_columns, 0.0);
        let epilogue = Epilogue::Bounds(Bounds { bounds, factors: &self.factors });
        let out = &Disjoint::new(&mut self.ends);
        let targets = [Some(Target { weight: bounds.copy(), epilogue, lora: None, out, n_columns })];
        let packed = Packed { isa, activations: &cx.activations };
        Region { packed, n_rows, targets: &targets }.run(&cx.pool);
    }

    /// Selects the panels that may have a row's largest output; none for rows with too many.
    fn choose(&mut self, n_rows: usize, n_panels: usize) {
        let most = n_panels.div_ceil(CANDIDATES_SHARE);
        self.candidates.clear();
        self.candidates.reserve(n_rows * (most + 1));
        self.best.clear();
        for (row, ends) in self.ends.chunks_exact(2 * n_panels).enumerate() {
            let ends = ends.as_chunks::<2>().0;
            let first = self.candidates.len();
            if self.factors[row].is_some() {
                let floor =
                    ends.iter().fold(f32::NEG_INFINITY, |max, &[low, _]| if low > max { low } else { max });
                let may_be = (0..).zip(ends).filter(|(_, [_, high])| *high >= floor);
                self.candidates.extend(may_be.map(|(p, _)| (p, row as u32)).take(most + 1));
            }
            if self.candidates.len() - first > most {
                self.candidates.truncate(first);
            }
            let is_open = self.candidates.len() > first;
            self.best.push(is_open.then_some((f32::NEG_INFINITY, u32::MAX)));
        }
        // Rows with the same panel then find it in a cache.
        self.candidates.sort_unstable();
    }

    /// Computes the candidates with the matrix itself and keeps the best of each row.
    fn compute(&mut self, cx: &OpContext, isa: Isa, matrix: &PackedMatrix) {
        let form = form(isa, matrix.format());
        let (candidates, n_bytes) = (&self.candidates, matrix.panel_bytes());
        let activations = &cx.activations;
        self.found.clear();
        self.found.resize(candidates.len(), (0.0, 0));
        cx.pool.run_chunks(&mut self.found, 1, &|i, found| {
            let (p, row) = (candidates[i].0 as usize, candidates[i].1 as usize);
            let inputs = activations.block(form, matrix.n_columns(), &(row..row + 1));
            let bytes = &matrix.panels_from(p)[..n_bytes];
            let mut tile = Tile([[0.0; PANEL]; MAX_TILE_ROWS]);
            let panel = Panel { format: matrix.format(), bytes, prefetch: Prefetch::NONE };
            run_tile(isa, &panel, 1, inputs, &mut tile);
            let products = &tile.0[0][..PANEL.min(matrix.n_rows() - p * PANEL)];
            let c = argmax(products);
            found[0] = (products[c], (p * PANEL + c) as u32);
        });
        for (&(_, row), &found) in self.candidates.iter().zip(&self.found) {
            if let Some(best) = &mut self.best[row as usize]
                && (found.0 > best.0 || (found.0 == best.0 && found.1 < best.1))
            {
                *best = found;
            }
        }
    }
}

impl BoundFactors {
    /// The factors of a row of inputs with `|x| = of_row` and `|x - y| = of_difference`. `None` if they are huge or
    /// not finite.
    fn new(of_row: f64, of_difference: f64, n_columns: usize, bounds: &ArgmaxBounds) -> Option<Self> {
        let sum = of_row + of_difference;
        let g = gamma(n_columns) * sum;
        // Below the normal numbers: a weight or an input that a kernel treats as 0 costs 2^-126 times the other, and a
        // step of a sum 2^-126. In the copy's sums the step is also multiplied by a row's scale. There are at most 2^25
        // of these.
        let least = (1.0 + sum) * (1.0 + bounds.longest()) * 2_f64.powi(-100);
        (sum < MAX_NORM).then(|| Self {
            errors: round_up(of_row + g),
            copies: round_up(of_difference + g),
            least: round_up(least),
        })
    }
}

/// Bounds the relative error of sums of `k` terms. `m u` is below 2^-4 ([`ArgmaxBounds::can_have`]).
fn gamma(k: usize) -> f64 {
    let roundings = 2 * k + k / BLOCK_LEN + 64;
    1.25 * roundings as f64 / (1 << 24) as f64
}

/// The squared norms of the inputs of the matrix's kernel, and of their differences from the inputs in groups. The
/// latter are row `row` of the `n_rows` of their block.
fn squares(exact: Inputs<'_>, rounded: Inputs<'_>, row: usize, n_rows: usize) -> [f64; 2] {
    let mut sums = [[0.0; 2]; BLOCK_LEN / 4];
    for (run, group) in (row..rounded.n_groups()).step_by(n_rows).enumerate() {
        let (words, scale) = rounded.group(group);
        for (quad, (word, sums)) in words.iter().zip(&mut sums).enumerate() {
            for (i, q) in word.to_le_bytes().into_iter().enumerate() {
                let x = f64::from(element(exact, run * BLOCK_LEN + quad * 4 + i));
                let difference = x - f64::from(q as i8) * f64::from(scale);
                *sums = [sums[0] + x * x, sums[1] + difference * difference];
            }
        }
    }
    sums.iter().fold([0.0; 2], |all, sums| [all[0] + sums[0], all[1] + sums[1]])
}

/// Input `k` of a block of one row.
#[inline(always)]
fn element(inputs: Inputs<'_>, k: usize) -> f32 {
    match inputs {
        Inputs::Plain(x) => x[k],
        Inputs::Pairs(x) => f32::from_bits((x[k / 2] >> (16 * (k % 2))) << 16),
        Inputs::Groups(..) | Inputs::Sized(_) => unreachable!("a matrix with bounds has a plain format"),
    }
}

impl Bounds<'_> {
    /// Replaces the first two sums of each of the `rows` by the two bounds of panel `p`.
    pub(super) fn apply(self, isa: Isa, p: usize, rows: Range<usize>, tile: &mut [[f32; PANEL]]) {
        let n_own = (self.bounds.copy().n_rows() - p * PANEL).min(PANEL);
        isa.run(Ends { tile, factors: &self.factors[rows], lengths: self.bounds.lengths(p), n_own });
    }
}

/// Computes the two bounds of a panel of `n_own` outputs.
struct Ends<'a> {
    tile: &'a mut [[f32; PANEL]],
    factors: &'a [Option<BoundFactors>],
    lengths: &'a Lengths,
    n_own: usize,
}

impl Kernel for Ends<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let none = lanes.splat(f32::NEG_INFINITY);
        for (sums, factors) in self.tile.iter_mut().zip(self.factors) {
            // The row cannot be bounded; its bounds are not used.
            let Some(factors) = factors else { continue };
            let (errors, copies) = (lanes.splat(factors.errors), lanes.splat(factors.copies));
            let least = lanes.splat(factors.least);
            let (mut low, mut high) = (none, none);
            let mut at = 0;
            while at < PANEL {
                let by_copy = lanes.mul_add(lanes.load(&self.lengths.copies[at..]), copies, least);
                let bound = lanes.mul_add(lanes.load(&self.lengths.errors[at..]), errors, by_copy);
                let sum = lanes.load(&sums[at..]);
                let n = self.n_own.saturating_sub(at);
                low = lanes.max(low, lanes.keep_first(lanes.sub(sum, bound), n, none));
                high = lanes.max(high, lanes.keep_first(lanes.add(sum, bound), n, none));
                at += L::N;
            }
            sums[0] = lanes.largest(low);
            sums[1] = lanes.largest(high);
        }
    }
}
