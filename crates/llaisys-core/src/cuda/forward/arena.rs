//! The sizes of a model's device memory, and the place of each array in an arena. Pure.

use crate::arch::config::ModelConfig;
use crate::cuda::device::DevicePtr;
use crate::error::DeviceError;

/// Alignment of every array, bytes. No load of a kernel crosses such a boundary.
const ALIGNMENT: usize = 256;
/// Bytes kept free for graphs, which the driver allocates after the KV cells.
pub const GRAPH_RESERVE_BYTES: usize = 256 << 20;

/// What the memory of a decoder is sized for.
#[derive(Debug, Clone, Copy)]
pub struct DeviceLimits {
    /// Rows of a pass.
    pub n_rows: usize,
    /// Rows of a pass whose logits are wanted.
    pub n_outputs: usize,
    /// Positions of a sequence.
    pub max_len: usize,
    /// Entries of the lists of cells that the rows of a pass see.
    pub n_listed: usize,
    /// KV cells.
    pub cells: CellCount,
}

/// The number of KV cells.
#[derive(Debug, Clone, Copy)]
pub enum CellCount {
    /// This number.
    Exactly(usize),
    /// As many as fit into this share of the device's memory, at least the rows of a pass.
    Share(f64),
}

/// Arrays placed one after the other. The same calls first count the bytes and then place the arrays.
#[derive(Debug, Clone, Copy)]
pub struct Arena {
    base: Option<DevicePtr>,
    used: usize,
}

impl Arena {
    /// Returns an arena that only counts bytes: its pointers are NULL.
    pub fn counting() -> Self {
        Self { base: None, used: 0 }
    }

    /// Returns an arena in the memory from `base` on.
    pub fn placing(base: DevicePtr) -> Self {
        Self { base: Some(base), used: 0 }
    }

    /// Returns whether the arena has memory.
    pub fn is_placing(&self) -> bool {
        self.base.is_some()
    }

    /// Returns the next `n_bytes` bytes. Panics if they exceed the memory.
    pub fn take(&mut self, n_bytes: usize) -> DevicePtr {
        let at = self.base.map_or(DevicePtr::NULL, |base| base.at(self.used));
        self.used += n_bytes.next_multiple_of(ALIGNMENT);
        at
    }

    /// Returns the bytes taken so far, alignment included.
    pub fn n_bytes(&self) -> usize {
        self.used
    }
}

/// Returns the bytes of one cell's keys and values in all layers, with 16-bit elements.
pub fn cell_bytes(config: &ModelConfig) -> usize {
    config.n_layers * 2 * config.n_kv_heads * config.d_head * 2
}

/// The device memory when everything except the KV cells is allocated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryBudget {
    /// Memory of the device, bytes.
    pub total: usize,
    /// Free memory, bytes.
    pub free: usize,
    /// Share of the total that may be in use, 0 to 1.
    pub utilization: f64,
}

/// Returns the number of KV cells that fit into `total * utilization - used - GRAPH_RESERVE_BYTES`, less the device's
/// dummy cell. Memory of other processes counts as used.
///
/// Errors: fewer than `min` cells fit; the text has the numbers.
pub fn n_cells(budget: MemoryBudget, cell_bytes: usize, min: usize) -> Result<usize, DeviceError> {
    let allowed = (budget.total as f64 * budget.utilization) as usize;
    let used = budget.total.saturating_sub(budget.free);
    let left = allowed.saturating_sub(used).saturating_sub(GRAPH_RESERVE_BYTES);
    let n = (left / cell_bytes).saturating_sub(1);
    if n >= min {
        return Ok(n);
    }
    let mib = |n: usize| n >> 20;
    Err(DeviceError::Cuda {
        op: "size the KV cache".to_owned(),
        status: format!(
            "{min} cells of {cell_bytes} bytes are needed, {n} fit: of {} MiB a share of {} may be used, {} MiB are \
             used, and {} MiB are kept for graphs; raise gpu_memory_utilization, or lower max_model_len or \
             max_num_batched_tokens",
            mib(budget.total),
            budget.utilization,
            mib(used),
            mib(GRAPH_RESERVE_BYTES)
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    #[test]
    fn counting_and_placing_use_the_same_aligned_offsets() {
        let (mut counted, mut placed) = (Arena::counting(), Arena::placing(DevicePtr::of_test(0x1000, 1280)));
        let sizes = [1, 256, 257, 0, 3];
        let offsets = sizes.map(|n| placed.take(n).address() - 0x1000);
        assert_eq!(offsets, [0, 256, 512, 1024, 1024]);
        for n in sizes {
            counted.take(n);
        }
        assert_eq!((counted.n_bytes(), placed.n_bytes()), (1280, 1280));
        assert!(!counted.is_placing() && placed.is_placing());
    }

    #[test]
    fn cells_fill_the_allowed_share_of_memory() {
        // 80 GiB, of which 16 are used: 72 - 16 GiB less the reserve, in cells of 64 KiB, less one.
        let budget = MemoryBudget { total: 80 * GIB, free: 64 * GIB, utilization: 0.9 };
        assert_eq!(n_cells(budget, 64 << 10, 1).unwrap(), (56 * GIB - GRAPH_RESERVE_BYTES) / (64 << 10) - 1);
        // Memory of another process counts as used.
        let crowded = MemoryBudget { free: 8 * GIB, ..budget };
        let text = n_cells(crowded, 64 << 10, 4096).unwrap_err().to_string();
        for part in ["4096 cells", "0 fit", "81920 MiB", "0.9", "73728 MiB", "gpu_memory_utilization"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }
}
