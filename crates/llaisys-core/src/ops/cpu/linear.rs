//! `linear`: products with packed weights. Reference: `ops/reference/linear.rs`.
//!
//! One sum per output runs over k in ascending order, whatever the number of rows. On one instruction set a row's
//! result therefore has the same bits alone, in any batch, and on any number of threads. Work is cut by panels of 32
//! outputs. Many rows are cut as well, so that a thread's inputs stay in its own cache while it passes over the panels.

#![allow(unsafe_code, reason = "workers write disjoint columns of one product")]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[deny(unsafe_code)]
mod epilogue;
#[deny(unsafe_code)]
mod expand;
mod experts;
#[cfg(target_arch = "x86_64")]
#[deny(unsafe_code)]
mod formats;
mod prefetch;
#[deny(unsafe_code)]
mod pruned_argmax;
#[deny(unsafe_code)]
mod scalar;

use super::activations::{Activations, Form, Inputs, Packing, RowBlocks, Rows};
use super::gate::{Gate, GateBias, gate_up_rows};
use super::isa::Isa;
use super::lora::LoraHidden;
use crate::ops::OpContext;
use crate::ops::packed::{PANEL, PackedFormat, PackedMatrix};
use crate::threads::{Chunks, Disjoint, Pool, share};
use epilogue::{Combine, Epilogue, Finish};
use expand::{Expand, PanelRows};
use prefetch::{PanelBlock, Prefetch, fetch};
use std::ops::Range;

pub use experts::{ExpertPart, ExpertScratch, Mixture, experts};
pub use pruned_argmax::{PrunedArgmaxScratch, pruned_argmax};

/// The most matrices in one call: query, key, value, and one to spare.
const MAX_PARTS: usize = 4;
/// Rows from which panels are distributed in chunks. With fewer, only the stream of the weights matters, and each
/// thread gets one contiguous share.
const DYNAMIC_ROWS: usize = 32;
/// Rows from which each thread has its own rows and all threads read all panels. From here on inputs no longer fit a
/// core's second-level cache, and reading the panels costs little compared with the products.
const SPLIT_ROWS: usize = 64;
/// Average number of chunks per thread.
const CHUNKS_PER_THREAD: usize = 8;
/// Chunks of panels for each part of the rows; a larger number lets the threads end closer together.
const CHUNKS_PER_PART: usize = 32;
/// Rows of the largest tile of any instruction set.
const MAX_TILE_ROWS: usize = 12;

/// A kernel's result: one row of 32 outputs for each row of its block.
#[repr(C, align(64))]
struct Tile([[f32; PANEL]; MAX_TILE_ROWS]);

/// The bytes of one panel for a kernel.
#[derive(Clone, Copy)]
struct Panel<'a> {
    format: PackedFormat,
    /// The panel itself, on a 64-byte boundary.
    bytes: &'a [u8],
    /// What to prefetch during the multiplication.
    prefetch: Prefetch,
}

/// One matrix of a product.
#[derive(Debug, Clone, Copy)]
pub struct LinearPart<'a> {
    /// Weights `[N, K]`.
    pub weight: &'a PackedMatrix,
    /// Added to every row, `[N]`.
    pub bias: Option<&'a [f32]>,
}

/// One matrix of a call, with the place of its results.
#[derive(Clone, Copy)]
struct Target<'a> {
    weight: &'a PackedMatrix,
    epilogue: Epilogue<'a>,
    /// What adapters add to the products.
    lora: Option<LoraHidden<'a>>,
    /// `[n, n_columns]`
    out: &'a Disjoint<'a, f32>,
    n_columns: usize,
}

/// A share of the blocks of some rows: part `number` of `n`.
#[derive(Clone)]
struct Part {
    rows: Range<usize>,
    number: usize,
    n: usize,
}

/// The packed inputs of a call, and the kernels that read them.
#[derive(Clone, Copy)]
struct Packed<'a> {
    isa: Isa,
    activations: &'a Activations,
}

