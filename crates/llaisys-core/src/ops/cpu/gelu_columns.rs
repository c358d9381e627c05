//! `gelu_columns`: y[t, c] = gelu(gate[t, c]) * x[t, first + c]. Reference: `ops/reference/gelu_columns.rs`.
//!
//! The error is that of the gate of the same name, which `gate` derives.

use super::gate::{Function, GeluTanh};
use super::isa::lanes::{Kernel, Lanes};
use super::rows::for_row_runs;
use crate::ops::OpContext;

/// Some columns of a matrix.
#[derive(Debug, Clone, Copy)]
pub struct Columns<'a> {
    /// The matrix, row-major.
    pub x: &'a [f32],
    /// Elements of a row.
    pub row_len: usize,
    /// The first column.
    pub first: usize,
}

/// Replaces each gate by its gelu, in the tanh form, times a number of the same row of `columns`.
///
/// - `gate`: `[n, width]`; `columns`: `[n, row_len]`, of which `width` columns from the first one on are used
///
/// Panics if shapes disagree. Source: arXiv:1606.08415.
pub fn gelu_columns(cx: &OpContext, gate: &mut [f32], width: usize, columns: Columns<'_>) {
    let Columns { x, row_len, first: column } = columns;
    assert!(gate.len() / width == x.len() / row_len && column + width <= row_len, "columns of wrong shape");
    let isa = cx.kernels.proof();
    for_row_runs(&cx.pool, gate, width, &|first, gate| {
        let x = &x[first * row_len..];
        isa.run(GeluColumns { gate, width, columns: Columns { x, row_len, first: column } });
    });
}

struct GeluColumns<'a> {
    gate: &'a mut [f32],
    width: usize,
    columns: Columns<'a>,
}

impl Kernel for GeluColumns<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Columns { x, row_len, first } = self.columns;
        for (gate, x) in self.gate.chunks_exact_mut(self.width).zip(x.chunks_exact(row_len)) {
            let x = &x[first..first + self.width];
            for (gate, x) in gate.chunks_mut(L::N).zip(x.chunks(L::N)) {
                let y = lanes.mul(GeluTanh::of(lanes, lanes.load_first(gate)), lanes.load_first(x));
                lanes.store_first(y, gate);
            }
        }
    }
}
