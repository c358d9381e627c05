//! Element types of the KV tensors, with the operations that kernels read and write them with.

#![allow(unsafe_code, reason = "views words as their halves")]

use super::isa::lanes::Lanes;
use crate::tensor::Plain;
use half::f16;

/// The 32 bits that products work on: one f32, or two bf16 (`u16`).
pub(super) trait KvWord {
    /// Numbers in a word.
    const PER_WORD: usize;

    /// Rounds the first `n` of `words`, which are f32, to the words' type in place. They then fill the first
    /// `n / PER_WORD` words (n even).
    fn round<L: Lanes>(lanes: L, words: &mut [f32], n: usize);
    /// `acc + a * b` for each number of the words.
    fn dot<L: Lanes>(lanes: L, a: L::F, b: L::F, acc: L::F) -> L::F;
    /// Number `j` of rounded `words`.
    fn number(words: &[f32], j: usize) -> f32;
    /// Number `which` of each word, as f32.
    fn pick<L: Lanes>(lanes: L, words: L::F, which: usize) -> L::F;
}

impl KvWord for f32 {
    const PER_WORD: usize = 1;

    #[inline(always)]
    fn round<L: Lanes>(_lanes: L, _words: &mut [f32], _n: usize) {}

    #[inline(always)]
    fn dot<L: Lanes>(lanes: L, a: L::F, b: L::F, acc: L::F) -> L::F {
        lanes.mul_add(a, b, acc)
    }

    #[inline(always)]
    fn number(words: &[f32], j: usize) -> f32 {
        words[j]
    }

    #[inline(always)]
    fn pick<L: Lanes>(_lanes: L, words: L::F, _which: usize) -> L::F {
        words
    }
}

impl KvWord for u16 {
    const PER_WORD: usize = 2;

    #[inline(always)]
    fn round<L: Lanes>(lanes: L, words: &mut [f32], n: usize) {
        for at in (0..n).step_by(L::N) {
            // A number is 2 bytes after it is rounded and 4 bytes before, so no write passes the reads.
            let numbers = lanes.load_first(&words[at..n]);
            lanes.store_bf16_first(numbers, &mut halves(words)[at..n]);
        }
    }

    #[inline(always)]
    fn dot<L: Lanes>(lanes: L, a: L::F, b: L::F, acc: L::F) -> L::F {
        lanes.dot_pairs(a, b, acc)
    }

    #[inline(always)]
    fn number(words: &[f32], j: usize) -> f32 {
        let bits = words[j / 2].to_bits();
        f32::from_bits(if j.is_multiple_of(2) { bits << 16 } else { bits & 0xffff_0000 })
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
    /// The words whose elements are the first `min(N, len)` of each of `PER_WORD` rows.
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> L::F;
    /// The first `2 N` elements of each row as two vectors of [`KvElement::zip_first`].
    fn zip_two<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> [L::F; 2];

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
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> L::F {
        lanes.load_first(rows[0])
    }

    #[inline(always)]
    fn zip_two<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> [L::F; 2] {
        [lanes.load(rows[0]), lanes.load(&rows[0][L::N..])]
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
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> L::F {
        lanes.load_f16_first(rows[0])
    }

    #[inline(always)]
    fn zip_two<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> [L::F; 2] {
        [lanes.load_f16_first(&rows[0][..L::N]), lanes.load_f16_first(&rows[0][L::N..2 * L::N])]
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
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> L::F {
        lanes.zip_pairs_first(rows[0], rows[1])
    }

    #[inline(always)]
    fn zip_two<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> [L::F; 2] {
        lanes.zip_pairs(rows[0], rows[1])
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
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> L::F {
        let (low, high) = (lanes.load_i8_first(rows[0]), lanes.load_i8_first(rows[1]));
        lanes.pair(low, high)
    }

    #[inline(always)]
    fn zip_two<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> [L::F; 2] {
        let [first, second] = rows;
        [
            Self::zip_first(lanes, [&first[..L::N], &second[..L::N]]),
            Self::zip_first(lanes, [&first[L::N..2 * L::N], &second[L::N..2 * L::N]]),
        ]
    }

    #[inline(always)]
    fn scale(head: &[Self]) -> f32 {
        let [.., a, b, c, d] = head else { unreachable!("a head ends with its scale") };
        f32::from_le_bytes([*a, *b, *c, *d].map(|byte| byte as u8))
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
