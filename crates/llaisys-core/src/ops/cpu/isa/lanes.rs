//! Lanes: the vector operations in which ops are written, once for every instruction set.
//!
//! A kernel is a [`Kernel`] whose `run` is generic over [`Lanes`]. [`Isa::run`](super::Isa::run) compiles it once for
//! each instruction set that has its own lanes (VNNI adds nothing to them), inside one function with the features
//! enabled. Everything called from that function is `#[inline(always)]`, so that it becomes part of it, or is a kernel
//! that [`Lanes::enter`] calls. Closures are not: one given to `array::map` is compiled without the features, and each
//! intrinsic in it is a call.

use half::f16;

/// The largest number of lanes of any instruction set: the length of arrays with one vector per lane.
pub(crate) const MAX_LANES: usize = 16;
/// Queries that [`Lanes::dot_eight`] multiplies.
pub(crate) const EIGHT: usize = 8;

/// Operations on vectors of `N` f32 numbers. A value of the type proves that the machine has the instructions.
///
/// The `_first` operations work on the first `min(N, len)` elements: loads return zero in the other lanes, stores leave
/// the rest of the slice unchanged. The other operations panic on slices shorter than `N`.
pub(crate) trait Lanes: Copy {
    /// A vector of `N` numbers.
    type F: Copy;
    /// Number of lanes of a vector; at most [`MAX_LANES`].
    const N: usize;
    /// Rows of a tile with 4 vectors per row whose sums fit in registers.
    const TILE_ROWS: usize;
    /// Rows of a tile with 2 vectors per row whose sums fit in registers; at most 8.
    const TALL_ROWS: usize;
    /// Rows of the tiles of more than `TALL_ROWS` rows: `TILE_ROWS` or `TALL_ROWS`.
    const MANY_ROWS: usize = Self::TILE_ROWS;
    /// True if the set multiplies pairs of bf16 ([`Lanes::dot_pairs`]).
    const DOTS_PAIRS: bool = false;

    /// Runs `kernel` as a function of its own, compiled for this instruction set. Large kernels call their parts this way:
    /// the compiler's time grows faster than the size of a function.
    fn enter<K: Kernel>(self, kernel: K);

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::F;
    /// Loads the first `N` elements.
    fn load(self, x: &[f32]) -> Self::F;
    /// Loads the first `min(N, len)` elements, then zeros.
    fn load_first(self, x: &[f32]) -> Self::F;
    /// Writes `N` elements.
    fn store(self, v: Self::F, out: &mut [f32]);
    /// Writes the first `min(N, len)` elements.
    fn store_first(self, v: Self::F, out: &mut [f32]);
    /// [`Lanes::load`] from bf16 bits.
    fn load_bf16(self, x: &[u16]) -> Self::F;
    /// [`Lanes::load_first`] from bf16 bits.
    fn load_bf16_first(self, x: &[u16]) -> Self::F;
    /// Rounds to bf16: to nearest, ties to even; NaN stays NaN.
    fn round_bf16(self, v: Self::F) -> Self::F;
    /// [`Lanes::store_first`] of [`Lanes::round_bf16`], as bf16 bits.
    fn store_bf16_first(self, v: Self::F, out: &mut [u16]);
    /// Loads `2 N` bf16 numbers as pairs, without conversion: lane `i` has elements `2i` (low half) and `2i + 1`.
    fn load_pairs(self, x: &[u16]) -> Self::F;
    /// Loads the first `min(2 N, len)` elements as in [`Lanes::load_pairs`], then zeros.
    fn load_pairs_first(self, x: &[u16]) -> Self::F;
    /// Converts the pairs of `load_pairs` to numbers: the even elements and the odd ones.
    fn split_pairs(self, v: Self::F) -> (Self::F, Self::F);

