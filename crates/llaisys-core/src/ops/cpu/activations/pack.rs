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

/// Where an item goes, from its first run on: `[word][row]`, and `[run][row]` for the groups.
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
/// Runs of 32 columns are taken for all rows in turn, so that the places they go to, which are neighbours, stay
/// in the cache; zeros follow the last column.
#[inline(always)]
fn pack_lanes<R: Round>(round: R, item: Item<'_>, mut out: Outputs<'_>) {
    let Item { x, runs } = item;
    for run in runs.clone() {
        for (row, values) in x.values.chunks_exact(x.n_columns).enumerate() {
            let place = Place { run: run - runs.start, row, n_rows: x.n_rows };
            let values = &values[run * BLOCK_LEN..];
            match values.first_chunk() {
                Some(values) => out.put(round, place, values),
                None => out.put(round, place, &padded(values)),
            }
        }
    }
}

/// Fewer than 32 values, then zeros.
#[cold]
fn padded(values: &[f32]) -> [f32; BLOCK_LEN] {
    let mut run = [0.0; BLOCK_LEN];
    run[..values.len()].copy_from_slice(values);
    run
}

/// Which run of which row, counted from the start of the output.
#[derive(Clone, Copy)]
struct Place {
    run: usize,
    row: usize,
    n_rows: usize,
}

impl Outputs<'_> {
    /// Rounds one run and puts it in its place.
    #[inline(always)]
    fn put<R: Round>(&mut self, round: R, place: Place, values: &[f32; BLOCK_LEN]) {
        match self {
            Outputs::Plain(out) => {
                let mut words = [0; BLOCK_LEN];
                for (word, value) in words.iter_mut().zip(values) {
                    *word = value.to_bits();
                }
                put_words(out, place, &words);
            }
            Outputs::Rounded(out) => {
                let mut words = [0; BLOCK_LEN];
                for (word, value) in words.iter_mut().zip(values) {
                    *word = round_bf16(*value) << 16;
                }
                put_words(out, place, &words);
            }
            Outputs::Pairs(out) => {
                let mut pairs = [0; BLOCK_LEN / 2];
                for (pair, values) in pairs.iter_mut().zip(values.as_chunks::<2>().0) {
                    *pair = round_bf16(values[0]) | round_bf16(values[1]) << 16;
                }
                put_words(out, place, &pairs);
            }
            Outputs::Groups(words, groups) => {
                let (group, integers) = round_group(round, values);
                groups[place.run * place.n_rows + place.row] = group;
                put_words(words, place, &integers);
            }
        }
    }
}

/// Writes the `N` words of a run into its row's column of `[word][row]`; padding past the end is left out.
#[inline(always)]
fn put_words<const N: usize>(out: &mut [u32], place: Place, words: &[u32; N]) {
    let out = &mut out[place.run * N * place.n_rows + place.row..];
    if place.n_rows == 1
        && let Some(out) = out.first_chunk_mut()
    {
        *out = *words;
        return;
    }
    for (i, word) in words.iter().enumerate() {
        if let Some(slot) = out.get_mut(i * place.n_rows) {
            *slot = *word;
        }
    }
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
fn round_group<R: Round>(round: R, values: &[f32; BLOCK_LEN]) -> (GroupInput, [u32; BLOCK_LEN / 4]) {
    // Bits of absolute values order like the values, infinities above all numbers and NaNs above those.
    let max = f32::from_bits(round.largest_size(values));
    let inverse = 127.0 / max;
    if !max.is_finite() {
        let group = GroupInput { scale: f32::NAN, sums: [0; 2] };
        return (group, [0; BLOCK_LEN / 4]);
    }
    if !inverse.is_finite() {
        // Zeros, or so small that 127/max overflows: below 2^-120, nothing beside any weight.
        return (GroupInput::default(), [0; BLOCK_LEN / 4]);
    }
    let (sums, words) = round.integers(values, inverse);
    (GroupInput { scale: max / 127.0, sums }, words)
}

/// The two steps of [`round_group`] that compilers do not turn into good vector code. Every implementation
/// gives the same bits.
trait Round: Copy {
    /// The largest of the values' bits without sign.
    fn largest_size(self, values: &[f32; BLOCK_LEN]) -> u32;

    /// `values * inverse` (at most 127) rounded to nearest even: the sum of each half, and the bytes four to a
    /// word, first in the low byte.
    fn integers(self, values: &[f32; BLOCK_LEN], inverse: f32) -> ([i32; 2], [u32; BLOCK_LEN / 4]);
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
    fn integers(self, values: &[f32; BLOCK_LEN], inverse: f32) -> ([i32; 2], [u32; BLOCK_LEN / 4]) {
        // Adding 1.5 * 2^23 leaves the integer, rounded to nearest even, in the low bits of the sum.
        const ROUND: f32 = 12_582_912.0;
        let (mut sums, mut words) = ([0; 2], [0; BLOCK_LEN / 4]);
        for (quad, values) in values.as_chunks::<4>().0.iter().enumerate() {
            for (i, value) in values.iter().enumerate() {
                let integer = (value * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits());
                words[quad] |= (integer & 0xff) << (8 * i);
                sums[2 * quad / words.len()] += integer.cast_signed();
            }
        }
        (sums, words)
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{Avx512, BLOCK_LEN, Round};
    use std::arch::x86_64::*;

    impl Round for Avx512 {
        #[inline(always)]
        fn largest_size(self, values: &[f32; BLOCK_LEN]) -> u32 {
            // SAFETY: the token proves that the CPU has the function's features.
            unsafe { largest_size(values) }
        }

        #[inline(always)]
        fn integers(self, values: &[f32; BLOCK_LEN], inverse: f32) -> ([i32; 2], [u32; BLOCK_LEN / 4]) {
            // SAFETY: as above.
            unsafe { integers(values, inverse) }
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
    fn integers(values: &[f32; BLOCK_LEN], inverse: f32) -> ([i32; 2], [u32; BLOCK_LEN / 4]) {
        let ([a, b], inverse) = (load(values), _mm512_set1_ps(inverse));
        let a = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
        let b = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        let sums = [_mm512_reduce_add_epi32(a), _mm512_reduce_add_epi32(b)];
        let mut words = [0; BLOCK_LEN / 4];
        // SAFETY: the array has 32 bytes, 16 for each half; the stores ask for no alignment.
        unsafe {
            _mm_storeu_si128(words.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(a));
            _mm_storeu_si128(words.as_mut_ptr().add(4).cast(), _mm512_cvtepi32_epi8(b));
        }
        (sums, words)
    }
}
