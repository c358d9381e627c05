//! Element types of the KV tensors, as kernels read and write them.

use super::isa::lanes::Lanes;
use crate::tensor::Plain;

/// f32, or the bits of bf16. Conversion to f32 is exact.
pub(super) trait KvElement: Plain + Send + Sync {
    /// Elements in 32 bits.
    const PER_WORD: usize;

    /// The first `N` elements; panics if there are fewer.
    fn load<L: Lanes>(lanes: L, x: &[Self]) -> L::F;
    /// The first `min(N, len)` elements, then zeros.
    fn load_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F;
    /// Writes the first `min(N, len)` elements, rounded to nearest even.
    fn store_first<L: Lanes>(lanes: L, v: L::F, out: &mut [Self]);
    /// The first `N` 32-bit words, not numbers yet; panics if there are fewer.
    fn load_words<L: Lanes>(lanes: L, x: &[Self]) -> L::F;
    /// The first `min(N, len / PER_WORD)` 32-bit words, then zeros.
    fn load_words_first<L: Lanes>(lanes: L, x: &[Self]) -> L::F;
    /// The numbers in words: one vector per element of a word, at `lines[0]` and `lines[line_len]`.
    fn store_words<L: Lanes>(lanes: L, words: L::F, lines: &mut [f32], line_len: usize);
}

impl KvElement for f32 {
    const PER_WORD: usize = 1;

    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load(x)
    }

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
    fn store_words<L: Lanes>(lanes: L, words: L::F, lines: &mut [f32], _line_len: usize) {
        lanes.store(words, lines);
    }
}

impl KvElement for u16 {
    const PER_WORD: usize = 2;

    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[Self]) -> L::F {
        lanes.load_bf16(x)
    }

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
    fn store_words<L: Lanes>(lanes: L, words: L::F, lines: &mut [f32], line_len: usize) {
        let (even, odd) = lanes.split_pairs(words);
        lanes.store(even, lines);
        lanes.store(odd, &mut lines[line_len..]);
    }
}