    /// Loads pairs of bf16 from two slices, without conversion. Lane `i` has element `i` of `low` in its low half and
    /// of `high` in its high half; zeros follow the ends. Only with [`Lanes::DOTS_PAIRS`].
    fn zip_pairs_first(self, _low: &[u16], _high: &[u16]) -> Self::F {
        unreachable!("this instruction set does not multiply pairs")
    }
    /// The first `2 N` elements of each slice as two vectors of [`Lanes::zip_pairs_first`].
    fn zip_pairs(self, _low: &[u16], _high: &[u16]) -> [Self::F; 2] {
        unreachable!("this instruction set does not multiply pairs")
    }
    /// Pairs of the numbers of `first`, then of `second`, rounded as by [`Lanes::round_bf16`]; denormal numbers become
    /// zeros. Only with [`Lanes::DOTS_PAIRS`].
    fn round_pairs(self, _first: Self::F, _second: Self::F) -> Self::F {
        unreachable!("this instruction set does not multiply pairs")
    }
    /// `acc` plus the products of both elements of each pair of `a` and `b`, the odd ones first. Only with
    /// [`Lanes::DOTS_PAIRS`].
    fn dot_pairs(self, _a: Self::F, _b: Self::F, _acc: Self::F) -> Self::F {
        unreachable!("this instruction set does not multiply pairs")
    }

    /// Dot products of [`EIGHT`] queries with the first `N` of `keys`, rows of bf16, summed as by [`Lanes::dot_pairs`] in
    /// ascending order: lane `k` of vector `r` is that of query `r` and key `k`. Only with [`Lanes::DOTS_PAIRS`].
    ///
    /// - `queries`: `[pair][EIGHT]`, pairs of bf16
    fn dot_eight(self, _queries: &[[f32; EIGHT]], _keys: [&[u16]; MAX_LANES]) -> [Self::F; EIGHT] {
        unreachable!("this instruction set does not multiply pairs")
    }

    /// Pairs of bf16 from numbers that bf16 represents exactly: `low` and `high` of each lane.
    fn pair(self, low: Self::F, high: Self::F) -> Self::F;
    /// [`Lanes::load_first`] from IEEE binary16.
    fn load_f16_first(self, x: &[f16]) -> Self::F;
    /// [`Lanes::store_first`] rounded to binary16: to nearest, ties to even; NaN stays NaN.
    fn store_f16_first(self, v: Self::F, out: &mut [f16]);
    /// [`Lanes::load_first`] from signed bytes.
    fn load_i8_first(self, x: &[i8]) -> Self::F;
    /// [`Lanes::store_first`] of numbers in -128..=127, rounded to nearest, ties to even.
    fn store_i8_first(self, v: Self::F, out: &mut [i8]);
    /// [`Lanes::load_pairs`] from signed bytes, converted to bf16.
    fn load_i8_pairs(self, x: &[i8]) -> Self::F;

    /// [`Lanes::load_pairs_first`] from signed bytes, converted to bf16.
    #[inline(always)]
    fn load_i8_pairs_first(self, x: &[i8]) -> Self::F {
        let mut bytes = [0; 2 * MAX_LANES];
        let n = x.len().min(2 * Self::N);
        bytes[..n].copy_from_slice(&x[..n]);
        self.load_i8_pairs(&bytes)
    }

    /// `a + b`
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`; fused where the instruction set fuses.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger number; `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller number; `b` if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `v * 2^n` for integers `n` in -200..=200, rounded once; results may be denormal, zero or infinite.
    fn scale_pow2(self, v: Self::F, n: Self::F) -> Self::F;
    /// The lanes below `n` from `v`, the rest from `other`.
    fn keep_first(self, v: Self::F, n: usize, other: Self::F) -> Self::F;
    /// The sum of all lanes: the vector's halves are added until one lane is left.
    fn sum(self, v: Self::F) -> f32;
    /// The largest lane, reduced in the same order with [`Lanes::max`].
    fn largest(self, v: Self::F) -> f32;
    /// Transposes the first `N` vectors; the other vectors are unspecified.
    fn transpose(self, tile: [Self::F; MAX_LANES]) -> [Self::F; MAX_LANES];
    /// Prefetches the cache line at `at` to the second-level cache; any address is allowed. (The first level waits for
    /// few lines at a time. On Zen 4 a core that prefetches to it reaches two thirds of the bandwidth.)
    fn prefetch(self, at: *const u8);
}

