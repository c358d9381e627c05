//! `causal_conv`: y[t, c] = f(sum_j w[j, c] x[t - K + 1 + j, c]), with f silu or nothing. Reference: `ops/reference/causal_conv.rs`.
//!
//! The taps are added from the oldest to the newest, one column per lane. A row reads its inputs from the pass or from
//! the window that earlier passes left, so its bits do not depend on where a pass begins.

use super::gate::silu;
use super::isa::lanes::{Kernel, Lanes};
use super::rows::for_row_runs;
use crate::ops::OpContext;
use crate::ops::recurrent::{RecurrentRows, StateJob, StatesMut};

/// A short convolution and its rows.
#[derive(Debug)]
pub struct Convolution<'a> {
    /// `[K, C]`, the newest last.
    pub taps: &'a [f32],
    /// Silu is applied to the sums.
    pub silu: bool,
    /// The rows of each sequence.
    pub rows: RecurrentRows<'a>,
    /// `[K - 1, C]` of each state, the newest input last.
    pub windows: StatesMut<'a>,
}

/// Short causal convolution of each channel over the rows of its sequence, then silu if the convolution has it. Leaves
/// the last inputs of each sequence in its window.
///
/// - `x`, `out`: `[n, C]`
///
/// Panics if shapes disagree. Source: arXiv:2312.00752.
pub fn causal_conv(cx: &OpContext, x: &[f32], convolution: Convolution<'_>, out: &mut [f32]) {
    let Convolution { taps, silu, rows, windows } = convolution;
    let n = rows.order.len();
    let width = x.len().checked_div(n).unwrap_or(0);
    assert!(x.len() == n * width && out.len() == x.len(), "rows of wrong shape");
    if n == 0 {
        return;
    }
    assert_eq!(windows.len + width, taps.len(), "a window has all taps except one");
    let mut jobs = windows.jobs(&rows);
    let mut places = vec![Place::default(); n];
    for (number, job) in jobs.iter().enumerate() {
        for (index, &row) in rows.of(&job.sequence).iter().enumerate() {
            places[row as usize] = Place { sequence: number, index };
        }
    }
    let isa = cx.kernels.proof();
    for_row_runs(&cx.pool, out, width, &|first, out| {
        for (place, out) in places[first..].iter().zip(out.chunks_exact_mut(width)) {
            let job = &jobs[place.sequence];
            let rows = rows.of(&job.sequence);
            isa.run(Convolve { x, taps, silu, job, rows, index: place.index, out });
        }
    });
    cx.pool.run_chunks(&mut jobs, 1, &|_, jobs| {
        for job in jobs {
            keep_last(x, width, rows.of(&job.sequence), job);
        }
    });
}

/// Where a row is: its sequence, and its index there.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    sequence: usize,
    index: usize,
}

/// One row.
struct Convolve<'a, 'b> {
    x: &'a [f32],
    taps: &'a [f32],
    silu: bool,
    job: &'a StateJob<'b>,
    rows: &'a [u32],
    index: usize,
    out: &'a mut [f32],
}

impl Kernel for Convolve<'_, '_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let width = self.out.len();
        let n_before = self.taps.len() / width - 1;
        let window = self.job.before.unwrap_or(&*self.job.after);
        // Input `index + j` of the window followed by the rows.
        let input = |j: usize| {
            let at = self.index + j;
            match at.checked_sub(n_before) {
                None => &window[at * width..][..width],
                Some(row) => &self.x[self.rows[row] as usize * width..][..width],
            }
        };
        for (number, out) in self.out.chunks_mut(L::N).enumerate() {
            let columns = number * L::N..number * L::N + out.len();
            let mut sum = lanes.splat(0.0);
            for (j, taps) in self.taps.chunks_exact(width).enumerate() {
                let x = lanes.load_first(&input(j)[columns.clone()]);
                sum = lanes.mul_add(lanes.load_first(&taps[columns.clone()]), x, sum);
            }
            lanes.store_first(if self.silu { silu(lanes, sum) } else { sum }, out);
        }
    }
}

/// Writes the last inputs of a sequence to its window.
fn keep_last(x: &[f32], width: usize, rows: &[u32], job: &mut StateJob<'_>) {
    let n = job.after.len() / width;
    let n_old = n.saturating_sub(rows.len());
    match job.before {
        Some(before) => job.after[..n_old * width].copy_from_slice(&before[(n - n_old) * width..]),
        None => job.after.copy_within((n - n_old) * width.., 0),
    }
    let newest = &rows[rows.len() - (n - n_old)..];
    for (&row, to) in newest.iter().zip(job.after[n_old * width..].chunks_exact_mut(width)) {
        to.copy_from_slice(&x[row as usize * width..][..width]);
    }
}
