//! Grouped formats with 256-bit vectors: products of bytes summed in pairs, or `vpdpbusd` in either encoding.

use super::{STEP, VECTORS, apply_units, load, load_line, load_table, rolled, store};
use crate::ops::cpu::activations::GroupInput;
use crate::ops::cpu::linear::formats::{self, Group, GroupInputs, GroupOfRows, QUADS, for_group};
use crate::ops::cpu::linear::{Panel, Tile};
use crate::ops::packed::PackedFormat;
use std::arch::x86_64::*;

/// The sums of a part of a group, and their scaling. The code is the same for every set; `$sums` computes the exact
/// integer sums.
macro_rules! kernels {
    ($features:literal, $sums:ident, [$($rows:literal x $vectors:literal),*]) => {
        use super::*;

        /// The sums of `panel` for a block of `n_rows` rows.
        #[target_feature(enable = $features)]
        pub(in super::super) fn tile(panel: &Panel<'_>, n_rows: usize, x: GroupInputs<'_>, out: &mut Tile) {
            for_group!(panel.format, group_rows(panel, n_rows, x, out))
        }

        /// With one row, all columns at a time: the loads of the inputs are then shared by most products.
        #[target_feature(enable = $features)]
        fn group_rows<G: Group>(panel: &Panel<'_>, n_rows: usize, x: GroupInputs<'_>, out: &mut Tile) {
            match n_rows {
                $($rows => group_tile::<$rows, $vectors, G>(panel, x, out),)*
                n => unreachable!("no tile of {n} rows"),
            }
        }

        /// Each part of a group has an exact integer sum, which is scaled by the weights' and the inputs' scales and
        /// added to the f32 sum. The f32 sums of all columns are in memory, so that the panel is read once, in order:
        /// a panel that comes from memory is read at up to 1.3 times the rate of two passes over half of its columns.
        #[inline(never)]
        #[target_feature(enable = $features)]
        fn group_tile<const R: usize, const T: usize, G: Group>(
            panel: &Panel<'_>,
            inputs: GroupInputs<'_>,
            out: &mut Tile,
        ) {
            let x = inputs.words.as_chunks::<QUADS>().0.as_chunks::<R>().0;
            let mut prefetch = panel.prefetch;
            let mut sums = [[_mm256_setzero_ps(); VECTORS]; R];
            for ((group, x), groups) in
                panel.bytes.chunks_exact(G::BYTES).zip(x).zip(inputs.groups.as_chunks::<R>().0)
            {
                prefetch.next_step();
                let inputs = GroupOfRows { words: x, groups };
                let (header, weights) = group.split_at(G::HEADER);
                let weights = weights.as_chunks().0;
                for first in (0..VECTORS).step_by(T) {
                    for part in 0..G::PARTS {
                        let acc = $sums::<R, T, G>(weights, first, part, inputs);
                        let scale = load_line::<T, G>(header, part, first);
                        for r in 0..R {
                            let unit = _mm256_set1_ps(groups[r].scale);
                            for t in 0..T {
                                let value = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][t]), unit);
                                let sum = &mut sums[r][first + t];
                                *sum = _mm256_fmadd_ps(value, scale[t], *sum);
                            }
                        }
                        if G::HAS_MIN {
                            let min = load_min::<T, G>(header, part, first, scale);
                            for r in 0..R {
                                let input_sum = _mm256_set1_ps(groups[r].scaled_sums[G::sum(part)]);
                                for t in 0..T {
                                    let sum = &mut sums[r][first + t];
                                    *sum = _mm256_fmadd_ps(min[t], input_sum, *sum);
                                }
                            }
                        }
                    }
                }
            }
            if G::HAS_UNITS {
                apply_units(&mut sums, &panel.bytes[x.len() * G::BYTES..].as_chunks().0[0]);
            }
            store(sums, 0, out);
        }
    };
}

/// Defines the exact integer sums with `vpdpbusd`.
macro_rules! dots {
    ($features:literal, $dpbusd:ident) => {
        /// The integer sums of part `part` of a group.
        #[inline]
        #[target_feature(enable = $features)]
        fn dots<const R: usize, const T: usize, G: Group>(
            weights: &[[u8; STEP]],
            first: usize,
            part: usize,
            inputs: GroupOfRows<'_, R>,
        ) -> [[__m256i; T]; R] {
            let mut acc = [[_mm256_setzero_si256(); T]; R];
            for r in 0..R {
                acc[r] = [minus_offset::<G>(part, &inputs.groups[r]); T];
            }
            for pair in G::pairs(part) {
                let quads = load_pair::<T, G>(weights, first, pair);
                for i in 0..2 {
                    for r in 0..R {
                        let x = _mm256_set1_epi32(inputs.words[r][2 * pair + i].cast_signed());
                        for t in 0..T {
                            acc[r][t] = $dpbusd(acc[r][t], quads[i][t], x);
                        }
                    }
                }
            }
            acc
        }
    };
}

/// Kernels without `vpdpbusd`.
pub(super) mod pairs {
    kernels!("avx2,fma,f16c", pair_sums, [1 x 4, 2 x 2, 3 x 2, 4 x 2]);
}

