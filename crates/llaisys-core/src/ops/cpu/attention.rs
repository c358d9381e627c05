//! `attention`: out[t, h] = sum_j softmax_j(cap(scale * q[t, h] . K[j])) V[j] over the cells j that row t sees.
//! Reference: `ops/reference/attention.rs`.
//!
//! Arithmetic of one row and head, with all sums in f32. It depends only on the row's own list of cells:
//!
//! 1. The list is cut into blocks of 128 from its start, and the blocks are grouped into spans: at most 16 of equal
//!    length, which depends on the list's length, or with a window on [`window_span`]. With a window, lists begin at
//!    multiples of that length, counted in the sequence, so that the cuts do not move when the window moves. The cells
//!    of the first block that a row does not see are skipped.
//! 2. A score is one sum over the dimensions in ascending order, of q times the scale times k, then capped. With bf16
//!    cells, q times the scale is rounded to bf16, and two dimensions are added at a time. With int8 cells the bytes
//!    are converted to bf16 and treated likewise, and the sum is multiplied by the scale of k.
//! 3. A span keeps a running maximum m, a sum l of e^(s - m) and the weighted values. Each block rescales them by
//!    e^(old m - new m) (online softmax, arXiv:1805.02867). In a block, weights are summed in N lanes, and each output
//!    is one sum over the cells in ascending order. With bf16 cells, weights are rounded to bf16 after they are summed,
//!    and two cells are added at a time; a cell of a pair that the row does not see is skipped. With int8 cells,
//!    weights are multiplied by the scales of the values before they are rounded.
//! 4. Spans are merged in ascending order, with the same rescaling. Then the head's sink joins m and l, as a cell without
//!    a value would. The output is the weighted values divided by l.
//!
//! Therefore no bit depends on which rows are computed together, on which thread, or in which cells. Work is cut into
//! items: some rows of one sequence (a chunk) x the query heads of one KV head. If there are few items, they are
//! single rows x KV heads x spans; if there are many, single rows x all heads. Rows of a chunk share the transposed
//! keys and the packed values; a few rows multiply the keys as they are stored, which has the same bits. A chunk may
//! have rows of several sequences whose lists begin with the same cells, most of the list: the spans of these cells
//! are computed for all of its rows, then each sequence's other spans for its rows ("cascade", arXiv:2402.05099). Only
//! listed cells are read.

#![allow(unsafe_code, reason = "workers write disjoint heads and scratch")]

#[deny(unsafe_code)]
mod block;
#[deny(unsafe_code)]
mod item;
#[deny(unsafe_code)]
mod scratch;
#[deny(unsafe_code)]
mod softmax;
#[deny(unsafe_code)]
mod tile;

use super::kv_element::KvElement;
use crate::dtype::KvDType;
use crate::ops::OpContext;
use crate::tensor::KvLayer;
use crate::threads::{Chunks, Disjoint};
use half::f16;
use item::{Compute, Item};
use scratch::{AREA, Chunk, Heights};
use softmax::{MergeSpans, STATE};
use std::ops::Range;

pub(crate) use scratch::Scratch;

/// Largest `d_head`.
pub const MAX_D_HEAD: usize = 512;
/// Cells in a block.
const BLOCK: usize = 128;
/// The most spans of a row.
const MAX_SPANS: usize = 16;
/// The most query heads in one item; a KV head with more has several items per chunk.
const MAX_ITEM_HEADS: usize = 32;
/// The most rows x query heads in one item.
const MAX_ITEM_ROWS: usize = 192;
/// Items per thread to aim for: with fewer, threads wait for the last one.
const ITEMS_PER_THREAD: usize = 4;
/// The same for rows of several sequences with a common prefix.
const SHARED_ITEMS_PER_THREAD: usize = 2;
/// The most rows whose spans may be computed separately.
const MAX_SPLIT_ROWS: usize = 16;

