//! One item of attention: some rows, the query heads of one kv head, some spans.

use super::block::{Block, HeadRows, Reads};
use super::scratch::{Area, Chunk, State, TILE_VECTORS};
use super::softmax::{STATE, Softmax, SoftmaxMut, finish, largest, merge, multiply, weights};
use super::tile::{self, FewScores, Packed, Scores, Stored, Values, Weighted};
use super::{AttentionRow, BLOCK, Job, MAX_ITEM_HEADS, MAX_ITEM_ROWS, MAX_SPANS};
use crate::ops::cpu::isa::lanes::{EIGHT, Kernel, Lanes, MAX_LANES, exp};
use crate::ops::cpu::kv_element::{KvElement, KvWord};
use crate::ops::cpu::soft_cap::Cap;
use crate::threads::DisjointWriter;
use std::marker::PhantomData;
use std::ops::Range;

/// The work of one item.
pub(super) struct Item<'a> {
    /// Index of the first row.
    first_row: usize,
    rows: &'a [AttentionRow],
    /// The list of the rows up to the last cell that one of them sees, or of rows with several lists what is common.
    cells: &'a [u32],
    /// Number of cells at the start of the list that are not computed: no row sees them, or they were computed before.
    skipped: usize,
    /// More than one only if there is a single row.
    kv_heads: Range<usize>,
    /// The query heads that read `kv_heads`.
    heads: Range<usize>,
    /// The only span to compute, to be merged later; `None` for all spans.
    span: Option<usize>,
}

impl<'a> Item<'a> {
    /// Item `number` of a chunk's [`Heads::items`].
    pub(super) fn new<T>(job: &Job<'a, T>, chunk: Chunk, number: usize, span: Option<usize>) -> Self {
        let group = job.heads.group();
        let parts = group.div_ceil(MAX_ITEM_HEADS);
        let (kv_head, part) = (number / parts, number % parts);
        let first = kv_head * group + part * MAX_ITEM_HEADS;
        let heads = first..((kv_head + 1) * group).min(first + MAX_ITEM_HEADS);
        let rows = &job.rows.rows[chunk.first as usize..][..chunk.n as usize];
        let (first_row, kv_heads) = (chunk.first as usize, kv_head..kv_head + 1);
        let (cells, skipped) = listed(job, rows);
        let cells = &cells[..cells.len().min(chunk.n_shared)];
        Self { first_row, rows, cells, skipped, kv_heads, heads, span }
    }

    /// All heads of a chunk of one row.
    pub(super) fn all_heads<T>(job: &Job<'a, T>, chunk: Chunk) -> Self {
        let first_row = chunk.first as usize;
        let rows = &job.rows.rows[first_row..=first_row];
        let (cells, skipped) = listed(job, rows);
        let (kv_heads, heads) = (0..job.heads.n_kv_heads, 0..job.heads.n_heads);
        Self { first_row, rows, cells, skipped, kv_heads, heads, span: None }
    }

