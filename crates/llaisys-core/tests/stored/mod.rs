//! Random matrices as a model file stores them, with the exact values they stand for.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]
use half::{bf16, f16};
use llaisys_core::dtype::DType;
use llaisys_core::ops::packed::{PackedFormat, PackedMatrix};
use llaisys_core::quant::Block;
use llaisys_core::tensor::RowView;
use llaisys_core::threads::Pool;

/// Numbers that depend on the seed alone (splitmix64).
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
                _ => {
                    let n_f16 = if dtype == DType::Q4_1 { 2 } else { 1 };
                    for _ in 0..n_f16 {
                        bytes.extend(f16::from_f32(rng.unit() / 8.0).to_le_bytes());
                    }
                    bytes.extend((2 * n_f16..dtype.block_bytes()).map(|_| rng.bits() as u8));
                }
            }
        }
        Self { dtype, n_rows, n_columns, bytes }
    }

    pub fn row(&self, n: usize) -> RowView<'_> {
        let n_bytes = self.dtype.bytes_of(self.n_columns).unwrap();
        RowView { dtype: self.dtype, bytes: &self.bytes[n * n_bytes..(n + 1) * n_bytes] }
    }

    pub fn pack(&self, pool: &Pool, format: PackedFormat) -> PackedMatrix {
        PackedMatrix::pack(pool, format, self.n_rows, self.n_columns, &|n| self.row(n)).unwrap()
    }

    /// The exact values `[n_rows, n_columns]`.
    pub fn values(&self) -> Vec<f64> {
        self.parts().into_iter().map(|(scaled, min)| scaled + min).collect()
    }

    /// What rounding errors of a product are measured against: `|scaled| + |min|`.
    pub fn sizes(&self) -> Vec<f64> {
        self.parts().into_iter().map(|(scaled, min)| scaled.abs() + min.abs()).collect()
    }

    fn parts(&self) -> Vec<(f64, f64)> {
        let blocks = self.bytes.chunks_exact(self.dtype.block_bytes());
        match self.dtype {
            DType::F32 => {
                blocks.map(|b| (f64::from(f32::from_le_bytes(b.try_into().unwrap())), 0.0)).collect()
            }
            DType::F16 => blocks.map(|b| (f16::from_le_bytes(b.try_into().unwrap()).to_f64(), 0.0)).collect(),
            DType::BF16 => {
                blocks.map(|b| (bf16::from_le_bytes(b.try_into().unwrap()).to_f64(), 0.0)).collect()
            }
            _ => blocks.flat_map(|bytes| block_parts(&Block::parse(self.dtype, bytes).unwrap())).collect(),
        }
    }
}

fn block_parts(block: &Block) -> Vec<(f64, f64)> {
    let value =
        |&q: &u8| (block.scale.to_f64() * (f64::from(q) - f64::from(block.offset)), block.min.to_f64());
    block.q.iter().map(value).collect()
}