/// The cells that each row sees.
#[derive(Debug, Clone, Copy)]
pub struct AttentionRows<'a> {
    /// The cells of each sequence in position order, one sequence after the other. With a window, the list of a
    /// sequence begins at a multiple of its [`window_span`]; positions before those that the rows see repeat one of the
    /// cells that they see.
    pub cells: &'a [u32],
    /// One entry per query row. Consecutive rows of one sequence share work.
    pub rows: &'a [AttentionRow],
    /// The sliding window of the rows; `None` if they see everything before them.
    pub window: Option<usize>,
    /// For each row, how many cells at the start of its list are also those of the row before it; it may be fewer than
    /// there are. Empty: not known. It only affects the speed.
    pub n_shared: &'a [u32],
}

/// A row sees `cells[start + n_hidden..start + n_visible]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionRow {
    /// Where the list of the row's sequence begins in `cells`.
    pub start: u32,
    /// Cells of the list before those that the row sees; 0 without a window.
    pub n_hidden: u32,
    /// Cells of the list up to the last that the row sees; more than `n_hidden`. That is the row's own cell in a
    /// decoder. In an encoder a row sees cells after its own.
    pub n_visible: u32,
}

/// The queries of a call.
#[derive(Debug, Clone, Copy)]
pub struct Queries<'a> {
    /// `[n, n_heads, d_head]`, rotated.
    pub q: &'a [f32],
    /// How scores are computed from them.
    pub scoring: Scoring,
    /// The sink of each head, `[n_heads]`: a score, not capped, that joins the softmax's sum and has no value.
    pub sinks: Option<&'a [f32]>,
}