    /// The rows of each list with their cells after the common ones, if there are several lists.
    fn after_common<T>(&self, job: &Job<'a, T>) -> impl Iterator<Item = Item<'a>> {
        let same_list = |a: &AttentionRow, b: &AttentionRow| a.start == b.start;
        let (rows, common) = (self.rows, self.cells.len());
        let mut first_row = self.first_row;
        let has_several = rows.iter().any(|row| row.start != rows[0].start);
        let lists = rows.chunk_by(same_list).filter(move |_| has_several);
        lists.map(move |rows| {
            let own = Item {
                first_row,
                rows,
                cells: listed(job, rows).0,
                skipped: common,
                kv_heads: self.kv_heads.clone(),
                heads: self.heads.clone(),
                span: None,
            };
            first_row += rows.len();
            own
        })
    }

    /// The rows x query heads that read number `i` of `kv_heads`.
    fn rows_of(&self, i: usize) -> Range<usize> {
        let n = self.n_rows() / self.kv_heads.len();
        i * n..(i + 1) * n
    }

    /// Number of rows x query heads.
    fn n_rows(&self) -> usize {
        self.rows.len() * self.heads.len()
    }

    /// The cells that row `i` of the rows x query heads sees.
    fn row(&self, i: usize) -> AttentionRow {
        self.rows[i / self.heads.len()]
    }

    /// Writes which cells of the block that begins at `start` each row sees: start and end of a range, which is empty if
    /// it sees none.
    fn seen(&self, start: usize, out: &mut [[usize; 2]]) {
        for (row, out) in self.rows.iter().zip(out.chunks_exact_mut(self.heads.len())) {
            let end = row.n().saturating_sub(start).min(BLOCK);
            out.fill([row.hidden().saturating_sub(start).min(end), end]);
        }
    }

    /// The spans to compute, and the number of cells in each.
    fn spans<T>(&self, job: &Job<'a, T>) -> (Range<usize>, usize) {
        let len = job.rows.span_len(self.rows[0]);
        let all = self.skipped / len..self.cells.len().div_ceil(len);
        let spans = self.span.map_or(all.clone(), |span| span.max(all.start)..all.end.min(span + 1));
        (spans, len)
    }

    /// The keys and values that the item reads.
    fn reads<T>(&self, job: &Job<'a, T>) -> Reads<'a> {
        let (spans, len) = self.spans(job);
        let end = self.cells.len().min(spans.end * len);
        let start = (self.skipped.max(spans.start * len) / BLOCK * BLOCK).min(end);
        Reads { cells: &self.cells[start..end], head: self.kv_heads.start }
    }
}

/// The list of the first of `rows`, up to the last cell that one of them sees, and the number of cells at its start that
/// none of them sees.
fn listed<'a, T>(job: &Job<'a, T>, rows: &[AttentionRow]) -> (&'a [u32], usize) {
    let n = rows.iter().map(|row| row.n()).max().unwrap_or(0);
    let n_hidden = rows.iter().map(|row| row.hidden()).min().unwrap_or(0);
    (&job.rows.cells[rows[0].start as usize..][..n], n_hidden)
}

/// Computes an item in one worker's area.
pub(super) struct Compute<'a, T> {
    pub(super) job: &'a Job<'a, T>,
    pub(super) item: Item<'a>,
    /// The item that this thread computes next.
    pub(super) next: Option<Item<'a>>,
    /// True if this is the first item of this thread in this call.
    pub(super) is_first: bool,
    pub(super) area: &'a mut [f32],
    /// The output, or partials `[row][head][span][STATE + d_head]` if the item is a single span.
    pub(super) target: DisjointWriter<'a, f32>,
}

impl<T: KvElement> Kernel for Compute<'_, T> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Compute { job, item, next, is_first, area, mut target } = self;
        let item = &item;
        let d = job.heads.d_head;
        assert!(item.rows.iter().all(|row| row.n_visible > row.n_hidden), "a row sees no cell");
        let padded = d.next_multiple_of(L::N);
        let mut area = Area::new(area, item.n_rows(), d, padded);
        let mut later = item.after_common(job).peekable();
        let own = item.reads(job);
        let end = next.map_or(Reads { cells: &[], ..own }, |next| next.reads(job));
        let reads = [own, later.peek().map_or(end, |later| later.reads(job))];
        let n_rows = item.n_rows();
        let mut seen = [[0; 2]; MAX_ITEM_ROWS];
        let mut pass = Pass {
            lanes,
            job,
            item,
            reads,
            is_first,
            n_read: 0,
            seen: &mut seen,
            area: area.rows(0..n_rows, d, padded),
        };
        pass.scale_queries();
        let is_empty = !pass.spans(true);
        while let Some(own) = later.next() {
            let reads = [own.reads(job), later.peek().map_or(end, |later| later.reads(job))];
            let first = (own.first_row - item.first_row) * item.heads.len();
            let area = area.rows(first..first + own.n_rows(), d, padded);
            Pass { lanes, job, item: &own, reads, is_first: false, n_read: 0, seen: &mut seen, area }
                .spans(false);
        }
        if !is_empty {
            write_results(lanes, &area.total, job, item, &mut target);
        }
    }
}

