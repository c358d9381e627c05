//! Attention of chunks of prompts: many rows of each sequence, and several sequences in one launch.

use super::attention::Attention;
use crate::cuda::device::{Arg, Device, DevicePtr, Launch};
use crate::cuda::kernel_source::{self, Function, Kernel, KernelModule, KernelSource};
use crate::error::DeviceError;
use crate::ops::AttentionRow;
use std::cmp::Reverse;
use std::ops::Range;

/// `kernels/attn_prefill.cu`
pub static SOURCE: KernelSource = KernelSource {
    name: "attn_prefill",
    text: concat!(
        "\n#line 1 \"attn.cuh\"\n",
        include_str!("../kernels/attn.cuh"),
        "\n#line 1 \"attn_prefill.cu\"\n",
        include_str!("../kernels/attn_prefill.cu")
    ),
    variants: kernel_source::by_storage_and_head,
    // The bound is that of two blocks per SM. Where there are three, more than 168 registers would be spills.
    kernels: &[Kernel {
        name: "attn_prefill",
        max_threads: 128,
        max_registers: 255,
        max_shared_bytes: shared_bytes,
    }],
};

/// The most packed rows of a tile, and the keys of a step.
const TILE: usize = 64;

/// Two stages of keys and values, in rows 8 elements longer than a head, and two stages of cells.
fn shared_bytes(module: &KernelModule) -> u32 {
    let row = 2 * (module.constant("LL_D") + 8);
    2 * TILE as u32 * (2 * row + 4)
}

/// The work of one block for each KV head: `n_packed` packed rows of one sequence, from `first` on. Packed row p of a
/// sequence is query head `p % group` of the KV head's group, of token row `row + p / group`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// The sequence's first row.
    pub row: u32,
    /// The tile's first packed row.
    pub first: u32,
    /// Packed rows, 1 to 64.
    pub n_packed: u32,
    /// The start of the sequence's cells in the list.
    pub start: u32,
    /// The range of them that some row sees.
    pub seen: (u32, u32),
    /// The range of them that every row sees; empty if the first number is not below the second.
    pub seen_by_all: (u32, u32),
}

impl Tile {
    /// Bytes on the device.
    pub const BYTES: usize = 32;

    /// Returns the tile as the kernel reads it.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let Self { row, first, n_packed, start, seen, seen_by_all } = self;
        let words = [row, first, n_packed, start, seen.0, seen.1, seen_by_all.0, seen_by_all.1];
        let mut bytes = [0; Self::BYTES];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn new(rows: &[AttentionRow], sequence: &Range<usize>, packed: Range<usize>, group: usize) -> Self {
        let of_tile = sequence.start + packed.start / group..=sequence.start + (packed.end - 1) / group;
        let mut tile = Self {
            row: sequence.start as u32,
            first: packed.start as u32,
            n_packed: packed.len() as u32,
            start: rows[sequence.start].start,
            seen: (u32::MAX, 0),
            seen_by_all: (0, u32::MAX),
        };
        for row in &rows[of_tile] {
            tile.seen = (tile.seen.0.min(row.n_hidden), tile.seen.1.max(row.n_visible));
            tile.seen_by_all = (tile.seen_by_all.0.max(row.n_hidden), tile.seen_by_all.1.min(row.n_visible));
        }
        tile
    }
}

/// Returns the tiles of `rows`. The tiles that see most come first, so the last blocks to start are short. Adjacent
/// rows with the same `start` are one sequence. `group`: query heads that read one KV head.
pub fn tiles(rows: &[AttentionRow], group: usize) -> Vec<Tile> {
    let mut tiles = Vec::new();
    let mut first = 0;
    for sequence in rows.chunk_by(|a, b| a.start == b.start) {
        let sequence = first..first + sequence.len();
        first = sequence.end;
        let n_packed = sequence.len() * group;
        let packed = (0..n_packed).step_by(TILE).map(|p| p..(p + TILE).min(n_packed));
        tiles.extend(packed.map(|packed| Tile::new(rows, &sequence, packed, group)));
    }
    tiles.sort_by_key(|tile| Reverse(tile.seen.1.saturating_sub(tile.seen.0)));
    tiles
}

