//! The emulator's matrix product: plain loops, sums in f32 by ascending k, rounded once.

use super::memory::Memory;
use half::{bf16, f16};
use llaisys_core::cuda::device::{DevicePtr, Element, Product};

/// Returns the bytes of an element.
pub(crate) fn size_of(element: Element) -> usize {
    match element {
        Element::Bf16 | Element::F16 => 2,
        Element::F32 => 4,
    }
}

/// Returns the values of stored elements.
pub(crate) fn decode(element: Element, bytes: &[u8]) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match element {
        Element::Bf16 => pairs().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        Element::F16 => pairs().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        Element::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

/// Returns the bytes of values that are rounded to the element type.
pub(crate) fn encode(element: Element, values: &[f32]) -> Vec<u8> {
    match element {
        Element::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        Element::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        Element::F32 => values.iter().flat_map(|&x| x.to_le_bytes()).collect(),
    }
}

/// Computes a product. Errors: an array is not inside an allocation.
pub(crate) fn product(memory: &mut Memory, p: &Product) -> Result<(), String> {
    let array = |memory: &Memory, what: &str, at: DevicePtr, n: usize| {
        let bytes = memory.bytes(at, n * size_of(p.element)).map_err(|e| format!("{what}: {e}"))?;
        Ok::<_, String>(decode(p.element, bytes))
    };
    let input = array(memory, "input", p.input, p.m * p.k)?;
    let weight = array(memory, "weight", p.weight, p.n * p.k)?;
    let bias = match p.bias {
        DevicePtr::NULL => vec![0.0; p.n],
        at => array(memory, "bias", at, p.n)?,
    };
    let mut out = Vec::with_capacity(p.m * p.n);
    for row in input.chunks_exact(p.k) {
        for (column, bias) in weight.chunks_exact(p.k).zip(&bias) {
            out.push(row.iter().zip(column).map(|(x, w)| x * w).sum::<f32>() + bias);
        }
    }
    let out = encode(p.out_element, &out);
    memory.bytes_mut(p.out, out.len()).map_err(|e| format!("result: {e}"))?.copy_from_slice(&out);
    Ok(())
}