/// Writes an item's results to its target.
#[inline(always)]
fn write_results<L: Lanes, T>(
    lanes: L,
    total: &State<'_>,
    job: &Job<'_, T>,
    item: &Item<'_>,
    target: &mut DisjointWriter<'_, f32>,
) {
    let heads = job.heads;
    let padded = total.v.len() / item.n_rows();
    for (i, v) in total.v.chunks_exact(padded).enumerate() {
        let row = item.first_row + i / item.heads.len();
        let of_row = item.heads.start + i % item.heads.len();
        let head = row * heads.n_heads + of_row;
        let (place, len) = match item.span {
            None => (head, heads.d_head),
            Some(span) => (head * MAX_SPANS + span, heads.d_head + STATE),
        };
        let out = target.range(place * len..(place + 1) * len);
        if item.span.is_none() {
            let softmax = Softmax { m: total.m[i], l: total.l[i], v };
            finish(lanes, softmax, job.sinks.map(|sinks| sinks[of_row]), out);
        } else {
            (out[0], out[1]) = (total.m[i], total.l[i]);
            out[STATE..].copy_from_slice(&v[..heads.d_head]);
        }
    }
}

/// The state of an item during its computation.
struct Pass<'a, L, T> {
    lanes: L,
    job: &'a Job<'a, T>,
    item: &'a Item<'a>,
    /// The keys and values that this item reads, and those that the next one reads.
    reads: [Reads<'a>; 2],
    /// True if no earlier item has prefetched for this one.
    is_first: bool,
    /// Number of cells that have been read.
    n_read: usize,
    /// Which cells of the current block each row sees: start and end.
    seen: &'a mut [[usize; 2]; MAX_ITEM_ROWS],
    area: Area<'a>,
}

