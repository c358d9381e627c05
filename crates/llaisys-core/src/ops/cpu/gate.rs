//! The gate of a feed-forward block: y[t, f] = G(gate[t, f]) * up[t, f]. Reference: `ops/reference/swiglu.rs`,
//! `ops/reference/geglu.rs`, `ops/reference/gelu.rs` and `ops/reference/clamped_swiglu.rs`.
//!
//! Gate and up are one product. Its panels of 32 outputs have 16 of each, so that `linear_gated` has both in one tile.
//!
//! silu(g) = g / (1 + e^-g) has a relative error below 6e-7 (e^-g: 2e-7; sum, quotient and product round once each).
//! Below g = -88.73 it is -0 instead of a denormal. gelu in its tanh form, x/2 (1 + tanh u), equals x / (1 + e^-2u),
//! which has no cancellation. With u = sqrt(2/pi) (x + 0.044715 x^3), the exponent is x (a + b x^2).

use super::gelu::gelu_of;
use super::isa::lanes::{Lanes, exp};
use crate::ops::packed::{HALF_PANEL, PANEL};

/// -2 sqrt(2/pi)
const GELU_A: f32 = -1.595_769_2;
/// 0.044715 times [`GELU_A`]
const GELU_B: f32 = -0.071_354_814;

/// Rows of the interleaved gate-and-up matrix for `d_ff` features, both padded to whole half panels.
pub const fn gate_up_rows(d_ff: usize) -> usize {
    2 * d_ff.next_multiple_of(HALF_PANEL)
}

/// The source of row `n < gate_up_rows(d_ff)` of the interleaved matrix: row `.1` of up if `.0`, of gate otherwise;
/// `None` for padding (a row of zeros).
pub fn gate_up_row(d_ff: usize, n: usize) -> Option<(bool, usize)> {
    let (panel, c) = (n / PANEL, n % PANEL);
    let row = panel * HALF_PANEL + c % HALF_PANEL;
    (row < d_ff).then_some((c >= HALF_PANEL, row))
}

/// The biases of gate and up, `[d_ff]` each.
#[derive(Debug, Clone, Copy)]
pub struct GateBias<'a> {
    /// Added to the gates.
    pub gate: &'a [f32],
    /// Added to the ups.
    pub up: &'a [f32],
}

impl GateBias<'_> {
    /// Adds the biases of the features from `first` on to rows of sums, which have the gates, then the ups.
    #[inline(always)]
    pub(super) fn add<L: Lanes>(self, lanes: L, first: usize, rows: &mut [[f32; PANEL]]) {
        for row in rows {
            let (gate, up) = row.split_at_mut(HALF_PANEL);
            let mut i = 0;
            while i < HALF_PANEL && first + i < self.gate.len() {
                let gates = lanes.add(lanes.load(&gate[i..]), lanes.load_first(&self.gate[first + i..]));
                lanes.store(gates, &mut gate[i..]);
                let ups = lanes.add(lanes.load(&up[i..]), lanes.load_first(&self.up[first + i..]));
                lanes.store(ups, &mut up[i..]);
                i += L::N;
            }
        }
    }
}

/// The activation function of a gate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gate {
    /// x / (1 + e^-x)
    Silu,
    /// As `Silu`, with bounds; the up is increased by 1.
    ClampedSilu(ClampedSilu),
    /// The tanh form of gelu, arXiv:1606.08415.
    GeluTanh,
    /// gelu itself, with the error function.
    Gelu,
}

/// The gate of gpt-oss: `(u + 1) g / (1 + e^(-alpha g))`, with bounds of the gate g and the up u.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampedSilu {
    /// Upper bound of the gate, and of the magnitude of the up.
    pub limit: f32,
    /// Factor of the gate in the exponent.
    pub alpha: f32,
}

impl ClampedSilu {
    /// As [`Gate::apply`]. A NaN stays one: `min` and `max` return their second operand.
    #[inline(always)]
    fn apply<L: Lanes>(self, lanes: L, rows: &mut [[f32; PANEL]]) {
        let (limit, least) = (lanes.splat(self.limit), lanes.splat(-self.limit));
        let (minus_alpha, one) = (lanes.splat(-self.alpha), lanes.splat(1.0));
        for row in rows {
            let (gate, up) = row.split_at_mut(HALF_PANEL);
            let mut i = 0;
            while i < HALF_PANEL {
                let g = lanes.min(limit, lanes.load(&gate[i..]));
                let u = lanes.max(least, lanes.min(limit, lanes.load(&up[i..])));
                let e = exp(lanes, lanes.mul(minus_alpha, g));
                let y = lanes.mul(lanes.add(u, one), lanes.div(g, lanes.add(one, e)));
                lanes.store(y, &mut gate[i..]);
                i += L::N;
            }
        }
    }
}

impl Gate {
    /// Writes the products to the first half of each row of sums, which has the gates, then the ups.
    #[inline(always)]
    pub(super) fn apply<L: Lanes>(self, lanes: L, rows: &mut [[f32; PANEL]]) {
        match self {
            Gate::Silu => products::<Silu, L>(lanes, rows),
            Gate::ClampedSilu(clamped) => clamped.apply(lanes, rows),
            Gate::GeluTanh => products::<GeluTanh, L>(lanes, rows),
            Gate::Gelu => products::<Gelu, L>(lanes, rows),
        }
    }
}

pub(super) trait Function {
    /// Applies the function to `N` gates.
    fn of<L: Lanes>(lanes: L, x: L::F) -> L::F;
}

#[inline(always)]
fn products<G: Function, L: Lanes>(lanes: L, rows: &mut [[f32; PANEL]]) {
    for row in rows {
        let (gate, up) = row.split_at_mut(HALF_PANEL);
        let mut i = 0;
        while i < HALF_PANEL {
            let y = lanes.mul(G::of(lanes, lanes.load(&gate[i..])), lanes.load(&up[i..]));
            lanes.store(y, &mut gate[i..]);
            i += L::N;
        }
    }
}

struct Silu;

impl Function for Silu {
    #[inline(always)]
    fn of<L: Lanes>(lanes: L, x: L::F) -> L::F {
        silu(lanes, x)
    }
}

struct Gelu;

impl Function for Gelu {
    #[inline(always)]
    fn of<L: Lanes>(lanes: L, x: L::F) -> L::F {
        gelu_of(lanes, x)
    }
}

/// silu of `N` numbers.
#[inline(always)]
pub(super) fn silu<L: Lanes>(lanes: L, x: L::F) -> L::F {
    let negative = lanes.sub(lanes.splat(0.0), x);
    lanes.div(x, lanes.add(lanes.splat(1.0), exp(lanes, negative)))
}

pub(super) struct GeluTanh;

impl Function for GeluTanh {
    #[inline(always)]
    fn of<L: Lanes>(lanes: L, x: L::F) -> L::F {
        let factor = lanes.mul_add(lanes.mul(x, x), lanes.splat(GELU_B), lanes.splat(GELU_A));
        let e = exp(lanes, lanes.mul(x, factor));
        lanes.div(x, lanes.add(lanes.splat(1.0), e))
    }
}
