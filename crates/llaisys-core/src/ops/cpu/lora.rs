//! `lora`: y[t] = y[t] + B (scale * (A x[t])) for the rows of each adapter. Reference: `ops/reference/lora.rs`.
//!
//! All arithmetic is f32. A product with A has four partial sums: the inputs k, k + 4, ... are added to sum k % 4 in
//! ascending order, those after the last whole four to sum 0. A product with B is one sum over the ranks in ascending
//! order, which is then added to y. So the bits of a row do not depend on the other rows, on the adapters of the pass, or
//! on the number of threads. Rows without an adapter are not touched.
//!
//! Rows are grouped by adapter, so that each matrix is read from memory once for all rows of the pass.

#![allow(unsafe_code, reason = "workers write disjoint parts of one output")]

#[deny(unsafe_code)]
mod kernels;

use super::isa::Isa;
use crate::ops::OpContext;
use crate::ops::lora::{LoraGroup, LoraProduct, LoraRows, OUT_BLOCK, PanelBlock, RANK_BLOCK};
use crate::threads::{Chunks, Disjoint, Pool};
use kernels::{Columns, Expand, ROWS, Shrink};

/// The most projections of one input: query, key, value and the gate of attention.
const MAX_TARGETS: usize = 4;
/// Products from which work is spread over the threads; with fewer, a region costs more than it saves.
const PARALLEL_PRODUCTS: usize = 1 << 17;
/// Average number of chunks per thread.
const CHUNKS_PER_THREAD: usize = 8;

/// The adapters of a pass at one input.
#[derive(Clone, Copy)]
pub struct LoraInput<'a> {
    /// `[n, n_in]`
    pub x: &'a [f32],
    /// The rows that use adapters.
    pub rows: LoraRows<'a>,
    /// Returns the product of the adapter in a slot; None if it does not change the projections of this input.
    pub product: &'a (dyn Fn(u32) -> Option<&'a LoraProduct> + Sync),
}

impl<'a> LoraInput<'a> {
    /// The groups whose adapters change the projections of this input.
    fn products(self) -> impl Iterator<Item = (&'a LoraGroup, &'a LoraProduct)> {
        let product = self.product;
        self.rows.groups.iter().filter_map(move |group| Some((group, product(group.slot)?)))
    }
}

/// The outputs of the projections of one input.
#[derive(Debug)]
pub enum LoraOutputs<'a, 'b> {
    /// Of each projection, `[n, n_out]`.
    Separate(&'a mut [&'b mut [f32]]),
    /// Of gate (0) and up (1), `[n, gate_up_rows(d_ff)]`, interleaved as in [`gate_up_row`](super::gate::gate_up_row).
    GateUp(&'b mut [f32]),
}

/// Adds what the adapters of `input.rows` contribute to the outputs of the projections of `input.x`.
///
/// - `scratch`: `[n, width]`, with `width` at least that of each [`LoraProduct`]
///
/// Panics if shapes disagree.
pub fn lora(cx: &OpContext, input: LoraInput<'_>, scratch: &mut [f32], outputs: LoraOutputs<'_, '_>) {
    let Some((_, first)) = input.products().next() else { return };
    let (n_in, mut n_products) = (first.a.n_inner(), 0);
    let n = input.x.len() / n_in;
    let width = scratch.len() / n;
    for (group, product) in input.products() {
        assert_eq!(product.a.n_inner() * n, input.x.len(), "adapters and inputs differ in width");
        assert!(product.width() <= width, "{} ranks, but the scratch has {width}", product.width());
        assert!(input.rows.of(group).iter().all(|&row| (row as usize) < n), "rows outside the input");
        n_products += group.n * product.width() * n_in;
    }
    let isa = cx.kernels.proof();
    let region = ShrinkRegion { isa, input, n_in, hidden: Disjoint::new(scratch), width };
    // SAFETY: `run` hands out each unit once.
    run(&cx.pool, region.n_units(), n_products, &|unit| unsafe { region.unit(unit) });
    let is_gate_up = matches!(outputs, LoraOutputs::GateUp(_));
    let outs = match outputs {
        LoraOutputs::Separate(outs) => {
            let mut outs = outs.iter_mut();
            std::array::from_fn(|_| outs.next().map(|out| Disjoint::new(out)))
        }
        LoraOutputs::GateUp(out) => [Some(Disjoint::new(out)), None, None, None],
    };
    let (mut n_columns, mut n_products) = ([0; MAX_TARGETS], 0);
    for (group, product) in input.products() {
        for part in &product.parts {
            n_columns[part.target] = part.b.n_columns();
            n_products += group.n * part.b.n_inner() * part.b.n_columns();
        }
    }
    let region = ExpandRegion { isa, input, hidden: scratch, width, n_rows: n, outs, is_gate_up, n_columns };
    region.check();
    // SAFETY: `run` hands out each unit once.
    run(&cx.pool, region.n_units(), n_products, &|unit| unsafe { region.unit(unit) });
}

