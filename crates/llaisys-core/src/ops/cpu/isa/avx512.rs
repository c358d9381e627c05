//! Lanes of 512 bits, without and with the instructions for bf16. The functions here are inlined into
//! [`entry`] and [`entry_bf16`], which have the features enabled.

#![allow(unsafe_code, reason = "intrinsics")]

mod transpose;

use super::lanes::{EIGHT, Kernel, Lanes, MAX_LANES};
use super::{Avx512, Avx512Bf16};
use half::f16;
use std::arch::x86_64::*;

const N: usize = 16;

/// # Safety
/// The CPU has the features named below.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn entry<K: Kernel>(lanes: Avx512, kernel: K) {
    kernel.run(lanes);
}

/// # Safety
/// The CPU has the features named below.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c")]
unsafe fn entry_bf16<K: Kernel>(lanes: Avx512Bf16, kernel: K) {
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
fn mask(n: usize) -> __mmask16 {
    ((1_u32 << n.min(N)) - 1) as __mmask16
}

/// The operations that differ between the two sets.
pub(crate) trait Bf16Pairs: Copy {
    /// [`Lanes::DOTS_PAIRS`]
    const DOTS: bool = false;
    /// [`Lanes::enter`]
    fn enter<K: Kernel>(self, kernel: K);
    /// [`Lanes::dot_pairs`]
    fn dot(self, _a: __m512, _b: __m512, _acc: __m512) -> __m512 {
        unreachable!("this instruction set does not multiply pairs")
    }
    /// `acc` plus the products of the pair `b` with each pair of `a`, as in [`Lanes::dot_pairs`].
    fn dot_one(self, _a: __m256, _b: f32, _acc: __m256) -> __m256 {
        unreachable!("this instruction set does not multiply pairs")
    }
    /// [`Lanes::round_pairs`]
    fn narrow(self, _first: __m512, _second: __m512) -> __m512 {
        unreachable!("this instruction set does not multiply pairs")
    }
    /// [`Lanes::load_i8_pairs`]
    fn widen(self, x: &[i8]) -> __m512;
}

impl Bf16Pairs for Avx512 {
    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) {
        // SAFETY: `self` exists only if `Avx512::detect` found every feature that `entry` is compiled for.
        unsafe { entry(self, kernel) }
    }

    #[inline(always)]
    fn widen(self, x: &[i8]) -> __m512 {
        let x = &x[..2 * N];
        // SAFETY: 32 elements of 8 bits (sliced above); `self` proves the features.
        unsafe {
            let pairs = _mm512_cvtepi8_epi16(_mm256_loadu_si256(x.as_ptr().cast()));
            let even = _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(pairs));
            let odd = _mm512_srai_epi32::<16>(pairs);
            self.pair(_mm512_cvtepi32_ps(even), _mm512_cvtepi32_ps(odd))
        }
    }
}

impl Bf16Pairs for Avx512Bf16 {
    const DOTS: bool = true;

    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) {
        // SAFETY: `self` exists only if `Avx512Bf16::detect` found every feature that `entry_bf16` is compiled for.
        unsafe { entry_bf16(self, kernel) }
    }

    #[inline(always)]
    fn dot(self, a: __m512, b: __m512, acc: __m512) -> __m512 {
        // SAFETY: any bits are pairs of bf16, of the same size; `self` proves the features.
        unsafe {
            let (a, b) =
                (std::mem::transmute::<__m512, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b));
            _mm512_dpbf16_ps(acc, a, b)
        }
    }

    #[inline(always)]
    fn narrow(self, first: __m512, second: __m512) -> __m512 {
        // SAFETY: pairs of bf16 as bits, of the same size; `self` proves the features.
        unsafe { std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second, first)) }
    }

    #[inline(always)]
    fn dot_one(self, a: __m256, b: f32, acc: __m256) -> __m256 {
        // SAFETY: any bits are pairs of bf16, of the same size; `self` proves the features.
        unsafe {
            let b = _mm256_set1_ps(b);
            let (a, b) =
                (std::mem::transmute::<__m256, __m256bh>(a), std::mem::transmute::<__m256, __m256bh>(b));
            _mm256_dpbf16_ps(acc, a, b)
        }
    }

    #[inline(always)]
    fn widen(self, x: &[i8]) -> __m512 {
        let x = &x[..2 * N];
        // SAFETY: 32 elements of 8 bits (sliced above); `self` proves the features.
        unsafe {
            let numbers = |at: usize| {
                let bytes = _mm_loadu_si128(x.as_ptr().add(at).cast());
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
            };
            self.narrow(numbers(0), numbers(N))
        }
    }
}

