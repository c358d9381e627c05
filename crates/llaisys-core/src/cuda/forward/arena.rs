//! How much device memory a model takes, and where in an arena each array lies. Pure.

use crate::arch::config::ModelConfig;
use crate::cuda::device::DevicePtr;
use crate::error::DeviceError;

/// Every array begins on such a boundary: what kernels load at once never crosses it.
const ALIGNMENT: usize = 256;
/// Kept free for graphs, which the driver makes after the KV cells are there.
pub const GRAPH_RESERVE_BYTES: usize = 256 << 20;

/// Arrays one after the other, counted before the memory is there and placed after.
#[derive(Debug, Clone, Copy)]
pub struct Arena {
    base: Option<DevicePtr>,
    used: usize,
}

impl Arena {
    /// Counts only: what it gives are no addresses.
    pub fn counting() -> Self {
        Self { base: None, used: 0 }
    }

    /// Places in memory from `base` on.
    pub fn placing(base: DevicePtr) -> Self {
        Self { base: Some(base), used: 0 }
    }

    /// True if there is memory behind what it gives.
    pub fn is_placing(&self) -> bool {
        self.base.is_some()
    }

    /// The next `n_bytes` bytes.
    pub fn take(&mut self, n_bytes: usize) -> DevicePtr {
        let at = self.base.map_or(DevicePtr::NULL, |base| base.at(self.used));
        self.used += n_bytes.next_multiple_of(ALIGNMENT);
        at
    }

    /// Bytes taken so far.
    pub fn n_bytes(&self) -> usize {
        self.used
    }
}

/// Bytes of one cell over all layers, keys and values, of 16 bits an element.
pub fn cell_bytes(config: &ModelConfig) -> usize {
    config.n_layers * 2 * config.n_kv_heads * config.d_head * 2
}

/// Device memory when everything but the KV cells is there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Room {
    /// Of the device, bytes.
    pub total: usize,
    /// Free now, bytes.
    pub free: usize,
    /// Share of the total that the process may use, 0 to 1.
    pub utilization: f64,
}

/// KV cells that fit: `total * utilization - used - graphs`, less the device's dummy cell, where what others use
/// counts as used.
///
/// Errors: fewer than `min`, with the numbers.
pub fn n_cells(room: Room, cell_bytes: usize, min: usize) -> Result<usize, DeviceError> {
    let allowed = (room.total as f64 * room.utilization) as usize;
    let used = room.total.saturating_sub(room.free);
    let left = allowed.saturating_sub(used).saturating_sub(GRAPH_RESERVE_BYTES);
    let n = (left / cell_bytes).saturating_sub(1);
    if n >= min {
        return Ok(n);
    }
    let mib = |n: usize| n >> 20;
    Err(DeviceError::Cuda {
        op: "size the KV cache".to_owned(),
        status: format!(
            "{min} cells of {cell_bytes} bytes are needed, {n} fit: of {} MiB a share of {} may be used, {} MiB are, \
             and {} MiB are kept for graphs; raise gpu_memory_utilization, or lower max_model_len or \
             max_num_batched_tokens",
            mib(room.total),
            room.utilization,
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
    fn arrays_are_aligned_and_apart_counted_or_placed() {
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
    fn cells_take_what_the_share_leaves() {
        // 80 GiB, of which 16 are used: 72 - 16 GiB less the reserve, in cells of 64 KiB, less one.
        let room = Room { total: 80 * GIB, free: 64 * GIB, utilization: 0.9 };
        assert_eq!(n_cells(room, 64 << 10, 1).unwrap(), (56 * GIB - GRAPH_RESERVE_BYTES) / (64 << 10) - 1);
        // Another process's memory is nobody's to give.
        let crowded = Room { free: 8 * GIB, ..room };
        let text = n_cells(crowded, 64 << 10, 4096).unwrap_err().to_string();
        for part in ["4096 cells", "0 fit", "81920 MiB", "0.9", "73728 MiB", "gpu_memory_utilization"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }
}
