//! A writer of small folders in FP8 and by compressed-tensors, with the values that they represent.

use super::folder::{Folder, Tensor};
use half::{bf16, f16};
use serde_json::{Value, json};

/// Outputs and inputs of the quantized matrix. Blocks of 64 and 128 inputs do not divide it.
pub const N: usize = 16;
pub const K: usize = 160;
pub use super::folder::DOWN as MODULE;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numbers {
    E4M3,
    Bytes,
    Packed8,
    Packed4,
}

/// Rows and columns that share a scale, and the shape of the tensor of scales.
#[derive(Debug, Clone)]
pub struct Sharing {
    pub rows: usize,
    pub columns: usize,
    pub shape: Vec<usize>,
}

impl Sharing {
    pub fn matrix(shape: &[usize]) -> Self {
        Self { rows: N, columns: K, shape: shape.to_vec() }
    }

    pub fn row(shape: &[usize]) -> Self {
        Self { rows: 1, columns: K, shape: shape.to_vec() }
    }

    pub fn block(rows: usize, columns: usize) -> Self {
        Self { rows, columns, shape: vec![N.div_ceil(rows), K.div_ceil(columns)] }
    }

    fn n_per_row(&self) -> usize {
        K.div_ceil(self.columns)
    }

    fn n_scales(&self) -> usize {
        N.div_ceil(self.rows) * self.n_per_row()
    }

    fn index(&self, n: usize, k: usize) -> usize {
        n / self.rows * self.n_per_row() + k / self.columns
    }
}

/// A quantized matrix.
pub struct Scaled {
    pub numbers: Numbers,
    pub sharing: Sharing,
    pub scale_type: &'static str,
    /// `[N][K]`, as in `numbers`: E4M3 bytes, or integers plus half of their range.
    pub q: Vec<u8>,
    /// One for each scale, in the type `scale_type`.
    pub scales: Vec<f32>,
    /// Plus 8.
    pub zeros: Option<Vec<u8>>,
}

impl Scaled {
    /// `next` returns random bits.
    pub fn random(
        numbers: Numbers,
        sharing: Sharing,
        scale_type: &'static str,
        mut next: impl FnMut() -> u64,
    ) -> Self {
        let number = |bits: u64| match (numbers, bits as u8) {
            (Numbers::Packed4, byte) => byte & 15,
            (Numbers::E4M3, byte) if byte & 0x7f == 0x7f => 0x80,
            (_, byte) => byte,
        };
        let q = (0..N * K).map(|_| number(next())).collect();
        let scales = (0..sharing.n_scales())
            .map(|_| {
                let scale = 0.001 + (next() >> 40) as f32 * 1e-9;
                match scale_type {
                    "F32" => scale,
                    "BF16" => bf16::from_f32(scale).to_f32(),
                    _ => f16::from_f32(scale).to_f32(),
                }
            })
            .collect();
        Self { numbers, sharing, scale_type, q, scales, zeros: None }
    }

    pub fn with_zeros(mut self, mut next: impl FnMut() -> u64) -> Self {
        self.zeros = Some((0..self.scales.len()).map(|_| next() as u8 & 15).collect());
        self
    }

    /// The values `[N][K]`, each by the definition of its type.
    pub fn values(&self) -> Vec<f32> {
        let value = |i: usize| {
            let (group, q) = (self.sharing.index(i / K, i % K), self.q[i]);
            let zero = self.zeros.as_ref().map_or(8, |zeros| zeros[group]);
            let number = match self.numbers {
                Numbers::E4M3 => e4m3(q),
                Numbers::Bytes | Numbers::Packed8 => f32::from(q) - 128.0,
                Numbers::Packed4 => f32::from(q) - f32::from(zero),
            };
            self.scales[group] * number
        };
        (0..N * K).map(value).collect()
    }

    fn scale_bytes(&self) -> Vec<u8> {
        let of = |&scale: &f32| match self.scale_type {
            "F32" => scale.to_le_bytes().to_vec(),
            "BF16" => bf16::from_f32(scale).to_le_bytes().to_vec(),
            _ => f16::from_f32(scale).to_le_bytes().to_vec(),
        };
        self.scales.iter().flat_map(of).collect()
    }

    /// A small Llama whose `down_proj` is this matrix. `scale` is the name of its tensor of scales.
    pub fn folder(&self, config: Value, scale: &str) -> Folder {
        let mut folder = Folder::without_down(K, config);
        let mut push = |part: &str, dtype, shape: &[usize], data| {
            let name = format!("{MODULE}.{part}");
            folder.tensors.push(Tensor { name, dtype, shape: shape.to_vec(), data });
        };
        match self.numbers {
            Numbers::E4M3 => push("weight", "F8_E4M3", &[N, K], self.q.clone()),
            Numbers::Bytes => push("weight", "I8", &[N, K], self.q.iter().map(|q| q ^ 0x80).collect()),
            Numbers::Packed8 => push("weight_packed", "I32", &[N, K / 4], self.q.clone()),
            Numbers::Packed4 => {
                push("weight_packed", "I32", &[N, K / 8], words(N * K / 8, |w, i| self.q[8 * w + i]))
            }
        }
        if matches!(self.numbers, Numbers::Packed4 | Numbers::Packed8) {
            let sizes = [N, K].iter().flat_map(|&n| (n as i64).to_le_bytes()).collect();
            push("weight_shape", "I64", &[2], sizes);
        }
        push(scale, self.scale_type, &self.sharing.shape, self.scale_bytes());
        if let Some(zeros) = &self.zeros {
            let n_groups = self.sharing.n_per_row();
            let data =
                words(N / 8 * n_groups, |w, i| zeros[(w / n_groups * 8 + i) * n_groups + w % n_groups]);
            push("weight_zero_point", "I32", &[N / 8, n_groups], data);
        }
        folder
    }
}

/// The number of a byte in E4M3.
pub fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match exponent {
        0 => mantissa / 8.0 * 2_f32.powi(-6),
        15 if mantissa == 7.0 => f32::NAN,
        _ => (1.0 + mantissa / 8.0) * 2_f32.powi(exponent - 7),
    };
    if byte >> 7 == 1 { -magnitude } else { magnitude }
}

/// The bytes of words whose integer `i`, counted from the lowest bits, is `of(word, i)`.
fn words(n: usize, of: impl Fn(usize, usize) -> u8) -> Vec<u8> {
    let word = |w: usize| (0..8).map(|i| u32::from(of(w, i)) << (4 * i)).sum::<u32>();
    (0..n).flat_map(|w| word(w).to_le_bytes()).collect()
}

/// `quantization_config` of an FP8 checkpoint.
pub fn fp8_config(block: Option<[usize; 2]>) -> Value {
    json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block,
        "modules_to_not_convert": ["lm_head"]})
}

/// `quantization_config` of compressed-tensors, with some of the settings of its only group's weights.
pub fn compressed_config(format: &str, weights: Value) -> Value {
    json!({"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "ignore": ["lm_head"], "kv_cache_scheme": null, "sparsity_config": {}, "transform_config": {},
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights,
            "input_activations": null, "output_activations": null}}})
}
