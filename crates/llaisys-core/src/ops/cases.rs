//! The cases with which each op is tested and timed: shapes with odd sizes and tails, and numbers of ordinary, tiny and
//! huge size. Each result has a tolerance against the reference, with its derivation.
//!
//! Cases are deterministic: every machine and every run gets the same numbers.

pub mod attention;

use crate::ops::{ClampedSilu, HeadWidths};

/// The relative error of one rounding to f32: half the distance between f32 numbers at 1.
pub const ROUNDING: f64 = 1.0 / (1 << 24) as f64;
/// Error allowed where a result is below the normal numbers of f32.
const UNDERFLOW: f64 = f32::MIN_POSITIVE as f64;

/// Random numbers from a seed (the splitmix64 sequence, doi:10.1145/2714064.2660195).
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// `n` numbers of a given size.
    pub fn values(&mut self, size: Size, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value(size)).collect()
    }

    /// A random order of `0..n`.
    pub fn order(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }

    fn value(&mut self, size: Size) -> f32 {
        let unit = (self.bits() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0;
        match size {
            Size::Unit => unit,
            Size::Tiny => unit * 1e-30,
            Size::Huge => unit * 1e15,
            Size::Zero => 0.0,
            // Single outliers among small numbers, as in the activations of trained models.
            Size::Outliers if self.below(50) == 0 => unit * 1e3,
            Size::Outliers => unit * 1e-2,
        }
    }
}

/// How large a case's numbers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// Uniform in -1..1.
    Unit,
    /// Around 1e-30: squares are zero in f32.
    Tiny,
    /// Around 1e15: sums of squares are still finite.
    Huge,
    /// All zero.
    Zero,
    /// One in fifty is 1e5 times larger than the others.
    Outliers,
}

impl Size {
    /// Every size.
    pub const ALL: [Size; 5] = [Size::Unit, Size::Tiny, Size::Huge, Size::Zero, Size::Outliers];
}

/// Rows of one width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsCase {
    /// Rows.
    pub n: usize,
    /// Elements of a row.
    pub width: usize,
    /// Size of the input's numbers.
    pub size: Size,
}

/// Widths around every vector length and unrolling (8, 16, x 4), and widths of real models.
const WIDTHS: [usize; 20] = [1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 33, 63, 64, 65, 80, 129, 576, 577, 896, 1536];

/// Cases of row-wise ops: every width and size with few rows, no rows, and enough rows to use several threads.
pub fn rows_cases() -> Vec<RowsCase> {
    let mut cases = Vec::new();
    for size in Size::ALL {
        cases.extend(WIDTHS.map(|width| RowsCase { n: 3, width, size }));
    }
    cases.push(RowsCase { n: 0, width: 5, size: Size::Unit });
    cases.extend([(64, 576), (33, 577), (20_000, 1)].map(|(n, width)| RowsCase {
        n,
        width,
        size: Size::Unit,
    }));
    cases
}

/// The largest error of `rms_norm` against `want`, over a row of `width`.
///
/// Each square passes through `width / 32` additions (32 partial sums on the narrowest lanes) and at most 13 more (the
/// tail's vectors, the final tree). Each addition rounds twice where nothing is fused. The root halves the relative
/// error. Mean, sum with eps, root, quotient and two products round once each.
pub fn rms_norm_tolerance(width: usize, want: f64) -> f64 {
    ((width / 32 + 13) as f64 + 6.0) * ROUNDING * want.abs() + UNDERFLOW
}

/// The largest error of `layer_norm` of a row against the wanted number, for weights of at most 1.
///
/// Mean and variance have the roundings of [`rms_norm_tolerance`]. An error of the mean is relative to the row's largest
/// number, and is divided by the root as the row is.
pub fn layer_norm_tolerance(row: &[f32], eps: f32) -> impl Fn(f64) -> f64 + use<> {
    let d = row.len() as f64;
    let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / d;
    let variance = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / d;
    let largest = row.iter().map(|&x| f64::from(x.abs())).fold(0.0, f64::max);
    let n_roundings = (row.len() / 32 + 13) as f64 + 8.0;
    let largest = largest / (variance + f64::from(eps)).sqrt();
    move |want| n_roundings * ROUNDING * (2.0 * want.abs() + largest) + UNDERFLOW
}

/// The largest error of `gelu` against `want`: that of the error function (derived at `gelu`), and of the difference.
pub fn gelu_tolerance(want: f64) -> f64 {
    5e-7 + 2.0 * ROUNDING * want.abs()
}

/// Queries or keys to rotate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeCase {
    /// Rows.
    pub n: usize,
    /// Heads of a row.
    pub n_heads: usize,
    /// Elements of a head, and those that are rotated.
    pub widths: HeadWidths,
}

