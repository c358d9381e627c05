//! Products with a weight in integers of 4 or 8 bits, by our own kernel for few rows; and the weight as plain numbers,
//! for products of more.

use super::device::{Arg, Device, DevicePtr, Element, Launch};
use super::gemv::{BLOCK_ROWS, MAX_ROWS};
use super::unit::{self, Function, Kernel, KernelFile, Unit};
use crate::error::DeviceError;

/// `kernels/gemv_quant.cu`
pub const FILE: KernelFile = KernelFile {
    name: "gemv_quant",
    text: concat!(
        "\n#line 1 \"gemv.cuh\"\n",
        include_str!("kernels/gemv.cuh"),
        "\n#line 1 \"gemv_quant.cu\"\n",
        include_str!("kernels/gemv_quant.cu")
    ),
    variants,
    kernels: &[
        Kernel {
            name: "gemv_quant",
            max_threads: 256,
            max_registers: 128,
            max_shared_bytes: Kernel::NO_SHARED,
        },
        Kernel {
            name: "gemv_quant_f32",
            max_threads: 256,
            max_registers: 128,
            max_shared_bytes: Kernel::NO_SHARED,
        },
        Kernel {
            name: "dequantize",
            max_threads: 256,
            max_registers: 40,
            max_shared_bytes: Kernel::NO_SHARED,
        },
    ],
};

/// Elements of k that share a scale and a minimum.
pub const GROUP: usize = 32;
/// Elements of k that lie together: a row's last block is filled up with zeros.
const BLOCK: usize = 128;

fn variants() -> Vec<Vec<(&'static str, u32)>> {
    let of = |element| [4, 8].map(|bits| vec![unit::storage(element), ("LL_BITS", bits)]);
    [Element::Bf16, Element::F16].into_iter().flat_map(of).collect()
}

/// A weight `[n, k]` of `scale * q + min`, with `q` in `0..2^bits` and a scale and a minimum for every [`GROUP`] of k.
/// The order of its bytes is told in `kernels/gemv_quant.cu`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Grouped {
    /// 4 or 8.
    pub bits: usize,
    /// Rows.
    pub n: usize,
    /// Columns, a multiple of [`GROUP`].
    pub k: usize,
    /// Of each row what [`pack_codes`] made, aligned to 16 bytes.
    pub codes: DevicePtr,
    /// Of each row what [`pack_scales`] made, aligned to 16 bytes.
    pub scales: DevicePtr,
}

/// One row's integers as the kernels read them: 16 (4 bits) or 32 bytes for each 32 of k, rounded up to 128.
///
/// - `q`: `[k]`, each below `2^bits`
pub fn pack_codes(bits: usize, q: &[u8]) -> Vec<u8> {
    let n_planes = bits / 4;
    let mut words = vec![0_u32; q.len().div_ceil(BLOCK) * (BLOCK / 8) * n_planes];
    for (i, &q) in q.iter().enumerate() {
        let (block, group, part, e) = (i / BLOCK, i % BLOCK / GROUP, i % GROUP / 8, i % 8);
        for plane in 0..n_planes {
            let word = ((block * 4 + part) * n_planes + plane) * (BLOCK / GROUP) + group;
            words[word] |= u32::from(q >> (4 * plane) & 15) << (4 * (e / 2) + 16 * (e % 2));
        }
    }
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// One row's scales and minima, f16 bits, as the kernels read them: 4 bytes for each 32 of k, rounded up to 128.
///
/// - `groups`: `[k / 32]` of (scale, minimum)
pub fn pack_scales(groups: &[(u16, u16)]) -> Vec<u8> {
    let n = groups.len().next_multiple_of(BLOCK / GROUP);
    let words = groups.iter().map(|&(scale, min)| u32::from(scale) | u32::from(min) << 16);
    words.chain(std::iter::repeat(0)).take(n).flat_map(u32::to_le_bytes).collect()
}

impl Grouped {
    fn function(&self, element: Element, name: &'static str) -> Function {
        let defines = vec![unit::storage(element), ("LL_BITS", self.bits as u32)];
        Function { unit: Unit { file: FILE.name, defines }, name }
    }

    fn check(&self) {
        assert!(self.bits == 4 || self.bits == 8, "{} bits", self.bits);
        assert!(
            self.n > 0 && self.k > 0 && self.k.is_multiple_of(GROUP),
            "a weight of {} x {}",
            self.n,
            self.k
        );
    }

    /// Starts `out[n, k]` = the weight, in `element`.
    ///
    /// Panics on shapes that the kernel does not know. Errors: [`Device::launch`]'s.
    pub fn dequantize(
        &self,
        device: &dyn Device,
        element: Element,
        out: DevicePtr,
    ) -> Result<(), DeviceError> {
        self.check();
        device.launch(&Launch {
            function: &self.function(element, "dequantize"),
            grid: [(self.n * (self.k / 8)).div_ceil(256) as u32, 1, 1],
            block: 256,
            shared_bytes: 0,
            args: &[
                Arg::Ptr(self.codes),
                Arg::Ptr(self.scales),
                Arg::Ptr(out),
                Arg::I32(self.n as i32),
                Arg::I32(self.k as i32),
            ],
        })
    }
}

/// `out[m, n] = input[m, k] . weight[n, k]^T (+ bias[n])`, sums in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupedProduct {
    /// Rows of the input, 1 to 8.
    pub m: usize,
    /// Of input and bias.
    pub element: Element,
    /// Of the result: `element` or F32.
    pub out_element: Element,
    /// `[m, k]`, aligned to 16 bytes.
    pub input: DevicePtr,
    /// `[n, k]`
    pub weight: Grouped,
    /// `[n]`, or NULL.
    pub bias: DevicePtr,
    /// `[m, n]`
    pub out: DevicePtr,
}

impl GroupedProduct {
    /// Starts it.
    ///
    /// Panics on shapes that the kernel does not know. Errors: [`Device::launch`]'s.
    pub fn launch(&self, device: &dyn Device) -> Result<(), DeviceError> {
        let Self { m, element, out_element, weight, .. } = *self;
        weight.check();
        assert!((1..=MAX_ROWS).contains(&m), "{m} rows");
        assert!(out_element == Element::F32 || out_element == element, "{element:?} to {out_element:?}");
        let name = if out_element == Element::F32 { "gemv_quant_f32" } else { "gemv_quant" };
        device.launch(&Launch {
            function: &weight.function(element, name),
            grid: [weight.n.div_ceil(BLOCK_ROWS) as u32, 1, 1],
            block: 256,
            shared_bytes: 0,
            args: &[
                Arg::Ptr(self.input),
                Arg::Ptr(weight.codes),
                Arg::Ptr(weight.scales),
                Arg::Ptr(self.bias),
                Arg::Ptr(self.out),
                Arg::I32(m as i32),
                Arg::I32(weight.n as i32),
                Arg::I32(weight.k as i32),
            ],
        })
    }
}
