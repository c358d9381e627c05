//! Random matrices in the formats of model files, with the exact values that they represent.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]
use half::{bf16, f16};
use llaisys_core::dtype::DType;
use llaisys_core::ops::packed::{PackedFormat, PackedMatrix};
use llaisys_core::quant::quantize::{Grid, QuantizedRow, quantize};
use llaisys_core::quant::{BLOCK_LEN, Block, HALF_LEN};
use llaisys_core::tensor::RowView;
use llaisys_core::threads::Pool;

/// Random numbers from a seed (SplitMix64).
pub struct Rng(pub u64);

impl Rng {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    }

    pub fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

/// A stored matrix.
pub struct Stored {
    pub dtype: DType,
    pub n_rows: usize,
    pub n_columns: usize,
    bytes: Vec<u8>,
    /// The quantized rows of a matrix for a format that quantizes plain weights.
    fitted: Vec<(f64, f64)>,
}

impl Stored {
    /// Uniform values; integers of blocks over their whole range, scales and minima up to 1/8.
    pub fn random(rng: &mut Rng, dtype: DType, n_rows: usize, n_columns: usize) -> Self {
        let mut bytes = Vec::new();
        for _ in 0..n_rows * n_columns / dtype.block_len() {
            match dtype {
                DType::F32 => bytes.extend(rng.unit().to_le_bytes()),
                DType::F16 => bytes.extend(f16::from_f32(rng.unit()).to_le_bytes()),
                DType::BF16 => bytes.extend(bf16::from_f32(rng.unit()).to_le_bytes()),
                _ => bytes.extend(random_block(rng, dtype)),
            }
        }
        Self { dtype, n_rows, n_columns, bytes, fitted: Vec::new() }
    }

    /// A matrix that `format` represents exactly: of the type of the same name, or for formats that quantize plain
    /// weights, quantized values.
    pub fn of(rng: &mut Rng, format: PackedFormat, n_rows: usize, n_columns: usize) -> Self {
        let mut stored = Self::random(rng, format.dtype(), n_rows, n_columns);
        if let Some(grid) = format.grid() {
            let mut row = QuantizedRow::default();
            stored.bytes.clear();
            for _ in 0..n_rows {
                quantize(grid, &rng.units(n_columns), &mut row);
                stored.bytes.extend(row.values(grid).iter().flat_map(|value| value.to_le_bytes()));
                stored.fitted.extend(fitted_parts(&row, grid));
            }
        }
        stored
    }

    pub fn row(&self, n: usize) -> RowView<'_> {
        let n_bytes = self.dtype.bytes_of(self.n_columns).unwrap();
        RowView { dtype: self.dtype, bytes: &self.bytes[n * n_bytes..(n + 1) * n_bytes] }
    }

    pub fn pack(&self, pool: &Pool, format: PackedFormat) -> PackedMatrix {
        PackedMatrix::pack(pool, format, self.n_rows, self.n_columns, &|n| self.row(n)).unwrap()
    }

    /// The values `[n_rows, n_columns]` of a packed matrix in the type's own format.
    pub fn values(&self) -> Vec<f64> {
        self.parts().into_iter().map(|(scaled, min)| scaled + min).collect()
    }

    /// The sizes to which rounding errors of a product are relative: `|scaled| + |min|`.
    pub fn sizes(&self) -> Vec<f64> {
        self.parts().into_iter().map(|(scaled, min)| scaled.abs() + min.abs()).collect()
    }

    fn parts(&self) -> Vec<(f64, f64)> {
        if !self.fitted.is_empty() {
            return self.fitted.clone();
        }
        let blocks = self.bytes.chunks_exact(self.dtype.block_bytes());
        match self.dtype {
            DType::F32 => {
                blocks.map(|b| (f64::from(f32::from_le_bytes(b.try_into().unwrap())), 0.0)).collect()
            }
            DType::F16 => blocks.map(|b| (f16::from_le_bytes(b.try_into().unwrap()).to_f64(), 0.0)).collect(),
            DType::BF16 => {
                blocks.map(|b| (bf16::from_le_bytes(b.try_into().unwrap()).to_f64(), 0.0)).collect()
            }
            _ => {
                let mut parts = Vec::new();
                let row = RowView { dtype: self.dtype, bytes: &self.bytes };
                Block::for_each(row, |_, block| parts.extend(block_parts(block)));
                parts
            }
        }
    }
}

/// Each value of a quantized row as `scaled + min`.
fn fitted_parts(row: &QuantizedRow, grid: Grid) -> Vec<(f64, f64)> {
    let values = row.values(grid);
    let min = |i: usize| {
        let group = row.groups[i / BLOCK_LEN];
        -f64::from(row.unit) * f64::from(group.scale) * f64::from(group.zero) / 16.0
    };
    values.iter().enumerate().map(|(i, &value)| (f64::from(value) - min(i), min(i))).collect()
}

/// Elements of a block; rows of a format have whole blocks.
pub fn block_len(format: PackedFormat) -> usize {
    if format.grid().is_some() { BLOCK_LEN } else { format.dtype().block_len() }
}

/// The byte offsets of the f16 numbers in a block.
pub fn f16_places(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        DType::MXFP4 => &[],
        _ => &[0],
    }
}

fn random_block(rng: &mut Rng, dtype: DType) -> Vec<u8> {
    let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| rng.bits() as u8).collect();
    if dtype == DType::Int4 {
        block[..4].copy_from_slice(&f16::from_f32(rng.unit() / 8.0).to_f32().to_le_bytes());
        block[4] %= 17;
        return block;
    }
    if matches!(dtype, DType::Int8 | DType::Fp8) {
        block[..4].copy_from_slice(&(rng.unit() / 8.0).to_le_bytes());
        // No NaN.
        block[4..].iter_mut().filter(|byte| **byte & 0x7f == 0x7f).for_each(|byte| *byte = 0);
        return block;
    }
    if dtype == DType::MXFP4 {
        block[0] = 116 + block[0] % 8;
    }
    for &at in f16_places(dtype) {
        block[at..at + 2].copy_from_slice(&f16::from_f32(rng.unit() / 8.0).to_le_bytes());
    }
    block
}

/// A block as it is packed: with scales and minima rounded to f16, which changes only K types and Int4.
pub fn as_packed(block: &Block) -> Block {
    let round = |x: f32| f16::from_f32(x).to_f32();
    Block { scale: block.scale.map(round), min: block.min.map(round), ..*block }
}

fn block_parts(block: &Block) -> Vec<(f64, f64)> {
    let block = as_packed(block);
    let part = |i: usize| {
        let (scale, min) = (block.scale[i / HALF_LEN], block.min[i / HALF_LEN]);
        (f64::from(scale) * (f64::from(block.q[i]) - f64::from(block.offset)), f64::from(min))
    };
    (0..BLOCK_LEN).map(part).collect()
}
