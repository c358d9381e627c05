//! `pruned_argmax`: for each row of inputs the index of its largest product, of which only few are computed. Meaning:
//! `ops/reference/argmax.rs` of [`linear`](super::linear), bit for bit: the products that decide come of the same
//! kernel.
//!
//! Let `w` be an output's weights, `c` their copy in 8 bits, `x` the inputs as the matrix's kernel rounds them and `y`
//! as the copy's does. In real numbers
//!
//! ```text
//! |w.x - c.y| = |(w - c).x + c.(x - y)| <= |w - c| |x| + |c| |x - y|          (Cauchy and Schwarz)
//! ```
//!
//! Both kernels round. A sum in which a term passes through m roundings of u = 2^-24 is off by at most `m u / (1 - m u)`
//! times the sum of its terms' sizes (Higham, Accuracy and Stability of Numerical Algorithms, 3.1), which is at most
//! `|w| |x|`, and `|c| |y|`. The matrix's kernels round a term at most k + 1 times, the copy's k/32 + 4 times, the bounds
//! below themselves a few times; [`gamma`] allows for more than all. With `|w| <= |c| + |w - c|` and
//! `|y| <= |x| + |x - y|`, the exact result differs from the approximate one by at most
//!
//! ```text
//! B = |w - c| (|x| + g) + |c| (|x - y| + g) + t        g = gamma (|x| + |x - y|)
//! ```
//!
//! where t stands for what is lost below the normal numbers of f32 ([`Reach::new`]). So no output whose `approximate + B`
//! is below the largest `approximate - B` can be the largest, nor one of several. Whole panels of the others are computed
//! as they always are.

#[cfg(test)]
mod tests;

use super::{Epilogue, MAX_TILE_ROWS, Panel, Prefetch, Region, Rows, Target, Tile, form, rows_max, run_tile};
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

/// Of so many panels one may be computed for a row; with more, all had better be.
const CANDIDATES_SHARE: usize = 8;

/// Scratch of [`pruned_argmax`]; grows with use.
#[derive(Debug, Default)]
pub struct PrunedArgmaxScratch {
    reaches: Vec<Option<Reach>>,
    /// The largest `approximate - B` and the largest `approximate + B` of each panel, `[n][panels]`.
    ends: Vec<f32>,
    /// Panel and row of what is to be computed, and the best of each.
    candidates: Vec<(u32, u32)>,
    found: Vec<(f32, u32)>,
    best: Vec<Option<(f32, u32)>>,
}

/// What B depends on besides the output: `errors * |w - c| + copies * |c| + least`.
#[derive(Debug, Clone, Copy)]
struct Reach {
    errors: f32,
    copies: f32,
    least: f32,
}

/// Inputs that are packed for both products.
struct PackedRows<'a> {
    activations: &'a Activations,
    n_columns: usize,
    /// The form that the matrix's own kernel reads, in blocks of one row.
    exact: Form,
    /// Blocks of the inputs of the copy's product.
    blocks: RowBlocks,
}

/// The epilogue of the copy's product: of each row's sums of a panel the two ends are left.
#[derive(Clone, Copy)]
pub(super) struct Bounds<'a> {
    bounds: &'a ArgmaxBounds,
    reaches: &'a [Option<Reach>],
}

/// For each row of `x` `[n, K]` the lowest index of the largest of its products with `matrix` `[N, K]`, whose
/// `bounds` are given: what `argmax` of `linear` gives, all of whose results are finite then. None if too many outputs may be
/// the largest, or a row is not finite, or huge.
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
    // Each row a block of its own: it is multiplied alone, or read alone here.
    let by_row = Packing { isa, pool: &cx.pool, form: forms[1], rows_max: 1 };
    cx.activations.pack(by_row, x);
    let by_block = Packing { form: forms[0], rows_max: rows_max(isa, forms[0]), ..by_row };
    cx.activations.pack(by_block, x);
    let packed = PackedRows {
        activations: &cx.activations,
        n_columns: x.n_columns,
        exact: forms[1],
        blocks: RowBlocks::new(x.n_rows, rows_max(isa, Form::Groups)),
    };
    scratch.measure(&packed, bounds);
    scratch.approximate(cx, isa, x.n_rows, bounds);
    scratch.choose(x.n_rows, matrix.n_panels());
    scratch.compute(cx, isa, matrix);
    scratch.best.iter().map(|best| best.map(|(_, id)| id))
}

impl PrunedArgmaxScratch {
    /// How far each row's bounds reach.
    fn measure(&mut self, x: &PackedRows<'_>, bounds: &ArgmaxBounds) {
        self.reaches.clear();
        let (inputs, blocks) = (x.activations, x.blocks);
        for rows in (0..blocks.len()).map(|i| blocks.rows(i)) {
            let rounded = inputs.block(Form::Groups, x.n_columns, &rows);
            for row in rows.clone() {
                let exact = inputs.block(x.exact, x.n_columns, &(row..row + 1));
                let [of_row, of_difference] = squares(exact, rounded, row - rows.start, rows.len());
                self.reaches.push(Reach::new(of_row.sqrt(), of_difference.sqrt(), x.n_columns, bounds));
            }
        }
    }

