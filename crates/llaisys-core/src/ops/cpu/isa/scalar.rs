//! Lanes as plain arrays, for every machine.

use super::lanes::{Kernel, Lanes, MAX_LANES};
use half::{bf16, f16};

/// Plain loops over 8 numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalar;

const N: usize = 8;

#[inline(always)]
fn zip(a: [f32; N], b: [f32; N], f: impl Fn(f32, f32) -> f32) -> [f32; N] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// `2^n` for `n` in -126..=127.
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

impl Lanes for Scalar {
    type F = [f32; N];
    const N: usize = N;
    const TILE_ROWS: usize = 1;
    const TALL_ROWS: usize = 1;

    #[inline(never)]
    fn enter<K: Kernel>(self, kernel: K) {
        kernel.run(self);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; N]
    }

    #[inline(always)]
    fn load(self, x: &[f32]) -> Self::F {
        std::array::from_fn(|i| x[i])
    }

    #[inline(always)]
    fn load_first(self, x: &[f32]) -> Self::F {
        std::array::from_fn(|i| x.get(i).copied().unwrap_or(0.0))
    }

    #[inline(always)]
    fn store(self, v: Self::F, out: &mut [f32]) {
        out[..N].copy_from_slice(&v);
    }

    #[inline(always)]
    fn store_first(self, v: Self::F, out: &mut [f32]) {
        for (out, v) in out.iter_mut().zip(v) {
            *out = v;
        }
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u16]) -> Self::F {
        std::array::from_fn(|i| f32::from_bits(u32::from(x[i]) << 16))
    }

    #[inline(always)]
    fn load_bf16_first(self, x: &[u16]) -> Self::F {
        std::array::from_fn(|i| x.get(i).map_or(0.0, |&bits| f32::from_bits(u32::from(bits) << 16)))
    }

    #[inline(always)]
    fn round_bf16(self, v: Self::F) -> Self::F {
        v.map(|v| bf16::from_f32(v).to_f32())
    }

    #[inline(always)]
    fn store_bf16_first(self, v: Self::F, out: &mut [u16]) {
        for (out, v) in out.iter_mut().zip(v) {
            *out = bf16::from_f32(v).to_bits();
        }
    }

    #[inline(always)]
    fn load_pairs(self, x: &[u16]) -> Self::F {
        std::array::from_fn(|i| f32::from_bits(u32::from(x[2 * i]) | u32::from(x[2 * i + 1]) << 16))
    }

    #[inline(always)]
    fn load_pairs_first(self, x: &[u16]) -> Self::F {
        let half = |i: usize| x.get(i).copied().map_or(0, u32::from);
        std::array::from_fn(|i| f32::from_bits(half(2 * i) | half(2 * i + 1) << 16))
    }

    #[inline(always)]
    fn split_pairs(self, v: Self::F) -> (Self::F, Self::F) {
        let even = v.map(|v| f32::from_bits(v.to_bits() << 16));
        (even, v.map(|v| f32::from_bits(v.to_bits() & 0xffff_0000)))
    }

    #[inline(always)]
    fn pair(self, low: Self::F, high: Self::F) -> Self::F {
        zip(low, high, |low, high| f32::from_bits(low.to_bits() >> 16 | high.to_bits()))
    }

    #[inline(always)]
    fn load_f16_first(self, x: &[f16]) -> Self::F {
        std::array::from_fn(|i| x.get(i).map_or(0.0, |x| x.to_f32()))
    }

    #[inline(always)]
    fn store_f16_first(self, v: Self::F, out: &mut [f16]) {
        for (out, v) in out.iter_mut().zip(v) {
            *out = f16::from_f32(v);
        }
    }

    #[inline(always)]
    fn load_i8_first(self, x: &[i8]) -> Self::F {
        std::array::from_fn(|i| x.get(i).map_or(0.0, |&x| f32::from(x)))
    }

    #[inline(always)]
    fn store_i8_first(self, v: Self::F, out: &mut [i8]) {
        for (out, v) in out.iter_mut().zip(v) {
            *out = v.round_ties_even() as i8;
        }
    }

    #[inline(always)]
    fn load_i8_pairs(self, x: &[i8]) -> Self::F {
        let number = |i: usize| f32::from(x[i]);
        self.pair(std::array::from_fn(|i| number(2 * i)), std::array::from_fn(|i| number(2 * i + 1)))
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // Not fused: without the instruction, `f32::mul_add` is a call of some hundred cycles.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn scale_pow2(self, v: Self::F, n: Self::F) -> Self::F {
        // In two steps, so that each factor is a normal number; only the second can round.
        zip(v, n, |v, n| {
            let n = n as i32;
            v * pow2(n >> 1) * pow2(n - (n >> 1))
        })
    }

    #[inline(always)]
    fn keep_first(self, v: Self::F, n: usize, other: Self::F) -> Self::F {
        std::array::from_fn(|i| if i < n { v[i] } else { other[i] })
    }

    #[inline(always)]
    fn sum(self, v: Self::F) -> f32 {
        let four: [f32; 4] = std::array::from_fn(|i| v[i] + v[i + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }

    #[inline(always)]
    fn largest(self, v: Self::F) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |max, v| if max > v { max } else { v })
    }

    #[inline(always)]
    fn transpose(self, tile: [Self::F; MAX_LANES]) -> [Self::F; MAX_LANES] {
        std::array::from_fn(|i| if i < N { std::array::from_fn(|j| tile[j][i]) } else { tile[i] })
    }

    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}
}
