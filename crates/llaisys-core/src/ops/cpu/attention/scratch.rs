//! Scratch memory of attention, and the cutting of rows into chunks.

use super::{AttentionRows, BLOCK, MAX_D_HEAD, MAX_ITEM_ROWS, MAX_SPANS, MAX_SPLIT_ROWS};
use crate::error::DeviceError;
use crate::ops::cpu::isa::lanes::{EIGHT, MAX_LANES};
use crate::tensor::AlignedBuf;
use std::ops::Range;

/// Vectors of keys that are scored together.
pub(super) const TILE_VECTORS: usize = 4;
/// f32 numbers in the largest area: the parts of [`Area`] in order.
pub(super) const AREA: usize = MAX_ITEM_ROWS * MAX_D_HEAD
    + MAX_ITEM_ROWS * EIGHT / 2 * MAX_D_HEAD
    + MAX_D_HEAD * TILE_VECTORS * MAX_LANES
    + MAX_ITEM_ROWS * BLOCK
    + BLOCK * MAX_D_HEAD
    + MAX_ITEM_ROWS
    + 2 * MAX_ITEM_ROWS * (MAX_D_HEAD + 2);

/// Consecutive rows whose lists begin with the same cells: `rows[first..first + n]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk {
    pub(super) first: u32,
    pub(super) n: u32,
    /// The number of these cells, in whole spans; `usize::MAX` for rows of one list.
    pub(super) n_shared: usize,
}

/// The most rows of a chunk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heights {
    /// Of one list.
    pub(super) same_list: usize,
    /// Of several lists that begin with the same cells.
    pub(super) same_start: usize,
}

/// Scratch memory of a context. Its pages are touched only when they are used.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// One area of [`AREA`] numbers per worker.
    pub(super) areas: AlignedBuf,
    /// The chunks of the current call's rows.
    pub(super) chunks: Vec<Chunk>,
    /// Results of spans that are computed separately.
    pub(super) partials: AlignedBuf,
    /// The most rows in one call.
    pub(super) max_rows: usize,
}

impl Scratch {
    /// Allocates scratch for calls of up to `max_rows` rows of up to `max_columns` numbers on `n_threads` threads.
    pub(crate) fn new(n_threads: usize, max_rows: usize, max_columns: usize) -> Result<Self, DeviceError> {
        // A head has at least 2 dimensions, so m and l need no more memory than the values.
        let n_partials = MAX_SPLIT_ROWS.min(max_rows) * MAX_SPANS * 2 * max_columns;
        Ok(Self {
            areas: AlignedBuf::zeroed("attention scratch", n_threads * AREA * size_of::<f32>())?,
            chunks: Vec::with_capacity(max_rows),
            partials: AlignedBuf::zeroed("attention scratch", n_partials * size_of::<f32>())?,
            max_rows,
        })
    }
}

/// Cuts `rows` into chunks of consecutive rows with spans of the same length, of one list or of several that have at
/// least half of their cells in common. The chunks with the most work come first.
pub(super) fn cut_rows(all: AttentionRows<'_>, heights: Heights, chunks: &mut Vec<Chunk>) {
    let rows = all.rows;
    chunks.clear();
    // The fewest cells that a row of the last chunk sees.
    let mut fewest = 0;
    for (i, row) in rows.iter().enumerate() {
        let span_len = all.span_len(*row);
        if let Some(chunk) = chunks.last_mut()
            && all.span_len(rows[i - 1]) == span_len
        {
            let n_shared = chunk.n_shared.min(all.n_shared(i));
            let is_same_list = n_shared == usize::MAX;
            let n_shared = n_shared.min(fewest).min(row.n()) / span_len * span_len;
            let highest = if is_same_list { heights.same_list } else { heights.same_start };
            if (is_same_list || 2 * n_shared >= row.n()) && (chunk.n as usize) < highest {
                chunk.n += 1;
                chunk.n_shared = if is_same_list { usize::MAX } else { n_shared };
                fewest = fewest.min(row.n());
                continue;
            }
        }
        fewest = row.n();
        chunks.push(Chunk { first: i as u32, n: 1, n_shared: usize::MAX });
    }
    let seen = |chunk: &Chunk| {
        let row = rows[(chunk.first + chunk.n - 1) as usize];
        row.n().saturating_sub(row.hidden())
    };
    chunks.sort_unstable_by_key(|chunk| std::cmp::Reverse(chunk.n as usize * seen(chunk)));
}

