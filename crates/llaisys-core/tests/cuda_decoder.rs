//! The decoder on a device, from a checkpoint to logits, on the emulator: against the decoder of the CPU.
#![cfg(feature = "cuda")]

mod common;
mod cuda_emu;
mod formats_common;

use common::{Rows, Tiny, settings};
use cuda_emu::Emulator;
use formats_common::golden;
use llaisys_core::context::Context;
use llaisys_core::dtype::ComputeMode;
use llaisys_core::model::checkpoint::Checkpoint;
use llaisys_core::model::decoder::ForwardRows;
use llaisys_core::model::device::{CellCount, DeviceDecoder, DeviceLimits};
use llaisys_core::ops::cuda::device::{Device, Element};
use llaisys_core::ops::{AttentionRow, AttentionRows};
use llaisys_core::threads::Pool;
use std::path::Path;

const N_CELLS: usize = 96;
/// Tokens of the first sequence; the second shares the first of them and has some of its own.
const N_FIRST: usize = 37;
const N_SHARED: usize = 8;
const N_SECOND: usize = 16;

/// A head of 64 with every shape around it odd.
fn tiny(architecture: &'static str, tied_head: bool) -> Tiny {
    Tiny::sized(architecture, tied_head, |model| {
        (model.d_model, model.d_ff, model.vocab_size) = (72, 104, 75);
        (model.n_heads, model.n_kv_heads, model.d_head) = (6, 2, 64);
    })
}

/// One sequence of a test: its tokens, and the cell of each.
struct Sequence {
    tokens: Vec<i32>,
    cells: Vec<u32>,
}

/// Two sequences, the second on the first's cells as far as they are equal, in cells without any order.
fn sequences(vocab_size: usize) -> [Sequence; 2] {
    let mut random = common::Random(7);
    let mut free: Vec<u32> = (0..N_CELLS as u32).collect();
    let mut cell = || free.swap_remove((random.next_u64() % free.len() as u64) as usize);
    let first: Vec<u32> = (0..N_FIRST).map(|_| cell()).collect();
    let second = first[..N_SHARED].iter().copied().chain((N_SHARED..N_SECOND).map(|_| cell())).collect();
    let mut random = common::Random(11);
    let mut token = || (random.next_u64() % vocab_size as u64) as i32;
    let tokens: Vec<i32> = (0..N_FIRST).map(|_| token()).collect();
    let others = tokens[..N_SHARED].iter().copied().chain((N_SHARED..N_SECOND).map(|_| token())).collect();
    [Sequence { tokens, cells: first }, Sequence { tokens: others, cells: second }]
}

/// Which tokens of which sequence are computed together: a chunk, a decode row before a chunk on a shared prefix,
/// decode rows only, a chunk in the middle of a context.
const PASSES: [&[(usize, std::ops::Range<usize>)]; 4] =
    [&[(0, 0..20)], &[(0, 20..21), (1, 8..15)], &[(0, 21..22), (1, 15..16)], &[(0, 22..37)]];

/// Logits of every token that a pass computes, by sequence and position.
fn on_device(folder: &Path) -> [Vec<Vec<f32>>; 2] {
    let device = Emulator::new();
    let checkpoint = Checkpoint::open(folder).unwrap();
    let limits = DeviceLimits {
        n_rows: 20,
        n_outputs: 20,
        max_len: N_FIRST,
        n_listed: N_FIRST + N_SECOND,
        cells: CellCount::Exactly(N_CELLS),
    };
    let decoder = DeviceDecoder::new(&device, &checkpoint, limits, &Pool::new(2).unwrap()).unwrap();
    let vocab_size = decoder.config().vocab_size;
    let sequences = sequences(vocab_size);
    let mut logits = sequences.each_ref().map(|sequence| vec![Vec::new(); sequence.tokens.len()]);
    for pass in PASSES {
        let (mut tokens, mut positions, mut cells) = (Vec::new(), Vec::new(), Vec::new());
        let (mut listed, mut rows) = (Vec::new(), Vec::new());
        for (index, range) in pass {
            let (sequence, start) = (&sequences[*index], listed.len() as u32);
            tokens.extend_from_slice(&sequence.tokens[range.clone()]);
            positions.extend(range.clone().map(|position| position as i32));
            cells.extend_from_slice(&sequence.cells[range.clone()]);
            listed.extend_from_slice(&sequence.cells[..range.end]);
            let row = |position| AttentionRow { start, n_hidden: 0, n_visible: position as u32 + 1 };
            rows.extend(range.clone().map(row));
        }
        let attention = AttentionRows { cells: &listed, rows: &rows, window: None };
        let rows =
            ForwardRows { tokens: &tokens, positions: &positions, cells: &cells, attention, near: None };
        let outputs: Vec<usize> = (0..tokens.len()).collect();
        let at = decoder.forward(&device, &rows, &outputs).unwrap();
        let given = device.read(Element::F32, at, outputs.len() * vocab_size);
        let places = pass.iter().flat_map(|(index, range)| range.clone().map(move |p| (*index, p)));
        for ((index, position), row) in places.zip(given.chunks_exact(vocab_size)) {
            logits[index][position] = row.to_vec();
        }
    }
    device.synchronize().unwrap();
    logits
}