/// `outs[i] = x W_i^T + b_i` for every part, in one region of the pool.
///
/// - `x`: `[n, K]`, the same K for all parts; rounded as each part's format requires (see `PackedFormat`)
/// - `outs[i]`: `[n, N_i]`
///
/// Panics if shapes disagree, if there are more than 4 parts, or `x` exceeds the context's scratch.
pub fn linear(cx: &mut OpContext, x: &[f32], parts: &[LinearPart<'_>], outs: &mut [&mut [f32]]) {
    linear_lora(cx, x, parts, None, outs);
}

/// [`linear`], then the rows that use adapters add their products: `lora` numbers the matrices as `parts`.
pub fn linear_lora(
    cx: &mut OpContext,
    x: &[f32],
    parts: &[LinearPart<'_>],
    lora: Option<LoraHidden<'_>>,
    outs: &mut [&mut [f32]],
) {
    assert!(parts.len() == outs.len() && parts.len() <= MAX_PARTS, "{} parts", parts.len());
    let mut outs = outs.iter_mut();
    let outs: [Option<Disjoint<'_, f32>>; MAX_PARTS] =
        std::array::from_fn(|_| outs.next().map(|out| Disjoint::new(out)));
    let mut pairs = parts.iter().zip(outs.iter().flatten());
    let targets: [Option<Target<'_>>; MAX_PARTS] = std::array::from_fn(|i| {
        pairs.next().map(|(part, out)| Target {
            weight: part.weight,
            epilogue: part.bias.map_or(Epilogue::Store, Epilogue::Bias),
            lora: lora.map(|lora| lora.after(i)),
            out,
            n_columns: part.weight.n_rows(),
        })
    });
    product(cx, x, &targets);
}

/// `y += x W^T`: a product added to the residual stream.
///
/// - `x`: `[n, K]`, `y`: `[n, N]`
///
/// Panics as [`linear`] does.
pub fn linear_add(cx: &mut OpContext, x: &[f32], weight: &PackedMatrix, y: &mut [f32]) {
    linear_add_lora(cx, x, weight, None, y);
}

/// [`linear_add`], then the rows that use adapters add their products.
pub fn linear_add_lora(
    cx: &mut OpContext,
    x: &[f32],
    weight: &PackedMatrix,
    lora: Option<LoraHidden<'_>>,
    y: &mut [f32],
) {
    let n_columns = weight.n_rows();
    let out = &Disjoint::new(y);
    product(cx, x, &[Some(Target { weight, epilogue: Epilogue::Add, lora, out, n_columns })]);
}

/// The first half of a gated feed-forward block.
#[derive(Debug, Clone, Copy)]
pub struct GatedPart<'a> {
    /// Gate and up, `[gate_up_rows(d_ff), K]`, interleaved as in [`gate_up_row`](super::gate::gate_up_row).
    pub gate_up: &'a PackedMatrix,
    /// Their biases.
    pub bias: Option<GateBias<'a>>,
    /// The activation of the gate.
    pub gate: Gate,
}

/// `inner = G(x gate^T + gate_bias) * (x up^T + up_bias)`, the first half of a gated feed-forward block
/// (arXiv:2002.05202). Gates and ups are never written to memory.
///
/// - `x`: `[n, K]`; `inner`: `[n, d_ff]`
///
/// Panics as [`linear`] does.
pub fn linear_gated(cx: &mut OpContext, x: &[f32], part: GatedPart<'_>, inner: &mut [f32]) {
    linear_gated_lora(cx, x, part, None, inner);
}

/// [`linear_gated`], where the rows that use adapters add their products to gates and ups before the biases.
pub fn linear_gated_lora(
    cx: &mut OpContext,
    x: &[f32],
    part: GatedPart<'_>,
    lora: Option<LoraHidden<'_>>,
    inner: &mut [f32],
) {
    let GatedPart { gate_up, bias, gate } = part;
    let n_rows = x.len() / gate_up.n_columns();
    let n_columns = inner.len().checked_div(n_rows).unwrap_or(0);
    let wide = n_rows == 0 || gate_up_rows(n_columns) == gate_up.n_rows();
    assert!(wide, "{n_columns} outputs, but gate_up has {} rows", gate_up.n_rows());
    let (epilogue, out) = (Epilogue::Gate(gate, bias), &Disjoint::new(inner));
    product(cx, x, &[Some(Target { weight: gate_up, epilogue, lora, out, n_columns })]);
}

fn product(cx: &mut OpContext, x: &[f32], targets: &[Option<Target<'_>>]) {
    let isa = cx.kernels.proof();
    let Some(first) = targets.iter().flatten().next() else { return };
    let x = Rows::new(x, first.weight.n_columns());
    let mut packed: [Option<Form>; MAX_PARTS] = [None; MAX_PARTS];
    for (i, target) in targets.iter().flatten().enumerate() {
        check(target, x);
        let form = form(isa, target.weight.format());
        if !packed.contains(&Some(form)) {
            let packing = Packing { isa, pool: &cx.pool, form, rows_max: rows_max(isa, form) };
            cx.activations.pack(packing, x, std::iter::once(0..x.n_rows));
            packed[i] = Some(form);
        }
    }
    let packed = Packed { isa, activations: &cx.activations };
    Region { packed, n_rows: x.n_rows, targets }.run(&cx.pool);
}

fn check(target: &Target<'_>, x: Rows<'_>) {
    let n_columns = target.n_columns;
    assert_eq!(x.n_columns, target.weight.n_columns(), "inputs and weights differ in width");
    if let Some(lora) = target.lora {
        lora.check(x.n_rows, target.weight.n_rows());
    }
    if let Epilogue::Combine(Combine { bias, rows, weights }) = target.epilogue {
        assert!(rows.len() == x.n_rows && weights.len() == x.n_rows, "rows and weights of wrong shape");
        assert_eq!(n_columns, target.weight.n_rows(), "output of wrong shape");
        assert!(bias.is_none_or(|bias| bias.len() == n_columns), "bias of wrong length");
        return;
    }
    assert_eq!(target.out.len(), x.n_rows * n_columns, "output of wrong shape");
    let biases = match target.epilogue {
        Epilogue::Bias(bias) => [bias, bias],
        Epilogue::Gate(_, Some(GateBias { gate, up })) if x.n_rows > 0 => [gate, up],
        _ => return,
    };
    for bias in biases {
        assert_eq!(bias.len(), n_columns, "bias of wrong length");
    }
}

/// The form in which `isa`'s kernel for `format` reads its inputs.
fn form(isa: Isa, format: PackedFormat) -> Form {
    match (format, isa) {
        (PackedFormat::F32, _) => Form::Plain,
        #[cfg(target_arch = "x86_64")]
        (PackedFormat::BF16, Isa::Avx512Bf16(_)) => Form::Pairs,
        (PackedFormat::BF16, _) => Form::Rounded,
        #[cfg(target_arch = "x86_64")]
        (PackedFormat::Q8_0 | PackedFormat::I8, Isa::Avx2(_) | Isa::Avx512(_)) => Form::Sized,
        _ => Form::Groups,
    }
}

/// Rows of the largest tile of `isa`'s kernels that read `form`.
fn rows_max(isa: Isa, form: Form) -> usize {
    match (isa, form) {
        (Isa::Scalar, _) => scalar::TILE_ROWS,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2(_), Form::Groups | Form::Sized) => avx2::PAIR_ROWS,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2Vnni(_), Form::Groups) => avx2::VNNI_ROWS,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2(_) | Isa::Avx2Vnni(_), _) => avx2::PLAIN_ROWS,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512(_), Form::Groups | Form::Sized) => avx512::PAIR_ROWS,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Vnni(_) | Isa::Avx512Bf16(_), Form::Groups) => avx512::VNNI_ROWS,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512(_) | Isa::Avx512Vnni(_) | Isa::Avx512Bf16(_), _) => avx512::PLAIN_ROWS,
    }
}

