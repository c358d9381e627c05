//! 8-bit formats with 256-bit vectors and without VNNI: products of bytes summed in pairs.

use super::{STEP, VECTORS, apply_units, load, load_line, rolled, store};
use crate::ops::cpu::activations::SizedGroup;
use crate::ops::cpu::linear::formats::{self, Group, QUADS, for_bytes};
use crate::ops::cpu::linear::{Panel, Tile};
use crate::ops::packed::PackedFormat;
use std::arch::x86_64::*;

/// The sums of `panel` for a block of `n_rows` rows.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tile(panel: &Panel<'_>, n_rows: usize, x: &[SizedGroup], out: &mut Tile) {
    for_bytes!(panel.format, n_rows, [1 2 3 4], byte_tile(panel, x, out));
}

/// A group is read once for each row, which costs little after the first time: the loads of the inputs are shared by all
/// columns, and the integer sums of one row fit in the registers.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn byte_tile<const R: usize, G: Group>(panel: &Panel<'_>, x: &[SizedGroup], out: &mut Tile) {
    let x = x.as_chunks::<R>().0;
    let mut prefetch = panel.prefetch;
    let mut sums = [[_mm256_setzero_ps(); VECTORS]; R];
    for (group, x) in panel.bytes.chunks_exact(G::BYTES).zip(x) {
        prefetch.next_step();
        let (header, weights) = group.split_at(G::HEADER);
        let scale = load_line::<VECTORS, G>(header, 0, 0);
        for (x, sums) in x.iter().zip(&mut sums) {
            let acc = integer_sums(weights.as_chunks().0, x);
            let unit = _mm256_set1_ps(x.scale);
            for t in 0..VECTORS {
                let value = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[t]), unit);
                sums[t] = _mm256_fmadd_ps(value, scale[t], sums[t]);
            }
        }
    }
    if G::HAS_UNITS {
        apply_units(&mut sums, &panel.bytes[x.len() * G::BYTES..].as_chunks().0[0]);
    }
    store(sums, 0, out);
}

/// The exact integer sums of a group for one row. `maddubs` multiplies unsigned by signed bytes and adds pairs in 16
/// bits: |x| <= 127 times |w| <= 128, twice, is 32512 and fits; the stored weights (up to 255) times x would not.
/// (`sign` would give the weights the signs of the inputs, but takes one of the two units that multiply.)
#[inline]
#[target_feature(enable = "avx2")]
fn integer_sums(weights: &[[u8; STEP]], x: &SizedGroup) -> [__m256i; VECTORS] {
    let ones = _mm256_set1_epi16(1);
    let mut acc = [_mm256_set1_epi32(x.minus_negatives); VECTORS];
    for quad in rolled(0..QUADS) {
        let sizes = _mm256_set1_epi32(x.sizes[quad].cast_signed());
        let flips = _mm256_set1_epi32(x.flips[quad].cast_signed());
        for (acc, w) in acc.iter_mut().zip(load::<VECTORS>(&weights[quad], 0)) {
            let pairs = _mm256_maddubs_epi16(sizes, _mm256_xor_si256(w, flips));
            *acc = _mm256_add_epi32(*acc, _mm256_madd_epi16(pairs, ones));
        }
    }
    acc
}
