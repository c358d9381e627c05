//! Products with 256-bit vectors, for CPUs without AVX-512; grouped formats are in `groups.rs`, those of 8 bits without
//! VNNI in `bytes.rs`.
//!
//! A panel is four vectors wide. The sums of a tile with all four do not fit in 16 registers, so a tile has `T` vectors
//! of columns. A plain format's kernel passes over the panel `4 / T` times, a grouped one's `4 / T` times over each
//! group. Each tile is a function of its own, as in `avx512.rs`.

#![allow(unsafe_code, reason = "intrinsics")]

#[deny(unsafe_code)]
mod bytes;
#[deny(unsafe_code)]
mod groups;

use super::formats::{Group, GroupInputs};
use super::{Panel, Prefetch, Tile};
use crate::ops::cpu::activations::Inputs;
use crate::ops::cpu::isa::{Avx2, Avx2Vnni, Encoding};
use crate::ops::packed::{PANEL, PackedFormat};
use crate::quant::BLOCK_LEN;
use std::arch::x86_64::*;
use std::hint::black_box;
use std::ops::Range;

/// Rows of a tile of a plain format: 5 x 16 columns. With 6 rows LLVM moves sums of bf16 to the stack.
pub(super) const PLAIN_ROWS: usize = 5;
/// Rows of a tile of a grouped format: 4 x 16 columns or 1 x 32. Those of 8 bits are multiplied one after the other.
pub(super) const PAIR_ROWS: usize = 4;
/// Rows of a tile of a grouped format with VNNI, which needs fewer registers: 3 x 16 columns, 2 x 16 or 1 x 32.
pub(super) const VNNI_ROWS: usize = 3;

/// Vectors in a panel.
const VECTORS: usize = 4;
/// Bytes in one vector of weights.
const LANE: usize = 32;
/// Bytes in a panel's four vectors.
const STEP: usize = VECTORS * LANE;

/// Calls the instance of a plain kernel for the number of rows. With one or two rows it reads the panel once.
macro_rules! plain_rows {
    ($n_rows:expr, $kernel:ident $args:tt) => {
        match $n_rows {
            1 => $kernel::<1, 4> $args,
            2 => $kernel::<2, 4> $args,
            3 => $kernel::<3, 2> $args,
            4 => $kernel::<4, 2> $args,
            PLAIN_ROWS => $kernel::<5, 2> $args,
            n => unreachable!("no tile of {n} rows"),
        }
    };
}

/// The sums of `panel` for a block of `n_rows` rows.
pub(super) fn tile(_: Avx2, panel: &Panel<'_>, n_rows: usize, inputs: Inputs<'_>, out: &mut Tile) {
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
pub(super) fn tile_vnni(
    token: Avx2Vnni,
    panel: &Panel<'_>,
    n_rows: usize,
    inputs: Inputs<'_>,
    out: &mut Tile,
) {
    // SAFETY: as in `tile`, and the encoding is one that the CPU has.
    unsafe {
        match (inputs, token.encoding()) {
            (Inputs::Groups(words, groups), Encoding::Vex) => {
                groups::vex::tile(panel, n_rows, GroupInputs { words, groups }, out)
            }
            (Inputs::Groups(words, groups), Encoding::Evex) => {
                groups::evex::tile(panel, n_rows, GroupInputs { words, groups }, out)
            }
            _ => plain_tile(panel, n_rows, inputs, out),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn plain_tile(panel: &Panel<'_>, n_rows: usize, inputs: Inputs<'_>, out: &mut Tile) {
    match (panel.format, inputs) {
        (PackedFormat::F32, Inputs::Plain(x)) => {
            plain_rows!(n_rows, f32_tile(panel, x, out));
        }
        (PackedFormat::BF16, Inputs::Plain(x)) => {
            plain_rows!(n_rows, bf16_tile(panel, x, out));
        }
        (format, _) => unreachable!("`form` returns another form for {format:?}"),
    }
}

/// `range`, with an end that the compiler does not know, so that it does not unroll the loop. Unrolled, LLVM adds the
/// products of a group as a tree and moves sums to the stack, and a row's loads are not in the order of memory.
#[inline(always)]
fn rolled(range: Range<usize>) -> Range<usize> {
    range.start..black_box(range.end)
}

/// Vectors `first..first + T` of one step.
#[inline]
#[target_feature(enable = "avx2")]
fn load<const T: usize>(step: &[u8; STEP], first: usize) -> [__m256i; T] {
    let vectors = &step.as_chunks::<LANE>().0[first..first + T];
    // SAFETY: each chunk has 32 bytes; the load needs no alignment.
    std::array::from_fn(|t| unsafe { _mm256_loadu_si256(vectors[t].as_ptr().cast()) })
}

/// Eight columns per vector of a header of f16 numbers, from vector `first` on, as f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_f16<const T: usize>(header: &[u8; 2 * PANEL], first: usize) -> [__m256; T] {
    let vectors = &header.as_chunks::<{ LANE / 2 }>().0[first..first + T];
    // SAFETY: each chunk has 16 bytes; the load needs no alignment.
    std::array::from_fn(|t| _mm256_cvtph_ps(unsafe { _mm_loadu_si128(vectors[t].as_ptr().cast()) }))
}

/// Eight columns per vector of a header of bytes, from vector `first` on, as integers of 32 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn load_u8<const T: usize>(header: &[u8; PANEL], first: usize) -> [__m256i; T] {
    let vectors = &header.as_chunks::<{ LANE / 4 }>().0[first..first + T];
    std::array::from_fn(|t| {
        // SAFETY: each chunk has 8 bytes; the load needs no alignment.
        let bytes = unsafe { _mm_loadl_epi64(vectors[t].as_ptr().cast()) };
        _mm256_cvtepu8_epi32(bytes)
    })
}

/// Line `line` of a group's scales and minima (or zero points) as f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_line<const T: usize, G: Group>(header: &[u8], line: usize, first: usize) -> [__m256; T] {
    if G::HAS_EXPONENTS {
        return load_exponents(&header.as_chunks().0[line], first);
    }
    if G::HAS_UNITS {
        return load_u8(&header.as_chunks().0[line], first).map(|bytes| _mm256_cvtepi32_ps(bytes));
    }
    load_f16(&header.as_chunks().0[line], first)
}

/// The scales of exponents: see [`mxfp4`](crate::quant::mxfp4).
#[inline]
#[target_feature(enable = "avx2")]
fn load_exponents<const T: usize>(header: &[u8; PANEL], first: usize) -> [__m256; T] {
    let half = _mm256_set1_ps(0.5);
    load_u8(header, first).map(|e| _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(e)), half))
}

