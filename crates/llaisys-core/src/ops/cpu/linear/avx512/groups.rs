//! Grouped formats with 512-bit vectors: `vpdpbusd` with VNNI, products of bytes summed in pairs without.

use super::{STEP, apply_units, load, load_line, load_table, store};
use crate::ops::cpu::linear::formats::{self, Group, GroupInputs, GroupOfRows, QUADS, for_group};
use crate::ops::cpu::linear::{Panel, Tile};
use crate::ops::packed::PackedFormat;
use std::arch::x86_64::*;

/// The sums of a part of a group, and their scaling. The code is the same for every set; `$sums` computes the exact
/// integer sums.
macro_rules! kernels {
    ($features:literal, $sums:ident, [$($rows:literal)*]) => {
        use super::*;

        /// The sums of `panel` for a block of `n_rows` rows.
        #[target_feature(enable = $features)]
        pub(in super::super) fn tile(panel: &Panel<'_>, n_rows: usize, x: GroupInputs<'_>, out: &mut Tile) {
            for_group!(panel.format, group_rows(panel, n_rows, x, out))
        }

        /// Calls the instance of [`group_tile`] for the number of rows.
        #[target_feature(enable = $features)]
        fn group_rows<G: Group>(panel: &Panel<'_>, n_rows: usize, x: GroupInputs<'_>, out: &mut Tile) {
            match n_rows {
                $($rows => group_tile::<$rows, G>(panel, x, out),)*
                n => unreachable!("no tile of {n} rows"),
            }
        }

        /// Each part of a group has an exact integer sum, which is scaled by the weights' and the inputs' scales and
        /// added to the f32 sum.
        #[inline(never)]
        #[target_feature(enable = $features)]
        fn group_tile<const R: usize, G: Group>(
            panel: &Panel<'_>,
            inputs: GroupInputs<'_>,
            out: &mut Tile,
        ) {
            let mut sums = [[_mm512_setzero_ps(); 2]; R];
            let mut prefetch = panel.prefetch;
            let x = inputs.words.as_chunks::<QUADS>().0.as_chunks::<R>().0;
            let n_groups = x.len();
            for ((group, x), groups) in
                panel.bytes.chunks_exact(G::BYTES).zip(x).zip(inputs.groups.as_chunks::<R>().0)
            {
                prefetch.next_step();
                let inputs = GroupOfRows { words: x, groups };
                let (header, weights) = group.split_at(G::HEADER);
                let weights = weights.as_chunks().0;
                for part in 0..G::PARTS {
                    let mut acc = [[_mm512_setzero_si512(); 2]; R];
                    $sums!(R, G, acc, weights, part, inputs);
                    let scale = load_line::<G>(header, part);
                    for r in 0..R {
                        let unit = _mm512_set1_ps(inputs.groups[r].scale);
                        for t in 0..2 {
                            let value = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][t]), unit);
                            sums[r][t] = _mm512_fmadd_ps(value, scale[t], sums[r][t]);
                        }
                    }
                    if G::HAS_MIN {
                        let min = load_min::<G>(header, part, scale);
                        for r in 0..R {
                            let input_sum = _mm512_set1_ps(inputs.groups[r].scaled_sums[G::sum(part)]);
                            for t in 0..2 {
                                sums[r][t] = _mm512_fmadd_ps(min[t], input_sum, sums[r][t]);
                            }
                        }
                    }
                }
            }
            if G::HAS_UNITS {
                apply_units(&mut sums, &panel.bytes[n_groups * G::BYTES..].as_chunks().0[0]);
            }
            store(sums, out);
        }
    };
}

/// Adds the integer sums of part `part` of a group to zeros. A macro instead of a function: from a function, LLVM loads
/// the last weights of an 8-bit group backwards.
macro_rules! dots {
    ($R:ident, $G:ident, $acc:ident, $weights:ident, $part:ident, $inputs:ident) => {
        if $G::FORMAT.offset() > 0 {
            // The correction for unsigned storage is a multiple of the offset, which is a power of two.
            let shift = _mm_cvtsi32_si128($G::FORMAT.offset().trailing_zeros().cast_signed());
            for (acc, input) in $acc.iter_mut().zip($inputs.groups) {
                let minus_sum = _mm512_set1_epi32(input.minus_sums[$G::sum($part)]);
                *acc = [_mm512_sll_epi32(minus_sum, shift); 2];
            }
        }
        for pair in $G::pairs($part) {
            let [even, odd] = load_pair::<$G>($weights, pair);
            dot(&mut $acc, even, $inputs.words, 2 * pair);
            dot(&mut $acc, odd, $inputs.words, 2 * pair + 1);
        }
    };
}

/// The same without VNNI.
macro_rules! pair_sums {
    ($R:ident, $G:ident, $acc:ident, $weights:ident, $part:ident, $inputs:ident) => {
        pair_sums::<$R, $G>(&mut $acc, $weights, $part, $inputs)
    };
}