/// How scores are computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scoring {
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Soft cap: a score becomes `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
}

/// Number of cells in a span with a sliding window of this many positions: a power of two of blocks, chosen so that
/// a window plus some rows touch at most 16 spans.
pub fn window_span(window: usize) -> usize {
    BLOCK * window.div_ceil(BLOCK * MAX_SPANS / 2).next_power_of_two()
}

impl AttentionRow {
    /// Cells of the list up to and including the row's own.
    fn n(self) -> usize {
        self.n_visible as usize
    }

    /// Cells of the list that the row does not see.
    fn hidden(self) -> usize {
        self.n_hidden as usize
    }
}

impl AttentionRows<'_> {
    /// Cells in a span of `row`: a power of two of whole blocks.
    fn span_len(&self, row: AttentionRow) -> usize {
        match self.window {
            Some(window) => window_span(window),
            None => BLOCK * row.n().div_ceil(BLOCK * MAX_SPANS).next_power_of_two(),
        }
    }

    /// How many cells at the start of the list of row `index` are also those of the row before it.
    fn n_shared(&self, index: usize) -> usize {
        if self.rows[index].start == self.rows[index - 1].start {
            return usize::MAX;
        }
        self.n_shared.get(index).map_or(0, |&n| n as usize)
    }

    /// The spans of the list that contain cells `row` sees.
    fn spans(&self, row: AttentionRow) -> Range<usize> {
        let len = self.span_len(row);
        row.hidden() / len..row.n().div_ceil(len)
    }
}

/// Attention of every row over the cells that it sees.
///
/// - `queries`: one row for each of `rows`; query head `h` reads KV head `h / (n_heads / n_kv_heads)`
/// - `out`: the shape of the queries
///
/// Panics if shapes disagree, if a row sees no cell or one that does not exist, if there are more rows than the
/// context's scratch has capacity for, or if `d_head` is odd or above [`MAX_D_HEAD`].
pub fn attention(
    cx: &mut OpContext,
    queries: Queries<'_>,
    layer: KvLayer<'_>,
    rows: AttentionRows<'_>,
    out: &mut [f32],
) {
    let Queries { q, scoring, sinks } = queries;
    if rows.rows.is_empty() {
        return assert!(q.is_empty() && out.is_empty(), "queries without rows");
    }
    let heads = Heads::new(q.len() / rows.rows.len(), &layer);
    assert!(
        q.len() == rows.rows.len() * heads.row_len() && out.len() == q.len(),
        "queries or output of wrong shape"
    );
    assert!(sinks.is_none_or(|sinks| sinks.len() == heads.n_heads), "sinks of another number of heads");
    match layer.dtype {
        KvDType::Float32 => {
            let (k, v) = (layer.k.as_slice::<f32>(), layer.v.as_slice());
            run(cx, &Job { q, scoring, sinks, k, v, heads, rows }, out);
        }
        KvDType::Float16 => {
            let (k, v) = (layer.k.as_slice::<f16>(), layer.v.as_slice());
            run(cx, &Job { q, scoring, sinks, k, v, heads, rows }, out);
        }
        KvDType::Bfloat16 => {
            let (k, v) = (layer.k.as_slice::<u16>(), layer.v.as_slice());
            run(cx, &Job { q, scoring, sinks, k, v, heads, rows }, out);
        }
        KvDType::Int8 => {
            let (k, v) = (layer.k.as_slice::<i8>(), layer.v.as_slice());
            run(cx, &Job { q, scoring, sinks, k, v, heads, rows }, out);
        }
    }
}

/// The shape of queries, keys and values.
#[derive(Debug, Clone, Copy)]
struct Heads {
    n_heads: usize,
    n_kv_heads: usize,
    d_head: usize,
}

impl Heads {
    fn new(row_len: usize, layer: &KvLayer<'_>) -> Self {
        let heads =
            Self { n_heads: row_len / layer.d_head, n_kv_heads: layer.n_kv_heads, d_head: layer.d_head };
        assert!(heads.n_heads > 0 && heads.n_heads.is_multiple_of(heads.n_kv_heads), "{heads:?}");
        assert!(heads.d_head <= MAX_D_HEAD && heads.d_head.is_multiple_of(2), "{heads:?}");
        heads
    }

    /// Elements in a query row.
    fn row_len(self) -> usize {
        self.n_heads * self.d_head
    }

    /// Query heads that read one KV head.
    fn group(self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// Items per chunk, without splitting by spans.
    fn items(self) -> usize {
        self.n_kv_heads * self.group().div_ceil(MAX_ITEM_HEADS)
    }
}

/// One call of the op.
#[derive(Clone, Copy)]
struct Job<'a, T> {
    q: &'a [f32],
    scoring: Scoring,
    sinks: Option<&'a [f32]>,
    k: &'a [T],
    v: &'a [T],
    heads: Heads,
    rows: AttentionRows<'a>,
}

/// Computes all items on the pool, and merges the spans if they were computed separately.
fn run<T: KvElement>(cx: &mut OpContext, job: &Job<'_, T>, out: &mut [f32]) {
    let isa = cx.kernels.proof();
    let Scratch { areas, chunks, partials, max_rows } = &mut cx.attention;
    let max_rows = *max_rows;
    assert!(job.rows.rows.len() <= max_rows, "{} rows, scratch is for {max_rows}", job.rows.rows.len());
    let partials = partials.as_mut_slice::<f32>();
    let n_threads = cx.pool.n_threads();
    let n_spans = cut(job, n_threads, partials.len(), chunks);
    let split = n_spans > 1;
    let chunks = &*chunks;
    let cutting =
        Cutting { chunks, n_spans, by_chunk: !split && chunks.len() >= ITEMS_PER_THREAD * n_threads };
    let queue = Chunks::new(cutting.n_units(job.heads), 1);
    let areas = Disjoint::new(areas.as_mut_slice::<f32>());
    let target = Disjoint::new(if split { &mut *partials } else { &mut *out });
    cx.pool.run(&|worker| {
        // SAFETY: each worker has its own area.
        let area = unsafe { areas.range(worker * AREA..(worker + 1) * AREA) };
        let take = || queue.take().map(|units| units.start);
        let (mut taken, mut is_first) = (take(), true);
        while let Some(unit) = taken {
            // Taken before the current item is computed, so that its first keys can be prefetched meanwhile.
            taken = take();
            let n_items = cutting.n_items(job.heads, unit);
            for number in 0..n_items {
                let after =
                    if number + 1 < n_items { Some((unit, number + 1)) } else { taken.map(|unit| (unit, 0)) };
                let item = cutting.item(job, unit, number);
                let next = after.map(|(unit, number)| cutting.item(job, unit, number));
                // SAFETY: the queue hands out each item once, and no two items have a row, head and span in common.
                let target = unsafe { target.writer() };
                isa.run(Compute { job, item, next, is_first, area: &mut *area, target });
                is_first = false;
            }
        }
    });
    if split {
        isa.run(MergeSpans { job, partials, out });
    }
}

/// How the work of a call is distributed: in units of one item, or of all items of a chunk.
#[derive(Clone, Copy)]
struct Cutting<'a> {
    chunks: &'a [Chunk],
    /// Number of spans into which items are cut; 1 if they are not cut.
    n_spans: usize,
    by_chunk: bool,
}

impl Cutting<'_> {
    /// Number of units to distribute.
    fn n_units(&self, heads: Heads) -> usize {
        self.chunks.len() * if self.by_chunk { 1 } else { heads.items() * self.n_spans }
    }

    /// True if all heads of unit `unit`, a single row, are one item: their keys and values are contiguous.
    fn is_one_item(&self, heads: Heads, unit: usize) -> bool {
        let fits_an_item = heads.group() <= MAX_ITEM_HEADS && heads.n_heads <= MAX_ITEM_ROWS;
        self.by_chunk && fits_an_item && self.chunks[unit].n == 1
    }

    /// Items in unit `unit`.
    fn n_items(&self, heads: Heads, unit: usize) -> usize {
        if !self.by_chunk || self.is_one_item(heads, unit) { 1 } else { heads.items() }
    }

    /// Item `number` of unit `unit`.
    fn item<'a, T>(&self, job: &Job<'a, T>, unit: usize, number: usize) -> Item<'a> {
        if !self.by_chunk {
            let (unit, span) = (unit / self.n_spans, unit % self.n_spans);
            let chunk = self.chunks[unit / job.heads.items()];
            return Item::new(job, chunk, unit % job.heads.items(), (self.n_spans > 1).then_some(span));
        }
        let chunk = self.chunks[unit];
        if self.is_one_item(job.heads, unit) {
            Item::all_heads(job, chunk)
        } else {
            Item::new(job, chunk, number, None)
        }
    }
}

/// Cuts the rows into chunks, longest work first. Returns the number of spans into which items are also cut; 1 if they
/// are not cut. The choice only affects the speed.
fn cut<T>(job: &Job<'_, T>, n_threads: usize, n_partials: usize, chunks: &mut Vec<Chunk>) -> usize {
    let rows = job.rows.rows;
    let n_items = rows.len() * job.heads.items();
    let wanted = ITEMS_PER_THREAD * n_threads;
    let n_spans = rows.iter().map(|&row| job.rows.spans(row).end).max().unwrap_or(1);
    let split = n_threads > 1
        && n_items < wanted
        && rows.len() <= MAX_SPLIT_ROWS
        && n_spans <= MAX_SPANS
        && rows.len() * partials_of_row(job.heads) <= n_partials;
    let highest = MAX_ITEM_ROWS / job.heads.group().min(MAX_ITEM_HEADS);
    let height = n_items.div_ceil(wanted).clamp(1, highest);
    // Rows of a prefix that is read once are worth more than an even distribution.
    let shared =
        if split { 1 } else { n_items.div_ceil(SHARED_ITEMS_PER_THREAD * n_threads).clamp(1, highest) };
    scratch::cut_rows(job.rows, Heights { same_list: height, same_start: shared }, chunks);
    if split { n_spans } else { 1 }
}

/// Numbers in the partial results of one row.
fn partials_of_row(heads: Heads) -> usize {
    heads.n_heads * MAX_SPANS * (heads.d_head + STATE)
}
