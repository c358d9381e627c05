//! 8-bit formats with 512-bit vectors and without VNNI: products of bytes summed in pairs, as in `avx2/bytes.rs`.

use super::{STEP, apply_units, load, load_line, store};
use crate::ops::cpu::activations::SizedGroup;
use crate::ops::cpu::linear::formats::{self, Group, QUADS, for_bytes};
use crate::ops::cpu::linear::{Panel, Tile};
use crate::ops::packed::PackedFormat;
use std::arch::x86_64::*;

/// The sums of `panel` for a block of `n_rows` rows.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn tile(panel: &Panel<'_>, n_rows: usize, x: &[SizedGroup], out: &mut Tile) {
    for_bytes!(panel.format, n_rows, [1 2 3 4], byte_tile(panel, x, out));
}

/// The exact integer sum of each group is scaled by the weights' and the inputs' scales and added to the f32 sum.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw")]
fn byte_tile<const R: usize, G: Group>(panel: &Panel<'_>, x: &[SizedGroup], out: &mut Tile) {
    let x = x.as_chunks::<R>().0;
    let mut prefetch = panel.prefetch;
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    for (group, x) in panel.bytes.chunks_exact(G::BYTES).zip(x) {
        prefetch.next_step();
        let (header, weights) = group.split_at(G::HEADER);
        let acc = integer_sums(weights.as_chunks().0, x);
        let scale = load_line::<G>(header, 0);
        for r in 0..R {
            let unit = _mm512_set1_ps(x[r].scale);
            for t in 0..2 {
                let value = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][t]), unit);
                sums[r][t] = _mm512_fmadd_ps(value, scale[t], sums[r][t]);
            }
        }
    }
    if G::HAS_UNITS {
        apply_units(&mut sums, &panel.bytes[x.len() * G::BYTES..].as_chunks().0[0]);
    }
    store(sums, out);
}

/// The exact integer sums of a group. `maddubs` multiplies unsigned by signed bytes and adds pairs in 16 bits:
/// |x| <= 127 times |w| <= 128, twice, is 32512 and fits; the stored weights (up to 255) times x would not.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn integer_sums<const R: usize>(weights: &[[u8; STEP]], x: &[SizedGroup; R]) -> [[__m512i; 2]; R] {
    let ones = _mm512_set1_epi16(1);
    let mut acc = [[_mm512_setzero_si512(); 2]; R];
    for r in 0..R {
        acc[r] = [_mm512_set1_epi32(x[r].minus_negatives); 2];
    }
    for quad in 0..QUADS {
        let w = load(&weights[quad]);
        for r in 0..R {
            let sizes = _mm512_set1_epi32(x[r].sizes[quad].cast_signed());
            let flips = _mm512_set1_epi32(x[r].flips[quad].cast_signed());
            for t in 0..2 {
                let pairs = _mm512_maddubs_epi16(sizes, _mm512_xor_si512(w[t], flips));
                acc[r][t] = _mm512_add_epi32(acc[r][t], _mm512_madd_epi16(pairs, ones));
            }
        }
    }
    acc
}