/// Head sizes of real models and odd ones, with few rows and with enough rows to use several threads; heads that are
/// rotated whole and in part.
pub fn rope_cases() -> Vec<RopeCase> {
    let shapes = [
        (1, 1, 2),
        (2, 3, 6),
        (3, 2, 16),
        (5, 1, 24),
        (4, 3, 32),
        (0, 3, 64),
        (1, 9, 64),
        (2, 5, 80),
        (3, 2, 96),
        (2, 4, 128),
        (1, 2, 256),
        (2, 2, 512),
        (40, 9, 64),
        (129, 4, 34),
    ];
    let whole = shapes.map(|(n, n_heads, d_head)| RopeCase { n, n_heads, widths: HeadWidths::whole(d_head) });
    // Phi-4-mini, GLM-4, and tails of either part.
    let parts = [(128, 96), (128, 64), (16, 8), (36, 22), (6, 2)];
    let parts =
        parts.map(|(d_head, d_rope)| RopeCase { n: 33, n_heads: 5, widths: HeadWidths { d_head, d_rope } });
    [whole.as_slice(), &parts].concat()
}

/// The largest error of a rotated number against the reference, given the sizes of its two products. Each product is
/// rounded, then their sum.
pub fn rope_tolerance(products: f64) -> f64 {
    2.0 * ROUNDING * products + UNDERFLOW
}

/// The largest error of cosine and sine at an angle. Exponent, power, reciprocal and angle are rounded, and the result
/// once. The exponent's rounding counts `ln theta` times, which is 14 for a theta of 1e6.
pub fn angle_tolerance(theta: f64, angle: f64) -> f64 {
    (theta.ln().abs() + 4.0) * ROUNDING * angle.abs() + ROUNDING
}

/// `d_ff` of the feed-forward cases: around half panels, and those of real models.
pub fn swiglu_widths() -> Vec<usize> {
    vec![1, 7, 8, 15, 16, 17, 31, 32, 33, 48, 100, 1536, 4864]
}

/// The largest error of `swiglu` against `want`, given its `up`.
///
/// The relative error of e^-g is 2e-7 (derived at `exp`). The sum, the quotient and the product round once each.
/// Where e^-g overflows (g < -88.73) the result is zero instead of at most 1e-36 times up.
pub fn swiglu_tolerance(up: f64, want: f64) -> f64 {
    (2e-7 + 3.0 * ROUNDING) * want.abs() + 1e-36 * up.abs() + UNDERFLOW
}

/// The largest error of `clamped_swiglu` against `want`, given its gate.
///
/// The exponent rounds twice, with the constant of `alpha`; its absolute error is the relative error of the exponential.
/// The sum with 1 and one more product round as well. The rest is as in [`swiglu_tolerance`], with an up of at most
/// `limit + 1`.
pub fn clamped_swiglu_tolerance(clamp: ClampedSilu, gate: f32, want: f64) -> f64 {
    let exponent = f64::from(clamp.alpha * gate.min(clamp.limit).abs()).min(110.0);
    (2e-7 + (5.0 + 2.0 * exponent) * ROUNDING) * want.abs() + 1e-36 * f64::from(clamp.limit + 1.0) + UNDERFLOW
}

/// The largest error of `geglu` against `want`, given gate and up.
///
/// The exponent, of size `|x| (1.6 + 0.072 x^2)`, has three roundings besides those of its constants. Its absolute
/// error is the relative error of the exponential. The rest is as in [`swiglu_tolerance`].
pub fn geglu_tolerance(gate: f32, up: f32, want: f64) -> f64 {
    let x = f64::from(gate.abs());
    let exponent = (x * (1.6 + 0.072 * x * x)).min(110.0);
    (2e-7 + (3.0 + 5.0 * exponent) * ROUNDING) * want.abs() + 1e-36 * f64::from(up.abs()) + UNDERFLOW
}

/// The largest error of `soft_cap` against `want`. The relative error of tanh is 6e-7 (derived at `tanh`); the quotient
/// before it and the product after it round once each.
pub fn soft_cap_tolerance(want: f64) -> f64 {
    (6e-7 + 2.0 * ROUNDING) * want.abs() + UNDERFLOW
}

/// The largest error of an expert's weight against `want`. Differences of logits below 18 round once, and this absolute
/// error is the relative error of the exponential, which also rounds. `n_experts` terms are summed, and the quotient
/// rounds once.
pub fn route_tolerance(n_experts: usize, want: f64) -> f64 {
    (2.0 * (18.0 + 2.0) + n_experts as f64) * ROUNDING * want
}

/// Rows of logits whose largest value occurs once, several times, at the ends, in the last part of a search, or never.
pub fn argmax_cases() -> Vec<Vec<f32>> {
    let draw = &mut SplitMix64::new(31);
    let mut cases = vec![
        vec![0.0],
        vec![f32::NAN],
        vec![f32::NAN, f32::NEG_INFINITY],
        vec![f32::NEG_INFINITY; 40],
        vec![1.0, 2.0, 2.0, 1.0],
        vec![-0.0, 0.0],
        vec![f32::NAN, -3.0, f32::INFINITY, f32::INFINITY],
        vec![5.0; 3000],
    ];
    for n in [2, 15, 16, 17, 1023, 1024, 1025, 5000, 49_152] {
        let row = draw.values(Size::Unit, n);
        for place in [0, n / 2, n - 1] {
            let mut peaked = row.clone();
            peaked[place] = 7.0;
            cases.push(peaked);
        }
        let mut tied = row.clone();
        for _ in 0..4 {
            let place = draw.below(n);
            tied[place] = 9.0;
        }
        cases.extend([row, tied]);
    }
    cases
}
