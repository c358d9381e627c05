//! Quantizes float weights to small integers: `--quantization` while a model is loaded.
//!
//! A row is split into groups of 32. Each group has an 8-bit scale, in multiples of the row's `unit`. In one of the
//! grids it also has a zero point in 16ths. Every weight is an integer:
//!
//! ```text
//! Symmetric { bits }   unit * scale * (q - 2^(bits - 1))    |q - 2^(bits - 1)| < 2^(bits - 1)
//! ZeroPoint            unit * scale * (q - zero / 16)       q of 4 bits
//! ```
//!
//! A search reduces the squared error of each group. It tries scales around the one that just covers the largest
//! weight, each with the best zero point for its integers. The first candidate is rounding to nearest; another one is
//! used only if it is better.
//!
//! Quantized values do not change when they are quantized again, except in groups that extend less than one step to one
//! side of zero. This holds for three reasons. A unit has 8 significant bits, so that every value is exact in f32. The
//! group with the widest span, which determines the unit, keeps the scale 255. A scale that makes the span a whole
//! number of steps is always tried.

use super::{BLOCK_LEN, Block, dequantize_row};
use crate::tensor::RowView;
use half::f16;

/// The integers that represent weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grid {
    /// Symmetric around zero.
    Symmetric {
        /// Bits of an integer: 2 to 8.
        bits: u32,
    },
    /// 4 bits around a zero point of each group.
    ZeroPoint,
}

/// The largest scale: that of the group with the widest span of a row.
const MAX_SCALE: f32 = 255.0;
/// The largest integer of [`Grid::ZeroPoint`].
const MAX_NIBBLE: f32 = 15.0;
/// Zero points per step of the integers.
const ZERO_PARTS: f32 = 16.0;
/// Number of scales tried below the one that covers the largest weight.
const N_BELOW: i32 = 6;
/// Number of scales tried above it.
const N_ABOVE: i32 = 3;

/// One quantized row.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct QuantizedRow {
    /// Scales are multiples of this; not negative.
    pub unit: f32,
    /// The groups, in order of the elements.
    pub groups: Vec<Group>,
}

/// Up to 32 weights that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The scale in units; 0 in a group of zeros.
    pub scale: u8,
    /// The zero point in 16ths of a step; 0 in symmetric grids.
    pub zero: u8,
    /// The integers.
    pub q: [u8; BLOCK_LEN],
}

impl QuantizedRow {
    /// The values that the integers represent.
    pub fn values(&self, grid: Grid) -> Vec<f32> {
        let value = |group: &Group, q: u8| {
            let zero = match grid {
                Grid::Symmetric { bits } => f32::from(1_u8 << (bits - 1)),
                Grid::ZeroPoint => f32::from(group.zero) / ZERO_PARTS,
            };
            self.unit * f32::from(group.scale) * (f32::from(q) - zero)
        };
        self.groups.iter().flat_map(|group| group.q.map(|q| value(group, q))).collect()
    }
}

/// Quantizes rows of one length, one after the other.
#[derive(Debug)]
pub struct Quantizer {
    grid: Grid,
    values: Vec<f32>,
    quantized: QuantizedRow,
}

impl Quantizer {
    /// A quantizer for rows of `n_columns`, a multiple of 32.
    pub fn new(grid: Grid, n_columns: usize) -> Self {
        Self { grid, values: vec![0.0; n_columns], quantized: QuantizedRow::default() }
    }

    /// Quantizes the values of `row`, which must be finite. Panics if the row has another length.
    pub fn quantize(&mut self, row: RowView<'_>) -> &QuantizedRow {
        dequantize_row(row, &mut self.values);
        quantize(self.grid, &self.values, &mut self.quantized);
        &self.quantized
    }
}

/// Quantizes `values` into `out`. They must be finite, and their number a multiple of 32.
pub fn quantize(grid: Grid, values: &[f32], out: &mut QuantizedRow) {
    let groups = values.as_chunks::<BLOCK_LEN>().0;
    let longest = groups.iter().map(|group| reach(grid, group)).fold(0.0, f32::max);
    out.unit = coarse(longest / MAX_SCALE);
    out.groups.clear();
    out.groups.extend(groups.iter().map(|group| match grid {
        Grid::Symmetric { bits } => quantize_symmetric(group, bits, out.unit),
        Grid::ZeroPoint => quantize_zero_point(group, out.unit),
    }));
}

