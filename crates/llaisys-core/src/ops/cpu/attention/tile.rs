//! The two products of attention, in tiles of rows (rows x query heads of an item) by vectors.
//!
//! An output's sum has the same order in every tile shape, so the tiles can follow the number of rows.

use super::BLOCK;
use super::block::HeadRows;
use super::scratch::TILE_VECTORS;
use crate::ops::cpu::isa::lanes::{EIGHT, Kernel, Lanes, MAX_LANES};
use crate::ops::cpu::kv_element::{KvElement, KvWord};
use std::marker::PhantomData;
use std::ops::Range;

/// A tile whose code depends on its number of rows. `run` and what it calls must be `#[inline(always)]`.
pub(super) trait Tile {
    /// Computes the tile.
    fn run<L: Lanes, const R: usize>(self, lanes: L);
}

/// A tile of `R` rows.
struct OfRows<const R: usize, T>(T);

impl<const R: usize, T: Tile> Kernel for OfRows<R, T> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        self.0.run::<L, R>(lanes);
    }
}

/// Height of the tiles into which `n_rows` rows are cut. If they fit in one tall tile, what they read is read once.
/// Otherwise the tiles are of almost the same height: one of few rows takes almost as long.
#[inline(always)]
pub(super) fn height<L: Lanes>(n_rows: usize) -> usize {
    if n_rows <= L::TALL_ROWS { n_rows.max(1) } else { n_rows.div_ceil(n_rows.div_ceil(L::MANY_ROWS)) }
}

/// Computes a tile of `n_rows <= L::TALL_ROWS` rows, in a function of its own. The guards are constants, so that no code
/// is compiled for tiles that do not occur.
#[inline(always)]
pub(super) fn run<L: Lanes, T: Tile>(lanes: L, n_rows: usize, tile: T) {
    match n_rows {
        1 => lanes.enter(OfRows::<1, T>(tile)),
        2 if const { L::TALL_ROWS >= 2 } => lanes.enter(OfRows::<2, T>(tile)),
        3 if const { L::TALL_ROWS >= 3 } => lanes.enter(OfRows::<3, T>(tile)),
        4 if const { L::TALL_ROWS >= 4 } => lanes.enter(OfRows::<4, T>(tile)),
        5 if const { L::TALL_ROWS >= 5 } => lanes.enter(OfRows::<5, T>(tile)),
        6 if const { L::TALL_ROWS >= 6 } => lanes.enter(OfRows::<6, T>(tile)),
        7 if const { L::TALL_ROWS >= 7 } => lanes.enter(OfRows::<7, T>(tile)),
        8 if const { L::TALL_ROWS >= 8 } => lanes.enter(OfRows::<8, T>(tile)),
        _ => unreachable!("tiles have up to {} rows", L::TALL_ROWS),
    }
}

/// Scores of some rows for up to `4 N` keys, multiplied as words of type `W`.
pub(super) struct Scores<'a, W> {
    pub(super) word: PhantomData<W>,
    /// `[R][d]`, rounded by [`KvWord::round`].
    pub(super) queries: &'a [f32],
    /// `[word of d][part][4 N]`
    pub(super) keys: &'a [f32],
    /// Factors of the scores, one per key; none if the keys have none.
    pub(super) scales: &'a [f32],
    /// Vectors of keys to score.
    pub(super) n_vectors: usize,
    /// R rows.
    pub(super) out: &'a mut [[f32; BLOCK]],
    /// Position of the first key in a row of scores.
    pub(super) offset: usize,
}

impl<W: KvWord> Tile for Scores<'_, W> {
    #[inline(always)]
    fn run<L: Lanes, const R: usize>(mut self, lanes: L) {
        let mut first = 0;
        if const { R > L::TILE_ROWS } {
            while first + 2 <= self.n_vectors {
                self.vectors::<L, R, 2>(lanes, first);
                first += 2;
            }
        } else if self.n_vectors == TILE_VECTORS {
            return self.vectors::<L, R, TILE_VECTORS>(lanes, 0);
        }
        for first in first..self.n_vectors {
            self.vectors::<L, R, 1>(lanes, first);
        }
    }
}

