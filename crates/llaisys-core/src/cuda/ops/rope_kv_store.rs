//! `rope_kv_store`: the norms of q and k, `rope` and `kv_store` in one kernel; `rope_shift`: rotates stored keys.
//! Definitions: `ops/reference/{rms_norm,rope,kv_store}.rs`.

use crate::cuda::device::{Arg, Device, DevicePtr, Element, Launch};
use crate::cuda::kernel_source::{self, Function, Kernel, KernelSource};
use crate::error::DeviceError;

/// `kernels/rope_kv_store.cu`
pub static SOURCE: KernelSource = KernelSource {
    name: "rope_kv_store",
    text: include_str!("../kernels/rope_kv_store.cu"),
    variants: kernel_source::by_storage,
    kernels: &[
        Kernel {
            name: "rope_kv_store",
            max_threads: 256,
            max_registers: 48,
            max_shared_bytes: Kernel::NO_SHARED,
        },
        Kernel {
            name: "rope_shift",
            max_threads: 256,
            max_registers: 48,
            max_shared_bytes: Kernel::NO_SHARED,
        },
    ],
};

/// The widest head.
pub const MAX_D_HEAD: usize = 256;
/// Heads of a block, one per warp.
const HEADS_OF_A_BLOCK: usize = 8;

/// Returns [`RopeKvStore`]'s kernel for a storage type.
pub fn function(element: Element) -> Function {
    SOURCE.function(&[kernel_source::storage(element)], "rope_kv_store")
}

/// Returns [`RopeShift`]'s kernel for a storage type.
pub fn shift_function(element: Element) -> Function {
    SOURCE.function(&[kernel_source::storage(element)], "rope_shift")
}

/// Shape of a layer's queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// Query heads.
    pub n_heads: usize,
    /// Heads of keys and of values.
    pub n_kv_heads: usize,
    /// Elements of a head: a multiple of 4, at most [`MAX_D_HEAD`].
    pub d_head: usize,
}

impl HeadShape {
    /// Returns the heads of a row of qkv: query heads, key heads, value heads.
    pub fn n_all(&self) -> usize {
        self.n_heads + 2 * self.n_kv_heads
    }

    fn check(&self) {
        let whole = self.d_head.is_multiple_of(4) && self.d_head <= MAX_D_HEAD;
        assert!(whole, "heads of {} elements", self.d_head);
    }
}

/// Norms and rotates the q and k of each row, q in place, and stores k and v in the row's cell.
#[derive(Debug, Clone, Copy)]
pub struct RopeKvStore {
    /// Type of activations and cells.
    pub element: Element,
    /// Heads of a row.
    pub shape: HeadShape,
    /// `[n_rows, n_heads + 2 n_kv_heads, d_head]`; only the query heads change.
    pub qkv: DevicePtr,
    /// Weight of the norm of query heads, `[d_head]` f32; NULL: no norm.
    pub q_norm: DevicePtr,
    /// As `q_norm`, for key heads.
    pub k_norm: DevicePtr,
    /// Added to the mean square.
    pub eps: f32,
    /// `[n_positions, d_head / 2]` f32
    pub cos: DevicePtr,
    /// `[n_positions, d_head / 2]` f32
    pub sin: DevicePtr,
    /// `[n_rows]` i32, each in `0..n_positions`; 0 for padding.
    pub positions: DevicePtr,
    /// `[n_rows]` u32, the device's cell numbers; 0 for padding.
    pub cells: DevicePtr,
    /// The layer's keys `[n_cells, n_kv_heads, d_head]`.
    pub keys: DevicePtr,
    /// The layer's values, as keys.
    pub values: DevicePtr,
    /// Rows, at least one.
    pub n_rows: usize,
}

impl RopeKvStore {
    /// Launches the kernel.
    ///
    /// Panics on a head width that the kernel does not support. Errors: an array ends too early; those of
    /// [`Device::launch`].
    ///
    /// # Safety
    /// When the kernel runs, `cos` and `sin` have each of `positions`, and `keys` and `values` each of `cells`.
    pub unsafe fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        self.shape.check();
        let d = self.shape.d_head;
        self.qkv.array(SOURCE.name, self.element.n_bytes(self.n_rows * self.shape.n_all() * d))?;
        for norm in [self.q_norm, self.k_norm] {
            if norm != DevicePtr::NULL {
                norm.array(SOURCE.name, Element::F32.n_bytes(d))?;
            }
        }
        self.positions.array(SOURCE.name, 4 * self.n_rows)?;
        self.cells.array(SOURCE.name, 4 * self.n_rows)?;
        let launch = Launch {
            function: &function(self.element),
            grid: [self.n_rows as u32, self.shape.n_all().div_ceil(HEADS_OF_A_BLOCK) as u32, 1],
            block: 256,
            shared_bytes: 0,
            args: &[
                Arg::Ptr(self.qkv),
                Arg::Ptr(self.q_norm),
                Arg::Ptr(self.k_norm),
                Arg::Ptr(self.cos),
                Arg::Ptr(self.sin),
                Arg::Ptr(self.positions),
                Arg::Ptr(self.cells),
                Arg::Ptr(self.keys),
                Arg::Ptr(self.values),
                Arg::I32(self.shape.n_heads as i32),
                Arg::I32(self.shape.n_kv_heads as i32),
                Arg::I32(self.shape.d_head as i32),
                Arg::F32(self.eps),
            ],
        };
        // SAFETY: `array` checked the arrays for all rows; the caller promises positions and cells.
        unsafe { device.launch(&launch) }
    }
}

/// Rotates the stored keys of cells whose positions change by one distance.
#[derive(Debug, Clone, Copy)]
pub struct RopeShift {
    /// Type of the cells.
    pub element: Element,
    /// Heads of a cell; `n_heads` is not used.
    pub shape: HeadShape,
    /// The layer's keys `[.., n_kv_heads, d_head]`.
    pub keys: DevicePtr,
    /// `[n_cells]` u32, the device's cell numbers, all different.
    pub cells: DevicePtr,
    /// Of the distance: `[d_head / 2]` f32.
    pub cos: DevicePtr,
    /// Of the distance: `[d_head / 2]` f32.
    pub sin: DevicePtr,
    /// Cells, at least one.
    pub n_cells: usize,
}

impl RopeShift {
    /// Launches the kernel.
    ///
    /// Panics on a head width that the kernel does not support. Errors: an array ends too early; those of
    /// [`Device::launch`].
    ///
    /// # Safety
    /// When the kernel runs, `keys` has each of `cells`.
    pub unsafe fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        self.shape.check();
        self.cells.array(SOURCE.name, 4 * self.n_cells)?;
        for angles in [self.cos, self.sin] {
            angles.array(SOURCE.name, Element::F32.n_bytes(self.shape.d_head / 2))?;
        }
        let launch = Launch {
            function: &shift_function(self.element),
            grid: [self.n_cells as u32, self.shape.n_kv_heads.div_ceil(HEADS_OF_A_BLOCK) as u32, 1],
            block: 256,
            shared_bytes: 0,
            args: &[
                Arg::Ptr(self.keys),
                Arg::Ptr(self.cells),
                Arg::Ptr(self.cos),
                Arg::Ptr(self.sin),
                Arg::I32(self.shape.n_kv_heads as i32),
                Arg::I32(self.shape.d_head as i32),
            ],
        };
        // SAFETY: `array` checked cells and angles; the caller promises that the cells exist.
        unsafe { device.launch(&launch) }
    }
}
