//! Rounding and transposing one block of inputs.

use super::{GroupInput, Rows};
use crate::ops::cpu::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::ops::cpu::isa::{Avx2, Avx512};
use crate::quant::BLOCK_LEN;
use std::ops::Range;

/// What one call packs: runs of 32 columns of the rows of a block.
pub(super) struct Item<'a> {
    /// All columns of the block's rows.
    pub(super) x: Rows<'a>,
    /// The runs to pack, of `n_columns.div_ceil(32)`.
    pub(super) runs: Range<usize>,
}

/// Where an item goes, from its first run on: `[run][row][word of the run]`, and `[run][row]` for the groups.
pub(super) enum Outputs<'a> {
    /// The inputs' bits.
    Plain(&'a mut [u32]),
    /// The bits of the inputs rounded to bf16.
    Rounded(&'a mut [u32]),
    /// Pairs of bf16.
    Pairs(&'a mut [u32]),
    /// Four integers a word, and what kernels must know of each group.
    Groups(&'a mut [u32], &'a mut [GroupInput]),
}

/// Packs one item, compiled for each instruction set.
pub(super) fn pack(isa: Isa, item: Item<'_>, out: Outputs<'_>) {
    match isa {
        Isa::Scalar => pack_lanes(Portable, item, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the token proves that the CPU has these features.
        Isa::Avx2(token) => unsafe { pack_avx2(token, item, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512(token) => unsafe { pack_avx512(token, item, out) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn pack_avx2(_: Avx2, item: Item<'_>, out: Outputs<'_>) {
    pack_lanes(Portable, item, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn pack_avx512(token: Avx512, item: Item<'_>, out: Outputs<'_>) {
    pack_lanes(token, item, out);
}

/// The packing itself: plain loops that compilers turn into vector code. No closures here: they would be
/// compiled without the set's features.
///
/// Runs of 32 columns are taken for all rows in turn, four runs of a row together; zeros follow the last column.
#[inline(always)]
fn pack_lanes<R: Round>(round: R, item: Item<'_>, mut out: Outputs<'_>) {
    let Item { x, runs } = item;
    let mut run = runs.start;
    while run < runs.end {
        let n = if runs.end - run >= FOUR { FOUR } else { 1 };
        for (row, values) in x.values.chunks_exact(x.n_columns).enumerate() {
            let place = (run - runs.start) * x.n_rows + row;
            let values = &values[run * BLOCK_LEN..];
            if n == FOUR
                && let (Outputs::Groups(words, groups), Some(values)) =
                    (&mut out, values.as_chunks().0.first_chunk())
                && round.four_groups(values, (words, groups), (place, x.n_rows))
            {
                continue;
            }
            for i in 0..n {
                let (values, place) = (&values[(i * BLOCK_LEN).min(values.len())..], place + i * x.n_rows);
                match values.first_chunk() {
                    Some(values) => out.put(round, place, values),
                    None => out.put(round, place, &padded(values)),
                }
            }
        }
        run += n;
    }
}

/// Fewer than 32 values, then zeros.
#[cold]
fn padded(values: &[f32]) -> [f32; BLOCK_LEN] {
    let mut run = [0.0; BLOCK_LEN];
    run[..values.len()].copy_from_slice(values);
    run
}

impl Outputs<'_> {
    /// Rounds one run of one row and puts it in its place, counted in runs.
    #[inline(always)]
    fn put<R: Round>(&mut self, round: R, place: usize, values: &[f32; BLOCK_LEN]) {
        match self {
            Outputs::Plain(out) => {
                for (word, value) in run_at::<BLOCK_LEN>(out, place).iter_mut().zip(values) {
                    *word = value.to_bits();
                }
            }
            Outputs::Rounded(out) => {
                for (word, value) in run_at::<BLOCK_LEN>(out, place).iter_mut().zip(values) {
                    *word = round_bf16(*value) << 16;
                }
            }
            Outputs::Pairs(out) => round.pairs(values, run_at(out, place)),
            Outputs::Groups(words, groups) => {
                groups[place] = round_group(round, values, run_at(words, place));
            }
        }
    }
}

/// The `N` words of the run at `place`.
#[inline(always)]
fn run_at<const N: usize>(words: &mut [u32], place: usize) -> &mut [u32; N] {
    &mut words.as_chunks_mut().0[place]
}

/// The bf16 nearest to `value` (ties to even) in the low half of a word; a NaN stays one.
#[inline(always)]
fn round_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if value.is_nan() { bits >> 16 | 0x40 } else { rounded }
}

/// Rounds 32 inputs to 8 bits with one scale.
#[inline(always)]
fn round_group<R: Round>(
    round: R,
    values: &[f32; BLOCK_LEN],
    words: &mut [u32; BLOCK_LEN / 4],
) -> GroupInput {
    // Bits of absolute values order like the values, infinities above all numbers and NaNs above those.
    let max = f32::from_bits(round.largest_size(values));
    let inverse = 127.0 / max;
    if !max.is_finite() || !inverse.is_finite() {
        // Not a number, or zeros, or so small that 127/max overflows: below 2^-120, nothing beside any weight.
        words.fill(0);
        return GroupInput::new(if max.is_finite() { 0.0 } else { f32::NAN }, [0; 2]);
    }
    GroupInput::new(max / 127.0, round.integers(values, inverse, words))
}

/// Groups of a row that are rounded together: one vector then holds a number of each.
const FOUR: usize = 4;

/// The steps that compilers do not turn into good vector code. Every implementation gives the same bits.
trait Round: Copy {
    /// The largest of the values' bits without sign.
    fn largest_size(self, values: &[f32; BLOCK_LEN]) -> u32;

    /// `values * inverse` (at most 127) rounded to nearest even, the bytes four to a word, first in the low byte;
    /// returns the sum of each half.
    fn integers(self, values: &[f32; BLOCK_LEN], inverse: f32, words: &mut [u32; BLOCK_LEN / 4]) -> [i32; 2];

    /// The values rounded to bf16, two to a word, first in the low half.
    fn pairs(self, values: &[f32; BLOCK_LEN], words: &mut [u32; BLOCK_LEN / 2]);

    /// What [`round_group`] makes of each of four groups, put in the places `first + i * stride`. False if nothing
    /// was done: there is no faster way, or a group is one of those that become zeros.
    fn four_groups(
        self,
        _values: &[[f32; BLOCK_LEN]; FOUR],
        _out: (&mut [u32], &mut [GroupInput]),
        _places: (usize, usize),
    ) -> bool {
        false
    }
}

/// Plain loops.
#[derive(Clone, Copy)]
struct Portable;

impl Round for Portable {
    #[inline(always)]
    fn largest_size(self, values: &[f32; BLOCK_LEN]) -> u32 {
        let mut max = 0;
        for value in values {
            max = (value.to_bits() & 0x7fff_ffff).max(max);
        }
        max
    }

    #[inline(always)]
    fn integers(self, values: &[f32; BLOCK_LEN], inverse: f32, words: &mut [u32; BLOCK_LEN / 4]) -> [i32; 2] {
        // Adding 1.5 * 2^23 leaves the integer, rounded to nearest even, in the low bits of the sum.
        const ROUND: f32 = 12_582_912.0;
        let mut sums = [0; 2];
        for (quad, values) in values.as_chunks::<4>().0.iter().enumerate() {
            words[quad] = 0;
            for (i, value) in values.iter().enumerate() {
                let integer = (value * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits());
                words[quad] |= (integer & 0xff) << (8 * i);
                sums[2 * quad / words.len()] += integer.cast_signed();
            }
        }
        sums
    }

    #[inline(always)]
    fn pairs(self, values: &[f32; BLOCK_LEN], words: &mut [u32; BLOCK_LEN / 2]) {
        for (pair, values) in words.iter_mut().zip(values.as_chunks::<2>().0) {
            *pair = round_bf16(values[0]) | round_bf16(values[1]) << 16;
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{Avx512, BLOCK_LEN, FOUR, GroupInput, Round, run_at};
    use std::arch::x86_64::*;

    impl Round for Avx512 {
        #[inline(always)]
        fn largest_size(self, values: &[f32; BLOCK_LEN]) -> u32 {
            // SAFETY: the token proves that the CPU has the function's features.
            unsafe { largest_size(values) }
        }

        #[inline(always)]
        fn integers(
            self,
            values: &[f32; BLOCK_LEN],
            inverse: f32,
            words: &mut [u32; BLOCK_LEN / 4],
        ) -> [i32; 2] {
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
            values: &[[f32; BLOCK_LEN]; FOUR],
            out: (&mut [u32], &mut [GroupInput]),
            places: (usize, usize),
        ) -> bool {
            // SAFETY: as above.
            unsafe { four_groups(values, out, places) }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(values: &[f32; BLOCK_LEN]) -> [__m512; 2] {
        // SAFETY: the array has 32 numbers; the loads ask for no alignment.
        unsafe { [_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values.as_ptr().add(16))] }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    fn largest_size(values: &[f32; BLOCK_LEN]) -> u32 {
        let [a, b] = load(values);
        let size = _mm512_set1_epi32(i32::MAX);
        let a = _mm512_and_si512(_mm512_castps_si512(a), size);
        let b = _mm512_and_si512(_mm512_castps_si512(b), size);
        _mm512_reduce_max_epu32(_mm512_max_epu32(a, b))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn integers(values: &[f32; BLOCK_LEN], inverse: f32, words: &mut [u32; BLOCK_LEN / 4]) -> [i32; 2] {
        let ([a, b], inverse) = (load(values), _mm512_set1_ps(inverse));
        let a = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
        let b = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        // SAFETY: the array has 32 bytes, 16 for each half; the stores ask for no alignment.
        unsafe {
            _mm_storeu_si128(words.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(a));
            _mm_storeu_si128(words.as_mut_ptr().add(4).cast(), _mm512_cvtepi32_epi8(b));
        }
        [_mm512_reduce_add_epi32(a), _mm512_reduce_add_epi32(b)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn pairs(values: &[f32; BLOCK_LEN], words: &mut [u32; BLOCK_LEN / 2]) {
        let [a, b] = load(values).map(|values| {
            // Just below one half is added, and the last kept bit; NaN gets its quiet bit instead.
            // (vcvtneps2bf16 would flush denormals, which the other instruction sets keep.)
            let bits = _mm512_castps_si512(values);
            let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let sum = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
            _mm512_srli_epi32::<16>(_mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x0040_0000)))
        });
        // SAFETY: the array has 64 bytes, 32 for each half; the stores ask for no alignment.
        unsafe {
            _mm256_storeu_si256(words.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(a));
            _mm256_storeu_si256(words.as_mut_ptr().add(8).cast(), _mm512_cvtepi32_epi16(b));
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn four_groups(
        values: &[[f32; BLOCK_LEN]; FOUR],
        (words, groups): (&mut [u32], &mut [GroupInput]),
        (first, stride): (usize, usize),
    ) -> bool {
        let max = _mm_castsi128_ps(largest_sizes(values));
        let c = _mm_set1_ps(127.0);
        let (inverses, units) = (_mm_div_ps(c, max), _mm_div_ps(max, c));
        let larger = _mm_castsi128_ps(_mm_max_epu32(_mm_castps_si128(max), _mm_castps_si128(inverses)));
        if _mm_cmp_ps_mask::<_CMP_LT_OQ>(larger, _mm_set1_ps(f32::INFINITY)) != 15 {
            return false;
        }
        let mut inverse = [0.0; FOUR];
        // SAFETY: the array has 16 bytes; the store asks for no alignment.
        unsafe { _mm_storeu_ps(inverse.as_mut_ptr(), inverses) };
        let bytes = [0, 2].map(|i| two_groups([&values[i], &values[i + 1]], [inverse[i], inverse[i + 1]]));
        for (i, quarter) in [
            _mm512_castsi512_si256(bytes[0]),
            _mm512_extracti64x4_epi64::<1>(bytes[0]),
            _mm512_castsi512_si256(bytes[1]),
            _mm512_extracti64x4_epi64::<1>(bytes[1]),
        ]
        .into_iter()
        .enumerate()
        {
            let words: &mut [u32; BLOCK_LEN / 4] = run_at(words, first + i * stride);
            // SAFETY: the array has 32 bytes; the store asks for no alignment.
            unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), quarter) };
        }
        for (i, group) in group_inputs(units, minus_sums(bytes)).into_iter().enumerate() {
            groups[first + i * stride] = group;
        }
        true
    }

    /// `largest_size` of each group.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl")]
    fn largest_sizes(values: &[[f32; BLOCK_LEN]; FOUR]) -> __m128i {
        let size = _mm512_set1_epi32(i32::MAX);
        let [a, b, c, d] = [&values[0], &values[1], &values[2], &values[3]].map(|values| {
            let [low, high] = load(values).map(|values| _mm512_and_si512(_mm512_castps_si512(values), size));
            _mm512_max_epu32(low, high)
        });
        // Lanes of a and b, then of all four, come to alternate while they are reduced.
        let ab = _mm512_max_epu32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let cd = _mm512_max_epu32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        let all = _mm512_max_epu32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        let half = _mm256_max_epu32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
        _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half))
    }

    /// The integers of two groups.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn two_groups(values: [&[f32; BLOCK_LEN]; 2], inverses: [f32; 2]) -> __m512i {
        let words = [0, 1].map(|i| {
            let inverse = _mm512_set1_ps(inverses[i]);
            let [low, high] = load(values[i]).map(|v| _mm512_cvtps_epi32(_mm512_mul_ps(v, inverse)));
            _mm512_packs_epi32(low, high)
        });
        // Each lane of 128 bits has a word of each of the four vectors.
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words[0], words[1]))
    }

    /// The sums, times -1, of the first halves of the four groups and of the second ones.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn minus_sums(bytes: [__m512i; 2]) -> [__m128i; 2] {
        // The instruction sums unsigned bytes: 16 times 128 too much.
        let [a, b] = bytes.map(|bytes| {
            _mm512_sad_epu8(_mm512_xor_si512(bytes, _mm512_set1_epi8(-128)), _mm512_setzero_si512())
        });
        let sums = _mm512_add_epi64(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let sums = _mm256_permutevar8x32_epi32(_mm512_cvtepi64_epi32(sums), order);
        let minus = _mm256_sub_epi32(_mm256_set1_epi32(16 * 128), sums);
        [_mm256_castsi256_si128(minus), _mm256_extracti128_si256::<1>(minus)]
    }

    /// [`GroupInput::new`] of each group.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl")]
    fn group_inputs(units: __m128, [first, second]: [__m128i; 2]) -> [GroupInput; FOUR] {
        let minus = [_mm_add_epi32(first, second), first, second];
        let scaled = minus.map(|m| _mm_mul_ps(units, _mm_cvtepi32_ps(_mm_sub_epi32(_mm_setzero_si128(), m))));
        let [all, first, second] = minus.map(|m| _mm_castsi128_ps(m));
        let low = transpose([units, all, first, second]);
        let high = transpose([scaled[0], scaled[1], scaled[2], _mm_setzero_ps()]);
        [0, 1, 2, 3].map(|i| {
            // SAFETY: both are 32 bytes; a group is a scale, three sums, three products and a zero, in this order.
            unsafe { std::mem::transmute::<__m256, GroupInput>(_mm256_set_m128(high[i], low[i])) }
        })
    }

    /// Rows become columns.
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
}
