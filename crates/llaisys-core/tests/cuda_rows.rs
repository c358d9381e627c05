//! The row-wise CUDA kernels, run by the emulator, against their references.

#[allow(unsafe_code, dead_code, reason = "runs compiled kernels; each test file uses a part of it")]
mod cuda_emu;

use cuda_emu::Emulator;
use llaisys_core::ops::contract::{Draw, Size};
use llaisys_core::ops::cuda::device::Element;
use llaisys_core::ops::cuda::embed::Embed;

const STORED: [Element; 2] = [Element::Bf16, Element::F16];

#[test]
fn embed_gathers_rows_exactly() {
    for element in STORED {
        for (n_rows, width) in [(1, 64), (2, 896), (17, 1536), (257, 8), (64, 3584)] {
            let device = Emulator::new();
            let draw = &mut Draw::new(width as u64);
            let vocab_size = 50;
            let table = draw.values(Size::Unit, vocab_size * width);
            let mut tokens: Vec<i32> = (0..n_rows).map(|_| draw.below(vocab_size) as i32).collect();
            tokens[0] = vocab_size as i32 - 1;
            let table_at = device.elements("table", element, &table);
            let out = device.room("out", element, n_rows * width);
            let embed = Embed {
                element,
                table: table_at,
                tokens: device.i32s("tokens", &tokens),
                out,
                n_rows,
                width,
            };
            embed.launch(&device).expect("the kernel runs");
            let stored = device.read(element, table_at, table.len());
            let want: Vec<f32> =
                tokens.iter().flat_map(|&t| stored[t as usize * width..][..width].to_vec()).collect();
            assert_eq!(device.read(element, out, n_rows * width), want, "{element:?} {n_rows} x {width}");
        }
    }
}
