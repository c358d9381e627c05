//! The products with 256-bit vectors, for CPUs without AVX-512 BF16 and VNNI.
//!
//! A panel is four vectors wide; 16 registers do not hold a tile of all four, so a tile takes `T` vectors of
//! columns at a time and passes over the panel `4 / T` times. Each tile is a function of its own, as in `avx512.rs`.

use super::formats::{self, Group, GroupInputs, QUADS, for_group};
use super::{Ahead, Panel, Tile};
use crate::ops::cpu::activations::{GroupInput, Inputs};
use crate::ops::cpu::isa::Avx2;
use crate::ops::packed::{PANEL, PackedFormat};
use crate::quant::BLOCK_LEN;
use std::arch::x86_64::*;

/// Rows of a tile of a plain format: 6 x 16 columns.
pub(super) const PLAIN_ROWS: usize = 6;
/// Rows of a tile of a grouped format: 4 x 8 columns, 2 x 16 or 1 x 32.
pub(super) const GROUP_ROWS: usize = 4;

/// Vectors of a panel.
const VECTORS: usize = 4;
/// Bytes of one vector of weights.
const LANE: usize = 32;
/// Bytes of a panel's four vectors.
const STEP: usize = VECTORS * LANE;

/// Calls the instance of a plain kernel for the number of rows: one or two read the panel once.
macro_rules! plain_rows {
    ($n_rows:expr, $kernel:ident $args:tt) => {
        match $n_rows {
            1 => $kernel::<1, 4> $args,
            2 => $kernel::<2, 4> $args,
            3 => $kernel::<3, 2> $args,
            4 => $kernel::<4, 2> $args,
            5 => $kernel::<5, 2> $args,
            PLAIN_ROWS => $kernel::<6, 2> $args,
            n => unreachable!("no tile of {n} rows"),
        }
    };
}

/// The sums of `panel` for a block of `n_rows` rows.
pub(super) fn tile(_: Avx2, panel: &Panel<'_>, block: (usize, Inputs<'_>), out: &mut Tile) {
    // SAFETY: the token proves that the CPU has every feature that `dispatch` is compiled for.
    unsafe { dispatch(panel, block, out) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn dispatch(panel: &Panel<'_>, (n_rows, inputs): (usize, Inputs<'_>), out: &mut Tile) {
    match (panel.format, inputs) {
        (PackedFormat::F32, Inputs::Plain(x)) => {
            plain_rows!(n_rows, f32_tile(panel, x, out));
        }
        (PackedFormat::BF16, Inputs::Plain(x)) => {
            plain_rows!(n_rows, bf16_tile(panel, x, out));
        }
        (format, Inputs::Groups(x, groups)) => {
            for_group!(format, group_rows(panel, n_rows, (x, groups), out))
        }
        (format, _) => unreachable!("`form` gives {format:?} another form of inputs"),
    }
}

/// Vectors `first..first + T` of one step.
#[inline]
#[target_feature(enable = "avx2")]
fn load<const T: usize>(step: &[u8; STEP], first: usize) -> [__m256i; T] {
    let vectors = &step.as_chunks::<LANE>().0[first..first + T];
    // SAFETY: each chunk has 32 bytes; the load asks for no alignment.
    std::array::from_fn(|t| unsafe { _mm256_loadu_si256(vectors[t].as_ptr().cast()) })
}

/// Eight columns of a header of f16 numbers, starting at vector `first`, as f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_f16<const T: usize>(header: &[u8; 2 * PANEL], first: usize) -> [__m256; T] {
    let vectors = &header.as_chunks::<{ LANE / 2 }>().0[first..first + T];
    // SAFETY: each chunk has 16 bytes; the load asks for no alignment.
    std::array::from_fn(|t| _mm256_cvtph_ps(unsafe { _mm_loadu_si128(vectors[t].as_ptr().cast()) }))
}

/// Eight columns of a header of bytes, starting at vector `first`, as f32.
#[inline]
#[target_feature(enable = "avx2")]
fn load_u8<const T: usize>(header: &[u8; PANEL], first: usize) -> [__m256; T] {
    let vectors = &header.as_chunks::<{ LANE / 4 }>().0[first..first + T];
    std::array::from_fn(|t| {
        // SAFETY: each chunk has 8 bytes; the load asks for no alignment.
        let bytes = unsafe { _mm_loadl_epi64(vectors[t].as_ptr().cast()) };
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))
    })
}

/// Line `line` of a group's scales and minima (or zero points) as f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_line<const T: usize, G: Group>(header: &[u8], line: usize, first: usize) -> [__m256; T] {
    if G::HAS_UNITS {
        load_u8(&header.as_chunks().0[line], first)
    } else {
        load_f16(&header.as_chunks().0[line], first)
    }
}

/// The minima of part `part` of a group, whose scales are `scale`; those of zero points follow from them.
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

