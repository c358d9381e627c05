//! Rounding and reordering of one block of inputs.

#![allow(unsafe_code, reason = "calls functions compiled for an instruction set")]

#[cfg(target_arch = "x86_64")]
mod avx512;

use super::{GroupInput, Rows, SizedGroup};
use crate::ops::cpu::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::ops::cpu::isa::{Avx2, Avx512};
use crate::quant::BLOCK_LEN;
use std::ops::Range;

/// The input of one call: runs of 32 columns of the rows of a block.
pub(super) struct Item<'a> {
    /// All columns of the block's rows.
    pub(super) x: Rows<'a>,
    /// The runs to pack, out of `n_columns.div_ceil(32)`.
    pub(super) runs: Range<usize>,
}

/// The output of an item, from its first run on: `[run][row][word of the run]`, and `[run][row]` for the groups.
pub(super) enum Outputs<'a> {
    /// The inputs' bits.
    Plain(&'a mut [u32]),
    /// The bits of the inputs rounded to bf16.
    Rounded(&'a mut [u32]),
    /// Pairs of bf16.
    Pairs(&'a mut [u32]),
    /// Four integers per word, and what kernels need to know of each group.
    Groups(&'a mut [u32], &'a mut [GroupInput]),
    /// Sizes and signs of integers.
    Sized(&'a mut [SizedGroup]),
}

/// Packs one item with code compiled for the instruction set.
pub(super) fn pack(isa: Isa, item: Item<'_>, out: Outputs<'_>) {
    match isa {
        Isa::Scalar => pack_lanes(Portable, item, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the token proves that the CPU has these features.
        Isa::Avx2(token) => unsafe { pack_avx2(token, item, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2Vnni(token) => unsafe { pack_avx2(token.base(), item, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512(token) => unsafe { pack_avx512(token, item, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512Vnni(token) => unsafe { pack_avx512(token.base(), item, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512Bf16(token) => unsafe { pack_avx512(token.base().base(), item, out) },
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
/// Runs of 32 columns are packed in order, each for all rows; groups are packed four runs at a time. Zeros follow the
/// last column.
#[inline(always)]
fn pack_lanes<R: Round>(round: R, item: Item<'_>, mut out: Outputs<'_>) {
    let Item { x, runs } = item;
    let mut rest = runs.clone();
    if let Outputs::Groups(words, groups) = &mut out {
        while rest.start + FOUR <= rest.end.min(x.n_columns / BLOCK_LEN) {
            for (row, values) in x.values.chunks_exact(x.n_columns).enumerate() {
                let first = (rest.start - runs.start) * x.n_rows + row;
                let values = &values.as_chunks().0[rest.start..rest.start + FOUR];
                if round.four_groups(values, GroupOutputs { words, groups }, first, x.n_rows) {
                    continue;
                }
                for i in 0..FOUR {
                    let place = first + i * x.n_rows;
                    groups[place] = round_group(round, &values[i], run_at(words, place));
                }
            }
            rest.start += FOUR;
        }
    }
    for run in rest {
        for (row, values) in x.values.chunks_exact(x.n_columns).enumerate() {
            let place = (run - runs.start) * x.n_rows + row;
            let values = &values[run * BLOCK_LEN..];
            match values.first_chunk() {
                Some(values) => out.put(round, place, values),
                None => out.put(round, place, &padded(values)),
            }
        }
    }
}

/// Up to 32 values, padded with zeros.
#[cold]
fn padded(values: &[f32]) -> [f32; BLOCK_LEN] {
    let mut run = [0.0; BLOCK_LEN];
    run[..values.len()].copy_from_slice(values);
    run
}

impl Outputs<'_> {
    /// Rounds one run of one row and writes it to its place, counted in runs.
    #[inline(always)]
    fn put<R: Round>(&mut self, round: R, place: usize, values: &[f32; BLOCK_LEN]) {
        match self {
            Outputs::Plain(out) => {
                for (word, value) in run_at::<BLOCK_LEN>(out, place).iter_mut().zip(values) {
                    *word = value.to_bits();
                }
            }
            Outputs::Rounded(out) => {
                for (word, value) in run_at::<BLOCK_LEN>(out, place).iter_mut().zip(values) {
                    *word = round_bf16(*value) << 16;
                }
            }
            Outputs::Pairs(out) => round.pairs(values, run_at(out, place)),
            Outputs::Groups(words, groups) => {
                groups[place] = round_group(round, values, run_at(words, place));
            }
            Outputs::Sized(groups) => {
                let mut words = [0; BLOCK_LEN / 4];
                let scale = round_group(round, values, &mut words).scale;
                groups[place] = SizedGroup::new(scale, &words);
            }
        }
    }
}

/// The `N` words of the run at `place`.
#[inline(always)]
fn run_at<const N: usize>(words: &mut [u32], place: usize) -> &mut [u32; N] {
    &mut words.as_chunks_mut().0[place]
}

/// The bf16 nearest to `value` (ties to even) in the low half of a word; NaN stays NaN.
#[inline(always)]
fn round_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if value.is_nan() { bits >> 16 | 0x40 } else { rounded }
}

/// Rounds 32 inputs to 8 bits with one scale.
#[inline(always)]
fn round_group<R: Round>(
    round: R,
    values: &[f32; BLOCK_LEN],
    words: &mut [u32; BLOCK_LEN / 4],
) -> GroupInput {
    // The bits of absolute values are ordered as the values are, then infinity, then NaN.
    let max = f32::from_bits(round.largest_size(values));
    let inverse = 127.0 / max;
    if !max.is_finite() || !inverse.is_finite() {
        // NaN or infinity, zeros, or so small that 127/max overflows: below 2^-120, negligible with any weight.
        words.fill(0);
        return GroupInput::new(if max.is_finite() { 0.0 } else { f32::NAN }, [0; 2]);
    }
    GroupInput::new(max / 127.0, round.integers(values, inverse, words))
}

/// The output of rounded groups.
struct GroupOutputs<'a> {
    words: &'a mut [u32],
    groups: &'a mut [GroupInput],
}

/// Groups of a row that are rounded together: a vector then has numbers of each of them.
const FOUR: usize = 4;

/// The steps that compilers do not turn into good vector code. Every implementation returns the same bits.
trait Round: Copy {
    /// The largest of the values' bits without the sign.
    fn largest_size(self, values: &[f32; BLOCK_LEN]) -> u32;

    /// Rounds `values * inverse` (at most 127) to nearest even and writes the bytes, four per word, the first in the
    /// low byte. Returns the sum of each half.
    fn integers(self, values: &[f32; BLOCK_LEN], inverse: f32, words: &mut [u32; BLOCK_LEN / 4]) -> [i32; 2];

    /// Rounds the values to bf16, two per word, the first in the low half.
    fn pairs(self, values: &[f32; BLOCK_LEN], words: &mut [u32; BLOCK_LEN / 2]);

    /// Rounds [`FOUR`] groups as [`round_group`] does and writes them to the places `first + i * stride`. Returns false
    /// and does nothing if there is no faster way, or if a group is one that becomes zeros.
    fn four_groups(
        self,
        _values: &[[f32; BLOCK_LEN]],
        _out: GroupOutputs<'_>,
        _first: usize,
        _stride: usize,
    ) -> bool {
        false
    }
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
    fn integers(self, values: &[f32; BLOCK_LEN], inverse: f32, words: &mut [u32; BLOCK_LEN / 4]) -> [i32; 2] {
        // Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits of the sum.
        const ROUND: f32 = 12_582_912.0;
        let mut sums = [0; 2];
        for (quad, values) in values.as_chunks::<4>().0.iter().enumerate() {
            words[quad] = 0;
            for (i, value) in values.iter().enumerate() {
                let integer = (value * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits());
                words[quad] |= (integer & 0xff) << (8 * i);
                sums[2 * quad / words.len()] += integer.cast_signed();
            }
        }
        sums
    }

    #[inline(always)]
    fn pairs(self, values: &[f32; BLOCK_LEN], words: &mut [u32; BLOCK_LEN / 2]) {
        for (pair, values) in words.iter_mut().zip(values.as_chunks::<2>().0) {
            *pair = round_bf16(values[0]) | round_bf16(values[1]) << 16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cpu::activations::Inputs;
    use crate::ops::cpu::isa::{IsaName, detect};

    /// Integers and groups of `n_rows` rows, packed with `isa`.
    fn packed(isa: Isa, values: &[f32], n_rows: usize) -> (Vec<u32>, Vec<GroupInput>) {
        let x = Rows::new(values, values.len() / n_rows);
        let n_runs = x.n_columns / BLOCK_LEN;
        let mut words = vec![u32::MAX; values.len() / 4];
        let mut groups = vec![GroupInput::new(7.0, [7; 2]); n_rows * n_runs];
        pack(isa, Item { x, runs: 0..n_runs }, Outputs::Groups(&mut words, &mut groups));
        (words, groups)
    }

    #[test]
    fn groups_have_the_same_bits_on_every_instruction_set() {
        const N_RUNS: usize = 11;
        let odd = [0.0, f32::NAN, f32::INFINITY, -0.0, 1e-40, -3e38];
        for n_rows in 1..=6 {
            let mut values: Vec<f32> = (0..n_rows * N_RUNS * BLOCK_LEN)
                .map(|i| ((i * 7919 % 1009) as f32 - 504.0) * [0.5, 1e-3, 3e5][i / 96 % 3])
                .collect();
            // Groups of zeros, of numbers near the ends of f32, and one that is not finite, next to ordinary groups.
            for (i, odd) in odd.into_iter().enumerate() {
                let at = (i * 2 + 1) * BLOCK_LEN % values.len();
                values[at] = odd;
                if odd == 0.0 || odd == 1e-40 {
                    values[at..at + BLOCK_LEN].fill(odd);
                }
            }
            let (words, groups) = packed(Isa::Scalar, &values, n_rows);
            for name in IsaName::available() {
                let isa = detect(name).expect("an available set");
                let (own_words, own_groups) = packed(isa, &values, n_rows);
                assert_eq!(own_words, words, "integers of {n_rows} rows on {name:?}");
                for (i, (own, group)) in own_groups.iter().zip(&groups).enumerate() {
                    let same = own.scale.to_bits() == group.scale.to_bits() || own.scale.is_nan();
                    let sums = own.scaled_sums.map(f32::to_bits) == group.scaled_sums.map(f32::to_bits);
                    let minus = own.minus_sums == group.minus_sums;
                    assert!(
                        same && minus && (sums || group.scale.is_nan()),
                        "{name:?}, {i}: {own:?}, {group:?}"
                    );
                    assert_eq!(own.scale.is_nan(), group.scale.is_nan(), "{name:?}, {i}");
                }
            }
        }
    }

    #[test]
    fn sizes_and_signs_are_those_of_the_integers() {
        const N_RUNS: usize = 9;
        for n_rows in 1..=4 {
            // The least and the largest integer, zero, and groups of zeros and of a NaN.
            let mut values: Vec<f32> =
                (0..n_rows * N_RUNS * BLOCK_LEN).map(|i| (i * 7919 % 255) as f32 - 127.0).collect();
            values[BLOCK_LEN..2 * BLOCK_LEN].fill(0.0);
            values[3 * BLOCK_LEN] = f32::NAN;
            let (words, groups) = packed(Isa::Scalar, &values, n_rows);
            let words = words.as_chunks::<{ BLOCK_LEN / 4 }>().0;
            for name in IsaName::available() {
                let isa = detect(name).expect("an available set");
                let x = Rows::new(&values, values.len() / n_rows);
                let mut sized = vec![SizedGroup::default(); n_rows * N_RUNS];
                pack(isa, Item { x, runs: 0..N_RUNS }, Outputs::Sized(&mut sized));
                for ((own, words), group) in sized.iter().zip(words).zip(&groups) {
                    assert_eq!(own.scale.to_bits(), group.scale.to_bits());
                    let bytes = |words: &[u32; BLOCK_LEN / 4]| words.map(u32::to_le_bytes).concat();
                    let integers: Vec<i32> =
                        bytes(words).iter().map(|&x| i32::from(x.cast_signed())).collect();
                    let sizes: Vec<i32> = bytes(&own.sizes).iter().map(|&size| i32::from(size)).collect();
                    assert_eq!(sizes, integers.iter().map(|x| x.abs()).collect::<Vec<_>>());
                    assert_eq!(-own.minus_negatives, integers.iter().filter(|x| **x < 0).sum::<i32>());
                    assert_eq!(Inputs::Sized(std::slice::from_ref(own)).group(0).0, *words);
                    for (flip, x) in bytes(&own.flips).iter().zip(integers) {
                        assert_eq!(*flip, if x < 0 { 0x7f } else { 0x80 });
                    }
                }
            }
        }
    }
}