impl<W: KvWord> Scores<'_, W> {
    #[inline(always)]
    fn vectors<L: Lanes, const R: usize, const C: usize>(&mut self, lanes: L, first: usize) {
        let mut sums = [[lanes.splat(0.0); C]; R];
        let d = self.queries.len() / R;
        let mut queries = [self.queries; R];
        for r in 0..R {
            queries[r] = &self.queries[r * d..][..d];
        }
        let (n_parts, line_len) = (W::n_parts::<L>(), TILE_VECTORS * L::N);
        let words = self.keys.chunks_exact(n_parts * line_len);
        for (i, word) in (0..d / W::PER_WORD).zip(words) {
            for part in (0..n_parts).rev() {
                let line = &word[part * line_len + first * L::N..];
                let mut keys = [lanes.splat(0.0); C];
                for c in 0..C {
                    keys[c] = lanes.load(&line[c * L::N..]);
                }
                for r in 0..R {
                    let q = lanes.splat(W::part::<L>(queries[r], i, part));
                    for c in 0..C {
                        sums[r][c] = W::dot(lanes, q, keys[c], sums[r][c]);
                    }
                }
            }
        }
        if !self.scales.is_empty() {
            for c in 0..C {
                let scales = lanes.load(&self.scales[(first + c) * L::N..]);
                for r in 0..R {
                    sums[r][c] = lanes.mul(sums[r][c], scales);
                }
            }
        }
        for (out, sums) in self.out.iter_mut().zip(sums) {
            let out = &mut out[self.offset + first * L::N..][..C * L::N];
            for c in 0..C {
                lanes.store(sums[c], &mut out[c * L::N..]);
            }
        }
    }
}

/// Scores of up to [`EIGHT`] rows, multiplied by the keys' scales. Keys are not transposed, because for so few rows that
/// takes longer than the products. Only if [`KvElement::dots_eight`].
pub(super) struct FewScores<'a, T> {
    /// `[pair of d]`
    pub(super) queries: &'a [[f32; EIGHT]],
    pub(super) keys: HeadRows<'a, T>,
    /// Number of cells of the block to score.
    pub(super) n: usize,
    /// Memory for N keys of d numbers.
    pub(super) memory: &'a mut [f32],
    pub(super) out: &'a mut [[f32; BLOCK]],
}

impl<T: KvElement> Kernel for FewScores<'_, T> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { queries, keys, n, memory, out } = self;
        let d = keys.d();
        for first in (0..n).step_by(L::N) {
            let (mut rows, mut scales) = ([&[][..]; MAX_LANES], [1.0; MAX_LANES]);
            for (k, memory) in (0..L::N).zip(memory.chunks_exact_mut(d)) {
                rows[k] = T::pairs(lanes, keys.row(first + k), memory);
                scales[k] = keys.scale(first + k);
                keys.fetch(lanes, first + k, 0, d);
            }
            let (scores, scales) = (lanes.dot_eight(queries, rows), lanes.load(&scales));
            for (scores, out) in scores.iter().zip(out.iter_mut()) {
                let scores = if T::SCALE > 0 { lanes.mul(*scores, scales) } else { *scores };
                lanes.store(scores, &mut out[first..]);
            }
        }
    }
}

/// A part of the words of the cells from `PER_WORD * step` on.
#[derive(Clone, Copy)]
pub(super) struct Place {
    step: usize,
    part: usize,
}

/// Source of the values of a block: words of one cell (f32) or of two neighbors (bf16), by dimension.
pub(super) trait Values {
    /// What the values are multiplied as.
    type Word: KvWord;
    /// Elements of a value.
    fn d(&self) -> usize;
    /// The first `N` words at a place from dimension `at` on, or as many as there are.
    fn words<L: Lanes>(&self, lanes: L, place: Place, at: usize) -> L::F;
    /// The first `2 N` words, as [`Values::words`].
    fn two_words<L: Lanes>(&self, lanes: L, place: Place, at: usize) -> [L::F; 2];
    /// Cell `j` as numbers, from dimension `at` on.
    fn cell<L: Lanes>(&self, lanes: L, j: usize, at: usize) -> L::F;
}

/// Values that were packed into words: `[step][part][d padded]`.
pub(super) struct Packed<'a, W> {
    pub(super) values: &'a [f32],
    pub(super) padded: usize,
    pub(super) d: usize,
    pub(super) word: PhantomData<W>,
}

impl<W: KvWord> Values for Packed<'_, W> {
    type Word = W;

    #[inline(always)]
    fn d(&self) -> usize {
        self.d
    }

    #[inline(always)]
    fn words<L: Lanes>(&self, lanes: L, place: Place, at: usize) -> L::F {
        lanes.load(&self.values[(place.step * W::n_parts::<L>() + place.part) * self.padded + at..])
    }

    #[inline(always)]
    fn two_words<L: Lanes>(&self, lanes: L, place: Place, at: usize) -> [L::F; 2] {
        let start = (place.step * W::n_parts::<L>() + place.part) * self.padded + at;
        let words = &self.values[start..][..2 * L::N];
        [lanes.load(words), lanes.load(&words[L::N..])]
    }

    #[inline(always)]
    fn cell<L: Lanes>(&self, lanes: L, j: usize, at: usize) -> L::F {
        let (step, which) = (j / W::PER_WORD, j % W::PER_WORD);
        if W::n_parts::<L>() == W::PER_WORD {
            self.words(lanes, Place { step, part: which }, at)
        } else {
            W::pick(lanes, self.words(lanes, Place { step, part: 0 }, at), which)
        }
    }
}