/// Multiplies each row's sums by the units of the columns.
#[inline]
#[target_feature(enable = "avx2")]
fn apply_units<const R: usize, const T: usize>(
    sums: &mut [[__m256; T]; R],
    units: &[u8; STEP],
    first: usize,
) {
    let units = load::<T>(units, first).map(|units| _mm256_castsi256_ps(units));
    for sums in sums {
        for (sum, unit) in sums.iter_mut().zip(units) {
            *sum = _mm256_mul_ps(*sum, unit);
        }
    }
}

/// Writes the sums of `T` vectors of columns for each row.
#[inline]
#[target_feature(enable = "avx2")]
fn store<const R: usize, const T: usize>(sums: [[__m256; T]; R], first: usize, out: &mut Tile) {
    for (sums, out) in sums.into_iter().zip(&mut out.0) {
        for (sum, out) in sums.into_iter().zip(&mut out.as_chunks_mut::<8>().0[first..]) {
            // SAFETY: each chunk has 8 numbers; the store asks for no alignment.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sum) };
        }
    }
}

/// F32: one fused multiply-add for each k.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn f32_tile<const R: usize, const T: usize>(panel: &Panel<'_>, x: &[f32], out: &mut Tile) {
    let steps: &[[u8; STEP]] = panel.bytes.as_chunks().0;
    let mut ahead = panel.ahead;
    for first in (0..VECTORS).step_by(T) {
        let mut sums = [[_mm256_setzero_ps(); T]; R];
        for (run, x) in steps.chunks(BLOCK_LEN).zip(x.as_chunks::<BLOCK_LEN>().0.as_chunks::<R>().0) {
            for (i, w) in run.iter().enumerate() {
                ahead.prefetch();
                let w = load::<T>(w, first).map(|w| _mm256_castsi256_ps(w));
                multiply(&mut sums, x, i, w);
            }
        }
        ahead = Ahead::NONE;
        store(sums, first, out);
    }
}

/// BF16: weights widened by shift and mask, one fused multiply-add for each k.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn bf16_tile<const R: usize, const T: usize>(panel: &Panel<'_>, x: &[f32], out: &mut Tile) {
    let high = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
    let steps: &[[u8; STEP]] = panel.bytes.as_chunks().0;
    let mut ahead = panel.ahead;
    for first in (0..VECTORS).step_by(T) {
        let mut sums = [[_mm256_setzero_ps(); T]; R];
        for (run, x) in steps.chunks(BLOCK_LEN / 2).zip(x.as_chunks::<BLOCK_LEN>().0.as_chunks::<R>().0) {
            for (i, w) in run.iter().enumerate() {
                ahead.prefetch();
                let w = load::<T>(w, first);
                let even = w.map(|w| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w)));
                multiply(&mut sums, x, 2 * i, even);
                multiply(&mut sums, x, 2 * i + 1, w.map(|w| _mm256_castsi256_ps(_mm256_and_si256(w, high))));
            }
        }
        ahead = Ahead::NONE;
        store(sums, first, out);
    }
}

/// `sums[r] += x[r][i] * w`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn multiply<const R: usize, const T: usize>(
    sums: &mut [[__m256; T]; R],
    x: &[[f32; BLOCK_LEN]; R],
    i: usize,
    w: [__m256; T],
) {
    for (sums, x) in sums.iter_mut().zip(x) {
        for (sum, w) in sums.iter_mut().zip(w) {
            *sum = _mm256_fmadd_ps(_mm256_set1_ps(x[i]), w, *sum);
        }
    }
}

/// Fewer rows, more columns at a time: one row reads the panel once.
#[target_feature(enable = "avx2,fma,f16c")]
fn group_rows<G: Group>(panel: &Panel<'_>, n_rows: usize, x: GroupInputs<'_>, out: &mut Tile) {
    match n_rows {
        1 => group_tile::<1, 4, G>(panel, x, out),
        2 => group_tile::<2, 2, G>(panel, x, out),
        3 => group_tile::<3, 1, G>(panel, x, out),
        GROUP_ROWS => group_tile::<4, 1, G>(panel, x, out),
        n => unreachable!("no tile of {n} rows"),
    }
}

