//! Element types of the KV tensors, with the operations that kernels read and write them with.

#![allow(unsafe_code, reason = "views words as their halves")]

use super::isa::lanes::Lanes;
use crate::tensor::Plain;
use half::f16;

/// What products work on: numbers (`f32`), or pairs of bf16 (`u16`).
///
/// A vector of words is multiplied in [`KvWord::n_parts`] parts, the last one first. A pair is one part, its 32 bits, if
/// the instruction set multiplies pairs. Otherwise it is two, each an f32.
pub(super) trait KvWord {
    /// Numbers in a word.
    const PER_WORD: usize;

    /// Parts of a word: 1 or `PER_WORD`.
    fn n_parts<L: Lanes>() -> usize;
    /// Rounds the first `n` of `row`, which are f32, to the words' type in place (n even). Pairs of one part then fill the
    /// first half; denormal numbers may become zeros, as which [`Lanes::dot_pairs`] takes them.
    fn round<L: Lanes>(lanes: L, row: &mut [f32], n: usize);
    /// Part `part` of word `i` of a rounded row.
    fn part<L: Lanes>(row: &[f32], i: usize, part: usize) -> f32;
    /// Number `j` of a rounded row.
    fn number<L: Lanes>(row: &[f32], j: usize) -> f32;
    /// Writes the parts of `words`, each `stride` after the one before.
    fn store<L: Lanes>(lanes: L, words: L::F, out: &mut [f32], stride: usize);
    /// `acc + a * b` for each number of the parts.
    fn dot<L: Lanes>(lanes: L, a: L::F, b: L::F, acc: L::F) -> L::F;
    /// Number `which` of each word that is one part, as f32.
    fn pick<L: Lanes>(lanes: L, words: L::F, which: usize) -> L::F;
}

impl KvWord for f32 {
    const PER_WORD: usize = 1;

    #[inline(always)]
    fn n_parts<L: Lanes>() -> usize {
        1
    }

    #[inline(always)]
    fn round<L: Lanes>(_lanes: L, _row: &mut [f32], _n: usize) {}

    #[inline(always)]
    fn part<L: Lanes>(row: &[f32], i: usize, _part: usize) -> f32 {
        row[i]
    }

    #[inline(always)]
    fn number<L: Lanes>(row: &[f32], j: usize) -> f32 {
        row[j]
    }

    #[inline(always)]
    fn store<L: Lanes>(lanes: L, words: L::F, out: &mut [f32], _stride: usize) {
        lanes.store(words, out);
    }

    #[inline(always)]
    fn dot<L: Lanes>(lanes: L, a: L::F, b: L::F, acc: L::F) -> L::F {
        lanes.mul_add(a, b, acc)
    }

    #[inline(always)]
    fn pick<L: Lanes>(_lanes: L, words: L::F, _which: usize) -> L::F {
        words
    }
}

impl KvWord for u16 {
    const PER_WORD: usize = 2;

    #[inline(always)]
    fn n_parts<L: Lanes>() -> usize {
        if const { L::DOTS_PAIRS } { 1 } else { 2 }
    }

    #[inline(always)]
    fn round<L: Lanes>(lanes: L, row: &mut [f32], n: usize) {
        if const { !L::DOTS_PAIRS } {
            for part in row[..n].chunks_mut(L::N) {
                lanes.store_first(lanes.round_bf16(lanes.load_first(part)), part);
            }
            return;
        }
        // A number is 2 bytes after it is rounded and 4 bytes before, so no write passes the reads.
        let n_whole = n / (2 * L::N) * (2 * L::N);
        for at in (0..n_whole).step_by(2 * L::N) {
            let pairs = lanes.round_pairs(lanes.load(&row[at..]), lanes.load(&row[at + L::N..]));
            lanes.store(pairs, &mut row[at / 2..]);
        }
        for at in (n_whole..n).step_by(L::N) {
            let numbers = lanes.load_first(&row[at..n]);
            lanes.store_bf16_first(numbers, &mut halves(row)[at..n]);
        }
    }

    #[inline(always)]
    fn part<L: Lanes>(row: &[f32], i: usize, part: usize) -> f32 {
        if const { L::DOTS_PAIRS } { row[i] } else { row[2 * i + part] }
    }

    #[inline(always)]
    fn number<L: Lanes>(row: &[f32], j: usize) -> f32 {
        if const { !L::DOTS_PAIRS } {
            return row[j];
        }
        let bits = row[j / 2].to_bits();
        f32::from_bits(if j.is_multiple_of(2) { bits << 16 } else { bits & 0xffff_0000 })
    }

    #[inline(always)]
    fn store<L: Lanes>(lanes: L, words: L::F, out: &mut [f32], stride: usize) {
        if const { L::DOTS_PAIRS } {
            return lanes.store(words, out);
        }
        let (even, odd) = lanes.split_pairs(words);
        lanes.store(even, out);
        lanes.store(odd, &mut out[stride..]);
    }