    /// The ends of every panel, by the copy.
    fn approximate(&mut self, cx: &OpContext, isa: Isa, n_rows: usize, bounds: &ArgmaxBounds) {
        let n_columns = 2 * bounds.copy().n_panels();
        self.ends.resize(n_rows * n_columns, 0.0);
        let epilogue = Epilogue::Bounds(Bounds { bounds, reaches: &self.reaches });
        let out = Disjoint::new(&mut self.ends);
        let targets = [Some(Target { weight: bounds.copy(), epilogue, out, n_columns })];
        Region { isa, activations: &cx.activations, n_rows, targets: &targets }.run(&cx.pool);
    }

    /// The panels that may hold a row's largest output; none of rows with too many.
    fn choose(&mut self, n_rows: usize, n_panels: usize) {
        let most = n_panels.div_ceil(CANDIDATES_SHARE);
        self.candidates.clear();
        self.candidates.reserve(n_rows * (most + 1));
        self.best.clear();
        for (row, ends) in self.ends.chunks_exact(2 * n_panels).enumerate() {
            let ends = ends.as_chunks::<2>().0;
            let first = self.candidates.len();
            if self.reaches[row].is_some() {
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
        // Rows that want the same panel find it in a cache.
        self.candidates.sort_unstable();
    }

    /// The best of the candidates, with the matrix itself.
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

impl Reach {
    /// Of a row of inputs of length `|x|` that the copy's kernel sees `|x - y|` off; None if they are not finite, or
    /// huge.
    fn new(of_row: f64, of_difference: f64, n_columns: usize, bounds: &ArgmaxBounds) -> Option<Self> {
        let sum = of_row + of_difference;
        let g = gamma(n_columns) * sum;
        // Below the normal numbers: a weight or an input that the kernel takes for 0 costs 2^-126 times the other, a
        // step of a sum 2^-126, the copy's sums this times a row's scale; all of these at most 2^25 times.
        let least = (1.0 + sum) * (1.0 + bounds.longest()) * 2_f64.powi(-100);
        (sum < MAX_NORM).then(|| Self {
            errors: round_up(of_row + g),
            copies: round_up(of_difference + g),
            least: round_up(least),
        })
    }
}

/// The share of the sums of sizes that rounding can cost, of `k` inputs. `m u` is below 2^-4 ([`ArgmaxBounds::can_have`]).
fn gamma(k: usize) -> f64 {
    let roundings = 2 * k + k / BLOCK_LEN + 64;
    1.25 * roundings as f64 / (1 << 24) as f64
}

/// The squared lengths of the inputs that a matrix's kernel sees, and of what the inputs in groups differ from them.
/// Those are row `row` of the `n_rows` of their block.
fn squares(exact: Inputs<'_>, rounded: Inputs<'_>, row: usize, n_rows: usize) -> [f64; 2] {
    let Inputs::Groups(words, groups) = rounded else { unreachable!("the copy is in groups") };
    let mut sums = [[0.0; 2]; BLOCK_LEN / 4];
    for (run, group) in groups.iter().skip(row).step_by(n_rows).enumerate() {
        let words = &words[(run * n_rows + row) * (BLOCK_LEN / 4)..][..BLOCK_LEN / 4];
        for (quad, (word, sums)) in words.iter().zip(&mut sums).enumerate() {
            for (i, q) in word.to_le_bytes().into_iter().enumerate() {
                let x = f64::from(element(exact, run * BLOCK_LEN + quad * 4 + i));
                let difference = x - f64::from(q as i8) * f64::from(group.scale);
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
        Inputs::Groups(..) => unreachable!("a matrix with bounds has no groups"),
    }
}

impl Bounds<'_> {
    /// Puts the ends of panel `p` in front of each of the `rows`.
    pub(super) fn apply(self, isa: Isa, p: usize, rows: Range<usize>, tile: &mut [[f32; PANEL]]) {
        let n_own = (self.bounds.copy().n_rows() - p * PANEL).min(PANEL);
        isa.run(Ends { tile, reaches: &self.reaches[rows], lengths: self.bounds.lengths(p), n_own });
    }
}

/// The ends of a panel of `n_own` outputs.
struct Ends<'a> {
    tile: &'a mut [[f32; PANEL]],
    reaches: &'a [Option<Reach>],
    lengths: &'a Lengths,
    n_own: usize,
}

impl Kernel for Ends<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let none = lanes.splat(f32::NEG_INFINITY);
        for (sums, reach) in self.tile.iter_mut().zip(self.reaches) {
            // A row that cannot be bounded: its ends are not used.
            let Some(reach) = reach else { continue };
            let (errors, copies) = (lanes.splat(reach.errors), lanes.splat(reach.copies));
            let least = lanes.splat(reach.least);
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
