//! What is computed from a tile's sums, and where it is written.

use super::pruned_argmax::Bounds;
use crate::ops::cpu::gate::{Gate, GateBias};
use crate::ops::cpu::isa::lanes::{Kernel, Lanes};
use crate::ops::packed::{HALF_PANEL, PANEL};
use crate::threads::DisjointWriter;
use std::ops::Range;

/// The last step of a product.
#[derive(Clone, Copy)]
pub(super) enum Epilogue<'a> {
    Store,
    Bias(&'a [f32]),
    Add,
    /// A panel has 16 gates and 16 ups, which become 16 outputs.
    Gate(Gate, Option<GateBias<'a>>),
    /// The weighted sums are added to rows of the output: see [`Combine`].
    Combine(Combine<'a>),
    /// A panel's sums become the lower and the upper bound of its largest output.
    Bounds(Bounds<'a>),
}

/// `y[rows[i]] += weights[i] * (sum + bias)` for row i of the inputs, rounded after each operation.
#[derive(Clone, Copy)]
pub(super) struct Combine<'a> {
    pub(super) bias: Option<&'a [f32]>,
    /// The row of the output for each row of the inputs.
    pub(super) rows: &'a [u32],
    pub(super) weights: &'a [f32],
}

impl Combine<'_> {
    /// `N` sums, the first of them at `at`, with bias and weight.
    #[inline(always)]
    fn weighted<L: Lanes>(self, lanes: L, sum: L::F, at: Place) -> L::F {
        let biased = match self.bias {
            Some(bias) => lanes.add(sum, lanes.load_first(&bias[at.column..])),
            None => sum,
        };
        lanes.mul(lanes.splat(self.weights[at.row]), biased)
    }
}

impl Epilogue<'_> {
    /// The row of the output for row `row` of the inputs.
    #[inline(always)]
    pub(super) fn row(self, row: usize) -> usize {
        match self {
            Epilogue::Combine(combine) => combine.rows[row] as usize,
            _ => row,
        }
    }

    /// True if adapters add to the sums, because this step keeps the sums or needs all of them. Otherwise they add to what
    /// it has written: a product of the base is complete, with its bias, before those of adapters are added.
    pub(super) fn takes_lora_in_tile(self) -> bool {
        matches!(self, Epilogue::Store | Epilogue::Gate(..))
    }

    /// The columns of the output that panel `p` determines, out of `n`.
    pub(super) fn columns(self, p: usize, n: usize) -> Range<usize> {
        let width = match self {
            Epilogue::Gate(..) => HALF_PANEL,
            Epilogue::Bounds(_) => 2,
            _ => PANEL,
        };
        p * width..((p + 1) * width).min(n)
    }

    /// Writes the sums of a row of a panel, the first of them at `at`.
    #[inline(always)]
    fn put<L: Lanes>(self, lanes: L, sums: &[f32; PANEL], at: Place, out: &mut [f32]) {
        // An index instead of iterators: code that is not inlined is not compiled for the instruction set.
        let (n, mut c) = (at.column, 0);
        while c < out.len() {
            let (sum, y) = (lanes.load(&sums[c..]), &mut out[c..]);
            let value = match self {
                Epilogue::Store | Epilogue::Gate(..) | Epilogue::Bounds(_) => sum,
                Epilogue::Bias(bias) => lanes.add(sum, lanes.load_first(&bias[n + c..])),
                Epilogue::Add => lanes.add(lanes.load_first(y), sum),
                Epilogue::Combine(combine) => lanes.add(
                    lanes.load_first(y),
                    combine.weighted(lanes, sum, Place { row: at.row, column: n + c }),
                ),
            };
            lanes.store_first(value, y);
            c += L::N;
        }
    }
}

/// A row of the inputs, and a column of the output.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    column: usize,
}

/// The last step of a tile, compiled for each instruction set: some 200 instructions, compared with 2,000 of a short
/// product.
pub(super) struct Finish<'a> {
    pub(super) epilogue: Epilogue<'a>,
    /// The sums of each row.
    pub(super) sums: &'a mut [[f32; PANEL]],
    /// `[n, n_columns]`. Only these columns of these rows are written.
    pub(super) out: DisjointWriter<'a, f32>,
    pub(super) n_columns: usize,
    /// The first row.
    pub(super) row: usize,
    pub(super) columns: Range<usize>,
}

impl Kernel for Finish<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { epilogue, sums, columns, mut out, .. } = self;
        if let Epilogue::Gate(gate, bias) = epilogue {
            if let Some(bias) = bias {
                bias.add(lanes, columns.start, sums);
            }
            gate.apply(lanes, sums);
        }
        for i in 0..sums.len() {
            let row = self.row + i;
            let start = epilogue.row(row) * self.n_columns + columns.start;
            let out = out.range(start..start + columns.len());
            epilogue.put(lanes, &sums[i], Place { row, column: columns.start }, out);
        }
    }
}
