//! State of running sequences on the device: what a decode step begins with, and cells that move.

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

/// One: integers and bytes are the same for every storage type, and `prim.cuh` wants one.
fn variants() -> Vec<Vec<(&'static str, u32)>> {
    vec![vec![kernel_source::storage(Element::Bf16)]]
}

/// [`StepBegin`]'s kernel.
pub fn begin_function() -> Function {
    SOURCE.function(&[kernel_source::storage(Element::Bf16)], "step_begin")
}

/// [`CopyCells`]' kernel.
pub fn copy_function() -> Function {
    SOURCE.function(&[kernel_source::storage(Element::Bf16)], "copy_cells")
}

/// First in a decode step: slots append their new cells, and each row gets what the step's kernels read.
///
/// Slot 0 is of padding rows: it has no cells, and its rows get token 0, position 0, cell 0 and an empty list. No other
/// slot is in two rows; each has room for one more cell.
#[derive(Debug, Clone, Copy)]
pub struct StepBegin {
    /// `[n_rows]` pairs of u32: slot, and the cell for its last token (the device's number).
    pub plan: DevicePtr,
    /// `[n_slots, max_len]` u32: cells of each slot in position order. One more is appended.
    pub cell_table: DevicePtr,
    /// `[n_slots]` i32: cells of each slot. One is added.
    pub lengths: DevicePtr,
    /// `[n_slots]` i32: the position of each slot's first cell, if its positions have no gap; its next position less
    /// the number of its cells in any case.
    pub bases: DevicePtr,
    /// `[n_slots]` i32: the token of each slot that has no cell yet.
    pub last_tokens: DevicePtr,
    /// What the rows get.
    pub rows: StepRows,
    /// Rows, at least one.
    pub n_rows: usize,
    /// Cells that a slot has room for.
    pub max_len: usize,
    /// Cells that a row sees in layers with a window; 0: all, and `n_hidden` becomes 0.
    pub window: usize,
}

/// What kernels read of a step's rows.
#[derive(Debug, Clone, Copy)]
pub struct StepRows {
    /// `[n_rows]` i32
    pub tokens: DevicePtr,
    /// `[n_rows]` i32
    pub positions: DevicePtr,
    /// `[n_rows]` u32: where key and value go.
    pub cells: DevicePtr,
    /// `[n_rows]` u32: where the row's list begins in the flat cell table.
    pub starts: DevicePtr,
    /// `[n_rows]` i32: cells of the list before those that the row sees.
    pub n_hidden: DevicePtr,
    /// `[n_rows]` i32: cells of the list up to the row's own; 0 for padding.
    pub n_visible: DevicePtr,
}

impl StepBegin {
    /// Starts it. Errors: [`Device::launch`]'s.
    pub fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        device.launch(&Launch {
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
        })
    }
}

/// Copies cells within each of several arrays that lie `stride` bytes apart: the keys and values of all layers.
#[derive(Debug, Clone, Copy)]
pub struct CopyCells {
    /// The first array.
    pub arrays: DevicePtr,
    /// Arrays, at most 65,535.
    pub n_arrays: usize,
    /// Bytes from one array to the next.
    pub stride: usize,
    /// `[n_moves]` pairs of u32: from, to (the device's numbers). What is written is in no other pair.
    pub moves: DevicePtr,
    /// Moves, at least one.
    pub n_moves: usize,
    /// Bytes of a cell in one array: a multiple of 16.
    pub cell_bytes: usize,
}

impl CopyCells {
    /// Starts it.
    ///
    /// Panics if `cell_bytes` or `stride` is no multiple of 16. Errors: [`Device::launch`]'s.
    pub fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        let whole = self.cell_bytes.is_multiple_of(16) && self.stride.is_multiple_of(16);
        assert!(whole, "cells of {} bytes in arrays {} apart", self.cell_bytes, self.stride);
        device.launch(&Launch {
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
        })
    }
}