/// Attention of the rows of a list of tiles.
#[derive(Debug, Clone, Copy)]
pub struct AttnPrefill {
    /// Queries, keys and values.
    pub attention: Attention,
    /// `[n_tiles]` of [`Tile`]: [`tiles`] of the same rows.
    pub tiles: DevicePtr,
    /// Tiles, 1 to 65535.
    pub n_tiles: usize,
}

impl AttnPrefill {
    /// Returns the kernel for these heads.
    pub fn function(attention: &Attention) -> Function {
        SOURCE.function(&attention.constants(), "attn_prefill")
    }

    /// Launches the kernel.
    ///
    /// Panics on shapes that the kernel does not support. Errors: the tiles end too early; those of [`Device::launch`].
    ///
    /// # Safety
    /// When the kernel runs, `tiles` are those of rows that the arrays of `attention` have. Each row sees a part of
    /// `cells` that exists, and `k` and `v` have the cells that it sees.
    pub unsafe fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        let of = &self.attention;
        of.check();
        assert!((1..=65535).contains(&self.n_tiles), "{} tiles", self.n_tiles);
        self.tiles.array(SOURCE.name, self.n_tiles * Tile::BYTES)?;
        let function = Self::function(of);
        let launch = Launch {
            function: &function,
            grid: [of.n_kv_heads as u32, self.n_tiles as u32, 1],
            block: 128,
            shared_bytes: shared_bytes(&function.module),
            args: &[
                Arg::Ptr(of.q),
                Arg::U32(of.q_width as u32),
                Arg::Ptr(of.k),
                Arg::Ptr(of.v),
                Arg::Ptr(of.cells),
                Arg::Ptr(of.n_hidden),
                Arg::Ptr(of.n_visible),
                Arg::Ptr(self.tiles),
                Arg::Ptr(of.out),
                Arg::I32(of.group() as i32),
                of.scale_log2(),
            ],
        };
        // SAFETY: `array` checked the tiles; the caller promises the rows and what they see.
        unsafe { device.launch(&launch) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sequences, the second with a window. A token whose heads are in two tiles belongs to both.
    #[test]
    fn tiles_cover_every_packed_row_once_with_the_ranges_that_rows_see() {
        let row = |start, n_hidden, n_visible| AttentionRow { start, n_hidden, n_visible };
        let mut rows: Vec<AttentionRow> = (0..20).map(|i| row(0, 0, 101 + i)).collect();
        rows.extend((0..3).map(|i| row(120, 500 + i, 600 + i)));
        for group in [1, 6, 7, 8, 71] {
            let tiles = tiles(&rows, group);
            let mut seen = vec![0; rows.len() * group];
            for tile in &tiles {
                assert!((1..=TILE as u32).contains(&tile.n_packed), "{tile:?}");
                let mut of_rows = Vec::new();
                for p in tile.first..tile.first + tile.n_packed {
                    let at = tile.row as usize * group + p as usize;
                    seen[at] += 1;
                    of_rows.push(rows[at / group]);
                }
                let of = |f: fn(&AttentionRow) -> u32| of_rows.iter().map(f).collect::<Vec<_>>();
                let (hidden, visible) = (of(|r| r.n_hidden), of(|r| r.n_visible));
                assert_eq!(Some(&tile.seen.0), hidden.iter().min());
                assert_eq!(Some(&tile.seen.1), visible.iter().max());
                assert_eq!(Some(&tile.seen_by_all.0), hidden.iter().max());
                assert_eq!(Some(&tile.seen_by_all.1), visible.iter().min());
                assert!(of_rows.iter().all(|r| r.start == tile.start));
            }
            assert!(seen.iter().all(|&n| n == 1), "group {group}: {seen:?}");
            let work: Vec<u32> = tiles.iter().map(|tile| tile.seen.1 - tile.seen.0).collect();
            assert!(work.is_sorted_by(|a, b| a >= b), "{work:?}");
        }
        assert!(tiles(&[], 7).is_empty());
    }
}