/// Kernels with `vpdpbusd`.
pub(super) mod vnni {
    kernels!("avx512f,avx512bw,avx512vnni", dots, [1 2 3 4 5 6]);
}

/// Kernels without `vpdpbusd`.
pub(super) mod pairs {
    kernels!("avx512f,avx512bw", pair_sums, [1 2 3 4]);
}

/// The integer sums of part `part` of a group of up to 6 bits, by sums of pairs in 16 bits. With up to 4 bits they hold
/// all 8 quads, each at most 2 * 15 * 127; with 5 or 6 bits, and those of a table, two quads (4 * 63 * 127 is 32004).
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pair_sums<const R: usize, G: Group>(
    acc: &mut [[__m512i; 2]; R],
    weights: &[[u8; STEP]],
    part: usize,
    inputs: GroupOfRows<'_, R>,
) {
    if G::BITS == 8 {
        unreachable!("`form` returns another form for 8 bits");
    }
    let ones = _mm512_set1_epi16(1);
    let mut sums = [[_mm512_setzero_si512(); 2]; R];
    for pair in G::pairs(part) {
        let [even, odd] = load_pair::<G>(weights, pair);
        for r in 0..R {
            let x =
                [2 * pair, 2 * pair + 1].map(|quad| _mm512_set1_epi32(inputs.words[r][quad].cast_signed()));
            for t in 0..2 {
                let even = _mm512_maddubs_epi16(even[t], x[0]);
                let odd = _mm512_maddubs_epi16(odd[t], x[1]);
                sums[r][t] = if G::IS_SMALL {
                    _mm512_add_epi16(_mm512_add_epi16(sums[r][t], even), odd)
                } else {
                    let both = _mm512_madd_epi16(_mm512_add_epi16(even, odd), ones);
                    _mm512_add_epi32(sums[r][t], both)
                };
            }
        }
    }
    for r in 0..R {
        let minus_offset = i32::from(G::FORMAT.offset()) * inputs.groups[r].minus_sums[G::sum(part)];
        for t in 0..2 {
            let sum = if G::IS_SMALL { _mm512_madd_epi16(sums[r][t], ones) } else { sums[r][t] };
            acc[r][t] = _mm512_add_epi32(_mm512_set1_epi32(minus_offset), sum);
        }
    }
}

/// The minima of part `part` of a group with the scales `scale`; those of zero points are computed from the scales.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_min<G: Group>(header: &[u8], part: usize, scale: [__m512; 2]) -> [__m512; 2] {
    let min = load_line::<G>(header, G::PARTS + part);
    if !G::HAS_UNITS {
        return min;
    }
    let sixteenth = _mm512_set1_ps(-1.0 / 16.0);
    let min_of = |t: usize| _mm512_mul_ps(_mm512_mul_ps(min[t], scale[t]), sixteenth);
    [min_of(0), min_of(1)]
}

/// The weights of quads `2 * pair` and `2 * pair + 1` of a group, a byte each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_pair<G: Group>(weights: &[[u8; STEP]], pair: usize) -> [[__m512i; 2]; 2] {
    if G::BITS == 8 {
        return [load(&weights[2 * pair]), load(&weights[2 * pair + 1])];
    }
    let mut quads =
        if G::BITS >= 4 { nibbles(load(&weights[pair])) } else { [[_mm512_setzero_si512(); 2]; 2] };
    if let Some(integers) = G::TABLE {
        let table = load_table(integers);
        return quads.map(|quad| quad.map(|nibbles| _mm512_shuffle_epi8(table, nibbles)));
    }
    for bit in G::BITS / 4 * 4..G::BITS {
        let plane = load(&weights[bit]);
        let value = _mm512_set1_epi8(1 << bit);
        for (i, quad) in quads.iter_mut().enumerate() {
            let place = _mm512_set1_epi8((1_u8 << (2 * pair + i)).cast_signed());
            for (w, plane) in quad.iter_mut().zip(plane) {
                *w = _mm512_mask_add_epi8(*w, _mm512_test_epi8_mask(plane, place), *w, value);
            }
        }
    }
    quads
}

/// Adds four products per column: unsigned weights `w` times the signed bytes of `x[r][quad]`.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn dot<const R: usize>(acc: &mut [[__m512i; 2]; R], w: [__m512i; 2], x: &[[u32; QUADS]; R], quad: usize) {
    for r in 0..R {
        let x = _mm512_set1_epi32(x[r][quad].cast_signed());
        for t in 0..2 {
            acc[r][t] = _mm512_dpbusd_epi32(acc[r][t], w[t], x);
        }
    }
}

/// The low and the high nibbles of each byte, as bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn nibbles(w: [__m512i; 2]) -> [[__m512i; 2]; 2] {
    let mask = _mm512_set1_epi8(15);
    let low = |w| _mm512_and_si512(w, mask);
    [[low(w[0]), low(w[1])], [low(_mm512_srli_epi16::<4>(w[0])), low(_mm512_srli_epi16::<4>(w[1]))]]
}