/// As [`on_device`], of every token.
fn on_cpu(folder: &Path) -> [Vec<Vec<f32>>; 2] {
    let mut context = Context::load(folder, common_settings()).unwrap();
    let vocab_size = context.config().vocab_size;
    sequences(vocab_size).map(|sequence| {
        let seq = context.open_sequence().unwrap();
        let result = Rows::default().run(seq, 0, &sequence.tokens).decode(&mut context).unwrap();
        result.logits.unwrap().chunks_exact(vocab_size).map(<[f32]>::to_vec).collect()
    })
}

fn common_settings() -> llaisys_core::context::ContextConfig {
    llaisys_core::context::ContextConfig { mode: ComputeMode::Bfloat16, ..settings() }
}

/// The two best tokens' ids and logits.
fn best_two(logits: &[f32]) -> [(usize, f32); 2] {
    let mut order: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    [order[0], order[1]]
}

/// Greedy tokens agree except where the reference's two best logits are closer than 2 ulp of bf16; and logits agree
/// to what some dozen roundings to 16 bits leave.
fn assert_agrees(folder: &Path, tolerance: f64) {
    let (device, cpu) = (on_device(folder), on_cpu(folder));
    let (mut n_compared, mut worst) = (0, 0.0_f64);
    for (index, (device, cpu)) in device.iter().zip(&cpu).enumerate() {
        for (position, (got, want)) in
            device.iter().zip(cpu).enumerate().filter(|(_, (got, _))| !got.is_empty())
        {
            let [best, second] = best_two(want);
            let ulp = best.1.abs().log2().floor().exp2() / 128.0;
            let [ours, _] = best_two(got);
            let at = format!("sequence {index}, position {position}");
            assert!(
                ours.0 == best.0 || best.1 - second.1 < 2.0 * ulp,
                "{at}: {ours:?} for {best:?}, {second:?}"
            );
            let square = |x: f32| f64::from(x) * f64::from(x);
            let error: f64 = got.iter().zip(want).map(|(a, b)| square(a - b)).sum();
            let size: f64 = want.iter().map(|&b| square(b)).sum();
            let relative = (error / size).sqrt();
            assert!(relative <= tolerance, "{at}: relative L2 {relative:e}");
            worst = worst.max(relative);
            n_compared += 1;
        }
    }
    println!("worst relative L2: {worst:e}");
    assert_eq!(n_compared, N_FIRST + N_SECOND - N_SHARED);
}

/// A model of the test's own, in a folder that goes with it.
fn assert_tiny_agrees(model: &Tiny) {
    let folder = model.write();
    assert_agrees(&folder, 2e-2);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn llama_with_a_head_of_its_own() {
    assert_tiny_agrees(&tiny("LlamaForCausalLM", false));
}

#[test]
fn qwen2_adds_biases_to_the_joined_product() {
    assert_tiny_agrees(&tiny("Qwen2ForCausalLM", true));
}

#[test]
fn qwen3_norms_the_heads() {
    assert_tiny_agrees(&tiny("Qwen3ForCausalLM", true));
}

#[test]
fn a_real_checkpoint_in_f16() {
    assert_agrees(&golden("qwen2-f16"), 2e-2);
}

#[test]
fn what_no_kernel_computes_is_refused_by_name() {
    let refused = |model: &Tiny| {
        let folder = model.write();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let limits =
            DeviceLimits { n_rows: 1, n_outputs: 1, max_len: 1, n_listed: 1, cells: CellCount::Exactly(1) };
        let made = DeviceDecoder::new(&Emulator::new(), &checkpoint, limits, &Pool::new(1).unwrap());
        std::fs::remove_dir_all(&folder).unwrap();
        made.unwrap_err().to_string()
    };
    let narrow = refused(&Tiny::odd("LlamaForCausalLM", true));
    assert!(
        narrow.contains("the head width \"16 on a GPU\"") && narrow.contains("64, 80, 96, 128"),
        "{narrow}"
    );
    let experts = refused(&Tiny { d_head: 16, ..Tiny::experts(3) });
    assert!(experts.contains("on a GPU"), "{experts}");
}