    #[inline(always)]
    fn dot<L: Lanes>(lanes: L, a: L::F, b: L::F, acc: L::F) -> L::F {
        if const { L::DOTS_PAIRS } { lanes.dot_pairs(a, b, acc) } else { lanes.mul_add(a, b, acc) }
    }

    #[inline(always)]
    fn pick<L: Lanes>(lanes: L, words: L::F, which: usize) -> L::F {
        let (even, odd) = lanes.split_pairs(words);
        if which == 0 { even } else { odd }
    }
}

/// f32, f16, the bits of bf16, or i8. Conversion to f32 is exact. The value of an i8 is the number times its head's
/// scale.
pub(super) trait KvElement: Plain + Send + Sync {
    /// What the elements are multiplied as, `PER_WORD` in a word. (bf16 represents each i8 exactly.)
    type Word: KvWord;
    /// Elements of a head besides its numbers: an f32 scale after them, or 0 for types without one.
    const SCALE: usize = 0;

    /// Loads the first `min(N, len)` elements, then zeros.
    fn load_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F;
    /// Writes the first `min(N, len)` elements, rounded to nearest even.
    fn store_first<L: Lanes>(lanes: L, v: L::F, out: &mut [Self]);
    /// Loads the first `N` words without conversion. Panics if there are fewer elements.
    fn load_words<L: Lanes>(lanes: L, x: &[Self]) -> L::F;
    /// Loads the first `min(N, len / PER_WORD)` words, then zeros.
    fn load_words_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F;
    /// Part `part` of the words whose numbers are the first `min(N, len)` elements of each of `PER_WORD` rows.
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2], part: usize) -> L::F;

    /// The first `2 N` elements of each row as two vectors of [`KvElement::zip_first`].
    #[inline(always)]
    fn zip_two<L: Lanes>(lanes: L, rows: [&[Self]; 2], part: usize) -> [L::F; 2] {
        let [first, last] = rows;
        [
            Self::zip_first(lanes, [&first[..L::N], &last[..L::N]], part),
            Self::zip_first(lanes, [&first[L::N..2 * L::N], &last[L::N..2 * L::N]], part),
        ]
    }

    /// True if [`Lanes::dot_eight`] multiplies [`KvElement::pairs`].
    #[inline(always)]
    fn dots_eight<L: Lanes>() -> bool {
        Self::Word::PER_WORD == 2 && L::DOTS_PAIRS
    }

    /// The row as bf16, converted in `memory` if it has another type. Only for types whose words are pairs.
    ///
    /// - `row`, `memory`: `[d]`
    fn pairs<'a, L: Lanes>(_lanes: L, _row: &'a [Self], _memory: &'a mut [f32]) -> &'a [u16] {
        unreachable!("the words are not pairs")
    }

    /// The factor of the elements of a head; `head` includes its scale.
    #[inline(always)]
    fn scale(_head: &[Self]) -> f32 {
        1.0
    }

    /// Loads a stored head as numbers.
    ///
    /// - `head`: `[d + SCALE]`; `out`: `[d]`
    #[inline(always)]
    fn load_head<L: Lanes>(lanes: L, head: &[Self], out: &mut [f32]) {
        let (elements, scale) = (&head[..out.len()], lanes.splat(Self::scale(head)));
        for (x, out) in elements.chunks(L::N).zip(out.chunks_mut(L::N)) {
            let x = Self::load_first(lanes, x);
            lanes.store_first(if Self::SCALE > 0 { lanes.mul(x, scale) } else { x }, out);
        }
    }

    /// Stores a head, rounded to nearest even.
    ///
    /// - `x`: `[d]`; `head`: `[d + SCALE]`
    #[inline(always)]
    fn store_head<L: Lanes>(lanes: L, x: &[f32], head: &mut [Self]) {
        for (x, out) in x.chunks(L::N).zip(head.chunks_mut(L::N)) {
            Self::store_first(lanes, lanes.load_first(x), out);
        }
    }
}

impl KvElement for f32 {
    type Word = f32;

    #[inline(always)]
    fn load_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_first(x)
    }

    #[inline(always)]
    fn store_first<L: Lanes>(lanes: L, v: L::F, out: &mut [Self]) {
        lanes.store_first(v, out);
    }

    #[inline(always)]
    fn load_words<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load(x)
    }

    #[inline(always)]
    fn load_words_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_first(x)
    }

    #[inline(always)]
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2], _part: usize) -> L::F {
        lanes.load_first(rows[0])
    }
}

impl KvElement for f16 {
    type Word = f32;

    #[inline(always)]
    fn load_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_f16_first(x)
    }

    #[inline(always)]
    fn store_first<L: Lanes>(lanes: L, v: L::F, out: &mut [Self]) {
        lanes.store_f16_first(v, out);
    }

    #[inline(always)]
    fn load_words<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_f16_first(&x[..L::N])
    }

    #[inline(always)]
    fn load_words_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_f16_first(x)
    }

    #[inline(always)]
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2], _part: usize) -> L::F {
        lanes.load_f16_first(rows[0])
    }
}

