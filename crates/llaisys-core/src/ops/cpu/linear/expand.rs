//! The second half of `lora`: the products with B of a panel's outputs, which are added to them in the first-level cache.

use crate::ops::cpu::isa::lanes::{Kernel, Lanes};
use crate::ops::cpu::lora::{LoraHidden, Number};
use crate::ops::lora::{LoraB, LoraRun, Numbers};
use crate::ops::packed::{HALF_PANEL, PANEL};
use crate::threads::DisjointWriter;
use std::ops::Range;

/// `y[row][n] += sum_j b[n][j] * hidden[row][j]` for the rows of a block that use adapters, and the outputs of panel `p`.
pub(super) struct Expand<'a> {
    pub(super) lora: LoraHidden<'a>,
    pub(super) p: usize,
    pub(super) rows: Range<usize>,
    /// The first row that this thread multiplies with the panel.
    pub(super) first_row: usize,
    pub(super) y: PanelRows<'a>,
}

/// The outputs of a panel.
pub(super) enum PanelRows<'a> {
    /// In the tile, of the rows of the block.
    Tile(&'a mut [[f32; PANEL]]),
    /// Where they were written.
    Written {
        /// `[n, n_columns]`
        out: DisjointWriter<'a, f32>,
        n_columns: usize,
        columns: Range<usize>,
    },
}

/// The block of B of a panel, for `R` rows.
struct Block<'a, T, const R: usize> {
    /// Of the ranks that both halves of the panel have.
    both: &'a [[T; PANEL]],
    /// Of the other ranks of each half; one of them is empty.
    rest: [&'a [[T; HALF_PANEL]]; 2],
    /// The products with A, as many as `both` has, for each half and row.
    hidden: [[&'a [f32]; R]; 2],
    /// As many as `rest` has.
    hidden_rest: [[&'a [f32]; R]; 2],
}

impl Kernel for Expand<'_> {
    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let mut row = self.rows.start;
        while row < self.rows.end {
            if let Some(run) = self.lora.rows().run(row, &self.rows)
                && let Some(b) = self.lora.b(run.slot)
            {
                // The first block of the adapter's rows prefetches what all of them read with the next panel.
                if run.before.is_none_or(|before| before < self.first_row) {
                    prefetch(lanes, b.block_bytes(self.p + 1));
                }
                match b.block(self.p) {
                    Numbers::F32(numbers) => self.add_run(lanes, b, numbers, run),
                    Numbers::Bf16(numbers) => self.add_run(lanes, b, numbers, run),
                }
            }
            row += 1;
        }
    }
}

#[inline(always)]
fn prefetch<L: Lanes>(lanes: L, bytes: &[u8]) {
    let mut at = 0;
    while at < bytes.len() {
        lanes.prefetch(bytes[at..].as_ptr());
        at += 64;
    }
}

impl Expand<'_> {
    /// Adds the products of all rows of a run.
    #[inline(always)]
    fn add_run<L: Lanes, T: Number>(&mut self, lanes: L, b: &LoraB, numbers: &[T], run: LoraRun<'_>) {
        let mut i = 0;
        while i < run.rows.len() {
            i += match run.rows.len() - i {
                4.. => self.tile::<L, T, 4>(lanes, b, numbers, run.after(i)),
                2.. => self.tile::<L, T, 2>(lanes, b, numbers, run.after(i)),
                _ => self.tile::<L, T, 1>(lanes, b, numbers, run.after(i)),
            };
        }
    }

    /// Adds the products of the first `R` rows of a run. Returns `R`.
    #[inline(always)]
    fn tile<L: Lanes, T: Number, const R: usize>(
        &mut self,
        lanes: L,
        b: &LoraB,
        numbers: &[T],
        run: LoraRun<'_>,
    ) -> usize {
        let block = Block::<T, R>::new(self.lora, b, numbers, run.index);
        let mut c = 0;
        while c < HALF_PANEL {
            let sums = block.sums(lanes, c);
            let mut i = 0;
            while i < R {
                let y = self.y.row(run.rows[i] as usize, self.rows.start);
                let mut half = 0;
                while half < 2 {
                    let at = half * HALF_PANEL + c;
                    // A half without an adapter is not touched.
                    if !b.ranks()[half].is_empty() && at < y.len() {
                        add(lanes, sums[half][i], &mut y[at..]);
                    }
                    half += 1;
                }
                i += 1;
            }
            c += L::N;
        }
        R
    }
}

/// Adds a vector to the first elements of `y`.
#[inline(always)]
fn add<L: Lanes>(lanes: L, sum: L::F, y: &mut [f32]) {
    if y.len() >= L::N {
        lanes.store(lanes.add(lanes.load(y), sum), y);
    } else {
        lanes.store_first(lanes.add(lanes.load_first(y), sum), y);
    }
}

impl PanelRows<'_> {
    /// The outputs of `row`; `first` is the first row of the block.
    #[inline(always)]
    fn row(&mut self, row: usize, first: usize) -> &mut [f32] {
        match self {
            PanelRows::Tile(sums) => &mut sums[row - first],
            PanelRows::Written { out, n_columns, columns } => {
                let start = row * *n_columns;
                out.range(start + columns.start..start + columns.end)
            }
        }
    }
}

