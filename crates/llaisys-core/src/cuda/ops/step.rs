//! `step_begin`: the first kernel of a decode step, which updates the sequences' state on the device. `copy_cells`:
//! copies cells.

use crate::cuda::device::{Arg, Device, DevicePtr, Element, Launch};
use crate::cuda::kernel_source::{self, Function, Kernel, KernelSource};
use crate::error::DeviceError;

/// `kernels/step.cu`
pub static SOURCE: KernelSource = KernelSource {
    name: "step",
    text: include_str!("../kernels/step.cu"),
    variants,
    kernels: &[
        Kernel {
            name: "step_begin",
            max_threads: 256,
            max_registers: 40,
            max_shared_bytes: Kernel::NO_SHARED,
        },
        Kernel {
            name: "copy_cells",
            max_threads: 128,
            max_registers: 40,
            max_shared_bytes: Kernel::NO_SHARED,
        },
    ],
};

/// One variant: the kernels use integers and bytes only, but `prim.cuh` needs some storage type.
fn variants() -> Vec<Vec<(&'static str, u32)>> {
    vec![vec![kernel_source::storage(Element::Bf16)]]
}

/// Returns [`StepBegin`]'s kernel.
pub fn begin_function() -> Function {
    SOURCE.function(&[kernel_source::storage(Element::Bf16)], "step_begin")
}

/// Returns [`CopyCells`]' kernel.
pub fn copy_function() -> Function {
    SOURCE.function(&[kernel_source::storage(Element::Bf16)], "copy_cells")
}

/// The first kernel of a decode step. It appends the new cell of each slot, and writes the arrays that the step's other
/// kernels read.
///
/// Slot 0 belongs to padding rows. It has no cells, and its rows get token 0, position 0, cell 0 and an empty list.
/// Every other slot is in at most one row and has fewer than `max_len` cells.
#[derive(Debug, Clone, Copy)]
pub struct StepBegin {
    /// `[n_rows]` pairs of u32: the slot, and the cell of its last token (the device's number).
    pub plan: DevicePtr,
    /// `[n_slots, max_len]` u32: cells of each slot in position order. The new cell is appended.
    pub cell_table: DevicePtr,
    /// `[n_slots]` i32: number of cells of each slot. It grows by one.
    pub lengths: DevicePtr,
    /// `[n_slots]` i32: the next position of each slot minus the number of its cells. If its positions have no gap,
    /// this is the position of its first cell.
    pub bases: DevicePtr,
    /// `[n_slots]` i32: the token of each slot that has no cell yet.
    pub last_tokens: DevicePtr,
    /// The arrays that the kernel writes.
    pub rows: StepRows,
    /// Rows, at least one.
    pub n_rows: usize,
    /// Cells of a row of `cell_table`.
    pub max_len: usize,
    /// Cells that a row sees in layers with a window. 0: all, and `n_hidden` becomes 0.
    pub window: usize,
}

/// The rows of a step as kernels read them.
#[derive(Debug, Clone, Copy)]
pub struct StepRows {
    /// `[n_rows]` i32
    pub tokens: DevicePtr,
    /// `[n_rows]` i32
    pub positions: DevicePtr,
    /// `[n_rows]` u32: the cell of each row's key and value.
    pub cells: DevicePtr,
    /// `[n_rows]` u32: the start of each row's list in the flat cell table.
    pub starts: DevicePtr,
    /// `[n_rows]` i32: cells of the list before the first that the row sees.
    pub n_hidden: DevicePtr,
    /// `[n_rows]` i32: cells of the list up to the row's own; 0 for padding.
    pub n_visible: DevicePtr,
}

impl StepBegin {
    /// Launches the kernel. Errors: an array ends too early; those of [`Device::launch`].
    ///
    /// # Safety
    /// When the kernel runs, the arrays by slot have each slot of `plan`, and each slot except 0 has fewer than
    /// `max_len` cells.
    pub unsafe fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        self.plan.array(SOURCE.name, 8 * self.n_rows)?;
        let StepRows { tokens, positions, cells, starts, n_hidden, n_visible } = self.rows;
        for of_rows in [tokens, positions, cells, starts, n_hidden, n_visible] {
            of_rows.array(SOURCE.name, 4 * self.n_rows)?;
        }
        let launch = Launch {
            function: &begin_function(),
            grid: [self.n_rows.div_ceil(256) as u32, 1, 1],
            block: 256,
            shared_bytes: 0,
            args: &[
                Arg::Ptr(self.plan),
                Arg::Ptr(self.cell_table),
                Arg::Ptr(self.lengths),
                Arg::Ptr(self.bases),
                Arg::Ptr(self.last_tokens),
                Arg::Ptr(self.rows.tokens),
                Arg::Ptr(self.rows.positions),
                Arg::Ptr(self.rows.cells),
                Arg::Ptr(self.rows.starts),
                Arg::Ptr(self.rows.n_hidden),
                Arg::Ptr(self.rows.n_visible),
                Arg::I32(self.n_rows as i32),
                Arg::I32(self.max_len as i32),
                Arg::I32(self.window as i32),
            ],
        };
        // SAFETY: `array` checked the arrays for all rows; the caller promises the slots.
        unsafe { device.launch(&launch) }
    }
}

/// Copies cells within each of several arrays that are `stride` bytes apart: the keys and values of all layers.
#[derive(Debug, Clone, Copy)]
pub struct CopyCells {
    /// The first array.
    pub arrays: DevicePtr,
    /// Number of arrays, up to 65,535.
    pub n_arrays: usize,
    /// Bytes from one array to the next.
    pub stride: usize,
    /// `[n_moves]` pairs of u32: from, to (the device's cell numbers). A cell that is written is in no other pair.
    pub moves: DevicePtr,
    /// Number of pairs, at least one.
    pub n_moves: usize,
    /// Bytes of a cell in one array: a multiple of 16.
    pub cell_bytes: usize,
}

impl CopyCells {
    /// Launches the kernel.
    ///
    /// Panics if `cell_bytes` or `stride` is not a multiple of 16. Errors: an array ends too early; those of
    /// [`Device::launch`].
    ///
    /// # Safety
    /// When the kernel runs, each array has all cells of `moves`.
    pub unsafe fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        let whole = self.cell_bytes.is_multiple_of(16) && self.stride.is_multiple_of(16);
        assert!(whole, "cells of {} bytes in arrays {} apart", self.cell_bytes, self.stride);
        self.arrays.array(SOURCE.name, self.n_arrays * self.stride)?;
        self.moves.array(SOURCE.name, 8 * self.n_moves)?;
        let launch = Launch {
            function: &copy_function(),
            grid: [self.n_moves as u32, self.n_arrays as u32, 1],
            block: 128,
            shared_bytes: 0,
            args: &[
                Arg::Ptr(self.arrays),
                Arg::Ptr(self.moves),
                Arg::U64(self.stride as u64),
                Arg::I32(self.cell_bytes as i32),
            ],
        };
        // SAFETY: `array` checked the arrays; the caller promises that the cells exist.
        unsafe { device.launch(&launch) }
    }
}
