//! The steps of packing with 512-bit vectors. No closures here: they would be compiled without the set's features.

#![allow(unsafe_code, reason = "intrinsics")]

use super::{Avx512, BLOCK_LEN, FOUR, GroupInput, GroupOutputs, Round, run_at};
use std::arch::x86_64::*;

impl Round for Avx512 {
    #[inline(always)]
    fn largest_size(self, values: &[f32; BLOCK_LEN]) -> u32 {
        // SAFETY: the token proves that the CPU has the function's features.
        unsafe { largest_size(values) }
    }

    #[inline(always)]
    fn integers(self, values: &[f32; BLOCK_LEN], inverse: f32, words: &mut [u32; BLOCK_LEN / 4]) -> [i32; 2] {
        // SAFETY: as above.
        unsafe { integers(values, inverse, words) }
    }

    #[inline(always)]
    fn pairs(self, values: &[f32; BLOCK_LEN], words: &mut [u32; BLOCK_LEN / 2]) {
        // SAFETY: as above.
        unsafe { pairs(values, words) }
    }

    #[inline(always)]
    fn four_groups(
        self,
        values: &[[f32; BLOCK_LEN]],
        out: GroupOutputs<'_>,
        first: usize,
        stride: usize,
    ) -> bool {
        // SAFETY: as above.
        unsafe { four_groups(values, out, first, stride) }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(values: &[f32; BLOCK_LEN]) -> [__m512; 2] {
    // SAFETY: the array has 32 numbers; the loads need no alignment.
    unsafe { [_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values.as_ptr().add(16))] }
}

/// The bits, without the sign, of the larger of the values `i` and `i + 16`.
#[inline]
#[target_feature(enable = "avx512f")]
fn sizes(values: &[f32; BLOCK_LEN]) -> __m512i {
    let ([a, b], size) = (load(values), _mm512_set1_epi32(i32::MAX));
    let a = _mm512_and_si512(_mm512_castps_si512(a), size);
    _mm512_max_epu32(a, _mm512_and_si512(_mm512_castps_si512(b), size))
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn largest_size(values: &[f32; BLOCK_LEN]) -> u32 {
    _mm512_reduce_max_epu32(sizes(values))
}

/// The integers of a group as 32-bit integers.
#[inline]
#[target_feature(enable = "avx512f")]
fn nearest(values: &[f32; BLOCK_LEN], inverse: f32) -> [__m512i; 2] {
    let ([a, b], inverse) = (load(values), _mm512_set1_ps(inverse));
    [_mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse))]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn integers(values: &[f32; BLOCK_LEN], inverse: f32, words: &mut [u32; BLOCK_LEN / 4]) -> [i32; 2] {
    let [a, b] = nearest(values, inverse);
    // SAFETY: the array has 32 bytes, 16 for each half; the stores need no alignment.
    unsafe {
        _mm_storeu_si128(words.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(a));
        _mm_storeu_si128(words.as_mut_ptr().add(4).cast(), _mm512_cvtepi32_epi8(b));
    }
    [_mm512_reduce_add_epi32(a), _mm512_reduce_add_epi32(b)]
}

/// The bf16 nearest to each value, in the low half of its lane. (vcvtneps2bf16 would flush denormals, which the other
/// instruction sets keep.)
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(values: __m512) -> __m512i {
    // Add just below one half, plus the last kept bit, to round to even. NaN gets its quiet bit instead.
    let bits = _mm512_castps_si512(values);
    let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let sum = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
    _mm512_srli_epi32::<16>(_mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x0040_0000)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pairs(values: &[f32; BLOCK_LEN], words: &mut [u32; BLOCK_LEN / 2]) {
    let [a, b] = load(values);
    let (a, b) = (rounded(a), rounded(b));
    // SAFETY: the array has 64 bytes, 32 for each half; the stores need no alignment.
    unsafe {
        _mm256_storeu_si256(words.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(a));
        _mm256_storeu_si256(words.as_mut_ptr().add(8).cast(), _mm512_cvtepi32_epi16(b));
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn four_groups(values: &[[f32; BLOCK_LEN]], out: GroupOutputs<'_>, first: usize, stride: usize) -> bool {
    let GroupOutputs { words, groups } = out;
    let max = _mm_castsi128_ps(largest_sizes(values));
    let c = _mm_set1_ps(127.0);
    let (inverses, units) = (_mm_div_ps(c, max), _mm_div_ps(max, c));
    let larger = _mm_castsi128_ps(_mm_max_epu32(_mm_castps_si128(max), _mm_castps_si128(inverses)));
    if _mm_cmp_ps_mask::<_CMP_LT_OQ>(larger, _mm_set1_ps(f32::INFINITY)) != 15 {
        return false;
    }
    let mut inverse = [0.0; FOUR];
    // SAFETY: the array has 16 bytes; the store needs no alignment.
    unsafe { _mm_storeu_ps(inverse.as_mut_ptr(), inverses) };
    let a = two_groups([&values[0], &values[1]], [inverse[0], inverse[1]]);
    let b = two_groups([&values[2], &values[3]], [inverse[2], inverse[3]]);
    let bytes = [
        _mm512_castsi512_si256(a),
        _mm512_extracti64x4_epi64::<1>(a),
        _mm512_castsi512_si256(b),
        _mm512_extracti64x4_epi64::<1>(b),
    ];
    let inputs = group_inputs(units, minus_sums(a, b));
    for i in 0..FOUR {
        let words: &mut [u32; BLOCK_LEN / 4] = run_at(words, first + i * stride);
        // SAFETY: the array has 32 bytes; the store needs no alignment.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), bytes[i]) };
        groups[first + i * stride] = inputs[i];
    }
    true
}

/// `largest_size` of each group.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn largest_sizes(values: &[[f32; BLOCK_LEN]]) -> __m128i {
    let (a, b, c, d) = (sizes(&values[0]), sizes(&values[1]), sizes(&values[2]), sizes(&values[3]));
    // The reduction interleaves the lanes of a and b, then of all four groups.
    let ab = _mm512_max_epu32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let cd = _mm512_max_epu32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    let all = _mm512_max_epu32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    let half = _mm256_max_epu32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
    _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half))
}

/// The integers of a group in 16 bits: each 128-bit lane has a word of its first half and one of its second half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn shorts(values: &[f32; BLOCK_LEN], inverse: f32) -> __m512i {
    let [a, b] = nearest(values, inverse);
    _mm512_packs_epi32(a, b)
}

