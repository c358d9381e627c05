//! The products with 512-bit vectors: `vdpbf16ps` for BF16, `vpdpbusd` for groups.
//!
//! A panel is two vectors wide. A tile keeps two accumulators a row (groups: two of integers and two of f32),
//! so 12 rows of plain formats and 6 of grouped ones fill the 32 registers. Each tile is a function of its own: in a
//! common one compilers keep a sum of every tile in one place on the stack, and each step waits for it.

use super::formats::{self, Group, GroupInputs, QUADS, for_group};
use super::{Panel, Tile};
use crate::ops::cpu::activations::Inputs;
use crate::ops::cpu::isa::Avx512;
use crate::ops::packed::{PANEL, PackedFormat};
use crate::quant::BLOCK_LEN;
use std::arch::x86_64::*;

/// Rows of a tile of a plain format.
pub(super) const PLAIN_ROWS: usize = 12;
/// Rows of a tile of a grouped format.
pub(super) const GROUP_ROWS: usize = 6;

/// Bytes of two vectors: what a panel holds for one k (F32), two (BF16), four (8 bit) or eight (4 bit).
const STEP: usize = 128;

/// Calls the instance of a plain kernel for the number of rows.
macro_rules! plain_rows {
    ($n_rows:expr, [$($rows:literal)*], $kernel:ident $args:tt) => {
        match $n_rows {
            $($rows => $kernel::<$rows> $args,)*
            n => unreachable!("no tile of {n} rows"),
        }
    };
}

/// The sums of `panel` for a block of `n_rows` rows.
pub(super) fn tile(_: Avx512, panel: &Panel<'_>, block: (usize, Inputs<'_>), out: &mut Tile) {
    // SAFETY: the token proves that the CPU has every feature that `dispatch` is compiled for.
    unsafe { dispatch(panel, block, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c")]
fn dispatch(panel: &Panel<'_>, (n_rows, inputs): (usize, Inputs<'_>), out: &mut Tile) {
    match (panel.format, inputs) {
        (PackedFormat::F32, Inputs::Plain(x)) => {
            plain_rows!(n_rows, [1 2 3 4 5 6 7 8 9 10 11 12], f32_tile(panel, x, out));
        }
        (PackedFormat::BF16, Inputs::Pairs(x)) => {
            plain_rows!(n_rows, [1 2 3 4 5 6 7 8 9 10 11 12], bf16_tile(panel, x, out));
        }
        (format, Inputs::Groups(x, groups)) => {
            for_group!(format, group_rows(panel, n_rows, (x, groups), out))
        }
        (format, _) => unreachable!("`form` gives {format:?} another form of inputs"),
    }
}

/// Two neighbouring vectors of weights.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; STEP]) -> [__m512i; 2] {
    // SAFETY: the array has 128 bytes; the loads ask for no alignment.
    unsafe { [_mm512_loadu_si512(bytes.as_ptr().cast()), _mm512_loadu_si512(bytes.as_ptr().add(64).cast())] }
}

/// 32 f16 numbers as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_f16(bytes: &[u8; 2 * PANEL]) -> [__m512; 2] {
    // SAFETY: the array has 64 bytes; the loads ask for no alignment.
    let halves = unsafe {
        [_mm256_loadu_si256(bytes.as_ptr().cast()), _mm256_loadu_si256(bytes.as_ptr().add(32).cast())]
    };
    [_mm512_cvtph_ps(halves[0]), _mm512_cvtph_ps(halves[1])]
}

/// 32 bytes as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_u8(bytes: &[u8; PANEL]) -> [__m512; 2] {
    // SAFETY: the array has 32 bytes; the loads ask for no alignment.
    let halves =
        unsafe { [_mm_loadu_si128(bytes.as_ptr().cast()), _mm_loadu_si128(bytes.as_ptr().add(16).cast())] };
    halves.map(|half| _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(half)))
}

/// Line `line` of a group's scales and minima (or zero points) as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_line<G: Group>(header: &[u8], line: usize) -> [__m512; 2] {
    if G::HAS_UNITS { load_u8(&header.as_chunks().0[line]) } else { load_f16(&header.as_chunks().0[line]) }
}

/// Multiplies each row's sums by the units of the columns.
#[inline]
#[target_feature(enable = "avx512f")]
fn apply_units<const R: usize>(sums: &mut [[__m512; 2]; R], units: &[u8; 4 * PANEL]) {
    let units = load(units).map(|units| _mm512_castsi512_ps(units));
    for sums in sums {
        *sums = [_mm512_mul_ps(sums[0], units[0]), _mm512_mul_ps(sums[1], units[1])];
    }
}

/// Writes each row's sums.
#[inline]
#[target_feature(enable = "avx512f")]
fn store<const R: usize>(sums: [[__m512; 2]; R], out: &mut Tile) {
    for (sums, out) in sums.into_iter().zip(&mut out.0) {
        // SAFETY: the array `out` has 32 numbers; the stores ask for no alignment.
        unsafe {
            _mm512_storeu_ps(out.as_mut_ptr(), sums[0]);
            _mm512_storeu_ps(out.as_mut_ptr().add(16), sums[1]);
        }
    }
}