/// Code written with [`Lanes`]. `run` and what it calls must be `#[inline(always)]`.
pub(crate) trait Kernel {
    /// Runs the kernel.
    fn run<L: Lanes>(self, lanes: L);
}

/// Prefetches the cache lines of `n` elements at `start`; any address is allowed.
#[inline(always)]
pub(crate) fn prefetch_all<L: Lanes, T>(lanes: L, start: *const T, n: usize) {
    const LINE: usize = 64;
    let (start, end) = (start.cast::<u8>(), start.wrapping_add(n).addr());
    let mut line = start.wrapping_sub(start.addr() % LINE);
    while line.addr() < end {
        lanes.prefetch(line);
        line = line.wrapping_add(LINE);
    }
}

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts. The first has 10 significant bits, so that its product with an integer is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Adding and subtracting 1.5 * 2^23 rounds numbers below 2^22 to an integer (to nearest, ties to even).
const ROUND: f32 = 12_582_912.0;
/// 1/7! to 1/2!.
const TAYLOR: [f32; 6] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5];

/// `e^x` with a relative error below 2e-7 (absolute below 1e-45 where the result is denormal). The result is 0 below
/// -104, infinity above 88.73, and NaN for NaN.
///
/// `x = n ln2 + r` with `|r| <= 0.347`, `e^r` by its Taylor series to `r^7`. The truncation error of the series is
/// `r^8 / 8! < 6e-9`. `r` has two roundings of 2^-26. The last two steps of Horner's scheme round by 2^-24 and
/// `r 2^-24` (and their products where nothing is fused): 1.6e-7 in all. Scaling by `2^n` is exact.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(lanes: L, x: L::F) -> L::F {
    let (n, r) = split(lanes, x);
    let one = lanes.splat(1.0);
    let p = lanes.mul_add(series(lanes, r), r, one);
    lanes.scale_pow2(lanes.mul_add(p, r, one), n)
}

/// Splits `x`, clamped to -110..89, into `n ln2 + r` with an integer `n` and `|r| <= 0.347`.
#[inline(always)]
fn split<L: Lanes>(lanes: L, x: L::F) -> (L::F, L::F) {
    let x = lanes.max(lanes.splat(-110.0), lanes.min(lanes.splat(89.0), x));
    let round = lanes.splat(ROUND);
    let n = lanes.sub(lanes.mul_add(x, lanes.splat(LOG2_E), round), round);
    let r = lanes.mul_add(n, lanes.splat(-LN_2_HIGH), x);
    (n, lanes.mul_add(n, lanes.splat(-LN_2_LOW), r))
}

/// `(e^r - 1 - r) / r^2` for small `r`.
#[inline(always)]
fn series<L: Lanes>(lanes: L, r: L::F) -> L::F {
    let mut p = lanes.splat(TAYLOR[0]);
    for c in &TAYLOR[1..] {
        p = lanes.mul_add(p, r, lanes.splat(*c));
    }
    p
}

/// `tanh(x)` with a relative error below 6e-7; NaN for NaN.
///
/// `t / (t + 2)` with `t = e^2x - 1 = 2^n (e^r - 1) + (2^n - 1)`; neither term has cancellation near zero.
/// `e^r - 1 = r (1 + r s)` has a relative error of 2e-7. Where `n` is not 0, `|t|` is at least 0.29; the sum's rounding
/// and the first term's error (of at most 0.42) add up to 3e-7 of it. Sum and quotient round once each, and the sum
/// adds the error of `t` at most once more. Above 10 the result is 1 in every digit.
#[inline(always)]
pub(crate) fn tanh<L: Lanes>(lanes: L, x: L::F) -> L::F {
    let x = lanes.max(lanes.splat(-10.0), lanes.min(lanes.splat(10.0), x));
    let (n, r) = split(lanes, lanes.add(x, x));
    let one = lanes.splat(1.0);
    let p = lanes.mul(r, lanes.mul_add(series(lanes, r), r, one));
    let t = lanes.add(lanes.scale_pow2(p, n), lanes.sub(lanes.scale_pow2(one, n), one));
    lanes.div(t, lanes.add(t, lanes.splat(2.0)))
}