/// The integers of two groups.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn two_groups(values: [&[f32; BLOCK_LEN]; 2], inverses: [f32; 2]) -> __m512i {
    let bytes = _mm512_packs_epi16(shorts(values[0], inverses[0]), shorts(values[1], inverses[1]));
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(order, bytes)
}

/// The sums of each half group as unsigned bytes, each byte too large by 128, in the halves of its 128 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn half_sums(bytes: __m512i) -> __m512i {
    _mm512_sad_epu8(_mm512_xor_si512(bytes, _mm512_set1_epi8(-128)), _mm512_setzero_si512())
}

/// The sums, times -1, of the first halves and of the second halves of the four groups.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn minus_sums(a: __m512i, b: __m512i) -> [__m128i; 2] {
    let (a, b) = (half_sums(a), half_sums(b));
    let sums = _mm512_add_epi64(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let sums = _mm256_permutevar8x32_epi32(_mm512_cvtepi64_epi32(sums), order);
    let minus = _mm256_sub_epi32(_mm256_set1_epi32(16 * 128), sums);
    [_mm256_castsi256_si128(minus), _mm256_extracti128_si256::<1>(minus)]
}

/// The scales times the sums.
#[inline]
#[target_feature(enable = "avx512f")]
fn scaled(units: __m128, minus_sums: __m128i) -> __m128 {
    _mm_mul_ps(units, _mm_cvtepi32_ps(_mm_sub_epi32(_mm_setzero_si128(), minus_sums)))
}

/// [`GroupInput::new`] of each group.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn group_inputs(units: __m128, [first, second]: [__m128i; 2]) -> [GroupInput; FOUR] {
    let all = _mm_add_epi32(first, second);
    let sums = [_mm_castsi128_ps(all), _mm_castsi128_ps(first), _mm_castsi128_ps(second)];
    let low = transpose([units, sums[0], sums[1], sums[2]]);
    let zero = _mm_setzero_ps();
    let high = transpose([scaled(units, all), scaled(units, first), scaled(units, second), zero]);
    let mut inputs = [GroupInput::default(); FOUR];
    for i in 0..FOUR {
        // SAFETY: a group is 32 bytes: a scale, three sums, three products and a zero, in this order; the store
        // needs no alignment.
        unsafe { _mm256_storeu_ps((&raw mut inputs[i]).cast(), _mm256_set_m128(high[i], low[i])) };
    }
    inputs
}

/// Transposes a 4 x 4 matrix.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn transpose([a, b, c, d]: [__m128; 4]) -> [__m128; 4] {
    let (ab, cd) = (_mm_unpacklo_ps(a, b), _mm_unpacklo_ps(c, d));
    let (ab_high, cd_high) = (_mm_unpackhi_ps(a, b), _mm_unpackhi_ps(c, d));
    [
        _mm_movelh_ps(ab, cd),
        _mm_movehl_ps(cd, ab),
        _mm_movelh_ps(ab_high, cd_high),
        _mm_movehl_ps(cd_high, ab_high),
    ]
}