/// A table of 16 bytes for each 128 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn load_table(table: &[u8; 16]) -> __m256i {
    // SAFETY: the array has 16 bytes; the load needs no alignment.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
}

/// Multiplies each row's sums by the units of the columns.
#[inline]
#[target_feature(enable = "avx2")]
fn apply_units<const R: usize>(sums: &mut [[__m256; VECTORS]; R], units: &[u8; STEP]) {
    let units = load::<VECTORS>(units, 0).map(|units| _mm256_castsi256_ps(units));
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
            // SAFETY: each chunk has 8 numbers; the store needs no alignment.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sum) };
        }
    }
}

/// F32: one fused multiply-add for each k.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn f32_tile<const R: usize, const T: usize>(panel: &Panel<'_>, x: &[f32], out: &mut Tile) {
    let steps: &[[u8; STEP]] = panel.bytes.as_chunks().0;
    let mut prefetch = panel.prefetch;
    for first in (0..VECTORS).step_by(T) {
        let mut sums = [[_mm256_setzero_ps(); T]; R];
        for (run, x) in steps.chunks(BLOCK_LEN).zip(x.as_chunks::<BLOCK_LEN>().0.as_chunks::<R>().0) {
            for (i, w) in run.iter().enumerate() {
                prefetch.next_step();
                let w = load::<T>(w, first).map(|w| _mm256_castsi256_ps(w));
                multiply(&mut sums, x, i, w);
            }
        }
        prefetch = Prefetch::NONE;
        store(sums, first, out);
    }
}

/// BF16: weights are widened with shift and mask, then one fused multiply-add for each k.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn bf16_tile<const R: usize, const T: usize>(panel: &Panel<'_>, x: &[f32], out: &mut Tile) {
    let high = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
    let steps: &[[u8; STEP]] = panel.bytes.as_chunks().0;
    let mut prefetch = panel.prefetch;
    for first in (0..VECTORS).step_by(T) {
        let mut sums = [[_mm256_setzero_ps(); T]; R];
        for (run, x) in steps.chunks(BLOCK_LEN / 2).zip(x.as_chunks::<BLOCK_LEN>().0.as_chunks::<R>().0) {
            for (i, w) in run.iter().enumerate() {
                prefetch.next_step();
                let w = load::<T>(w, first);
                let even = w.map(|w| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w)));
                multiply(&mut sums, x, 2 * i, even);
                multiply(&mut sums, x, 2 * i + 1, w.map(|w| _mm256_castsi256_ps(_mm256_and_si256(w, high))));
            }
        }
        prefetch = Prefetch::NONE;
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
