//! Lanes of 256 bits. The functions here are inlined into [`entry`], which has the features enabled.

#![allow(unsafe_code, reason = "intrinsics")]

use super::Avx2;
use super::lanes::{Kernel, Lanes, MAX_LANES};
use half::f16;
use std::arch::x86_64::*;

const N: usize = 8;

/// `N` words with all bits set, then `N` zeros: a mask of the first `n` lanes starts at `N - n`.
static MASKS: [i32; 2 * N] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

/// # Safety
/// The CPU has the features named below.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn entry<K: Kernel>(lanes: Avx2, kernel: K) {
    kernel.run(lanes);
}

/// Lane-wise operations of one intrinsic each.
macro_rules! lanewise {
    ($($name:ident($($arg:ident),+) = $intrinsic:ident;)+) => {$(
        #[inline(always)]
        fn $name(self, $($arg: Self::F),+) -> Self::F {
            // SAFETY: `self` proves the features (see `enter`).
            unsafe { $intrinsic($($arg),+) }
        }
    )+};
}

/// A mask of the first `min(n, N)` lanes.
#[inline(always)]
fn mask(n: usize) -> __m256i {
    let start = N - n.min(N);
    // SAFETY: `start <= N`, so 8 of the 16 elements follow; the callers' token proves the features.
    unsafe { _mm256_loadu_si256(MASKS.as_ptr().add(start).cast()) }
}

/// The first `min(M, len)` elements, then zeros.
#[inline(always)]
fn first<T: Copy + Default, const M: usize>(x: &[T]) -> [T; M] {
    let mut first = [T::default(); M];
    let n = x.len().min(M);
    first[..n].copy_from_slice(&x[..n]);
    first
}

/// Writes the first `min(N, len)` elements. A copy of constant length is a store, any other a call.
#[inline(always)]
fn store_array<T: Copy>(x: [T; N], out: &mut [T]) {
    match out.first_chunk_mut() {
        Some(out) => *out = x,
        None => out.copy_from_slice(&x[..out.len()]),
    }
}