impl<'a, T: Number, const R: usize> Block<'a, T, R> {
    /// The block for `R` rows, the first of them at `index` of the list of rows that use adapters.
    #[inline(always)]
    fn new(lora: LoraHidden<'a>, b: &LoraB, numbers: &'a [T], index: usize) -> Self {
        let (n_both, ranks) = (b.n_both(), b.ranks());
        let (both, rest) = numbers.split_at(n_both * PANEL);
        let (both, rest) = (both.as_chunks().0, rest.as_chunks().0);
        let rest = if ranks[0].len() > n_both { [rest, &[]] } else { [&[], rest] };
        let mut made = Self { both, rest, hidden: [[&[]; R]; 2], hidden_rest: [[&[]; R]; 2] };
        let mut half = 0;
        while half < 2 {
            let mut i = 0;
            while i < R {
                let hidden = &lora.row(index + i)[ranks[half].clone()];
                // With an empty half, `both` is empty, too.
                made.hidden[half][i] = &hidden[..both.len()];
                made.hidden_rest[half][i] = &hidden[both.len()..][..rest[half].len()];
                i += 1;
            }
            half += 1;
        }
        made
    }

    /// The products of `N` columns of each half, from column `c` of the half on.
    #[inline(always)]
    fn sums<L: Lanes>(&self, lanes: L, c: usize) -> [[L::F; R]; 2] {
        let (mut first, mut second) = ([lanes.splat(0.0); R], [lanes.splat(0.0); R]);
        let (both, [hidden_first, hidden_second]) = (self.both, self.hidden);
        let mut j = 0;
        while j < both.len() {
            let (b_first, b_second) =
                (T::load(lanes, &both[j][c..]), T::load(lanes, &both[j][HALF_PANEL + c..]));
            let mut i = 0;
            while i < R {
                first[i] = lanes.mul_add(lanes.splat(hidden_first[i][j]), b_first, first[i]);
                second[i] = lanes.mul_add(lanes.splat(hidden_second[i][j]), b_second, second[i]);
                i += 1;
            }
            j += 1;
        }
        let ([rest_first, rest_second], [more_first, more_second]) = (self.rest, self.hidden_rest);
        let first = chain(lanes, rest_first, c, more_first, first);
        let second = chain(lanes, rest_second, c, more_second, second);
        [first, second]
    }
}

/// Continues the sums of one half, of columns `c` on, with the ranks that only this half has.
#[inline(always)]
fn chain<L: Lanes, T: Number, const R: usize>(
    lanes: L,
    b: &[[T; HALF_PANEL]],
    c: usize,
    hidden: [&[f32]; R],
    mut sums: [L::F; R],
) -> [L::F; R] {
    let mut j = 0;
    while j < b.len() {
        let column = T::load(lanes, &b[j][c..]);
        let mut i = 0;
        while i < R {
            sums[i] = lanes.mul_add(lanes.splat(hidden[i][j]), column, sums[i]);
            i += 1;
        }
        j += 1;
    }
    sums
}
