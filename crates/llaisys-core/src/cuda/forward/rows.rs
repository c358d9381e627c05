//! The rows of a pass as kernels read them. All arrays are in one piece of memory and uploaded together.

use super::arena::DeviceLimits;
use crate::arch::config::ModelConfig;
use crate::cuda::device::{Device, DevicePtr};
use crate::cuda::ops::attn_prefill::{Tile, tiles};
use crate::error::DeviceError;
use crate::forward::decoder::ForwardRows;
use crate::ops::{AttentionRow, AttentionRows};

/// Alignment of every array, bytes.
const ALIGNMENT: usize = 16;

/// The cells that each row sees: `cells[start + n_hidden..start + n_visible]`.
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
    /// `[n_tiles]` of [`Tile`]: the rows after [`DeviceRows::n_alone`].
    pub tiles: DevicePtr,
    /// Number of tiles.
    pub n_tiles: usize,
}

/// The arrays of a pass in device memory.
#[derive(Debug, Clone, Copy)]
pub struct DeviceRows {
    /// `[n]` i32
    pub tokens: DevicePtr,
    /// `[n]` i32
    pub positions: DevicePtr,
    /// `[n]` u32, the device's cell numbers.
    pub cells: DevicePtr,
    /// The cells that rows see.
    pub full: Seen,
    /// The cells that rows see in layers with a window.
    pub windowed: Option<Seen>,
    /// The number of leading rows that are the only one of their sequence.
    pub n_alone: usize,
}

/// Returns the most bytes of [`upload`]'s arrays.
pub fn n_bytes(config: &ModelConfig, limits: &DeviceLimits) -> usize {
    let array = |n_bytes: usize| n_bytes.next_multiple_of(ALIGNMENT);
    let (rows, group) = (array(4 * limits.n_rows), config.n_heads / config.n_kv_heads);
    // At worst every row is a sequence with its own tiles.
    let tiles = limits.n_rows * (1 + group / 64) * Tile::BYTES;
    let seen = array(4 * limits.n_listed) + 3 * rows + array(tiles);
    3 * rows + if config.window.is_some() { 2 * seen } else { seen }
}

/// Copies the arrays of a pass to `base`, in one copy. `rows` has the KV cache's cell numbers. The device's are one
/// higher, because padding rows write to its cell 0. `group`: query heads that read one KV head.
///
/// Errors: the device's.
pub fn upload(
    device: &dyn Device,
    base: DevicePtr,
    rows: &ForwardRows<'_>,
    group: usize,
) -> Result<DeviceRows, DeviceError> {
    let mut arrays = Arrays { base, bytes: Vec::new() };
    let n_alone = n_alone(rows.attention.rows);
    let rows = DeviceRows {
        tokens: arrays.put(rows.tokens.iter().map(|&token| token as u32)),
        positions: arrays.put(rows.positions.iter().map(|&position| position as u32)),
        cells: arrays.put(rows.cells.iter().map(|&cell| cell + 1)),
        full: arrays.seen(rows.attention, n_alone, group),
        windowed: rows.windowed.map(|windowed| arrays.seen(windowed, n_alone, group)),
        n_alone,
    };
    device.upload(base, &arrays.bytes)?;
    Ok(rows)
}

/// Returns the number of leading rows that are the only one of their sequence.
fn n_alone(rows: &[AttentionRow]) -> usize {
    rows.chunk_by(|a, b| a.start == b.start).take_while(|sequence| sequence.len() == 1).count()
}

struct Arrays {
    base: DevicePtr,
    bytes: Vec<u8>,
}

impl Arrays {
    fn put(&mut self, values: impl Iterator<Item = u32>) -> DevicePtr {
        self.put_bytes(values.flat_map(u32::to_le_bytes))
    }

    fn put_bytes(&mut self, bytes: impl Iterator<Item = u8>) -> DevicePtr {
        let at = self.base.at(self.bytes.len());
        self.bytes.extend(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNMENT), 0);
        at
    }

    fn seen(&mut self, seen: AttentionRows<'_>, n_alone: usize, group: usize) -> Seen {
        let mut tiles = tiles(&seen.rows[n_alone..], group);
        for tile in &mut tiles {
            tile.row += n_alone as u32;
        }
        Seen {
            cells: self.put(seen.cells.iter().map(|&cell| cell + 1)),
            start: self.put(seen.rows.iter().map(|row| row.start)),
            n_hidden: self.put(seen.rows.iter().map(|row| row.n_hidden)),
            n_visible: self.put(seen.rows.iter().map(|row| row.n_visible)),
            n_tiles: tiles.len(),
            tiles: self.put_bytes(tiles.into_iter().flat_map(Tile::to_bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_rows_are_counted_up_to_the_first_chunk() {
        let row = |start| AttentionRow { start, n_hidden: 0, n_visible: 1 };
        let count = |starts: &[u32]| n_alone(&starts.iter().map(|&start| row(start)).collect::<Vec<_>>());
        assert_eq!(count(&[]), 0);
        assert_eq!(count(&[0, 5, 9]), 3);
        assert_eq!(count(&[0, 5, 9, 9, 12]), 2);
        assert_eq!(count(&[3, 3]), 0);
    }
}