/// F32: one fused multiply-add for each k.
#[inline(never)]
#[target_feature(enable = "avx512f")]
fn f32_tile<const R: usize>(panel: &Panel<'_>, x: &[f32], out: &mut Tile) {
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    let mut ahead = panel.ahead;
    let steps: &[[u8; STEP]] = panel.bytes.as_chunks().0;
    for (run, x) in steps.chunks(BLOCK_LEN).zip(x.as_chunks::<BLOCK_LEN>().0.as_chunks::<R>().0) {
        for (i, w) in run.iter().enumerate() {
            ahead.prefetch();
            let w = load(w);
            let w = [_mm512_castsi512_ps(w[0]), _mm512_castsi512_ps(w[1])];
            for r in 0..R {
                let x = _mm512_set1_ps(x[r][i]);
                for t in 0..2 {
                    sums[r][t] = _mm512_fmadd_ps(x, w[t], sums[r][t]);
                }
            }
        }
    }
    store(sums, out);
}

/// BF16: one `vdpbf16ps` for each pair of k.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16_tile<const R: usize>(panel: &Panel<'_>, x: &[u32], out: &mut Tile) {
    const PAIRS: usize = BLOCK_LEN / 2;
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    let mut ahead = panel.ahead;
    let steps: &[[u8; STEP]] = panel.bytes.as_chunks().0;
    for (run, x) in steps.chunks(PAIRS).zip(x.as_chunks::<PAIRS>().0.as_chunks::<R>().0) {
        for (i, w) in run.iter().enumerate() {
            ahead.prefetch();
            let w = load(w);
            let w = [as_bf16(w[0]), as_bf16(w[1])];
            for r in 0..R {
                let x = as_bf16(_mm512_set1_epi32(x[r][i].cast_signed()));
                for t in 0..2 {
                    sums[r][t] = _mm512_dpbf16_ps(sums[r][t], x, w[t]);
                }
            }
        }
    }
    store(sums, out);
}

/// The same bits as pairs of bf16.
#[inline]
#[target_feature(enable = "avx512f")]
fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes and any bits are values.
    unsafe { std::mem::transmute(bits) }
}

/// The instance of [`group_tile`] for the number of rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn group_rows<G: Group>(panel: &Panel<'_>, n_rows: usize, x: GroupInputs<'_>, out: &mut Tile) {
    match n_rows {
        1 => group_tile::<1, G>(panel, x, out),
        2 => group_tile::<2, G>(panel, x, out),
        3 => group_tile::<3, G>(panel, x, out),
        4 => group_tile::<4, G>(panel, x, out),
        5 => group_tile::<5, G>(panel, x, out),
        GROUP_ROWS => group_tile::<6, G>(panel, x, out),
        n => unreachable!("no tile of {n} rows"),
    }
}

/// Groups: an exact integer sum of each part of a group, scaled by the weights' and the inputs' units into the
/// f32 sum.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn group_tile<const R: usize, G: Group>(panel: &Panel<'_>, (x, inputs): GroupInputs<'_>, out: &mut Tile) {
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    let mut ahead = panel.ahead;
    let x = x.as_chunks::<QUADS>().0.as_chunks::<R>().0;
    let n_groups = x.len();
    for ((group, x), inputs) in panel.bytes.chunks_exact(G::BYTES).zip(x).zip(inputs.as_chunks::<R>().0) {
        ahead.prefetch();
        let (header, weights) = group.split_at(G::HEADER);
        let weights = weights.as_chunks().0;
        for part in 0..G::PARTS {
            let mut acc = [[_mm512_setzero_si512(); 2]; R];
            if G::FORMAT.offset() > 0 {
                // Stored weights are unsigned: what they are too much, an offset that is a power of two.
                let shift = _mm_cvtsi32_si128(G::FORMAT.offset().trailing_zeros().cast_signed());
                for (acc, input) in acc.iter_mut().zip(inputs) {
                    let minus_sum = _mm512_set1_epi32(input.minus_sums[G::sum(part)]);
                    *acc = [_mm512_sll_epi32(minus_sum, shift); 2];
                }
            }
            for pair in G::pairs(part) {
                let [even, odd] = load_pair::<G>(weights, pair);
                dot(&mut acc, even, x, 2 * pair);
                dot(&mut acc, odd, x, 2 * pair + 1);
            }
            let scale = load_line::<G>(header, part);
            for r in 0..R {
                let unit = _mm512_set1_ps(inputs[r].scale);
                for t in 0..2 {
                    let value = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][t]), unit);
                    sums[r][t] = _mm512_fmadd_ps(value, scale[t], sums[r][t]);
                }
            }
            if G::HAS_MIN {
                let min = load_min::<G>(header, part, scale);
                for r in 0..R {
                    let input_sum = _mm512_set1_ps(inputs[r].scaled_sums[G::sum(part)]);
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

/// The minima of part `part` of a group, whose scales are `scale`; those of zero points follow from them.
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

/// Adds four products a column: unsigned weights `w` times the signed bytes of `x[r][quad]`.
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
