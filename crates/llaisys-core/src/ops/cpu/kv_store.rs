//! `kv_store`: the new rows' keys and values into their cells. Meaning: `ops/reference/kv_store.rs`.

use super::isa::lanes::{Kernel, Lanes};
use super::kv_element::KvElement;
use super::rows::PARALLEL_ELEMENTS;
use crate::dtype::KvDType;
use crate::ops::OpContext;
use crate::tensor::KvLayerMut;
use crate::threads::{Disjoint, share};
use std::ops::Range;

/// Elements by which a cell is split between threads: whole cache lines of either type.
const SPLIT: usize = 32;

/// `K[cells[t]] = k[t]`, `V[cells[t]] = v[t]`, rounded to the stored type (nearest, ties to even).
///
/// - `cells`: `[n]`; `k`, `v`: `[n, n_kv_heads, d_head]`; of a cell named twice the last row stays
///
/// Panics if shapes disagree or a cell is not there.
pub fn kv_store(cx: &OpContext, layer: KvLayerMut<'_>, cells: &[u32], k: &[f32], v: &[f32]) {
    let width = layer.n_kv_heads * layer.d_head;
    assert!(k.len() == cells.len() * width && v.len() == k.len(), "keys or values of another shape");
    match layer.dtype {
        KvDType::Float32 => {
            store::<f32>(cx, (cells, width), [(k, layer.k.as_mut_slice()), (v, layer.v.as_mut_slice())])
        }
        KvDType::Bfloat16 => {
            store::<u16>(cx, (cells, width), [(k, layer.k.as_mut_slice()), (v, layer.v.as_mut_slice())])
        }
    }
}

/// Splits the work by tensor and by columns of a cell, never by cells: so two threads write different elements
/// whatever cells are named.
fn store<T: KvElement>(cx: &OpContext, (cells, width): (&[u32], usize), pairs: [(&[f32], &mut [T]); 2]) {
    let isa = cx.kernels.proof();
    let tensors = pairs.map(|(rows, out)| (rows, Disjoint::new(out)));
    let part = |tensor: usize, columns: Range<usize>| {
        let (rows, out) = &tensors[tensor];
        isa.run(Columns { cells, rows, width, columns, out });
    };
    if 2 * cells.len() * width < PARALLEL_ELEMENTS {
        part(0, 0..width);
        return part(1, 0..width);
    }
    let n_threads = cx.pool.n_threads();
    let n_parts = n_threads.div_ceil(2);
    cx.pool.run(&|worker| {
        for i in share(2 * n_parts, n_threads, worker) {
            let lines = share(width.div_ceil(SPLIT), n_parts, i / 2);
            part(i % 2, lines.start * SPLIT..(lines.end * SPLIT).min(width));
        }
    });
}

/// Some columns of every row of one tensor. Only one thread has them.
struct Columns<'a, T> {
    cells: &'a [u32],
    rows: &'a [f32],
    /// Elements of a row and of a cell.
    width: usize,
    columns: Range<usize>,
    out: &'a Disjoint<'a, T>,
}

impl<T: KvElement> Kernel for Columns<'_, T> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for (cell, row) in self.cells.iter().zip(self.rows.chunks_exact(self.width)) {
            let start = *cell as usize * self.width;
            let range = start + self.columns.start..start + self.columns.end;
            // SAFETY: `store` gives these columns of this tensor to this call alone, and the slice of the
            // previous row is gone.
            let out = unsafe { self.out.range(range) };
            for (x, out) in row[self.columns.clone()].chunks(L::N).zip(out.chunks_mut(L::N)) {
                T::store_first(lanes, lanes.load_first(x), out);
            }
        }
    }
}
