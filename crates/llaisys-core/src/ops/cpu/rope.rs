//! `rope`: rotary position embedding. Reference: `ops/reference/rope.rs`.
//!
//! Pairs are `(i, i + d_rope/2)` (half-split): (a, b) becomes (a cos - b sin, b cos + a sin), in f32. Only the first
//! `d_rope` elements of a head are rotated.

use super::isa::lanes::{Kernel, Lanes};
use super::kv_element::KvElement;
use super::rows::for_row_runs;
use crate::dtype::KvDType;
use crate::ops::OpContext;
use crate::tensor::KvLayerMut;
use half::f16;

/// The elements of a head, and how many of them are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadWidths {
    /// Elements of a head.
    pub d_head: usize,
    /// Elements that are rotated, the first ones: an even number.
    pub d_rope: usize,
}

impl HeadWidths {
    /// Heads that are rotated whole.
    pub fn whole(d_head: usize) -> Self {
        Self { d_head, d_rope: d_head }
    }
}

/// The frequencies of a model's rotary position embedding, and the factor of its rotated rows.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Radians per position of each pair, `[d_rope / 2]`.
    frequencies: Vec<f32>,
    /// Factor of cosine and sine.
    amplitude: f32,
}

impl RopeTable {
    /// The standard table: pair `i` rotates by `theta^(-2i / d_rope)` radians per position.
    ///
    /// The exponent, the power and its reciprocal are each rounded to f32 as in transformers, so that angles at large
    /// positions agree with the reference.
    ///
    /// Panics if `d_rope` is odd; the check of a model's configuration rejects that before.
    pub fn new(d_rope: usize, theta: f64) -> Self {
        assert!(d_rope.is_multiple_of(2), "d_rope is {d_rope}, expected an even number");
        let frequency = |i: usize| {
            let exponent = (2 * i) as f32 / d_rope as f32;
            1.0 / theta.powf(f64::from(exponent)) as f32
        };
        Self { frequencies: (0..d_rope / 2).map(frequency).collect(), amplitude: 1.0 }
    }

    /// Returns the table whose pair `i` rotates by `change(i, frequency)`, rounded once, and whose rotated rows are
    /// multiplied by `amplitude`.
    pub fn scaled(mut self, amplitude: f32, change: impl Fn(usize, f64) -> f64) -> Self {
        for (i, frequency) in self.frequencies.iter_mut().enumerate() {
            *frequency = change(i, f64::from(*frequency)) as f32;
        }
        self.amplitude *= amplitude;
        self
    }

    /// Computes cosine and sine of every pair's angle at each position, times the amplitude.
    ///
    /// - `positions`: `[n]`; `cos`, `sin`: `[n, d_rope / 2]`
    /// - the angle is the f32 product of position and frequency, rounded as in transformers. Its cosine and sine are
    ///   computed in f64; they and their product with the amplitude are rounded once
    ///
    /// Panics if shapes disagree.
    pub fn angles(&self, positions: &[i32], cos: &mut [f32], sin: &mut [f32]) {
        self.turns(positions, cos, sin);
        if self.amplitude != 1.0 {
            cos.iter_mut().chain(sin).for_each(|x| *x *= self.amplitude);
        }
    }

    /// [`RopeTable::angles`] without the amplitude; a negative position rotates backwards.
    pub fn turns(&self, positions: &[i32], cos: &mut [f32], sin: &mut [f32]) {
        let half = self.frequencies.len();
        assert!(
            cos.len() == positions.len() * half && sin.len() == cos.len(),
            "cosines or sines of wrong shape"
        );
        let rows = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
        for (position, (cos, sin)) in positions.iter().zip(rows) {
            for ((frequency, cos), sin) in self.frequencies.iter().zip(cos).zip(sin) {
                let (s, c) = f64::from(*position as f32 * frequency).sin_cos();
                (*cos, *sin) = (c as f32, s as f32);
            }
        }
    }
}

/// Rotates queries or keys in place.
///
/// - `x`: `[n, n_heads, d_head]`; `cos`, `sin`: `[n, d_rope / 2]` from [`RopeTable::angles`]
///
/// Panics if shapes disagree. Source: arXiv:2104.09864; rows of q and k are loaded in the half-split order.
pub fn rope(cx: &OpContext, x: &mut [f32], widths: HeadWidths, cos: &[f32], sin: &[f32]) {
    let HeadWidths { d_head, d_rope } = widths;
    assert!(d_rope <= d_head, "more than a head is rotated");
    let half = d_rope / 2;
    let n = cos.len() / half;
    if n == 0 {
        return assert!(x.is_empty(), "rows without angles");
    }
    let row_len = x.len() / n;
    let whole = x.len() == n * row_len && row_len.is_multiple_of(d_head);
    assert!(whole && cos.len() == n * half && sin.len() == cos.len(), "cosines or sines of wrong shape");
    let isa = cx.kernels.proof();
    for_row_runs(&cx.pool, x, row_len, &|first, x| {
        let (cos, sin) = (&cos[first * half..], &sin[first * half..]);
        isa.run(Rotate { x, row_len, widths, cos, sin });
    });
}

