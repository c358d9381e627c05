//! Reference for `kv_store`: keys and values are rounded to the type of their tensor.

use crate::dtype::KvDType;
use half::f16;

/// The nearest bf16, ties to even.
pub fn bf16(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let (below, rest) = (x.to_bits() & 0xffff_0000, x.to_bits() & 0xffff);
    let up = rest > 0x8000 || rest == 0x8000 && below & 0x1_0000 != 0;
    f32::from_bits(below + if up { 0x1_0000 } else { 0 })
}

/// The stored bytes of one head of a cell, in the layout of [`KvDType`]. Each number is rounded to the nearest of its
/// type. For int8 these are the nearest multiples of the scale, followed by the scale.
///
/// - `head`: `[d_head]`
pub fn encode(dtype: KvDType, head: &[f32]) -> Vec<u8> {
    match dtype {
        KvDType::Float32 => head.iter().flat_map(|x| x.to_le_bytes()).collect(),
        KvDType::Float16 => head.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        KvDType::Bfloat16 => {
            head.iter().flat_map(|&x| ((bf16(x).to_bits() >> 16) as u16).to_le_bytes()).collect()
        }
        KvDType::Int8 => {
            let finite = head.iter().all(|x| x.is_finite());
            let largest = head.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
            let scale = if finite { largest / 127.0 } else { f32::NAN };
            let byte =
                |x: &f32| if scale > 0.0 { (x / scale).round_ties_even().clamp(-127.0, 127.0) } else { 0.0 };
            head.iter().map(|x| byte(x) as i8 as u8).chain(scale.to_le_bytes()).collect()
        }
    }
}

/// The numbers of a head that [`encode`] wrote.
pub fn decode(dtype: KvDType, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.as_chunks().0.iter().map(|half| u16::from_le_bytes(*half));
    match dtype {
        KvDType::Float32 => bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        KvDType::Float16 => halves().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        KvDType::Bfloat16 => halves().map(|bits| f32::from_bits(u32::from(bits) << 16)).collect(),
        KvDType::Int8 => {
            let (elements, scale) = bytes.split_last_chunk().unwrap_or((&[], &[0; 4]));
            elements.iter().map(|&x| f32::from(x as i8) * f32::from_le_bytes(*scale)).collect()
        }
    }
}

/// Rows of heads after a round trip through their stored type.
///
/// - `x`: `[n, d_head]`; returns as `x`
pub fn stored(dtype: KvDType, d_head: usize, x: &[f32]) -> Vec<f32> {
    x.chunks(d_head).flat_map(|head| decode(dtype, &encode(dtype, head))).collect()
}

/// `tensor[cells[t]] = stored(rows[t])`.
///
/// - `tensor`: `[n_cells, n_kv_heads, d_head]`; `cells`: `[n]`; `rows`: `[n, n_kv_heads, d_head]`
pub fn kv_store(dtype: KvDType, d_head: usize, tensor: &mut [f32], cells: &[u32], rows: &[f32]) {
    let width = rows.len() / cells.len();
    for (&cell, row) in cells.iter().zip(rows.chunks_exact(width)) {
        tensor[cell as usize * width..][..width].copy_from_slice(&stored(dtype, d_head, row));
    }
}
