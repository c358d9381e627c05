//! Element types of the KV tensors, as kernels read and write them.

use super::isa::lanes::Lanes;
use crate::tensor::Plain;

/// f32, or the bits of bf16. Conversion to f32 is exact.
pub(super) trait KvElement: Plain + Send + Sync {
    /// Elements in 32 bits.
    const PER_WORD: usize;

    /// The first `min(N, len)` elements, then zeros.
    fn load_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F;
    /// Writes the first `min(N, len)` elements, rounded to nearest even.
    fn store_first<L: Lanes>(lanes: L, v: L::F, out: &mut [Self]);
    /// The first `N` 32-bit words, not numbers yet; panics if there are fewer.
    fn load_words<L: Lanes>(lanes: L, x: &[Self]) -> L::F;
    /// The first `min(N, len / PER_WORD)` 32-bit words, then zeros.
    fn load_words_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F;
    /// Rounds the first `n` of `words`, which are numbers, to this type, in place: they then fill the first
    /// `n / PER_WORD` words (n even).
    fn round<L: Lanes>(lanes: L, words: &mut [f32], n: usize);
    /// `acc + a * b`, for each element of the words.
    fn dot<L: Lanes>(lanes: L, a: L::F, b: L::F, acc: L::F) -> L::F;
    /// Number `j` of rounded `words`.
    fn number(words: &[f32], j: usize) -> f32;
    /// The words whose elements are the first `min(N, len)` of each of `PER_WORD` rows.
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> L::F;
    /// As `zip_first`, of `2 N` elements: two vectors.
    fn zip_two<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> [L::F; 2];
    /// As numbers, element `which` of each word.
    fn pick<L: Lanes>(lanes: L, words: L::F, which: usize) -> L::F;
}

impl KvElement for f32 {
    const PER_WORD: usize = 1;

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
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> L::F {
        lanes.load_first(rows[0])
    }

    #[inline(always)]
    fn zip_two<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> [L::F; 2] {
        [0, L::N].map(|at| lanes.load(&rows[0][at..]))
    }

    #[inline(always)]
    fn pick<L: Lanes>(_lanes: L, words: L::F, _which: usize) -> L::F {
        words
    }
}

impl KvElement for u16 {
    const PER_WORD: usize = 2;

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
    fn round<L: Lanes>(lanes: L, words: &mut [f32], n: usize) {
        for at in (0..n).step_by(L::N) {
            // Two bytes a number are written after four were read, so never over what is still to be read.
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
    fn zip_first<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> L::F {
        lanes.zip_pairs_first(rows[0], rows[1])
    }

    #[inline(always)]
    fn zip_two<L: Lanes>(lanes: L, rows: [&[Self]; 2]) -> [L::F; 2] {
        lanes.zip_pairs(rows[0], rows[1])
    }

    #[inline(always)]
    fn pick<L: Lanes>(lanes: L, words: L::F, which: usize) -> L::F {
        let (even, odd) = lanes.split_pairs(words);
        if which == 0 { even } else { odd }
    }
}

/// The same memory as halves of its words.
#[inline(always)]
fn halves(words: &mut [f32]) -> &mut [u16] {
    // SAFETY: the same bytes, borrowed for as long; u16 needs less alignment, and both types take any bits.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), 2 * words.len()) }
}