/// Values in their cells.
pub(super) struct Stored<'b, T>(pub(super) HeadRows<'b, T>);

impl<'b, T: KvElement> Stored<'b, T> {
    /// Elements `at..at + n` of the first and the last cell of a word. Prefetches for the cells of the part.
    #[inline(always)]
    fn rows<L: Lanes>(&self, lanes: L, place: Place, at: usize, n: usize) -> [&'b [T]; 2] {
        let Place { step, part } = place;
        let (first, last) = (step * T::Word::PER_WORD, (step + 1) * T::Word::PER_WORD - 1);
        let per_part = T::Word::PER_WORD / T::Word::n_parts::<L>();
        for i in 0..per_part {
            self.0.fetch(lanes, first + part * per_part + i, at, n);
        }
        [&self.0.row(first)[at..at + n], &self.0.row(last)[at..at + n]]
    }
}

impl<T: KvElement> Values for Stored<'_, T> {
    type Word = T::Word;

    #[inline(always)]
    fn d(&self) -> usize {
        self.0.d()
    }

    #[inline(always)]
    fn words<L: Lanes>(&self, lanes: L, place: Place, at: usize) -> L::F {
        T::zip_first(lanes, self.rows(lanes, place, at, L::N.min(self.0.d() - at)), place.part)
    }

    #[inline(always)]
    fn two_words<L: Lanes>(&self, lanes: L, place: Place, at: usize) -> [L::F; 2] {
        T::zip_two(lanes, self.rows(lanes, place, at, 2 * L::N), place.part)
    }

    #[inline(always)]
    fn cell<L: Lanes>(&self, lanes: L, j: usize, at: usize) -> L::F {
        T::load_first(lanes, &self.0.row(j)[at..])
    }
}

/// Adds the weighted values of a block to some rows that see the same cells of it.
pub(super) struct Weighted<'a, V> {
    pub(super) values: &'a V,
    /// R rows.
    pub(super) weights: &'a [[f32; BLOCK]],
    /// The cells of the block that the rows see.
    pub(super) seen: Range<usize>,
    /// Factors of the earlier sums: `[R]`.
    pub(super) rescale: &'a [f32],
    /// R rows of whole vectors.
    pub(super) out: &'a mut [f32],
}

impl<V: Values> Tile for Weighted<'_, V> {
    #[inline(always)]
    fn run<L: Lanes, const R: usize>(mut self, lanes: L) {
        let (d, mut at) = (self.values.d(), 0);
        if const { R > L::TILE_ROWS } {
            while at + 2 * L::N <= d {
                self.vectors::<L, R, 2>(lanes, at);
                at += 2 * L::N;
            }
        } else {
            while at + TILE_VECTORS * L::N <= d {
                self.vectors::<L, R, TILE_VECTORS>(lanes, at);
                at += TILE_VECTORS * L::N;
            }
        }
        while at < d {
            self.vectors::<L, R, 1>(lanes, at);
            at += L::N;
        }
    }
}

