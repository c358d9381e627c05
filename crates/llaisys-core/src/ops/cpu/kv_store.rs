//! `kv_store`: writes the new rows' keys and values to their cells. Reference: `ops/reference/kv_store.rs`.

#![allow(unsafe_code, reason = "workers write disjoint heads of one tensor")]

use super::isa::lanes::{Kernel, Lanes};
use super::kv_element::KvElement;
use super::rows::PARALLEL_ELEMENTS;
use crate::dtype::KvDType;
use crate::ops::OpContext;
use crate::tensor::KvLayerMut;
use crate::threads::{Disjoint, DisjointWriter, share};
use half::f16;
use std::ops::Range;

/// `K[cells[t]] = k[t]`, `V[cells[t]] = v[t]`, rounded to the stored type (to nearest, ties to even). For int8 the
/// largest number of each head determines its scale, as described at [`KvDType::Int8`].
///
/// - `cells`: `[n]`; `k`, `v`: `[n, n_kv_heads, d_head]`; the last row wins if a cell occurs twice
///
/// Panics if shapes disagree or a cell does not exist.
pub fn kv_store(cx: &OpContext, layer: KvLayerMut<'_>, cells: &[u32], k: &[f32], v: &[f32]) {
    let heads = KvHeads { n_heads: layer.n_kv_heads, d: layer.d_head };
    assert!(
        k.len() == cells.len() * heads.n_heads * heads.d && v.len() == k.len(),
        "keys or values of wrong shape"
    );
    let KvLayerMut { k: to_k, v: to_v, .. } = layer;
    match layer.dtype {
        KvDType::Float32 => {
            store::<f32>(cx, cells, heads, [(k, to_k.as_mut_slice()), (v, to_v.as_mut_slice())])
        }
        KvDType::Float16 => {
            store::<f16>(cx, cells, heads, [(k, to_k.as_mut_slice()), (v, to_v.as_mut_slice())])
        }
        KvDType::Bfloat16 => {
            store::<u16>(cx, cells, heads, [(k, to_k.as_mut_slice()), (v, to_v.as_mut_slice())])
        }
        KvDType::Int8 => store::<i8>(cx, cells, heads, [(k, to_k.as_mut_slice()), (v, to_v.as_mut_slice())]),
    }
}

/// The heads of a row and of a cell.
#[derive(Clone, Copy)]
struct KvHeads {
    n_heads: usize,
    /// Elements of a head.
    d: usize,
}

/// Splits the work by tensor and head, never by cells. Two threads therefore write different elements even if a cell
/// occurs twice.
fn store<T: KvElement>(cx: &OpContext, cells: &[u32], heads: KvHeads, pairs: [(&[f32], &mut [T]); 2]) {
    let KvHeads { n_heads, d } = heads;
    let isa = cx.kernels.proof();
    let tensors = pairs.map(|(rows, out)| (rows, Disjoint::new(out)));
    let part = |tensor: usize, heads: Range<usize>| {
        let (rows, out) = &tensors[tensor];
        // SAFETY: heads and tensors are divided over the threads, so no other call has these heads of this tensor.
        let out = unsafe { out.writer() };
        isa.run(HeadsOf { cells, rows, n_heads, d, heads, out });
    };
    if 2 * cells.len() * n_heads * d < PARALLEL_ELEMENTS {
        part(0, 0..n_heads);
        return part(1, 0..n_heads);
    }
    let n_threads = cx.pool.n_threads();
    let n_parts = n_threads.div_ceil(2).min(n_heads);
    cx.pool.run(&|worker| {
        for i in share(2 * n_parts, n_threads, worker) {
            part(i % 2, share(n_heads, n_parts, i / 2));
        }
    });
}

/// A range of heads of every row of one tensor.
struct HeadsOf<'a, T> {
    cells: &'a [u32],
    rows: &'a [f32],
    /// Heads of a row and of a cell.
    n_heads: usize,
    /// Elements of a head.
    d: usize,
    heads: Range<usize>,
    out: DisjointWriter<'a, T>,
}

impl<T: KvElement> Kernel for HeadsOf<'_, T> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (d, stored, mut out) = (self.d, self.d + T::SCALE, self.out);
        for (cell, row) in self.cells.iter().zip(self.rows.chunks_exact(self.n_heads * d)) {
            let first = *cell as usize * self.n_heads;
            let range = (first + self.heads.start) * stored..(first + self.heads.end) * stored;
            let out = out.range(range);
            let row = &row[self.heads.start * d..self.heads.end * d];
            for (head, out) in row.chunks_exact(d).zip(out.chunks_exact_mut(stored)) {
                T::store_head(lanes, head, out);
            }
        }
    }
}
