//! Products with 512-bit vectors. BF16 uses `vdpbf16ps` or, where the CPU lacks it, one fused multiply-add for each k;
//! grouped formats are in `groups.rs`, those of 8 bits without VNNI in `bytes.rs`.
//!
//! A panel is two vectors wide. A tile needs two accumulators per row (grouped formats: two of integers and two of
//! f32), so 12 rows of plain formats and 6 of grouped ones fill the 32 registers. Each tile is a function of its own:
//! in a common function compilers spill one sum of every tile to the same stack slot, and each step waits for it.

#![allow(unsafe_code, reason = "intrinsics")]

#[deny(unsafe_code)]
mod bytes;
#[deny(unsafe_code)]
mod groups;

use super::formats::{Group, GroupInputs};
use super::{Panel, Tile};
use crate::ops::cpu::activations::Inputs;
use crate::ops::cpu::isa::{Avx512, Avx512Bf16, Avx512Vnni};
use crate::ops::packed::{PANEL, PackedFormat};
use crate::quant::BLOCK_LEN;
use std::arch::x86_64::*;

/// Rows of a tile of a plain format.
pub(super) const PLAIN_ROWS: usize = 12;
/// Rows of a tile of a grouped format with VNNI.
pub(super) const VNNI_ROWS: usize = 6;
/// Rows of a tile of a grouped format without VNNI, which needs more registers per row.
pub(super) const PAIR_ROWS: usize = 4;

/// Bytes in two vectors: what a panel has for one k (F32), two (BF16), four (8 bit) or eight (4 bit).
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
pub(super) fn tile(_: Avx512, panel: &Panel<'_>, n_rows: usize, inputs: Inputs<'_>, out: &mut Tile) {
    // SAFETY: the token proves that the CPU has every feature that these functions are compiled for.
    unsafe {
        match inputs {
            Inputs::Groups(words, groups) => {
                groups::pairs::tile(panel, n_rows, GroupInputs { words, groups }, out)
            }
            Inputs::Sized(groups) => bytes::tile(panel, n_rows, groups, out),
            _ => plain_tile(panel, n_rows, inputs, out),
        }
    }
}

/// As [`tile`], with VNNI for grouped formats.
pub(super) fn tile_vnni(_: Avx512Vnni, panel: &Panel<'_>, n_rows: usize, inputs: Inputs<'_>, out: &mut Tile) {
    // SAFETY: as in `tile`.
    unsafe {
        match inputs {
            Inputs::Groups(words, groups) => {
                groups::vnni::tile(panel, n_rows, GroupInputs { words, groups }, out)
            }
            _ => plain_tile(panel, n_rows, inputs, out),
        }
    }
}

/// As [`tile_vnni`], with `vdpbf16ps` for pairs of bf16.
pub(super) fn tile_bf16(
    token: Avx512Bf16,
    panel: &Panel<'_>,
    n_rows: usize,
    inputs: Inputs<'_>,
    out: &mut Tile,
) {
    match inputs {
        // SAFETY: as in `tile`.
        Inputs::Pairs(x) => unsafe { pairs_tile(panel, n_rows, x, out) },
        _ => tile_vnni(token.base(), panel, n_rows, inputs, out),
    }
}

#[target_feature(enable = "avx512f")]
fn plain_tile(panel: &Panel<'_>, n_rows: usize, inputs: Inputs<'_>, out: &mut Tile) {
    match (panel.format, inputs) {
        (PackedFormat::F32, Inputs::Plain(x)) => {
            plain_rows!(n_rows, [1 2 3 4 5 6 7 8 9 10 11 12], f32_tile(panel, x, out));
        }
        (PackedFormat::BF16, Inputs::Plain(x)) => {
            plain_rows!(n_rows, [1 2 3 4 5 6 7 8 9 10 11 12], widened_tile(panel, x, out));
        }
        (format, _) => unreachable!("`form` returns another form for {format:?}"),
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn pairs_tile(panel: &Panel<'_>, n_rows: usize, x: &[u32], out: &mut Tile) {
    plain_rows!(n_rows, [1 2 3 4 5 6 7 8 9 10 11 12], bf16_tile(panel, x, out));
}

/// Two consecutive vectors of weights.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; STEP]) -> [__m512i; 2] {
    // SAFETY: the array has 128 bytes; the loads need no alignment.
    unsafe { [_mm512_loadu_si512(bytes.as_ptr().cast()), _mm512_loadu_si512(bytes.as_ptr().add(64).cast())] }
}

/// 32 f16 numbers as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_f16(bytes: &[u8; 2 * PANEL]) -> [__m512; 2] {
    // SAFETY: the array has 64 bytes; the loads need no alignment.
    let halves = unsafe {
        [_mm256_loadu_si256(bytes.as_ptr().cast()), _mm256_loadu_si256(bytes.as_ptr().add(32).cast())]
    };
    [_mm512_cvtph_ps(halves[0]), _mm512_cvtph_ps(halves[1])]
}