/// Quantizes a group to a Q8_0 block, with the best of the f16 scales next to the one that covers the largest weight.
///
/// Its scales are finer than those of a [`Grid`]: weights that were decoded from Q8_0 get the same values again.
pub fn quantize_q8_0(group: &[f32; BLOCK_LEN]) -> Block {
    const MAX: f32 = 127.0;
    let [low, high] = ends(group);
    let whole = f16::from_f32(high.max(-low) / MAX);
    let mut best = (f32::INFINITY, Block::scaled(0.0, 128, [128; BLOCK_LEN]));
    // Rounding to bf16 changes the largest magnitude, and with it the scale, by up to 2^-8: 4 steps of f16.
    for step in [0, 1, -1, 2, -2, 3, -3, 4, -4] {
        let scale = f16::from_bits(whole.to_bits().saturating_add_signed(step)).to_f32();
        let assigned = assign(group, scale, 0.0, [-MAX, MAX]);
        if assigned.error < best.0 {
            best = (assigned.error, Block::scaled(scale, 128, assigned.q.map(|q| to_byte(q + 128.0))));
        }
    }
    best.1
}

/// The absolute scale at which the grid covers every weight of a group.
fn reach(grid: Grid, group: &[f32; BLOCK_LEN]) -> f32 {
    let [low, high] = ends(group);
    match grid {
        Grid::Symmetric { bits } => high.max(-low) / max_symmetric(bits),
        Grid::ZeroPoint => high / MAX_NIBBLE - low / MAX_NIBBLE,
    }
}

/// The smallest and the largest of the weights and zero.
fn ends(group: &[f32; BLOCK_LEN]) -> [f32; 2] {
    // Eight at a time, which compilers vectorize.
    let (mut low, mut high) = ([0.0; 8], [0.0; 8]);
    for w in group.as_chunks::<8>().0 {
        for i in 0..8 {
            low[i] = w[i].min(low[i]);
            high[i] = w[i].max(high[i]);
        }
    }
    [low.into_iter().fold(0.0, f32::min), high.into_iter().fold(0.0, f32::max)]
}

fn max_symmetric(bits: u32) -> f32 {
    f32::from((1_u8 << (bits - 1)) - 1)
}

