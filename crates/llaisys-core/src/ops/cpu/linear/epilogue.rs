//! What is computed from a tile's sums, and where it is written.

use super::pruned_argmax::Bounds;
use crate::ops::cpu::gate::{Gate, GateBias, HALF_PANEL};
use crate::ops::cpu::isa::lanes::{Kernel, Lanes};
use crate::ops::packed::PANEL;
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
    /// A panel's sums become the lower and the upper bound of its largest output.
    Bounds(Bounds<'a>),
}

impl Epilogue<'_> {
    /// The columns of the output that panel `p` determines, out of `n`.
    pub(super) fn columns(self, p: usize, n: usize) -> Range<usize> {
        let width = match self {
            Epilogue::Gate(..) => HALF_PANEL,
            Epilogue::Bounds(_) => 2,
            _ => PANEL,
        };
        p * width..((p + 1) * width).min(n)
    }

    /// Writes the sums of one row of a panel whose first output is `n`.
    #[inline(always)]
    fn put<L: Lanes>(self, lanes: L, sums: &[f32; PANEL], n: usize, out: &mut [f32]) {
        // An index instead of iterators: code that is not inlined is not compiled for the instruction set.
        let mut c = 0;
        while c < out.len() {
            let (sum, y) = (lanes.load(&sums[c..]), &mut out[c..]);
            let value = match self {
                Epilogue::Store | Epilogue::Gate(..) | Epilogue::Bounds(_) => sum,
                Epilogue::Bias(bias) => lanes.add(sum, lanes.load_first(&bias[n + c..])),
                Epilogue::Add => lanes.add(lanes.load_first(y), sum),
            };
            lanes.store_first(value, y);
            c += L::N;
        }
    }
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
            let start = (self.row + i) * self.n_columns + columns.start;
            epilogue.put(lanes, &sums[i], columns.start, out.range(start..start + columns.len()));
        }
    }
}
