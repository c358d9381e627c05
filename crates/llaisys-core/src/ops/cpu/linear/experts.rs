//! `experts`: the feed-forward blocks of a mixture of experts. Reference: `linear_gated`, `linear` and `scatter_add`, one
//! expert after the other; the bits are the same.
//!
//! Rows are sorted by expert. Each of both products is one region for all experts of a pass: a thread computes the same
//! panels of every expert, so that the threads read equal parts of all matrices. The second product adds to an output
//! in ascending order of the experts, because one thread has the output's panel in all of them. So the bits of a row
//! are those of its experts computed one after the other, whatever other rows use.

#![allow(unsafe_code, reason = "workers write disjoint columns of one product")]

use super::epilogue::Combine;
use super::{
    CHUNKS_PER_THREAD, Disjoint, Epilogue, Form, GatedPart, LinearPart, MAX_TILE_ROWS, PANEL, Packed,
    Packing, Part, Rows, Target, Tile, check, form, rows_max,
};
use crate::ops::cpu::gate::gate_up_rows;
use crate::ops::{OpContext, Routes, gather};
use crate::threads::{Chunks, share};
use std::ops::Range;

/// Rows of an expert, on average, from which panels are distributed in chunks. With fewer, the streams of the weights
/// matter, and each thread reads one contiguous share of each matrix.
const DYNAMIC_ROWS: usize = 8;

/// The matrices of an expert.
#[derive(Debug, Clone, Copy)]
pub struct ExpertPart<'a> {
    /// Gate and up, with inputs of `d_model` and outputs of `d_ff`.
    pub gated: GatedPart<'a>,
    /// Down, from `d_ff` to `d_model`.
    pub down: LinearPart<'a>,
}

/// The experts of some rows.
#[derive(Clone, Copy)]
pub struct Mixture<'a> {
    /// The experts of each row, with their weights.
    pub routes: &'a Routes,
    /// Returns the matrices of an expert. All experts have the same shapes.
    pub part: &'a (dyn Fn(usize) -> ExpertPart<'a> + Sync),
}

/// Memory for the rows of the experts that are computed together: at least as many rows as the inputs have.
#[derive(Debug)]
pub struct ExpertScratch<'a> {
    /// Inputs, rows of `d_model`.
    pub gathered: &'a mut [f32],
    /// Outputs of the gates, rows of `d_ff`.
    pub inner: &'a mut [f32],
}

/// `y[t] += sum_e weight[t, e] * down_e(gated_e(x[t]))` over the experts of each row, in ascending order.
///
/// - `x`, `y`: `[n, d_model]`
///
/// Panics if shapes disagree, or if the scratch has fewer rows than `x`.
pub fn experts(
    cx: &mut OpContext,
    x: &[f32],
    mixture: Mixture<'_>,
    scratch: ExpertScratch<'_>,
    y: &mut [f32],
) {
    let Mixture { routes, part } = mixture;
    let groups = routes.groups();
    let Some(first) = groups.first() else { return };
    let ExpertPart { gated, down } = part(first.expert);
    let (d_model, d_ff) = (gated.gate_up.n_columns(), down.weight.n_columns());
    let ExpertScratch { gathered, inner } = scratch;
    let most = (gathered.len() / d_model).min(inner.len() / d_ff).min(cx.activations.max_rows());
    let y = Disjoint::new(y);
    let mut rest = groups;
    while let Some(first) = rest.first() {
        let start = first.rows.start;
        let n_groups = rest.iter().take_while(|group| group.rows.end - start <= most).count();
        assert!(n_groups > 0, "an expert has {} rows, the scratch {most}", first.rows.len());
        let (chunk, after) = rest.split_at(n_groups);
        let all = start..chunk[n_groups - 1].rows.end;
        let (rows, weights) = (&routes.rows()[all.clone()], &routes.weights()[all.clone()]);
        let (gathered, inner) = (&mut gathered[..all.len() * d_model], &mut inner[..all.len() * d_ff]);
        gather(cx, x, d_model, rows, gathered);
        let group = |i: usize| chunk[i].rows.start - start..chunk[i].rows.end - start;
        let out = Disjoint::new(inner);
        let gates = |i: usize| {
            let GatedPart { gate_up, bias, gate } = part(chunk[i].expert).gated;
            assert_eq!(gate_up.n_rows(), gate_up_rows(d_ff), "experts of different width");
            let epilogue = Epilogue::Gate(gate, bias);
            Target { weight: gate_up, epilogue, lora: None, out: &out, n_columns: d_ff }
        };
        product(cx, gathered, Groups { n: n_groups, rows: &group, target: &gates });
        let combine = |i: usize| {
            let LinearPart { weight, bias } = part(chunk[i].expert).down;
            let epilogue = Epilogue::Combine(Combine { bias, rows, weights });
            Target { weight, epilogue, lora: None, out: &y, n_columns: d_model }
        };
        product(cx, inner, Groups { n: n_groups, rows: &group, target: &combine });
        rest = after;
    }
}