/// All panels of one call, which the threads of a pool compute.
struct Region<'a> {
    packed: Packed<'a>,
    n_rows: usize,
    targets: &'a [Option<Target<'a>>],
}

impl Region<'_> {
    fn run(&self, pool: &Pool) {
        let n_threads = pool.n_threads();
        let n_panels: usize = self.targets().map(|t| t.weight.n_panels()).sum();
        let chunk = |n_chunks: usize| (n_panels / n_chunks).max(1);
        match self.n_rows {
            0..DYNAMIC_ROWS => pool.run(&|worker| {
                // SAFETY: the shares of two workers do not overlap.
                unsafe { self.panels(share(n_panels, n_threads, worker), &self.all_rows()) };
            }),
            DYNAMIC_ROWS..SPLIT_ROWS => {
                let chunks = Chunks::new(n_panels, chunk(n_threads * CHUNKS_PER_THREAD));
                pool.run(&|_| {
                    while let Some(panels) = chunks.take() {
                        // SAFETY: `Chunks` hands out each panel once.
                        unsafe { self.panels(panels, &self.all_rows()) };
                    }
                });
            }
            _ => pool.run_queues(n_panels, chunk(CHUNKS_PER_PART), &|number, panels| {
                // SAFETY: `run_queues` hands out each panel of a queue once; each queue is a part of its own.
                unsafe { self.panels(panels, &Part { number, n: n_threads, ..self.all_rows() }) };
            }),
        }
    }

    fn targets(&self) -> impl Iterator<Item = &Target<'_>> {
        self.targets.iter().flatten()
    }

    fn all_rows(&self) -> Part {
        Part::all(0..self.n_rows)
    }

    /// Computes `panels`, numbered through all targets, for a part of the rows.
    ///
    /// # Safety
    /// No other thread may compute one of these panels for the same part at the same time.
    unsafe fn panels(&self, panels: Range<usize>, part: &Part) {
        let mut tile = Tile([[0.0; PANEL]; MAX_TILE_ROWS]);
        let mut first = 0;
        for target in self.targets() {
            let n = target.weight.n_panels();
            for p in panels.start.max(first)..panels.end.min(first + n) {
                // SAFETY: as the caller guarantees.
                unsafe { self.packed.panel(target, p - first, part, &mut tile) };
            }
            first += n;
        }
    }
}