/// Rotates the stored keys of `cells` by `delta` positions, after `seq_add` has moved them.
///
/// Each key is rotated in f32 and stored again, which rounds it. With f16 and bf16 each shift rounds to nearest even
/// and adds up to half a unit in the last place. With int8 the key gets a new scale, at most sqrt 2 times the old one,
/// and each shift may add half of it to an element's error. Values do not depend on positions and are unchanged.
///
/// - `cells`: `[n]`; a cell that occurs twice is rotated twice
///
/// Panics if the table rotates more than a head, if `d_head` exceeds [`MAX_D_HEAD`](super::attention::MAX_D_HEAD), or if a
/// cell does not exist.
pub fn rope_shift(cx: &OpContext, layer: KvLayerMut<'_>, cells: &[u32], delta: i32, table: &RopeTable) {
    let half = table.frequencies.len();
    let d_head = layer.d_head;
    assert!(2 * half <= d_head, "the table rotates more than a head");
    let (mut cos, mut sin) = ([0.0; MAX_HALF], [0.0; MAX_HALF]);
    let (cos, sin) = (&mut cos[..half], &mut sin[..half]);
    // The stored keys already include the amplitude.
    table.turns(&[delta], cos, sin);
    let n_heads = layer.n_kv_heads;
    // On the calling thread: shifts are rare, and `cells` may repeat a cell.
    let isa = cx.kernels.proof();
    match layer.dtype {
        KvDType::Float32 => {
            let keys: &mut [f32] = layer.k.as_mut_slice();
            isa.run(Shift { keys, n_heads, d_head, cells, cos, sin });
        }
        KvDType::Float16 => {
            let keys: &mut [f16] = layer.k.as_mut_slice();
            isa.run(Shift { keys, n_heads, d_head, cells, cos, sin });
        }
        KvDType::Bfloat16 => {
            let keys: &mut [u16] = layer.k.as_mut_slice();
            isa.run(Shift { keys, n_heads, d_head, cells, cos, sin });
        }
        KvDType::Int8 => {
            let keys: &mut [i8] = layer.k.as_mut_slice();
            isa.run(Shift { keys, n_heads, d_head, cells, cos, sin });
        }
    }
}

/// Pairs of the largest head.
const MAX_HALF: usize = super::attention::MAX_D_HEAD / 2;

struct Rotate<'a> {
    x: &'a mut [f32],
    row_len: usize,
    widths: HeadWidths,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let HeadWidths { d_head, d_rope } = self.widths;
        let angles = self.cos.chunks_exact(d_rope / 2).zip(self.sin.chunks_exact(d_rope / 2));
        for (row, (cos, sin)) in self.x.chunks_exact_mut(self.row_len).zip(angles) {
            for head in row.chunks_exact_mut(d_head) {
                rotate_pairs(lanes, &mut head[..d_rope], cos, sin);
            }
        }
    }
}

struct Shift<'a, T> {
    keys: &'a mut [T],
    /// Heads of a cell.
    n_heads: usize,
    d_head: usize,
    cells: &'a [u32],
    cos: &'a [f32],
    sin: &'a [f32],
}

impl<T: KvElement> Kernel for Shift<'_, T> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let stored = self.d_head + T::SCALE;
        let mut numbers = [0.0; 2 * MAX_HALF];
        let numbers = &mut numbers[..self.d_head];
        for cell in self.cells {
            let start = *cell as usize * self.n_heads * stored;
            for head in self.keys[start..start + self.n_heads * stored].chunks_exact_mut(stored) {
                T::load_head(lanes, head, numbers);
                rotate_pairs(lanes, &mut numbers[..2 * self.cos.len()], self.cos, self.sin);
                T::store_head(lanes, numbers, head);
            }
        }
    }
}

/// Rotates the pairs of one head by one position's angles.
#[inline(always)]
fn rotate_pairs<L: Lanes>(lanes: L, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = x.split_at_mut(cos.len());
    let pairs = low.chunks_mut(L::N).zip(high.chunks_mut(L::N));
    for ((low, high), (cos, sin)) in pairs.zip(cos.chunks(L::N).zip(sin.chunks(L::N))) {
        let (a, b) = (lanes.load_first(low), lanes.load_first(high));
        let (cos, sin) = (lanes.load_first(cos), lanes.load_first(sin));
        let turned = lanes.sub(lanes.mul(a, cos), lanes.mul(b, sin));
        lanes.store_first(turned, low);
        lanes.store_first(lanes.mul_add(a, sin, lanes.mul(b, cos)), high);
    }
}