impl<V: Values> Weighted<'_, V> {
    /// Adds cells in ascending order: whole words, and single cells where the rows see only one cell of a word.
    #[inline(always)]
    fn vectors<L: Lanes, const R: usize, const C: usize>(&mut self, lanes: L, at: usize) {
        let per_word = V::Word::PER_WORD;
        let weights: &[[f32; BLOCK]; R] = self.weights.as_chunks().0.first().expect("R rows of weights");
        let mut sums = [[lanes.splat(0.0); C]; R];
        let seen = self.seen.start..self.seen.end.min(BLOCK);
        let first = seen.start.div_ceil(per_word);
        let steps = first..first.max(seen.end / per_word);
        for j in seen.start..seen.end.min(steps.start * per_word) {
            self.one_cell(lanes, weights, (j, at), &mut sums);
        }
        for step in steps.clone() {
            for part in (0..V::Word::n_parts::<L>()).rev() {
                let mut values = [lanes.splat(0.0); C];
                if C == 1 {
                    values[0] = self.values.words(lanes, Place { step, part }, at);
                } else {
                    for (c, pair) in values.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                        *pair = self.values.two_words(lanes, Place { step, part }, at + 2 * c * L::N);
                    }
                }
                for r in 0..R {
                    let weight = lanes.splat(V::Word::part::<L>(&weights[r], step, part));
                    for c in 0..C {
                        sums[r][c] = V::Word::dot(lanes, weight, values[c], sums[r][c]);
                    }
                }
            }
        }
        for j in steps.end * per_word..seen.end {
            self.one_cell(lanes, weights, (j, at), &mut sums);
        }
        self.add(lanes, at, &sums);
    }

    /// Adds the weighted value of cell `j`, from dimension `at` on.
    #[inline(always)]
    fn one_cell<L: Lanes, const R: usize, const C: usize>(
        &self,
        lanes: L,
        weights: &[[f32; BLOCK]; R],
        place: (usize, usize),
        sums: &mut [[L::F; C]; R],
    ) {
        let (j, at) = place;
        let mut values = [lanes.splat(0.0); C];
        for c in 0..C {
            values[c] = self.values.cell(lanes, j, at + c * L::N);
        }
        for r in 0..R {
            let weight = lanes.splat(V::Word::number::<L>(&weights[r], j));
            for c in 0..C {
                sums[r][c] = lanes.mul_add(weight, values[c], sums[r][c]);
            }
        }
    }

    /// Rescales the earlier sums and adds `sums`.
    #[inline(always)]
    fn add<L: Lanes, const R: usize, const C: usize>(&mut self, lanes: L, at: usize, sums: &[[L::F; C]; R]) {
        let row_len = self.out.len() / R;
        for ((out, sums), &rescale) in self.out.chunks_exact_mut(row_len).zip(sums).zip(self.rescale) {
            let out = &mut out[at..][..C * L::N];
            for c in 0..C {
                let out = &mut out[c * L::N..];
                lanes.store(lanes.mul_add(lanes.load(out), lanes.splat(rescale), sums[c]), out);
            }
        }
    }
}

/// Transposes the keys of `cells` of the block (at most `4 N`) to `[word of d][part][4 N]`, so that a vector is one word
/// of N cells, or a part of it. Places of the last vector after the end of the block are unspecified.
#[inline(always)]
pub(super) fn pack_keys<L: Lanes, T: KvElement>(
    lanes: L,
    keys: HeadRows<'_, T>,
    cells: Range<usize>,
    out: &mut [f32],
) {
    // Elements in N words, and the lengths of a part and of a word of the output.
    let (step, line_len, d) = (L::N * T::Word::PER_WORD, TILE_VECTORS * L::N, keys.d());
    let word_len = T::Word::n_parts::<L>() * line_len;
    for (c, first) in cells.step_by(L::N).enumerate() {
        let mut rows = [&[][..]; MAX_LANES];
        for i in 0..L::N {
            rows[i] = keys.row(first + i);
        }
        let zeros = [lanes.splat(0.0); MAX_LANES];
        let mut at = 0;
        while at + step <= d {
            let mut tile = zeros;
            for i in 0..L::N {
                tile[i] = T::load_words(lanes, &rows[i][at..at + step]);
                keys.fetch(lanes, first + i, at, step);
            }
            let tile = lanes.transpose(tile);
            let words = &mut out[at / T::Word::PER_WORD * word_len..][..L::N * word_len];
            for i in 0..L::N {
                T::Word::store(lanes, tile[i], &mut words[i * word_len + c * L::N..], line_len);
            }
            at += step;
        }
        if at < d {
            let mut tile = zeros;
            for i in 0..L::N {
                tile[i] = T::load_words_first(lanes, &rows[i][at..]);
                keys.fetch(lanes, first + i, at, d - at);
            }
            let tile = lanes.transpose(tile);
            let words = out[at / T::Word::PER_WORD * word_len..].chunks_mut(word_len);
            for (tile, word) in tile.iter().zip(words).take((d - at) / T::Word::PER_WORD) {
                T::Word::store(lanes, *tile, &mut word[c * L::N..], line_len);
            }
        }
    }
}

/// Packs the values of the block's first `n` cells into words, `[step][part][d padded]`. A missing cell of the last
/// word repeats the one before.
#[inline(always)]
pub(super) fn pack_values<L: Lanes, T: KvElement>(
    lanes: L,
    values: HeadRows<'_, T>,
    n: usize,
    out: &mut [f32],
) {
    let (padded, n_parts) = (values.d().next_multiple_of(L::N), T::Word::n_parts::<L>());
    for (first, out) in (0..n).step_by(T::Word::PER_WORD).zip(out.chunks_exact_mut(n_parts * padded)) {
        let rows = [values.row(first), values.row((first + T::Word::PER_WORD).min(n) - 1)];
        for i in first..first + T::Word::PER_WORD {
            values.fetch(lanes, i, 0, values.d());
        }
        for (part, out) in out.chunks_exact_mut(padded).enumerate() {
            for (i, out) in out.chunks_exact_mut(L::N).enumerate() {
                lanes.store(T::zip_first(lanes, [&rows[0][i * L::N..], &rows[1][i * L::N..]], part), out);
            }
        }
    }
}