/// Kernels with `vpdpbusd` of AVX-VNNI.
pub(super) mod vex {
    kernels!("avx2,fma,f16c,avxvnni", dots, [1 x 4, 2 x 2, 3 x 2]);

    dots!("avx2,avxvnni", _mm256_dpbusd_avx_epi32);
}

/// Kernels with `vpdpbusd` of AVX-512.
pub(super) mod evex {
    kernels!("avx2,fma,f16c,avx512vl,avx512vnni", dots, [1 x 4, 2 x 2, 3 x 2]);

    dots!("avx2,avx512vl,avx512vnni", _mm256_dpbusd_epi32);
}

/// The minima of part `part` of a group with the scales `scale`; those of zero points are computed from the scales.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_min<const T: usize, G: Group>(
    header: &[u8],
    part: usize,
    first: usize,
    scale: [__m256; T],
) -> [__m256; T] {
    let min = load_line::<T, G>(header, G::PARTS + part, first);
    if !G::HAS_UNITS {
        return min;
    }
    let sixteenth = _mm256_set1_ps(-1.0 / 16.0);
    std::array::from_fn(|t| _mm256_mul_ps(_mm256_mul_ps(min[t], scale[t]), sixteenth))
}

/// The integer sums of part `part` of a group of up to 6 bits, by sums of pairs in 16 bits. With up to 4 bits they hold
/// all 8 quads, each at most 2 * 15 * 127; with 5 or 6 bits, and those of a table, two quads (4 * 63 * 127 is 32004).
#[inline]
#[target_feature(enable = "avx2")]
fn pair_sums<const R: usize, const T: usize, G: Group>(
    weights: &[[u8; STEP]],
    first: usize,
    part: usize,
    inputs: GroupOfRows<'_, R>,
) -> [[__m256i; T]; R] {
    if G::BITS == 8 {
        unreachable!("`form` returns another form for 8 bits");
    }
    let ones = _mm256_set1_epi16(1);
    let mut acc = [[_mm256_setzero_si256(); T]; R];
    for pair in rolled(G::pairs(part)) {
        let [even, odd] = load_pair::<T, G>(weights, first, pair);
        for r in 0..R {
            let x =
                [2 * pair, 2 * pair + 1].map(|quad| _mm256_set1_epi32(inputs.words[r][quad].cast_signed()));
            for t in 0..T {
                let even = _mm256_maddubs_epi16(even[t], x[0]);
                let odd = _mm256_maddubs_epi16(odd[t], x[1]);
                acc[r][t] = if G::IS_SMALL {
                    _mm256_add_epi16(_mm256_add_epi16(acc[r][t], even), odd)
                } else {
                    let both = _mm256_madd_epi16(_mm256_add_epi16(even, odd), ones);
                    _mm256_add_epi32(acc[r][t], both)
                };
            }
        }
    }
    for r in 0..R {
        let minus_offset = minus_offset::<G>(part, &inputs.groups[r]);
        for acc in &mut acc[r] {
            let sum = if G::IS_SMALL { _mm256_madd_epi16(*acc, ones) } else { *acc };
            *acc = _mm256_add_epi32(sum, minus_offset);
        }
    }
    acc
}

/// The correction for unsigned storage: the offset of the weights times the inputs of a row.
#[inline]
#[target_feature(enable = "avx2")]
fn minus_offset<G: Group>(part: usize, input: &GroupInput) -> __m256i {
    _mm256_set1_epi32(i32::from(G::FORMAT.offset()) * input.minus_sums[G::sum(part)])
}

/// The weights of quads `2 * pair` and `2 * pair + 1` of a group, a byte each.
#[inline]
#[target_feature(enable = "avx2")]
fn load_pair<const T: usize, G: Group>(
    weights: &[[u8; STEP]],
    first: usize,
    pair: usize,
) -> [[__m256i; T]; 2] {
    if G::BITS == 8 {
        return [load(&weights[2 * pair], first), load(&weights[2 * pair + 1], first)];
    }
    let mut quads = [[_mm256_setzero_si256(); T]; 2];
    if G::BITS >= 4 {
        let low = _mm256_set1_epi8(15);
        let w = load::<T>(&weights[pair], first);
        quads = [
            w.map(|w| _mm256_and_si256(w, low)),
            w.map(|w| _mm256_and_si256(_mm256_srli_epi16::<4>(w), low)),
        ];
    }
    if let Some(integers) = G::TABLE {
        let table = load_table(integers);
        return quads.map(|quad| quad.map(|nibbles| _mm256_shuffle_epi8(table, nibbles)));
    }
    for bit in G::BITS / 4 * 4..G::BITS {
        let plane = load::<T>(&weights[bit], first);
        let value = _mm256_set1_epi8(1 << bit);
        for (i, quad) in quads.iter_mut().enumerate() {
            let place = _mm256_set1_epi8((1_u8 << (2 * pair + i)).cast_signed());
            for (w, plane) in quad.iter_mut().zip(plane) {
                let is_set = _mm256_cmpeq_epi8(_mm256_and_si256(plane, place), place);
                *w = _mm256_or_si256(*w, _mm256_and_si256(is_set, value));
            }
        }
    }
    quads
}