/// 32 bytes as integers of 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_u8(bytes: &[u8; PANEL]) -> [__m512i; 2] {
    // SAFETY: the array has 32 bytes; the loads need no alignment.
    let halves =
        unsafe { [_mm_loadu_si128(bytes.as_ptr().cast()), _mm_loadu_si128(bytes.as_ptr().add(16).cast())] };
    halves.map(|half| _mm512_cvtepu8_epi32(half))
}

/// Line `line` of a group's scales and minima (or zero points) as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_line<G: Group>(header: &[u8], line: usize) -> [__m512; 2] {
    if G::HAS_EXPONENTS {
        return load_exponents(&header.as_chunks().0[line]);
    }
    if G::HAS_UNITS {
        return load_u8(&header.as_chunks().0[line]).map(|bytes| _mm512_cvtepi32_ps(bytes));
    }
    load_f16(&header.as_chunks().0[line])
}

/// The scales of 32 exponents: see [`mxfp4`](crate::quant::mxfp4).
#[inline]
#[target_feature(enable = "avx512f")]
fn load_exponents(bytes: &[u8; PANEL]) -> [__m512; 2] {
    let half = _mm512_set1_ps(0.5);
    load_u8(bytes).map(|e| _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(e)), half))
}

/// A table of 16 bytes for each 128 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_table(table: &[u8; 16]) -> __m512i {
    // SAFETY: the array has 16 bytes; the load needs no alignment.
    _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
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
        // SAFETY: the array `out` has 32 numbers; the stores need no alignment.
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
    let mut prefetch = panel.prefetch;
    let steps: &[[u8; STEP]] = panel.bytes.as_chunks().0;
    for (run, x) in steps.chunks(BLOCK_LEN).zip(x.as_chunks::<BLOCK_LEN>().0.as_chunks::<R>().0) {
        for (i, w) in run.iter().enumerate() {
            prefetch.next_step();
            let w = load(w);
            multiply(&mut sums, x, i, [_mm512_castsi512_ps(w[0]), _mm512_castsi512_ps(w[1])]);
        }
    }
    store(sums, out);
}

/// BF16: weights are widened with shift and mask, then one fused multiply-add for each k.
#[inline(never)]
#[target_feature(enable = "avx512f")]
fn widened_tile<const R: usize>(panel: &Panel<'_>, x: &[f32], out: &mut Tile) {
    let high = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    let mut prefetch = panel.prefetch;
    let steps: &[[u8; STEP]] = panel.bytes.as_chunks().0;
    for (run, x) in steps.chunks(BLOCK_LEN / 2).zip(x.as_chunks::<BLOCK_LEN>().0.as_chunks::<R>().0) {
        for (i, w) in run.iter().enumerate() {
            prefetch.next_step();
            let w = load(w);
            let even = w.map(|w| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(w)));
            multiply(&mut sums, x, 2 * i, even);
            multiply(&mut sums, x, 2 * i + 1, w.map(|w| _mm512_castsi512_ps(_mm512_and_si512(w, high))));
        }
    }
    store(sums, out);
}

/// `sums[r] += x[r][i] * w`.
#[inline]
#[target_feature(enable = "avx512f")]
fn multiply<const R: usize>(
    sums: &mut [[__m512; 2]; R],
    x: &[[f32; BLOCK_LEN]; R],
    i: usize,
    w: [__m512; 2],
) {
    for r in 0..R {
        let x = _mm512_set1_ps(x[r][i]);
        for t in 0..2 {
            sums[r][t] = _mm512_fmadd_ps(x, w[t], sums[r][t]);
        }
    }
}

/// BF16: one `vdpbf16ps` for each pair of k.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16_tile<const R: usize>(panel: &Panel<'_>, x: &[u32], out: &mut Tile) {
    const PAIRS: usize = BLOCK_LEN / 2;
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    let mut prefetch = panel.prefetch;
    let steps: &[[u8; STEP]] = panel.bytes.as_chunks().0;
    for (run, x) in steps.chunks(PAIRS).zip(x.as_chunks::<PAIRS>().0.as_chunks::<R>().0) {
        for (i, w) in run.iter().enumerate() {
            prefetch.next_step();
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