/// The nearest number with 8 significant bits.
fn coarse(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

/// The smallest integer scale that covers `reach`, within 1 to 255; `None` for a group of zeros.
fn whole_scale(reach: f32, unit: f32) -> Option<u16> {
    let scale = (reach / unit).ceil();
    (reach > 0.0 && unit > 0.0).then(|| scale.clamp(1.0, MAX_SCALE) as u16)
}

/// Scales to try for a group whose weights span `span`: `whole`, smaller ones down to `1 - depth` of it, a few larger
/// ones (which may fit the weights better), and those at which `span` is a whole number of steps up to `levels`. The
/// group with the widest span of a row, which has the scale 255, keeps it.
fn scales(whole: u16, depth: f32, span: f32, levels: u8) -> impl Iterator<Item = u16> {
    let is_longest = f32::from(whole) == MAX_SCALE;
    let step = ((f32::from(whole) * depth) as i32 / N_BELOW).max(1);
    let around = (-N_BELOW..=N_ABOVE).map(move |i| i32::from(whole) + i * step);
    let exact = (1..=levels).map(move |n| span / f32::from(n)).filter(|scale| scale.fract() == 0.0);
    let others = around.chain(exact.map(|scale| scale as i32)).filter(|scale| (1..=255).contains(scale));
    std::iter::once(whole).chain(others.map(|scale| scale as u16).filter(move |_| !is_longest))
}

fn quantize_symmetric(group: &[f32; BLOCK_LEN], bits: u32, unit: f32) -> Group {
    let (max, middle) = (max_symmetric(bits), f32::from(1_u8 << (bits - 1)));
    let zeros = Group { scale: 0, zero: 0, q: [middle as u8; BLOCK_LEN] };
    let Some(whole) = whole_scale(reach(Grid::Symmetric { bits }, group), unit) else { return zeros };
    let [low, high] = ends(group);
    let mut best = (f32::INFINITY, zeros);
    // The fewer bits, the more a smaller scale can gain.
    for scale in scales(whole, 4.0 / max, high.max(-low) / unit, max as u8) {
        let assigned = assign(group, unit * f32::from(scale), 0.0, [-max, max]);
        if assigned.error < best.0 {
            let q = assigned.q.map(|q| to_byte(q + middle));
            best = (assigned.error, Group { scale: scale as u8, zero: 0, q });
        }
    }
    best.1
}

fn quantize_zero_point(group: &[f32; BLOCK_LEN], unit: f32) -> Group {
    let zeros = Group { scale: 0, zero: 0, q: [0; BLOCK_LEN] };
    let Some(whole) = whole_scale(reach(Grid::ZeroPoint, group), unit) else { return zeros };
    let [low, high] = ends(group);
    // The zero point stays at the end of a one-sided group, and the group with the widest span keeps its ends.
    let may_move = low < 0.0 && high > 0.0 && f32::from(whole) < MAX_SCALE;
    let mut best = (f32::INFINITY, zeros);
    for scale in scales(whole, 0.25, high / unit - low / unit, MAX_NIBBLE as u8) {
        let step = unit * f32::from(scale);
        // Weights outside the range are clipped equally on both sides.
        let excess = if scale < whole { (high / step - low / step - MAX_NIBBLE).max(0.0) } else { 0.0 };
        let mut zero =
            if high > 0.0 { whole_zero(-low / step - excess / 2.0) } else { whole_zero(MAX_NIBBLE) };
        for _ in 0..if may_move { 2 } else { 1 } {
            let assigned = assign(group, step, zero / ZERO_PARTS, [0.0, MAX_NIBBLE]);
            if assigned.error < best.0 {
                let q = assigned.q.map(to_byte);
                best = (assigned.error, Group { scale: scale as u8, zero: zero as u8, q });
            }
            zero = whole_zero(assigned.zero);
        }
    }
    best.1
}

/// A zero point in 16ths, within the range of the integers.
fn whole_zero(zero: f32) -> f32 {
    nearest(zero * ZERO_PARTS).clamp(0.0, MAX_NIBBLE * ZERO_PARTS)
}

/// The integers of a group for one scale and zero point.
struct Assigned {
    q: [f32; BLOCK_LEN],
    /// The sum of squared differences.
    error: f32,
    /// The zero point, in steps, with the smallest error for these integers.
    zero: f32,
}

/// Assigns each weight the nearest integer in the range.
fn assign(group: &[f32; BLOCK_LEN], step: f32, zero: f32, [least, most]: [f32; 2]) -> Assigned {
    let inverse = 1.0 / step;
    let mut q = [0.0; BLOCK_LEN];
    let (mut off, mut off_squared) = ([0.0; 8], [0.0; 8]);
    for (q, w) in q.as_chunks_mut::<8>().0.iter_mut().zip(group.as_chunks::<8>().0) {
        for i in 0..8 {
            let at = w[i] * inverse + zero;
            q[i] = nearest(at.max(least).min(most));
            let d = q[i] - at;
            off[i] += d;
            off_squared[i] += d * d;
        }
    }
    let sum = |parts: [f32; 8]| parts.iter().sum::<f32>();
    Assigned { q, error: sum(off_squared) * step * step, zero: zero + sum(off) / BLOCK_LEN as f32 }
}

/// Rounds a number below 2^22 to the nearest whole number, ties to even: only additions, which compilers vectorize.
pub(crate) fn nearest(x: f32) -> f32 {
    const WHOLE: f32 = 12_582_912.0; // 1.5 * 2^23: f32 has no fractions there
    (x + WHOLE) - WHOLE
}

/// The byte of a whole number of 0 to 255: as `as u8`, but vectorized.
pub(crate) fn to_byte(x: f32) -> u8 {
    const WHOLE: f32 = 8_388_608.0; // 2^23: the last bit of f32 is 1 there
    (x + WHOLE).to_bits() as u8
}