impl Packed<'_> {
    /// Computes one panel for a part of the rows.
    ///
    /// # Safety
    /// No other thread may compute the same panel for the same part at the same time. With [`Epilogue::Combine`], none
    /// may compute the same panel of another matrix for the same outputs either.
    unsafe fn panel(self, target: &Target<'_>, p: usize, part: &Part, tile: &mut Tile) {
        let weight = target.weight;
        let form = form(self.isa, weight.format());
        let blocks = RowBlocks::new(&part.rows, rows_max(self.isa, form));
        let own = share(blocks.len(), part.n, part.number);
        let (bytes, rest) = weight.panels_from(p).split_at(weight.panel_bytes());
        let columns = target.epilogue.columns(p, target.n_columns);
        for i in own.clone() {
            let rows = blocks.rows(i);
            let inputs = self.activations.block(form, weight.n_columns(), &rows);
            let prefetch = Prefetch::new(PanelBlock {
                format: weight.format(),
                panel: bytes,
                rest,
                block: i - own.start,
                n_blocks: own.len(),
                n_rows: rows.len(),
            });
            let panel = Panel { format: weight.format(), bytes, prefetch };
            // Prefetch the output's lines while the kernel runs: with many rows they are in memory, not in a cache.
            for row in rows.clone() {
                let first = target.epilogue.row(row) * target.n_columns + columns.start;
                for line in (first..first + columns.len()).step_by(64 / size_of::<f32>()) {
                    fetch(target.out.address(line).cast());
                }
            }
            run_tile(self.isa, &panel, rows.len(), inputs, tile);
            if let Epilogue::Bounds(bounds) = target.epilogue {
                bounds.apply(self.isa, p, rows.clone(), &mut tile.0);
            }
            let expand = |lora: LoraHidden<'_>, y: PanelRows<'_>| {
                let first_row = blocks.rows(own.start).start;
                self.isa.run(Expand { lora, p, rows: rows.clone(), first_row, y });
            };
            if let Some(lora) = target.lora
                && target.epilogue.takes_lora_in_tile()
            {
                expand(lora, PanelRows::Tile(&mut tile.0[..rows.len()]));
            }
            // SAFETY: this call alone has these rows of this panel's columns, and what `Finish` writes is inside them.
            let out = unsafe { target.out.writer() };
            self.isa.run(Finish {
                epilogue: target.epilogue,
                sums: &mut tile.0[..rows.len()],
                out,
                n_columns: target.n_columns,
                row: rows.start,
                columns: columns.clone(),
            });
            if let Some(lora) = target.lora
                && !target.epilogue.takes_lora_in_tile()
            {
                // SAFETY: as above; the other writer is gone.
                let out = unsafe { target.out.writer() };
                expand(
                    lora,
                    PanelRows::Written { out, n_columns: target.n_columns, columns: columns.clone() },
                );
            }
        }
    }
}

impl Part {
    /// All blocks of `rows`.
    fn all(rows: Range<usize>) -> Self {
        Self { rows, number: 0, n: 1 }
    }
}

/// The sums of one panel for one block of rows.
fn run_tile(isa: Isa, panel: &Panel<'_>, n_rows: usize, inputs: Inputs<'_>, out: &mut Tile) {
    match isa {
        Isa::Scalar => scalar::tile(panel, n_rows, inputs, out),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(token) => avx2::tile(token, panel, n_rows, inputs, out),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2Vnni(token) => avx2::tile_vnni(token, panel, n_rows, inputs, out),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(token) => avx512::tile(token, panel, n_rows, inputs, out),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni(token) => avx512::tile_vnni(token, panel, n_rows, inputs, out),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16(token) => avx512::tile_bf16(token, panel, n_rows, inputs, out),
    }
}