impl KvElement for u16 {
    type Word = u16;

    #[inline(always)]
    fn load_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_bf16_first(x)
    }

    #[inline(always)]
    fn store_first<L: Lanes>(lanes: L, v: L::F, out: &mut [Self]) {
        lanes.store_bf16_first(v, out);
    }

    #[inline(always)]
    fn load_words<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_pairs(x)
    }

    #[inline(always)]
    fn load_words_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_pairs_first(x)
    }

    #[inline(always)]
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2], part: usize) -> L::F {
        if const { L::DOTS_PAIRS } {
            lanes.zip_pairs_first(rows[0], rows[1])
        } else {
            lanes.load_bf16_first(rows[part])
        }
    }

    #[inline(always)]
    fn zip_two<L: Lanes>(lanes: L, rows: [&[Self]; 2], part: usize) -> [L::F; 2] {
        if const { L::DOTS_PAIRS } {
            lanes.zip_pairs(rows[0], rows[1])
        } else {
            [lanes.load_bf16(rows[part]), lanes.load_bf16(&rows[part][L::N..])]
        }
    }

    #[inline(always)]
    fn pairs<'a, L: Lanes>(_lanes: L, row: &'a [Self], _memory: &'a mut [f32]) -> &'a [u16] {
        row
    }
}

impl KvElement for i8 {
    type Word = u16;
    const SCALE: usize = size_of::<f32>();

    #[inline(always)]
    fn load_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_i8_first(x)
    }

    #[inline(always)]
    fn store_first<L: Lanes>(lanes: L, v: L::F, out: &mut [Self]) {
        lanes.store_i8_first(v, out);
    }

    #[inline(always)]
    fn load_words<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_i8_pairs(x)
    }

    #[inline(always)]
    fn load_words_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_i8_pairs_first(x)
    }

    #[inline(always)]
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2], part: usize) -> L::F {
        if const { L::DOTS_PAIRS } {
            lanes.pair(lanes.load_i8_first(rows[0]), lanes.load_i8_first(rows[1]))
        } else {
            lanes.load_i8_first(rows[part])
        }
    }

    #[inline(always)]
    fn pairs<'a, L: Lanes>(lanes: L, row: &'a [Self], memory: &'a mut [f32]) -> &'a [u16] {
        let rest = row.len() % (2 * L::N);
        let (whole, last) = row.split_at(row.len() - rest);
        for (row, out) in whole.chunks_exact(2 * L::N).zip(memory.chunks_exact_mut(L::N)) {
            lanes.store(lanes.load_i8_pairs(row), out);
        }
        if rest > 0 {
            lanes.store_first(lanes.load_i8_pairs_first(last), &mut memory[whole.len() / 2..]);
        }
        &*halves(memory)
    }

    #[inline(always)]
    fn scale(head: &[Self]) -> f32 {
        let [.., a, b, c, d] = *head else { unreachable!("a head ends with its scale") };
        f32::from_le_bytes([a as u8, b as u8, c as u8, d as u8])
    }

    /// The largest magnitude becomes 127. A number that is not finite makes the scale NaN.
    #[inline(always)]
    fn store_head<L: Lanes>(lanes: L, x: &[f32], head: &mut [Self]) {
        let zero = lanes.splat(0.0);
        let (mut largest, mut not_finite) = (zero, zero);
        for x in x.chunks(L::N) {
            let x = lanes.load_first(x);
            largest = lanes.max(largest, lanes.max(x, lanes.sub(zero, x)));
            // The sum is 0, or NaN if a number is not finite: the maximum may have dropped a NaN.
            not_finite = lanes.add(not_finite, lanes.mul(x, zero));
        }
        let scale = lanes.largest(largest) / 127.0 + lanes.sum(not_finite);
        let (elements, end) = head.split_at_mut(x.len());
        let (divisor, most) = (lanes.splat(if scale > 0.0 { scale } else { 1.0 }), lanes.splat(127.0));
        for (x, out) in x.chunks(L::N).zip(elements.chunks_mut(L::N)) {
            let x = lanes.div(lanes.load_first(x), divisor);
            // A denormal scale may be too small by half, so elements are clamped. If the scale is NaN, elements do not
            // matter.
            let x = lanes.min(lanes.max(x, lanes.sub(zero, most)), most);
            Self::store_first(lanes, x, out);
        }
        end.copy_from_slice(&scale.to_le_bytes().map(|byte| byte as i8));
    }
}

/// The same memory, viewed as the halves of its words.
#[inline(always)]
fn halves(words: &mut [f32]) -> &mut [u16] {
    // SAFETY: the same bytes for the same lifetime; u16 needs less alignment, and any bits are valid for both types.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), 2 * words.len()) }
}