/// Calls `job` once for each of `n_units` units, on all threads if there are enough products.
fn run(pool: &Pool, n_units: usize, n_products: usize, job: &(dyn Fn(usize) + Sync)) {
    if n_products < PARALLEL_PRODUCTS {
        return (0..n_units).for_each(job);
    }
    let chunks = Chunks::new(n_units, (n_units / (pool.n_threads() * CHUNKS_PER_THREAD)).max(1));
    pool.run(&|_| {
        while let Some(units) = chunks.take() {
            units.for_each(job);
        }
    });
}

/// The products with A. A unit is a block of ranks and up to [`ROWS`] rows of one adapter.
struct ShrinkRegion<'a, 'i> {
    isa: Isa,
    input: LoraInput<'i>,
    n_in: usize,
    /// `[n, width]`, in the order of [`LoraRows::rows`].
    hidden: Disjoint<'a, f32>,
    width: usize,
}

impl ShrinkRegion<'_, '_> {
    fn units_of(group: &LoraGroup, product: &LoraProduct) -> usize {
        group.n.div_ceil(ROWS) * product.a.n_blocks()
    }

    fn n_units(&self) -> usize {
        self.input.products().map(|(group, product)| Self::units_of(group, product)).sum()
    }

    /// # Safety
    /// No other thread may compute the same unit at the same time.
    unsafe fn unit(&self, mut unit: usize) {
        for (group, product) in self.input.products() {
            let n_units = Self::units_of(group, product);
            if unit >= n_units {
                unit -= n_units;
                continue;
            }
            let n_row_blocks = group.n.div_ceil(ROWS);
            let (block, first) = (unit / n_row_blocks, unit % n_row_blocks * ROWS);
            let rows = &self.input.rows.of(group)[first..group.n.min(first + ROWS)];
            let scales = &product.scales[block * RANK_BLOCK..][..RANK_BLOCK];
            let mut hidden = [[0.0; RANK_BLOCK]; ROWS];
            let (x, n_in) = (self.input.x, self.n_in);
            match product.a.block(block) {
                PanelBlock::F32(a) => self.isa.run(Shrink { x, n_in, rows, a, scales, out: &mut hidden }),
                PanelBlock::Bf16(a) => self.isa.run(Shrink { x, n_in, rows, a, scales, out: &mut hidden }),
            }
            for (i, hidden) in hidden[..rows.len()].iter().enumerate() {
                let start = (group.start + first + i) * self.width + block * RANK_BLOCK;
                // SAFETY: this unit alone has this block of ranks of these rows.
                unsafe { self.hidden.range(start..start + RANK_BLOCK) }.copy_from_slice(hidden);
            }
            return;
        }
    }
}

/// The products with B. A unit is a block of outputs of one projection, for the rows of all adapters.
struct ExpandRegion<'a, 'i> {
    isa: Isa,
    input: LoraInput<'i>,
    /// As in [`ShrinkRegion`].
    hidden: &'a [f32],
    width: usize,
    n_rows: usize,
    outs: [Option<Disjoint<'a, f32>>; MAX_TARGETS],
    is_gate_up: bool,
    /// Outputs of each projection that an adapter changes.
    n_columns: [usize; MAX_TARGETS],
}

impl ExpandRegion<'_, '_> {
    /// The output of a projection, and the place of its columns in a row.
    fn target(&self, target: usize) -> (&Disjoint<'_, f32>, Columns) {
        let half = self.is_gate_up.then_some(target == 1);
        let out =
            self.outs[if self.is_gate_up { 0 } else { target }].as_ref().expect("an output for each part");
        (out, Columns { stride: out.len() / self.n_rows, half })
    }

    /// Checks the shape of every matrix and output.
    fn check(&self) {
        for part in self.input.products().flat_map(|(_, product)| &product.parts) {
            let (out, columns) = self.target(part.target);
            let n_columns = self.n_columns[part.target];
            assert_eq!(part.b.n_columns(), n_columns, "outputs of the adapters");
            assert_eq!(out.len(), self.n_rows * columns.width(n_columns), "output of wrong shape");
        }
    }

    fn n_units(&self) -> usize {
        self.n_columns.iter().map(|n| n.div_ceil(OUT_BLOCK)).sum()
    }

    /// # Safety
    /// No other thread may compute the same unit at the same time.
    unsafe fn unit(&self, mut unit: usize) {
        let mut target = 0;
        while unit >= self.n_columns[target].div_ceil(OUT_BLOCK) {
            unit -= self.n_columns[target].div_ceil(OUT_BLOCK);
            target += 1;
        }
        let (out, columns) = self.target(target);
        let first = unit * OUT_BLOCK;
        for (group, product) in self.input.products() {
            let Some(part) = product.parts.iter().find(|part| part.target == target) else { continue };
            let rows = self.input.rows.of(group);
            let hidden = &self.hidden[group.start * self.width + part.first_rank..];
            let (rank, width) = (part.b.n_inner(), self.width);
            let range = first..self.n_columns[target].min(first + OUT_BLOCK);
            // SAFETY: this unit alone has this block of outputs, in all rows.
            let out = unsafe { out.writer() };
            match part.b.block(unit) {
                PanelBlock::F32(b) => {
                    self.isa.run(Expand { hidden, width, rank, rows, b, range, columns, out })
                }
                PanelBlock::Bf16(b) => {
                    self.isa.run(Expand { hidden, width, rank, rows, b, range, columns, out })
                }
            }
        }
    }
}