impl<S: Bf16Pairs> Lanes for S {
    type F = __m512;
    const N: usize = N;
    const TILE_ROWS: usize = 6;
    const TALL_ROWS: usize = 8;
    const DOTS_PAIRS: bool = S::DOTS;

    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) {
        Bf16Pairs::enter(self, kernel);
    }

    lanewise! {
        add(a, b) = _mm512_add_ps;
        sub(a, b) = _mm512_sub_ps;
        mul(a, b) = _mm512_mul_ps;
        div(a, b) = _mm512_div_ps;
        mul_add(a, b, c) = _mm512_fmadd_ps;
        max(a, b) = _mm512_max_ps;
        min(a, b) = _mm512_min_ps;
        scale_pow2(v, n) = _mm512_scalef_ps;
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, x: &[f32]) -> __m512 {
        let x = &x[..N];
        // SAFETY: 16 elements (sliced above); `self` proves the features.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn load_first(self, x: &[f32]) -> __m512 {
        // SAFETY: only elements below `len` are read (the mask); `self` proves the features.
        unsafe { _mm512_maskz_loadu_ps(mask(x.len()), x.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, v: __m512, out: &mut [f32]) {
        let out = &mut out[..N];
        // SAFETY: 16 elements (sliced above); `self` proves the features.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn store_first(self, v: __m512, out: &mut [f32]) {
        // A masked store is slow (Zen 4), and its data cannot be forwarded to a load that follows.
        if out.len() >= N {
            return self.store(v, out);
        }
        // SAFETY: only elements below `len` are written (the mask); `self` proves the features.
        unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr(), mask(out.len()), v) }
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u16]) -> __m512 {
        let x = &x[..N];
        // SAFETY: 16 elements of 16 bits (sliced above); `self` proves the features.
        unsafe {
            let bits = _mm256_loadu_si256(x.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        }
    }

    #[inline(always)]
    fn load_bf16_first(self, x: &[u16]) -> __m512 {
        // SAFETY: only elements below `len` are read (the mask); `self` proves the features.
        unsafe {
            let bits = _mm256_maskz_loadu_epi16(mask(x.len()), x.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        }
    }

    #[inline(always)]
    fn round_bf16(self, v: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe {
            // Add just below one half, plus the last kept bit, to round to even. NaN gets its quiet bit instead.
            // (vcvtneps2bf16 would flush denormals, which the other instruction sets keep.)
            let bits = _mm512_castps_si512(v);
            let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let sum = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let all = _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x0040_0000));
            _mm512_castsi512_ps(_mm512_and_si512(all, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
        }
    }

    #[inline(always)]
    fn store_bf16_first(self, v: __m512, out: &mut [u16]) {
        // SAFETY: only elements below `len` are written (the mask); `self` proves the features.
        unsafe {
            let rounded = _mm512_castps_si512(self.round_bf16(v));
            let high = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded));
            if out.len() >= N {
                return _mm256_storeu_si256(out.as_mut_ptr().cast(), high);
            }
            _mm256_mask_storeu_epi16(out.as_mut_ptr().cast(), mask(out.len()), high);
        }
    }

    #[inline(always)]
    fn load_pairs(self, x: &[u16]) -> __m512 {
        let x = &x[..2 * N];
        // SAFETY: 32 elements of 16 bits (sliced above); `self` proves the features.
        unsafe { _mm512_castsi512_ps(_mm512_loadu_si512(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_pairs_first(self, x: &[u16]) -> __m512 {
        let n = x.len().min(2 * N) as u32;
        // SAFETY: only elements below `len` are read (the mask, of 32 bits); `self` proves the features.
        unsafe {
            let mask = u32::MAX.unbounded_shr(32 - n);
            _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, x.as_ptr().cast()))
        }
    }

    #[inline(always)]
    fn zip_pairs_first(self, low: &[u16], high: &[u16]) -> __m512 {
        // SAFETY: only elements below each `len` are read (the masks); `self` proves the features.
        unsafe {
            let low = _mm256_maskz_loadu_epi16(mask(low.len()), low.as_ptr().cast());
            let high = _mm256_maskz_loadu_epi16(mask(high.len()), high.as_ptr().cast());
            let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(high));
            _mm512_castsi512_ps(_mm512_or_si512(_mm512_cvtepu16_epi32(low), high))
        }
    }

    #[inline(always)]
    fn zip_pairs(self, low: &[u16], high: &[u16]) -> [__m512; 2] {
        let (low, high) = (&low[..2 * N], &high[..2 * N]);
        // SAFETY: 32 elements of 16 bits each (sliced above); `self` proves the features.
        unsafe {
            let low = _mm512_loadu_si512(low.as_ptr().cast());
            let high = _mm512_loadu_si512(high.as_ptr().cast());
            // Index i selects element i of `low`, index 32 + i element i of `high`.
            let places = _mm512_add_epi32(
                _mm512_set1_epi32(32 << 16),
                _mm512_mullo_epi32(
                    _mm512_set1_epi32(0x0001_0001),
                    _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                ),
            );
            let upper = _mm512_add_epi16(places, _mm512_set1_epi16(16));
            [
                _mm512_castsi512_ps(_mm512_permutex2var_epi16(low, places, high)),
                _mm512_castsi512_ps(_mm512_permutex2var_epi16(low, upper, high)),
            ]
        }
    }

    #[inline(always)]
    fn dot_pairs(self, a: __m512, b: __m512, acc: __m512) -> __m512 {
        self.dot(a, b, acc)
    }

    #[inline(always)]
    fn round_pairs(self, first: __m512, second: __m512) -> __m512 {
        self.narrow(first, second)
    }

    #[inline(always)]
    fn dot_eight(self, queries: &[[f32; EIGHT]], keys: [&[u16]; MAX_LANES]) -> [__m512; EIGHT] {
        // Pairs of a key in sequence: 16 keys have more addresses than there are registers for.
        const IN_SEQUENCE: usize = 4;
        assert!(keys.iter().all(|key| key.len() >= 2 * queries.len()), "a key with too few pairs");
        let (several, rest) = queries.as_chunks::<IN_SEQUENCE>();
        // SAFETY: every key has two elements for each query, so pairs `0..queries.len()` (asserted); `self` proves the
        // features.
        unsafe {
            let mut pairs = [std::ptr::null::<f32>(); N];
            for k in 0..N {
                pairs[k] = keys[k].as_ptr().cast();
            }
            let mut sums = [_mm256_setzero_ps(); N];
            for (group, several) in several.iter().enumerate() {
                let mut queries = [_mm256_setzero_ps(); IN_SEQUENCE];
                for i in 0..IN_SEQUENCE {
                    queries[i] = _mm256_loadu_ps(several[i].as_ptr());
                }
                for k in 0..N {
                    for i in 0..IN_SEQUENCE {
                        sums[k] = self.dot_one(
                            queries[i],
                            pairs[k].add(group * IN_SEQUENCE + i).read_unaligned(),
                            sums[k],
                        );
                    }
                }
            }
            for (i, queries) in (queries.len() - rest.len()..).zip(rest) {
                let queries = _mm256_loadu_ps(queries.as_ptr());
                for k in 0..N {
                    sums[k] = self.dot_one(queries, pairs[k].add(i).read_unaligned(), sums[k]);
                }
            }
            transpose::eight(sums)
        }
    }

    #[inline(always)]
    fn split_pairs(self, v: __m512) -> (__m512, __m512) {
        // SAFETY: `self` proves the features.
        unsafe {
            let bits = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)), _mm512_castsi512_ps(odd))
        }
    }

    #[inline(always)]
    fn pair(self, low: __m512, high: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe {
            let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(low));
            _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(high)))
        }
    }

    #[inline(always)]
    fn load_f16_first(self, x: &[f16]) -> __m512 {
        // SAFETY: only elements below `len` are read (the mask); `self` proves the features.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(x.len()), x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store_f16_first(self, v: __m512, out: &mut [f16]) {
        // SAFETY: only elements below `len` are written (the mask); `self` proves the features.
        unsafe {
            let bits = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v);
            if out.len() >= N {
                return _mm256_storeu_si256(out.as_mut_ptr().cast(), bits);
            }
            _mm256_mask_storeu_epi16(out.as_mut_ptr().cast(), mask(out.len()), bits);
        }
    }

    #[inline(always)]
    fn load_i8_first(self, x: &[i8]) -> __m512 {
        // SAFETY: only elements below `len` are read (the mask); `self` proves the features.
        unsafe {
            let bytes = _mm_maskz_loadu_epi8(mask(x.len()), x.as_ptr());
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
        }
    }

    #[inline(always)]
    fn store_i8_first(self, v: __m512, out: &mut [i8]) {
        // SAFETY: only elements below `len` are written (the mask); `self` proves the features.
        unsafe {
            let bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v));
            if out.len() >= N {
                return _mm_storeu_si128(out.as_mut_ptr().cast(), bytes);
            }
            _mm_mask_storeu_epi8(out.as_mut_ptr(), mask(out.len()), bytes);
        }
    }

    #[inline(always)]
    fn load_i8_pairs(self, x: &[i8]) -> __m512 {
        self.widen(x)
    }

    #[inline(always)]
    fn keep_first(self, v: __m512, n: usize, other: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_mask_mov_ps(other, mask(n), v) }
    }

    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe {
            let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }

    #[inline(always)]
    fn largest(self, v: __m512) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe {
            let v = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        }
    }

    #[inline(always)]
    fn transpose(self, tile: [__m512; MAX_LANES]) -> [__m512; MAX_LANES] {
        // SAFETY: `self` proves the features.
        unsafe { transpose::sixteen(tile) }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch is a hint and reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}