/// Consecutive groups of rows, each with a matrix of its own.
#[derive(Clone, Copy)]
struct Groups<'a> {
    n: usize,
    /// The rows of each group.
    rows: &'a (dyn Fn(usize) -> Range<usize> + Sync),
    target: &'a (dyn Fn(usize) -> Target<'a> + Sync),
}

/// The products of all groups.
fn product(cx: &mut OpContext, x: &[f32], groups: Groups<'_>) {
    let isa = cx.kernels.proof();
    let first = (groups.target)(0).weight;
    let x = Rows::new(x, first.n_columns());
    let mut packed: [Option<Form>; 2] = [None; 2];
    for i in 0..groups.n {
        let target = (groups.target)(i);
        check(&target, x);
        assert_eq!(target.weight.n_panels(), first.n_panels(), "experts of different shapes");
        let form = form(isa, target.weight.format());
        if !packed.contains(&Some(form)) {
            let free = packed.iter_mut().find(|form| form.is_none()).expect("experts in at most two forms");
            *free = Some(form);
            let packing = Packing { isa, pool: &cx.pool, form, rows_max: rows_max(isa, form) };
            cx.activations.pack(packing, x, (0..groups.n).map(groups.rows));
        }
    }
    let region = Region { packed: Packed { isa, activations: &cx.activations }, groups };
    let (n_panels, n_threads) = (first.n_panels(), cx.pool.n_threads());
    if x.n_rows < DYNAMIC_ROWS * groups.n {
        cx.pool.run(&|worker| {
            // SAFETY: the shares of two workers do not overlap.
            unsafe { region.panels(share(n_panels, n_threads, worker)) };
        });
        return;
    }
    let chunks = Chunks::new(n_panels, (n_panels / (n_threads * CHUNKS_PER_THREAD)).max(1));
    cx.pool.run(&|_| {
        while let Some(panels) = chunks.take() {
            // SAFETY: `Chunks` hands out each panel once.
            unsafe { region.panels(panels) };
        }
    });
}

/// All panels of one call, which the threads of a pool compute.
struct Region<'p, 'g> {
    packed: Packed<'p>,
    groups: Groups<'g>,
}

impl Region<'_, '_> {
    /// Computes `panels` of the matrix of every group.
    ///
    /// # Safety
    /// No other thread may compute one of these panels at the same time.
    unsafe fn panels(&self, panels: Range<usize>) {
        let mut tile = Tile([[0.0; PANEL]; MAX_TILE_ROWS]);
        for i in 0..self.groups.n {
            let (target, part) = ((self.groups.target)(i), Part::all((self.groups.rows)(i)));
            for p in panels.clone() {
                // SAFETY: as the caller guarantees, for the matrices of all groups.
                unsafe { self.packed.panel(&target, p, &part, &mut tile) };
            }
        }
    }
}
