//! Attention of rows that are the only one of their sequence, as in a decode step. The launch fixes only the number of
//! rows. The kernel reads what rows see from device memory, so a captured launch can be replayed while contexts grow.

use super::attention::Attention;
use crate::cuda::device::{Arg, Device, DevicePtr, Launch};
use crate::cuda::kernel_source::{self, Function, Kernel, KernelModule, KernelSource};
use crate::error::DeviceError;

/// `kernels/attn_decode.cu`
pub static SOURCE: KernelSource = KernelSource {
    name: "attn_decode",
    text: concat!(
        "\n#line 1 \"attn.cuh\"\n",
        include_str!("../kernels/attn.cuh"),
        "\n#line 1 \"attn_decode.cu\"\n",
        include_str!("../kernels/attn_decode.cu")
    ),
    variants: kernel_source::by_storage_and_head,
    kernels: &[
        Kernel { name: "attn_decode", max_threads: 128, max_registers: 168, max_shared_bytes: shared_bytes },
        Kernel {
            name: "attn_merge",
            max_threads: 256,
            max_registers: 64,
            max_shared_bytes: Kernel::NO_SHARED,
        },
    ],
};

/// The most query heads of one block: the rows of the tensor core's tile.
const MAX_PACKED: usize = 16;
/// The most splits of a row.
const MAX_SPLITS: usize = 64;

/// Stages of 64 keys and values, in rows 8 elements longer than a head. The warps' sums at the end need less.
fn shared_bytes(module: &KernelModule) -> u32 {
    let d = module.constant("LL_D");
    let n_stages = if d <= 96 { 3 } else { 2 };
    n_stages * 2 * 64 * 2 * (d + 8)
}

/// Returns the number of splits of each context in a bucket of `n_rows` rows. It gives each multiprocessor four blocks,
/// because few rows would leave most multiprocessors idle. The last bits of results depend on it.
pub fn n_splits(n_rows: usize, n_kv_heads: usize, n_sms: usize) -> usize {
    (4 * n_sms).div_ceil(n_rows * n_kv_heads).clamp(1, MAX_SPLITS)
}

/// Attention of rows that are the only one of their sequence.
#[derive(Debug, Clone, Copy)]
pub struct AttnDecode {
    /// Queries, keys and values. A row with `n_visible == n_hidden` is padding: its result is not written.
    pub attention: Attention,
    /// `[n_rows]` u32: the start of each row's list of cells.
    pub start: DevicePtr,
    /// Rows, 1 to 65535.
    pub n_rows: usize,
    /// [`n_splits`] of the bucket.
    pub n_splits: usize,
    /// [`AttnDecode::scratch_bytes`] bytes, aligned to 16; not used with one split.
    pub scratch: DevicePtr,
}

impl AttnDecode {
    /// Returns the kernels for these heads.
    pub fn functions(attention: &Attention) -> [Function; 2] {
        ["attn_decode", "attn_merge"].map(|name| SOURCE.function(&attention.constants(), name))
    }

    /// Returns the bytes of scratch memory: for each split the weighted values, the largest exponent and the sum of
    /// weights, all f32.
    pub fn scratch_bytes(attention: &Attention, n_rows: usize, n_splits: usize) -> usize {
        if n_splits == 1 { 0 } else { n_rows * attention.n_heads * n_splits * (attention.d_head + 2) * 4 }
    }

    /// Launches one kernel if there is one split, else two.
    ///
    /// Panics on shapes that the kernels do not support. Errors: an array ends too early; those of [`Device::launch`].
    ///
    /// # Safety
    /// When the kernels run, each row sees a part of `cells` that exists, and `k` and `v` have the cells that it sees.
    pub unsafe fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        let (of, n_splits) = (&self.attention, self.n_splits);
        of.check();
        assert!((1..=65535).contains(&self.n_rows), "{} rows", self.n_rows);
        assert!((1..=MAX_SPLITS).contains(&n_splits), "{n_splits} splits");
        self.check_arrays()?;
        let [decode, merge] = Self::functions(of);
        // With one split there is nothing to merge, and the kernel writes no scratch.
        let n_partial = if n_splits == 1 { 0 } else { self.n_rows * of.n_heads * n_splits * of.d_head };
        let stats = self.scratch.at(n_partial * 4);
        let n_packs = of.group().div_ceil(MAX_PACKED);
        let launch = Launch {
            function: &decode,
            grid: [(of.n_kv_heads * n_packs) as u32, n_splits as u32, self.n_rows as u32],
            block: 128,
            shared_bytes: shared_bytes(&decode.module),
            args: &[
                Arg::Ptr(of.q),
                Arg::U32(of.q_width as u32),
                Arg::Ptr(of.k),
                Arg::Ptr(of.v),
                Arg::Ptr(of.cells),
                Arg::Ptr(self.start),
                Arg::Ptr(of.n_hidden),
                Arg::Ptr(of.n_visible),
                Arg::Ptr(of.out),
                Arg::Ptr(self.scratch),
                Arg::Ptr(stats),
                Arg::I32(of.n_kv_heads as i32),
                Arg::I32(of.group() as i32),
                of.scale_log2(),
            ],
        };
        // SAFETY: `check_arrays` checked the arrays for all rows; the caller promises what rows see.
        unsafe { device.launch(&launch) }?;
        if n_splits == 1 {
            return Ok(());
        }
        let launch = Launch {
            function: &merge,
            grid: [of.n_heads as u32, self.n_rows as u32, 1],
            block: 256,
            shared_bytes: 0,
            args: &[
                Arg::Ptr(self.scratch),
                Arg::Ptr(stats),
                Arg::Ptr(of.n_hidden),
                Arg::Ptr(of.n_visible),
                Arg::Ptr(of.out),
                Arg::I32(n_splits as i32),
            ],
        };
        // SAFETY: as above.
        unsafe { device.launch(&launch) }
    }

    /// Checks the arrays that are as long as the rows.
    fn check_arrays(&self) -> Result<(), DeviceError> {
        let Self { attention: of, n_rows, n_splits, .. } = *self;
        let width = of.n_heads * of.d_head;
        of.q.array(SOURCE.name, of.element.n_bytes((n_rows - 1) * of.q_width + width))?;
        for of_rows in [self.start, of.n_hidden, of.n_visible] {
            of_rows.array(SOURCE.name, 4 * n_rows)?;
        }
        of.out.array(SOURCE.name, of.element.n_bytes(n_rows * width))?;
        self.scratch.array(SOURCE.name, Self::scratch_bytes(&of, n_rows, n_splits)).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_give_each_multiprocessor_four_blocks() {
        assert_eq!(n_splits(1, 2, 132), 64);
        assert_eq!(n_splits(64, 4, 132), 3);
        assert_eq!(n_splits(256, 2, 132), 2);
        assert_eq!(n_splits(256, 8, 132), 1);
    }
}
