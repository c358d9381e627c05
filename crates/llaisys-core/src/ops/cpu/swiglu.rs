//! `swiglu`: y[t, f] = silu(gate[t, f]) * up[t, f]. Meaning: `ops/reference/swiglu.rs`.
//!
//! Gate and up are one product whose panels of 32 outputs hold 16 of each, so a later fused kernel finds both
//! in one tile. silu(g) = g / (1 + e^-g): relative error below 6e-7 (e^-g: 2e-7; sum, quotient and product
//! round once each); -0 instead of a denormal below g = -88.73.

use super::isa::lanes::{Kernel, Lanes, exp};
use super::rows::for_row_runs;
use crate::ops::OpContext;
use std::marker::PhantomData;

/// Columns of gate, then of up, in one panel of the interleaved matrix.
const HALF_PANEL: usize = 16;

/// Rows of the interleaved gate-and-up matrix for `d_ff` features: both padded to whole half panels.
pub const fn gate_up_rows(d_ff: usize) -> usize {
    2 * d_ff.next_multiple_of(HALF_PANEL)
}

/// What row `n < gate_up_rows(d_ff)` of the interleaved matrix holds: row `.1` of up if `.0`, else of gate;
/// `None` for padding (a row of zeros).
pub fn gate_up_row(d_ff: usize, n: usize) -> Option<(bool, usize)> {
    let (panel, c) = (n / (2 * HALF_PANEL), n % (2 * HALF_PANEL));
    let row = panel * HALF_PANEL + c % HALF_PANEL;
    (row < d_ff).then_some((c >= HALF_PANEL, row))
}

/// The gated activation of the feed-forward block.
///
/// - `gate_up`: `[n, gate_up_rows(d_ff)]`, interleaved as [`gate_up_row`] says; `out`: `[n, d_ff]`
///
/// Panics if shapes disagree. Source: arXiv:2002.05202.
pub fn swiglu(cx: &OpContext, gate_up: &[f32], d_ff: usize, out: &mut [f32]) {
    gated::<Silu>(cx, gate_up, d_ff, out);
}

/// What the gate goes through.
pub(super) trait GateFunction {
    /// Of `N` gates.
    fn of<L: Lanes>(lanes: L, x: L::F) -> L::F;
}

/// `out[t, f] = G(gate[t, f]) * up[t, f]`, of interleaved gates and ups.
pub(super) fn gated<G: GateFunction>(cx: &OpContext, gate_up: &[f32], d_ff: usize, out: &mut [f32]) {
    let width = gate_up_rows(d_ff);
    let n_rows = out.len() / d_ff;
    assert!(out.len() == n_rows * d_ff && gate_up.len() == n_rows * width, "gate and up of another shape");
    let isa = cx.kernels.proof();
    for_row_runs(&cx.pool, out, d_ff, &|first, rows| {
        isa.run(Gate::<G> { gate_up: &gate_up[first * width..], d_ff, out: rows, function: PhantomData });
    });
}

struct Gate<'a, G> {
    gate_up: &'a [f32],
    d_ff: usize,
    out: &'a mut [f32],
    function: PhantomData<G>,
}

impl<G: GateFunction> Kernel for Gate<'_, G> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let gate_up = self.gate_up.chunks_exact(gate_up_rows(self.d_ff));
        for (gate_up, out) in gate_up.zip(self.out.chunks_exact_mut(self.d_ff)) {
            for (panel, out) in gate_up.chunks_exact(2 * HALF_PANEL).zip(out.chunks_mut(HALF_PANEL)) {
                let (gate, up) = panel.split_at(HALF_PANEL);
                let parts = gate.chunks_exact(L::N).zip(up.chunks_exact(L::N));
                for ((gate, up), out) in parts.zip(out.chunks_mut(L::N)) {
                    let y = lanes.mul(G::of(lanes, lanes.load(gate)), lanes.load(up));
                    lanes.store_first(y, out);
                }
            }
        }
    }
}

struct Silu;

impl GateFunction for Silu {
    #[inline(always)]
    fn of<L: Lanes>(lanes: L, x: L::F) -> L::F {
        let negative = lanes.sub(lanes.splat(0.0), x);
        lanes.div(x, lanes.add(lanes.splat(1.0), exp(lanes, negative)))
    }
}
