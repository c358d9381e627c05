//! The rows of a pass as kernels read them: all arrays in one piece of memory, which is uploaded at once.

use crate::error::DeviceError;
use crate::model::decoder::ForwardRows;
use crate::ops::AttentionRows;
use crate::ops::cuda::device::{Device, DevicePtr};

/// Arrays begin on such a boundary.
const ALIGNMENT: usize = 16;

/// Which cells each row sees. A row sees `cells[start + n_hidden..start + n_visible]`.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// Lists of cells, u32.
    pub cells: DevicePtr,
    /// `[n]` u32
    pub start: DevicePtr,
    /// `[n]` i32
    pub n_hidden: DevicePtr,
    /// `[n]` i32
    pub n_visible: DevicePtr,
}

/// The arrays of a pass in device memory.
#[derive(Debug, Clone, Copy)]
pub struct DeviceRows {
    /// `[n]` i32
    pub tokens: DevicePtr,
    /// `[n]` i32
    pub positions: DevicePtr,
    /// `[n]` u32, the device's numbers of cells.
    pub cells: DevicePtr,
    /// `[n_outputs]` i32: the rows whose logits are wanted.
    pub outputs: DevicePtr,
    /// What rows see.
    pub far: Seen,
    /// What they see of that in layers with a window.
    pub near: Option<Seen>,
}

/// Bytes of [`upload`]'s arrays at most.
pub fn n_bytes(n_rows: usize, n_outputs: usize, n_listed: usize, has_window: bool) -> usize {
    let array = |n: usize| (n * 4).next_multiple_of(ALIGNMENT);
    let seen = array(n_listed) + 3 * array(n_rows);
    3 * array(n_rows) + array(n_outputs) + if has_window { 2 * seen } else { seen }
}

/// Copies the arrays of a pass to `base`, in one copy. `rows` has the books' numbers of cells: the device's are one
/// higher, as its cell 0 takes what padding rows write.
///
/// Errors: the device's.
pub fn upload(
    device: &dyn Device,
    base: DevicePtr,
    rows: &ForwardRows<'_>,
    outputs: &[usize],
) -> Result<DeviceRows, DeviceError> {
    let mut arrays = Arrays { base, bytes: Vec::new() };
    let tokens = arrays.put(rows.tokens.iter().map(|&token| token as u32));
    let positions = arrays.put(rows.positions.iter().map(|&position| position as u32));
    let cells = arrays.put(rows.cells.iter().map(|&cell| cell + 1));
    let outputs = arrays.put(outputs.iter().map(|&row| row as u32));
    let far = arrays.seen(rows.attention);
    let near = rows.near.map(|near| arrays.seen(near));
    device.upload(base, &arrays.bytes)?;
    Ok(DeviceRows { tokens, positions, cells, outputs, far, near })
}

struct Arrays {
    base: DevicePtr,
    bytes: Vec<u8>,
}

impl Arrays {
    fn put(&mut self, values: impl Iterator<Item = u32>) -> DevicePtr {
        let at = self.base.at(self.bytes.len());
        self.bytes.extend(values.flat_map(u32::to_le_bytes));
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNMENT), 0);
        at
    }

    fn seen(&mut self, seen: AttentionRows<'_>) -> Seen {
        Seen {
            cells: self.put(seen.cells.iter().map(|&cell| cell + 1)),
            start: self.put(seen.rows.iter().map(|row| row.start)),
            n_hidden: self.put(seen.rows.iter().map(|row| row.n_hidden)),
            n_visible: self.put(seen.rows.iter().map(|row| row.n_visible)),
        }
    }
}
