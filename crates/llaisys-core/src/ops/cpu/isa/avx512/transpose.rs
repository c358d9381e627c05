//! Transpositions in vectors of 512 bits.

#![allow(unsafe_code, reason = "intrinsics")]

use crate::ops::cpu::isa::lanes::{EIGHT, MAX_LANES};
use std::arch::x86_64::*;

/// Transposes: lane `k` of vector `r` is lane `r` of `tile[k]`.
///
/// # Safety
/// The CPU has avx512f.
#[inline(always)]
pub(super) unsafe fn sixteen(tile: [__m512; MAX_LANES]) -> [__m512; MAX_LANES] {
    // SAFETY: the caller's.
    unsafe {
        // Pairs of rows, then pairs of pairs: `u[4g + j]` holds column `4q + j` of rows `4g..4g+4` in
        // quarter q. Then the quarters, in two steps.
        let mut t = tile;
        for i in 0..8 {
            t[2 * i] = _mm512_unpacklo_ps(tile[2 * i], tile[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_ps(tile[2 * i], tile[2 * i + 1]);
        }
        let mut u = t;
        for g in 0..4 {
            let i = 4 * g;
            u[i] = _mm512_shuffle_ps::<0x44>(t[i], t[i + 2]);
            u[i + 1] = _mm512_shuffle_ps::<0xee>(t[i], t[i + 2]);
            u[i + 2] = _mm512_shuffle_ps::<0x44>(t[i + 1], t[i + 3]);
            u[i + 3] = _mm512_shuffle_ps::<0xee>(t[i + 1], t[i + 3]);
        }
        let mut out = tile;
        for j in 0..4 {
            let even_low = _mm512_shuffle_f32x4::<0x88>(u[j], u[j + 4]);
            let even_high = _mm512_shuffle_f32x4::<0x88>(u[j + 8], u[j + 12]);
            let odd_low = _mm512_shuffle_f32x4::<0xdd>(u[j], u[j + 4]);
            let odd_high = _mm512_shuffle_f32x4::<0xdd>(u[j + 8], u[j + 12]);
            out[j] = _mm512_shuffle_f32x4::<0x88>(even_low, even_high);
            out[j + 8] = _mm512_shuffle_f32x4::<0xdd>(even_low, even_high);
            out[j + 4] = _mm512_shuffle_f32x4::<0x88>(odd_low, odd_high);
            out[j + 12] = _mm512_shuffle_f32x4::<0xdd>(odd_low, odd_high);
        }
        out
    }
}

/// Transposes: lane `k` of vector `r` is lane `r` of `rows[k]`.
///
/// # Safety
/// The CPU has avx512f and avx512dq.
#[inline(always)]
pub(super) unsafe fn eight(rows: [__m256; MAX_LANES]) -> [__m512; EIGHT] {
    // SAFETY: the caller's.
    unsafe {
        // Two transpositions of 8 x 8 at a time, rows 0..8 in the lower half and rows 8..16 in the upper one: pairs of
        // rows, pairs of pairs, then the quarters.
        let mut t = [_mm512_setzero_ps(); EIGHT];
        for i in 0..EIGHT {
            t[i] = _mm512_insertf32x8::<1>(_mm512_castps256_ps512(rows[i]), rows[i + EIGHT]);
        }
        let mut u = t;
        for i in [0, 2, 4, 6] {
            u[i] = _mm512_unpacklo_ps(t[i], t[i + 1]);
            u[i + 1] = _mm512_unpackhi_ps(t[i], t[i + 1]);
        }
        for i in [0, 4] {
            t[i] = _mm512_shuffle_ps::<0x44>(u[i], u[i + 2]);
            t[i + 1] = _mm512_shuffle_ps::<0xee>(u[i], u[i + 2]);
            t[i + 2] = _mm512_shuffle_ps::<0x44>(u[i + 1], u[i + 3]);
            t[i + 3] = _mm512_shuffle_ps::<0xee>(u[i + 1], u[i + 3]);
        }
        let lower = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
        let upper = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
        for j in 0..4 {
            let (a, b) = (_mm512_castps_pd(t[j]), _mm512_castps_pd(t[j + 4]));
            u[j] = _mm512_castpd_ps(_mm512_permutex2var_pd(a, lower, b));
            u[j + 4] = _mm512_castpd_ps(_mm512_permutex2var_pd(a, upper, b));
        }
        u
    }
}