/// The memory of one item. Here "row" means one of its rows x query heads, in this order.
pub(super) struct Area<'a> {
    /// Scaled queries: `[row][d]`.
    pub(super) queries: &'a mut [f32],
    /// The same in pairs, if each KV head has few: `[kv head][d / 2][EIGHT]`.
    pub(super) few_queries: &'a mut [f32],
    /// Keys of a part of a block: `[d][cell]`.
    pub(super) keys: &'a mut [f32],
    /// Scores, then weights: `[row][cell]`.
    pub(super) scores: &'a mut [[f32; BLOCK]],
    /// Values of a block: `[cell][d padded]`.
    pub(super) values: &'a mut [f32],
    /// Factors by which a block rescales the sums: `[row]`.
    pub(super) rescale: &'a mut [f32],
    /// The merged spans.
    pub(super) total: State<'a>,
    /// The current span, unless it is the first.
    pub(super) span: State<'a>,
}

/// Running softmax of every row.
pub(super) struct State<'a> {
    /// Maximum of the scores: `[row]`.
    pub(super) m: &'a mut [f32],
    /// Sum of the weights relative to the maximum: `[row]`.
    pub(super) l: &'a mut [f32],
    /// Sum of the weighted values: `[row][d padded]`.
    pub(super) v: &'a mut [f32],
}

impl<'a> Area<'a> {
    /// The memory of some of the rows, with `d` and `padded` as in [`Area::new`].
    pub(super) fn rows(&mut self, rows: Range<usize>, d: usize, padded: usize) -> Area<'_> {
        Area {
            queries: &mut self.queries[rows.start * d..rows.end * d],
            few_queries: &mut *self.few_queries,
            keys: &mut *self.keys,
            scores: &mut self.scores[rows.clone()],
            values: &mut *self.values,
            rescale: &mut self.rescale[rows.clone()],
            total: self.total.rows(rows.clone(), padded),
            span: self.span.rows(rows, padded),
        }
    }

    /// Divides an area for heads of `d` dimensions, `padded` to whole vectors.
    pub(super) fn new(mut rest: &'a mut [f32], n_rows: usize, d: usize, padded: usize) -> Self {
        let mut take = |n| {
            let (taken, left) = std::mem::take(&mut rest).split_at_mut(n);
            rest = left;
            taken
        };
        Self {
            queries: take(n_rows * d),
            few_queries: take(n_rows * EIGHT / 2 * d),
            keys: take(d * TILE_VECTORS * MAX_LANES),
            scores: take(n_rows * BLOCK).as_chunks_mut().0,
            values: take(BLOCK * padded),
            rescale: take(n_rows),
            total: State { m: take(n_rows), l: take(n_rows), v: take(n_rows * padded) },
            span: State { m: take(n_rows), l: take(n_rows), v: take(n_rows * padded) },
        }
    }
}

impl State<'_> {
    /// The state of some of the rows.
    fn rows(&mut self, rows: Range<usize>, padded: usize) -> State<'_> {
        State {
            m: &mut self.m[rows.clone()],
            l: &mut self.l[rows.clone()],
            v: &mut self.v[rows.start * padded..rows.end * padded],
        }
    }

    /// Resets to no cells.
    pub(super) fn reset(&mut self) {
        self.m.fill(f32::NEG_INFINITY);
        self.l.fill(0.0);
        self.v.fill(0.0);
    }
}
