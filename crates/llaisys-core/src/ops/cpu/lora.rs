//! `lora`: y[t] = y[t] + B (scale * (A x[t])) for the rows of each adapter. Reference: `ops/reference/lora.rs`.
//!
//! [`lora`] computes the products with A, which need only x. The product of the base adds those with B to each panel of
//! its outputs while the panel is in the first-level cache (`linear/expand.rs`).
//!
//! All arithmetic is f32. A product with A has four partial sums: the inputs k, k + 4, ... are added to sum k % 4 in
//! ascending order, those after the last whole four to sum 0. A product with B is one sum over the ranks in ascending
//! order, which is then added to y. So the bits of a row do not depend on the other rows, on the adapters of the pass, or
//! on the number of threads. Rows without an adapter are not touched.
//!
//! Rows are grouped by adapter, so that each matrix is read from memory once for all rows of the pass.

#![allow(unsafe_code, reason = "workers write disjoint parts of one output")]

#[deny(unsafe_code)]
mod shrink;

use super::isa::Isa;
use crate::ops::OpContext;
use crate::ops::lora::{LoraB, LoraGroup, LoraProduct, LoraRows, Numbers, RANK_BLOCK};
use crate::threads::{Chunks, Disjoint, Pool};
use shrink::{ROWS, Shrink};

pub(super) use shrink::Number;

/// Products from which work is spread over the threads; with fewer, a region costs more than it saves.
const PARALLEL_PRODUCTS: usize = 1 << 17;
/// Average number of chunks per thread.
const CHUNKS_PER_THREAD: usize = 8;

/// The adapters of a pass at one input.
#[derive(Debug, Clone, Copy)]
pub struct LoraInput<'a> {
    /// `[n, n_in]`
    pub x: &'a [f32],
    /// The adapters of the rows.
    pub rows: LoraRows<'a>,
    /// By slot; None if the adapter does not change the projections of this input.
    pub products: &'a [Option<Box<LoraProduct>>],
}

impl<'a> LoraInput<'a> {
    /// The groups whose adapters change the projections of this input.
    fn products(self) -> impl Iterator<Item = (&'a LoraGroup, &'a LoraProduct)> {
        let product = move |group: &LoraGroup| self.products[group.slot as usize].as_deref();
        self.rows.groups().iter().filter_map(move |group| Some((group, product(group)?)))
    }
}

/// The products with A of a pass at one input: what a product of the base needs to add those with B.
#[derive(Debug, Clone, Copy)]
pub struct LoraHidden<'a> {
    rows: LoraRows<'a>,
    products: &'a [Option<Box<LoraProduct>>],
    /// Rows of `width`, in the order of the list of rows that use adapters.
    hidden: &'a [f32],
    width: usize,
    /// The number of the first matrix of the base product among those of the input.
    target: usize,
}

impl<'a> LoraHidden<'a> {
    /// The same for a base product whose first matrix is `n` later among those of the input.
    pub fn after(self, n: usize) -> Self {
        Self { target: self.target + n, ..self }
    }

    /// The rows of the pass.
    #[inline(always)]
    pub(super) fn rows(self) -> LoraRows<'a> {
        self.rows
    }

    /// What the adapter in a slot adds to the first matrix.
    #[inline(always)]
    pub(super) fn b(self, slot: u32) -> Option<&'a LoraB> {
        let product = self.products[slot as usize].as_deref()?;
        let mut i = 0;
        while i < product.parts.len() {
            if product.parts[i].target == self.target {
                return Some(&product.parts[i].b);
            }
            i += 1;
        }
        None
    }

    /// The ranks of a row, by its index in the list of rows that use adapters.
    #[inline(always)]
    pub(super) fn row(self, index: usize) -> &'a [f32] {
        &self.hidden[index * self.width..][..self.width]
    }

    /// Checks the shapes for a base product of `n` rows with a matrix of `n_rows`.
    pub(super) fn check(self, n: usize, n_rows: usize) {
        assert_eq!(self.rows.n_rows(), n, "rows of the adapters");
        for b in self.rows.groups().iter().filter_map(|group| self.b(group.slot)) {
            assert_eq!(b.n_rows(), n_rows, "outputs of the adapters");
        }
    }
}

/// Computes the products of the inputs with A, times the scales. None if no adapter changes a projection of the input.
///
/// - `scratch`: `[n, width]`, with `width` at least that of each [`LoraProduct`]
///
/// Panics if shapes disagree.
pub fn lora<'a>(cx: &OpContext, input: LoraInput<'a>, scratch: &'a mut [f32]) -> Option<LoraHidden<'a>> {
    let (_, first) = input.products().next()?;
    let (n_in, n, mut n_products) = (first.a.n_in(), input.rows.n_rows(), 0);
    let width = scratch.len() / n;
    for (group, product) in input.products() {
        assert_eq!(product.a.n_in() * n, input.x.len(), "adapters and inputs differ in width");
        assert!(product.width() <= width, "{} ranks, but the scratch has {width}", product.width());
        n_products += group.n * product.width() * n_in;
    }
    let isa = cx.kernels.proof();
    let region = Region { isa, input, n_in, hidden: Disjoint::new(scratch), width };
    // SAFETY: `run` hands out each unit once.
    run(&cx.pool, region.n_units(), n_products, &|unit| unsafe { region.unit(unit) });
    let LoraInput { rows, products, .. } = input;
    Some(LoraHidden { rows, products, hidden: scratch, width, target: 0 })
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
struct Region<'a, 'i> {
    isa: Isa,
    input: LoraInput<'i>,
    n_in: usize,
    /// As in [`LoraHidden`].
    hidden: Disjoint<'a, f32>,
    width: usize,
}

impl Region<'_, '_> {
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
                Numbers::F32(a) => self.isa.run(Shrink { x, n_in, rows, a, scales, out: &mut hidden }),
                Numbers::Bf16(a) => self.isa.run(Shrink { x, n_in, rows, a, scales, out: &mut hidden }),
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
