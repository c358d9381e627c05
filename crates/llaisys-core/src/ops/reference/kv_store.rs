//! What `kv_store` means.

use crate::dtype::KvDType;

/// The value that a cell of this type holds after `x` was stored: `x` itself, or the nearest bf16, of two
/// equally near the one whose last bit is 0; beyond the largest, infinity.
pub fn stored(dtype: KvDType, x: f32) -> f32 {
    match dtype {
        KvDType::Float32 => x,
        KvDType::Bfloat16 if x.is_nan() => x,
        KvDType::Bfloat16 => {
            let (below, rest) = (x.to_bits() & 0xffff_0000, x.to_bits() & 0xffff);
            let up = rest > 0x8000 || rest == 0x8000 && below & 0x1_0000 != 0;
            f32::from_bits(below + if up { 0x1_0000 } else { 0 })
        }
    }
}

/// `tensor[cells[t]] = stored(rows[t])`.
///
/// - `tensor`: `[n_cells, width]`; `cells`: `[n]`; `rows`: `[n, width]`
pub fn kv_store(dtype: KvDType, tensor: &mut [f32], cells: &[u32], rows: &[f32]) {
    let width = rows.len() / cells.len();
    for (&cell, row) in cells.iter().zip(rows.chunks_exact(width)) {
        for (out, &x) in tensor[cell as usize * width..].iter_mut().zip(row) {
            *out = stored(dtype, x);
        }
    }
}
