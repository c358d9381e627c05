//! What becomes of a tile's sums.

use crate::ops::cpu::gate::{Gate, HALF_PANEL};
use crate::ops::cpu::isa::lanes::{Kernel, Lanes};
use crate::ops::packed::PANEL;
use crate::threads::Disjoint;
use std::ops::Range;

/// What happens to sums.
#[derive(Clone, Copy)]
pub(super) enum Epilogue<'a> {
    Store,
    Bias(&'a [f32]),
    Add,
    /// Of 16 gates and 16 ups a panel, 16 products are left.
    Gate(Gate),
}

impl Epilogue<'_> {
    /// Which of `n` columns of the output come of panel `p`.
    pub(super) fn columns(self, p: usize, n: usize) -> Range<usize> {
        let width = if matches!(self, Epilogue::Gate(_)) { HALF_PANEL } else { PANEL };
        p * width..((p + 1) * width).min(n)
    }

    /// Puts the sums of one row of a panel, whose first output is `n`, where they go.
    #[inline(always)]
    fn put(self, sums: &[f32; PANEL], n: usize, out: &mut [f32]) {
        match self {
            Epilogue::Store | Epilogue::Gate(_) => out.copy_from_slice(&sums[..out.len()]),
            Epilogue::Bias(bias) => {
                let bias = &bias[n..n + out.len()];
                for ((y, sum), bias) in out.iter_mut().zip(sums).zip(bias) {
                    *y = sum + bias;
                }
            }
            Epilogue::Add => {
                for (y, sum) in out.iter_mut().zip(sums) {
                    *y += sum;
                }
            }
        }
    }
}

/// The end of a tile, compiled for each instruction set: some 200 instructions beside the 2,000 of a short product.
pub(super) struct Finish<'a> {
    pub(super) epilogue: Epilogue<'a>,
    /// Of each row.
    pub(super) sums: &'a mut [[f32; PANEL]],
    /// `[n, n_columns]`; nobody else writes these columns of these rows meanwhile.
    pub(super) out: &'a Disjoint<'a, f32>,
    pub(super) n_columns: usize,
    /// The first row.
    pub(super) row: usize,
    pub(super) columns: Range<usize>,
}

impl Kernel for Finish<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { epilogue, sums, columns, .. } = self;
        if let Epilogue::Gate(gate) = epilogue {
            gate.apply(lanes, sums);
        }
        for (i, sums) in sums.iter().enumerate() {
            let start = (self.row + i) * self.n_columns + columns.start;
            // SAFETY: who made this value has these rows and columns alone, and rows do not overlap.
            let out = unsafe { self.out.range(start..start + columns.len()) };
            // Compilers unroll the loops of a width they know: that of all panels but a last one.
            match out.len() {
                PANEL => epilogue.put(sums, columns.start, &mut out[..PANEL]),
                HALF_PANEL => epilogue.put(sums, columns.start, &mut out[..HALF_PANEL]),
                _ => epilogue.put(sums, columns.start, out),
            }
        }
    }
}