/// Groups: an exact integer sum of each part of a group, scaled by the weights' and the inputs' units into the
/// f32 sum.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn group_tile<const R: usize, const T: usize, G: Group>(
    panel: &Panel<'_>,
    (x, inputs): GroupInputs<'_>,
    out: &mut Tile,
) {
    let x = x.as_chunks::<QUADS>().0.as_chunks::<R>().0;
    let mut ahead = panel.ahead;
    for first in (0..VECTORS).step_by(T) {
        let mut sums = [[_mm256_setzero_ps(); T]; R];
        for ((group, x), inputs) in panel.bytes.chunks_exact(G::BYTES).zip(x).zip(inputs.as_chunks::<R>().0) {
            ahead.prefetch();
            let (header, weights) = group.split_at(G::HEADER);
            let weights = weights.as_chunks().0;
            for part in 0..G::PARTS {
                let acc = if G::BITS == 8 {
                    sum_bytes::<R, T>(weights, first, x)
                } else {
                    sum_bits::<R, T, G>(weights, first, part, (x, inputs))
                };
                let scale = load_line::<T, G>(header, part, first);
                for r in 0..R {
                    let unit = _mm256_set1_ps(inputs[r].scale);
                    for t in 0..T {
                        let value = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][t]), unit);
                        sums[r][t] = _mm256_fmadd_ps(value, scale[t], sums[r][t]);
                    }
                }
                if G::HAS_MIN {
                    let min = load_min::<T, G>(header, part, first, scale);
                    for r in 0..R {
                        let input_sum = _mm256_set1_ps(inputs[r].scaled_sums[G::sum(part)]);
                        for t in 0..T {
                            sums[r][t] = _mm256_fmadd_ps(min[t], input_sum, sums[r][t]);
                        }
                    }
                }
            }
        }
        if G::HAS_UNITS {
            apply_units(&mut sums, &panel.bytes[x.len() * G::BYTES..].as_chunks().0[0], first);
        }
        ahead = Ahead::NONE;
        store(sums, first, out);
    }
}

/// The integer sums of an 8-bit group. `maddubs` wants one side unsigned and adds pairs in 16 bits: |w| <= 128
/// times |x| <= 127, twice, is 32512 and fits, where the stored unsigned bytes (to 255) would not.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_bytes<const R: usize, const T: usize>(
    weights: &[[u8; STEP]],
    first: usize,
    x: &[[u32; QUADS]; R],
) -> [[__m256i; T]; R] {
    let (offset, ones) = (_mm256_set1_epi8(-128), _mm256_set1_epi16(1));
    let mut acc = [[_mm256_setzero_si256(); T]; R];
    for (quad, w) in weights.iter().enumerate() {
        let w = load::<T>(w, first).map(|w| _mm256_xor_si256(w, offset));
        let size = w.map(|w| _mm256_abs_epi8(w));
        for r in 0..R {
            let x = _mm256_set1_epi32(x[r][quad].cast_signed());
            for t in 0..T {
                let pairs = _mm256_maddubs_epi16(size[t], _mm256_sign_epi8(x, w[t]));
                acc[r][t] = _mm256_add_epi32(acc[r][t], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
    acc
}

/// The integer sums of part `part` of a group of up to 6 bits. 16-bit sums hold all 8 quads of up to 4 bits, each
/// at most 2 * 15 * 127; of 5 or 6 bits they hold one pair of quads (4 * 63 * 127 is 32004).
#[inline]
#[target_feature(enable = "avx2")]
fn sum_bits<const R: usize, const T: usize, G: Group>(
    weights: &[[u8; STEP]],
    first: usize,
    part: usize,
    (x, inputs): (&[[u32; QUADS]; R], &[GroupInput; R]),
) -> [[__m256i; T]; R] {
    let ones = _mm256_set1_epi16(1);
    let mut acc = [[_mm256_setzero_si256(); T]; R];
    for pair in G::pairs(part) {
        let [even, odd] = load_pair::<T, G>(weights, first, pair);
        for r in 0..R {
            let x = [2 * pair, 2 * pair + 1].map(|quad| _mm256_set1_epi32(x[r][quad].cast_signed()));
            for t in 0..T {
                let even = _mm256_maddubs_epi16(even[t], x[0]);
                let odd = _mm256_maddubs_epi16(odd[t], x[1]);
                acc[r][t] = if G::BITS <= 4 {
                    _mm256_add_epi16(_mm256_add_epi16(acc[r][t], even), odd)
                } else {
                    let both = _mm256_madd_epi16(_mm256_add_epi16(even, odd), ones);
                    _mm256_add_epi32(acc[r][t], both)
                };
            }
        }
    }
    for r in 0..R {
        let init = i32::from(G::FORMAT.offset()) * inputs[r].minus_sums[G::sum(part)];
        let init = _mm256_set1_epi32(init);
        for acc in &mut acc[r] {
            let sum = if G::BITS <= 4 { _mm256_madd_epi16(*acc, ones) } else { *acc };
            *acc = _mm256_add_epi32(sum, init);
        }
    }
    acc
}

/// The weights of quads `2 * pair` and `2 * pair + 1` of a group, a byte each.
#[inline]
#[target_feature(enable = "avx2")]
fn load_pair<const T: usize, G: Group>(
    weights: &[[u8; STEP]],
    first: usize,
    pair: usize,
) -> [[__m256i; T]; 2] {
    let mut quads = [[_mm256_setzero_si256(); T]; 2];
    if G::BITS >= 4 {
        let low = _mm256_set1_epi8(15);
        let w = load::<T>(&weights[pair], first);
        quads = [
            w.map(|w| _mm256_and_si256(w, low)),
            w.map(|w| _mm256_and_si256(_mm256_srli_epi16::<4>(w), low)),
        ];
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