impl Lanes for Avx2 {
    type F = __m256;
    const N: usize = N;
    const TILE_ROWS: usize = 2;
    const TALL_ROWS: usize = 6;
    const MANY_ROWS: usize = Self::TALL_ROWS;

    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) {
        // SAFETY: `self` exists only if `Avx2::detect` found avx2, fma and f16c.
        unsafe { entry(self, kernel) }
    }

    lanewise! {
        add(a, b) = _mm256_add_ps;
        sub(a, b) = _mm256_sub_ps;
        mul(a, b) = _mm256_mul_ps;
        div(a, b) = _mm256_div_ps;
        mul_add(a, b, c) = _mm256_fmadd_ps;
        max(a, b) = _mm256_max_ps;
        min(a, b) = _mm256_min_ps;
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, x: &[f32]) -> __m256 {
        let x = &x[..N];
        // SAFETY: 8 elements (sliced above); `self` proves the features.
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn load_first(self, x: &[f32]) -> __m256 {
        if x.len() >= N {
            return self.load(x);
        }
        // SAFETY: only elements below `len` are read (the mask); `self` proves the features.
        unsafe { _mm256_maskload_ps(x.as_ptr(), mask(x.len())) }
    }

    #[inline(always)]
    fn store(self, v: __m256, out: &mut [f32]) {
        let out = &mut out[..N];
        // SAFETY: 8 elements (sliced above); `self` proves the features.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn store_first(self, v: __m256, out: &mut [f32]) {
        if out.len() >= N {
            return self.store(v, out);
        }
        // SAFETY: only elements below `len` are written (the mask); `self` proves the features.
        unsafe { _mm256_maskstore_ps(out.as_mut_ptr(), mask(out.len()), v) }
    }

    #[inline(always)]
    fn load_bf16_first(self, x: &[u16]) -> __m256 {
        if x.len() >= N { self.load_bf16(x) } else { self.load_bf16(&first::<_, N>(x)) }
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u16]) -> __m256 {
        let x = &x[..N];
        // SAFETY: 8 elements (sliced above); `self` proves the features.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    fn round_bf16(self, v: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe {
            // Add just below one half, plus the last kept bit, to round to even. NaN gets its quiet bit instead.
            let bits = _mm256_castps_si256(v);
            let last = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let sum = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let rounded = _mm256_blendv_epi8(sum, quiet, nan);
            _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(0xffff_0000_u32 as i32)))
        }
    }

    #[inline(always)]
    fn store_bf16_first(self, v: __m256, out: &mut [u16]) {
        let mut rounded = [0_u16; N];
        // SAFETY: `rounded` has 8 elements of 16 bits; `self` proves the features.
        unsafe {
            let high = _mm256_srli_epi32::<16>(_mm256_castps_si256(self.round_bf16(v)));
            let (low, upper) = (_mm256_castsi256_si128(high), _mm256_extracti128_si256::<1>(high));
            _mm_storeu_si128(rounded.as_mut_ptr().cast(), _mm_packus_epi32(low, upper));
        }
        store_array(rounded, out);
    }

    #[inline(always)]
    fn load_pairs(self, x: &[u16]) -> __m256 {
        let x = &x[..2 * N];
        // SAFETY: 16 elements of 16 bits (sliced above); `self` proves the features.
        unsafe { _mm256_castsi256_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_pairs_first(self, x: &[u16]) -> __m256 {
        if x.len() >= 2 * N { self.load_pairs(x) } else { self.load_pairs(&first::<_, { 2 * N }>(x)) }
    }

    #[inline(always)]
    fn split_pairs(self, v: __m256) -> (__m256, __m256) {
        // SAFETY: `self` proves the features.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)), _mm256_castsi256_ps(odd))
        }
    }

    #[inline(always)]
    fn pair(self, low: __m256, high: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe {
            let low = _mm256_srli_epi32::<16>(_mm256_castps_si256(low));
            _mm256_or_ps(_mm256_castsi256_ps(low), high)
        }
    }

    #[inline(always)]
    fn load_f16_first(self, x: &[f16]) -> __m256 {
        let rest: [f16; N];
        let x = if x.len() >= N {
            &x[..N]
        } else {
            rest = first(x);
            &rest
        };
        // SAFETY: 8 elements of 16 bits (sliced above); `self` proves the features.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store_f16_first(self, v: __m256, out: &mut [f16]) {
        let mut rounded = [f16::ZERO; N];
        // SAFETY: `rounded` has 8 elements of 16 bits; `self` proves the features.
        unsafe {
            let bits = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v);
            _mm_storeu_si128(rounded.as_mut_ptr().cast(), bits);
        }
        store_array(rounded, out);
    }

    #[inline(always)]
    fn load_i8_first(self, x: &[i8]) -> __m256 {
        let rest: [i8; N];
        let x = if x.len() >= N {
            &x[..N]
        } else {
            rest = first(x);
            &rest
        };
        // SAFETY: 8 elements of 8 bits (sliced above); `self` proves the features.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn store_i8_first(self, v: __m256, out: &mut [i8]) {
        let mut rounded = [0_i32; N];
        // SAFETY: `rounded` has 8 elements of 32 bits; `self` proves the features.
        unsafe { _mm256_storeu_si256(rounded.as_mut_ptr().cast(), _mm256_cvtps_epi32(v)) }
        for (out, x) in out.iter_mut().zip(rounded) {
            *out = x as i8;
        }
    }

    #[inline(always)]
    fn load_i8_pairs(self, x: &[i8]) -> __m256 {
        let x = &x[..2 * N];
        // SAFETY: 16 elements of 8 bits (sliced above); `self` proves the features.
        unsafe {
            let pairs = _mm256_cvtepi8_epi16(_mm_loadu_si128(x.as_ptr().cast()));
            let even = _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(pairs));
            let odd = _mm256_srai_epi32::<16>(pairs);
            self.pair(_mm256_cvtepi32_ps(even), _mm256_cvtepi32_ps(odd))
        }
    }

    #[inline(always)]
    fn scale_pow2(self, v: __m256, n: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe {
            // In two steps, so that each factor is a normal number; only the second can round.
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            let bias = _mm256_set1_epi32(127);
            let first = _mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias));
            let second = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias));
            let v = _mm256_mul_ps(v, _mm256_castsi256_ps(first));
            _mm256_mul_ps(v, _mm256_castsi256_ps(second))
        }
    }

    #[inline(always)]
    fn keep_first(self, v: __m256, n: usize, other: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_blendv_ps(other, v, _mm256_castsi256_ps(mask(n))) }
    }

    #[inline(always)]
    fn sum(self, v: __m256) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe {
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }

    #[inline(always)]
    fn largest(self, v: __m256) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe {
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        }
    }

    #[inline(always)]
    fn transpose(self, tile: [__m256; MAX_LANES]) -> [__m256; MAX_LANES] {
        // SAFETY: `self` proves the features.
        unsafe {
            // Pairs of rows, then pairs of pairs, then the 128-bit halves.
            let mut t = [_mm256_setzero_ps(); N];
            for i in 0..4 {
                t[2 * i] = _mm256_unpacklo_ps(tile[2 * i], tile[2 * i + 1]);
                t[2 * i + 1] = _mm256_unpackhi_ps(tile[2 * i], tile[2 * i + 1]);
            }
            let mut u = t;
            for i in 0..2 {
                let i = 4 * i;
                u[i] = _mm256_shuffle_ps::<0x44>(t[i], t[i + 2]);
                u[i + 1] = _mm256_shuffle_ps::<0xee>(t[i], t[i + 2]);
                u[i + 2] = _mm256_shuffle_ps::<0x44>(t[i + 1], t[i + 3]);
                u[i + 3] = _mm256_shuffle_ps::<0xee>(t[i + 1], t[i + 3]);
            }
            let mut out = tile;
            for i in 0..4 {
                out[i] = _mm256_permute2f128_ps::<0x20>(u[i], u[i + 4]);
                out[i + 4] = _mm256_permute2f128_ps::<0x31>(u[i], u[i + 4]);
            }
            out
        }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch is a hint and reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}