impl<L: Lanes, T: KvElement> Pass<'_, L, T> {
    /// Numbers of a head, padded to whole vectors.
    #[inline(always)]
    fn padded(&self) -> usize {
        self.job.heads.d_head.next_multiple_of(L::N)
    }

    /// Multiplies the queries by the scale of the scores and rounds them to the type of the keys.
    #[inline(always)]
    fn scale_queries(&mut self) {
        let (item, Job { q, scoring, heads, .. }) = (self.item, self.job);
        let (d, row_len, scale) = (heads.d_head, heads.row_len(), self.lanes.splat(scoring.scale));
        for (i, out) in self.area.queries.chunks_exact_mut(d).enumerate() {
            let row = (item.first_row + i / item.heads.len()) * row_len;
            let head = &q[row + (item.heads.start + i % item.heads.len()) * d..][..d];
            for (q, out) in head.chunks(L::N).zip(out.chunks_mut(L::N)) {
                self.lanes.store_first(self.lanes.mul(self.lanes.load_first(q), scale), out);
            }
            T::Word::round(self.lanes, out, d);
        }
    }

    /// True if [`FewScores`] scores each KV head's rows.
    #[inline(always)]
    fn is_few(&self) -> bool {
        T::dots_eight::<L>() && self.item.n_rows() <= EIGHT * self.item.kv_heads.len()
    }

    /// Writes the queries of each KV head in the layout of [`FewScores`].
    #[inline(always)]
    fn pack_few_queries(&mut self) {
        let (d, n_heads) = (self.job.heads.d_head, self.item.kv_heads.len());
        let (n_rows, len) = (self.item.n_rows() / n_heads, d / 2 * EIGHT);
        let heads =
            self.area.queries.chunks_exact(n_rows * d).zip(self.area.few_queries.chunks_exact_mut(len));
        for (queries, out) in heads {
            for (i, out) in out.as_chunks_mut::<EIGHT>().0.iter_mut().enumerate() {
                for (out, query) in out.iter_mut().zip(queries.chunks_exact(d)) {
                    *out = query[i];
                }
            }
        }
    }

    /// Computes the spans of the item, in addition to those in `total` unless `is_empty`. Returns false if there are none.
    #[inline(always)]
    fn spans(&mut self, is_empty: bool) -> bool {
        let (spans, len) = self.item.spans(self.job);
        if self.is_few() {
            self.pack_few_queries();
        }
        for span in spans.clone() {
            let cells = span * len..((span + 1) * len).min(self.item.cells.len());
            self.span(cells, is_empty && span == spans.start);
        }
        !spans.is_empty()
    }

    /// Computes the blocks of one span, and merges it with the earlier spans unless it is the `first`.
    #[inline(always)]
    fn span(&mut self, span: Range<usize>, first: bool) {
        if !first {
            std::mem::swap(&mut self.area.total, &mut self.area.span);
        }
        self.area.total.reset();
        // Start with the first block of which a row sees a cell.
        let first_block = self.item.skipped.max(span.start) / BLOCK * BLOCK;
        for start in (first_block..span.end).step_by(BLOCK) {
            self.block(start, span.end);
        }
        if !first {
            std::mem::swap(&mut self.area.total, &mut self.area.span);
            self.merge(span);
        }
    }

    /// Adds one block of cells to the running softmax in `total`: scores the keys, then sums the values. Each read of a
    /// line comes with a prefetch of a later cell's line, so that memory is never idle.
    #[inline(always)]
    fn block(&mut self, start: usize, span_end: usize) {
        let (lanes, n_heads) = (self.lanes, self.item.kv_heads.len());
        let n = span_end.min(start + BLOCK) - start;
        let is_single = self.item.rows.len() == 1;
        let block = Block::new(self.job, self.reads, n_heads, self.n_read..self.n_read + n);
        if self.is_first && self.n_read == 0 {
            block.fetch_start(lanes);
        }
        self.n_read += n;
        self.item.seen(start, self.seen);
        for head in 0..n_heads {
            let (keys, rows) = (block.keys(head), self.item.rows_of(head));
            if self.is_few() {
                self.score_few(head, keys, n);
                continue;
            }
            for offset in (0..n).step_by(TILE_VECTORS * L::N) {
                let cells = offset..n.min(offset + TILE_VECTORS * L::N);
                tile::pack_keys(lanes, keys, cells.clone(), self.area.keys);
                self.score(rows.clone(), keys, cells);
            }
        }
        for head in 0..n_heads {
            let (values, rows) = (block.values(head), self.item.rows_of(head));
            self.weigh(rows.clone(), values, n);
            if is_single {
                self.add_values(&Stored(values), rows);
            } else {
                let (padded, d) = (self.padded(), self.job.heads.d_head);
                let packed = std::mem::take(&mut self.area.values);
                tile::pack_values(lanes, values, n, packed);
                let word = PhantomData::<T::Word>;
                self.add_values(&Packed { values: packed, padded, d, word }, rows);
                self.area.values = packed;
            }
        }
    }

    /// Computes the scores of KV head `head` for the first `n` keys of the block.
    #[inline(always)]
    fn score_few(&mut self, head: usize, keys: HeadRows<'_, T>, n: usize) {
        let (lanes, len) = (self.lanes, self.job.heads.d_head / 2 * EIGHT);
        let queries = self.area.few_queries[head * len..][..len].as_chunks().0;
        let out = &mut self.area.scores[self.item.rows_of(head)];
        lanes.enter(FewScores { queries, keys, n, memory: &mut *self.area.keys, out });
    }

    /// Computes the scores of `rows` for `cells` of the block, whose keys were packed.
    #[inline(always)]
    fn score(&mut self, rows: Range<usize>, keys: HeadRows<'_, T>, cells: Range<usize>) {
        let (d, offset) = (self.job.heads.d_head, cells.start);
        let scales = keys.scales(cells);
        let height = tile::height::<L>(rows.len());
        let queries = self.area.queries[rows.start * d..rows.end * d].chunks(height * d);
        let first = rows.start;
        for (t, (queries, out)) in queries.zip(self.area.scores[rows].chunks_mut(height)).enumerate() {
            let rows = first + t * height..first + t * height + out.len();
            let n_cells =
                self.seen[rows].iter().map(|seen| seen[1]).max().unwrap_or(0).saturating_sub(offset);
            let n_vectors = n_cells.div_ceil(L::N).min(TILE_VECTORS);
            let (lanes, keys) = (self.lanes, &self.area.keys[..d * TILE_VECTORS * L::N]);
            let word = PhantomData::<T::Word>;
            let scales = if T::SCALE > 0 { &scales[..] } else { &[] };
            tile::run(lanes, out.len(), Scores { word, queries, keys, scales, n_vectors, out, offset });
        }
    }

    /// Turns the scores of `rows` into weights relative to the new maximum, and stores the factors that rescale the
    /// earlier sums. The weights are multiplied by the scales of the block's `n` `values`, and rounded to their type.
    #[inline(always)]
    fn weigh(&mut self, rows: Range<usize>, values: HeadRows<'_, T>, n: usize) {
        let scales = values.scales(0..n);
        for first in rows.clone().step_by(L::N) {
            self.weigh_rows(first..rows.end.min(first + L::N), &scales);
        }
    }

    /// [`Pass::weigh`] for at most N rows, whose factors are one vector.
    #[inline(always)]
    fn weigh_rows(&mut self, rows: Range<usize>, scales: &[f32; BLOCK]) {
        let (lanes, seen) = (self.lanes, &self.seen[rows.clone()]);
        let scores = &mut self.area.scores[rows.clone()];
        // Rows that see nothing keep their maximum.
        let mut maxima = [f32::NEG_INFINITY; MAX_LANES];
        for ((scores, &[start, end]), max) in scores.iter_mut().zip(seen).zip(&mut maxima) {
            let scores = &mut scores[..end.next_multiple_of(L::N)];
            if let Some(cap) = self.job.scoring.soft_cap {
                Cap { x: scores, cap }.run(lanes);
            }
            *max = largest(lanes, scores, start..end);
        }
        let m = &mut self.area.total.m[rows.clone()];
        let earlier = lanes.load_first(m);
        let new = lanes.max(earlier, lanes.load(&maxima));
        lanes.store_first(new, m);
        lanes.store(new, &mut maxima);
        let rescale = &mut self.area.rescale[rows.clone()];
        lanes.store_first(exp(lanes, lanes.sub(earlier, new)), rescale);
        let sums = self.area.total.l[rows].iter_mut().zip(rescale).zip(maxima);
        for (((l, rescale), m), (scores, &[start, end])) in sums.zip(scores.iter_mut().zip(seen)) {
            if start == end {
                continue;
            }
            let n = end.next_multiple_of(L::N);
            let sum = weights(lanes, &mut scores[..n], start..end, m);
            let sum = lanes.mul_add(lanes.splat(*l), lanes.splat(*rescale), lanes.splat(sum));
            lanes.store_first(sum, std::slice::from_mut(l));
            if T::SCALE > 0 {
                multiply(lanes, &mut scores[..n], scales);
            }
            T::Word::round(lanes, scores, n);
        }
    }

    /// Adds the weighted values of a block to `rows`, in tiles of rows that see the same cells of it.
    #[inline(always)]
    fn add_values<V: Values>(&mut self, values: &V, rows: Range<usize>) {
        let (lanes, padded) = (self.lanes, self.padded());
        let height = tile::height::<L>(rows.len());
        let mut first = rows.start;
        while first < rows.end {
            let seen = self.seen[first];
            let highest = rows.end.min(first + height);
            let end = first + self.seen[first..highest].iter().take_while(|other| **other == seen).count();
            let seen = seen[0]..seen[1];
            if !seen.is_empty() {
                let weights = &self.area.scores[first..end];
                let rescale = &self.area.rescale[first..end];
                let out = &mut self.area.total.v[first * padded..end * padded];
                tile::run(lanes, end - first, Weighted { values, weights, seen, rescale, out });
            }
            first = end;
        }
    }

    /// Merges the span `cells` into `total`, for the rows that see some of its cells. If a row sees nothing before the
    /// span, the span becomes the row's total.
    #[inline(always)]
    fn merge(&mut self, cells: Range<usize>) {
        let padded = self.padded();
        let (total, span) = (&mut self.area.total, &self.area.span);
        for (i, (v, span_v)) in total.v.chunks_exact_mut(padded).zip(span.v.chunks_exact(padded)).enumerate()
        {
            let row = self.item.row(i);
            if row.n() <= cells.start || row.hidden() >= cells.end {
                continue;
            }
            if row.hidden() >= cells.start {
                (total.m[i], total.l[i]) = (span.m[i], span.l[i]);
                v.copy_from_slice(span_v);
            } else {
                let earlier = SoftmaxMut { m: &mut total.m[i], l: &mut total.l[i], v };
                merge(self.lanes, earlier, Softmax { m: span.m[i], l: span.l[i], v: span_v });
            }
        }
    }
}
