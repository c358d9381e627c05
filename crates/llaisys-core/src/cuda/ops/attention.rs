//! The arrays and shapes of both attention kernels. Definition: `ops/reference/attention.rs`.

use crate::cuda::device::{Arg, DevicePtr, Element};
use crate::cuda::kernel_source::{HEAD_WIDTHS, storage};

/// Queries, keys, values, and the cells that each row sees: row r sees `cells[start + n_hidden[r]..start +
/// n_visible[r]]`. Its own cell is the last, and `start` is the start of its sequence's list.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Type of queries, keys, values and the result.
    pub element: Element,
    /// Query heads; a multiple of `n_kv_heads`.
    pub n_heads: usize,
    /// Heads of keys and values.
    pub n_kv_heads: usize,
    /// Elements of a head: see [`supports_head_width`].
    pub d_head: usize,
    /// `[n_rows, n_heads, d_head]`, rotated, aligned to 16 bytes.
    pub q: DevicePtr,
    /// Elements from one row of `q` to the next, a multiple of 8: at least `n_heads * d_head`, more where `q` is a part
    /// of the rows of qkv.
    pub q_width: usize,
    /// `[n_cells, n_kv_heads, d_head]`, aligned to 16 bytes.
    pub k: DevicePtr,
    /// As `k`.
    pub v: DevicePtr,
    /// The lists of cells, u32.
    pub cells: DevicePtr,
    /// `[n_rows]` i32
    pub n_hidden: DevicePtr,
    /// `[n_rows]` i32
    pub n_visible: DevicePtr,
    /// The factor of scores before the softmax.
    pub score_scale: f32,
    /// `[n_rows, n_heads, d_head]`
    pub out: DevicePtr,
}

impl Attention {
    /// Returns the query heads that read one KV head.
    pub fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// Returns the constants of a kernel module for these heads.
    pub(super) fn constants(&self) -> [(&'static str, u32); 2] {
        [storage(self.element), ("LL_D", self.d_head as u32)]
    }

    /// Returns the last argument of both kernels, scale_log2: they compute powers of two.
    pub(super) fn scale_log2(&self) -> Arg {
        Arg::F32(self.score_scale * std::f32::consts::LOG2_E)
    }

    /// Panics on shapes that the kernels do not support. `forward/support.rs` refuses such models with an error before.
    pub(super) fn check(&self) {
        let Self { n_heads, n_kv_heads, d_head, q_width, .. } = *self;
        assert!(supports_head_width(d_head), "heads of {d_head}");
        assert!(
            n_kv_heads > 0 && n_heads.is_multiple_of(n_kv_heads),
            "{n_heads} query heads, {n_kv_heads} KV heads"
        );
        assert!(q_width >= n_heads * d_head && q_width.is_multiple_of(8), "rows of q {q_width} apart");
    }
}

/// Returns whether the kernels support heads of this width.
pub fn supports_head_width(d_head: usize) -> bool {
    HEAD_WIDTHS.contains(&(d_head as u32))
}
