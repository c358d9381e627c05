//! The decoder on a device (the emulator, or a GPU), from a checkpoint to logits, compared with the CPU's decoder.

use crate::common::{Rows, Tiny, settings};
use crate::emulator::arrays::Arrays;
use crate::emulator::pick::{case, test_device};
use crate::model_files::golden;
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::cuda::device::Element;
use llaisys_core::cuda::forward::load::element_of;
use llaisys_core::cuda::forward::{CellCount, DeviceDecoder, DeviceLimits};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::forward::decoder::ForwardRows;
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::ops::{AttentionRow, AttentionRows};
use llaisys_core::threads::Pool;
use std::path::Path;

const N_CELLS: usize = 96;
/// Tokens of the first sequence. The second sequence shares the first `N_SHARED` of them.
const N_FIRST: usize = 37;
const N_SHARED: usize = 8;
const N_SECOND: usize = 16;

/// One sequence of a test: its tokens, and the cell of each.
struct Sequence {
    tokens: Vec<i32>,
    cells: Vec<u32>,
}

/// Returns two sequences in unordered cells. The second shares the first's cells for the common prefix.
fn sequences(vocab_size: usize) -> [Sequence; 2] {
    let mut random = crate::common::Random(7);
    let mut free: Vec<u32> = (0..N_CELLS as u32).collect();
    let mut cell = || free.swap_remove((random.next_u64() % free.len() as u64) as usize);
    let first: Vec<u32> = (0..N_FIRST).map(|_| cell()).collect();
    let second = first[..N_SHARED].iter().copied().chain((N_SHARED..N_SECOND).map(|_| cell())).collect();
    let mut random = crate::common::Random(11);
    let mut token = || (random.next_u64() % vocab_size as u64) as i32;
    let tokens: Vec<i32> = (0..N_FIRST).map(|_| token()).collect();
    let others = tokens[..N_SHARED].iter().copied().chain((N_SHARED..N_SECOND).map(|_| token())).collect();
    [Sequence { tokens, cells: first }, Sequence { tokens: others, cells: second }]
}

/// The sequences and positions of each pass: a chunk; a decode row before a chunk on a shared prefix; decode rows only;
/// a chunk in the middle of a context.
const PASSES: [&[(usize, std::ops::Range<usize>)]; 4] =
    [&[(0, 0..20)], &[(0, 20..21), (1, 8..15)], &[(0, 21..22), (1, 15..16)], &[(0, 22..37)]];

/// Returns the logits of every token that a pass computes, by sequence and position.
fn on_device(folder: &Path) -> [Vec<Vec<f32>>; 2] {
    let device = &*test_device();
    let checkpoint = Checkpoint::open(folder).unwrap();
    let limits = DeviceLimits {
        n_rows: 20,
        n_outputs: 20,
        max_len: N_FIRST,
        n_listed: N_FIRST + N_SECOND,
        cells: CellCount::Exactly(N_CELLS),
    };
    let decoder = DeviceDecoder::new(device, &checkpoint, limits, &Pool::new(2).unwrap()).unwrap();
    let vocab_size = decoder.config().vocab_size;
    let element = element_of(&checkpoint);
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
        let attention = AttentionRows { cells: &listed, rows: &rows, window: None, n_shared: &[] };
        let rows = ForwardRows {
            tokens: &tokens,
            positions: &positions,
            cells: &cells,
            attention,
            windowed: None,
            recurrent: None,
            lora: None,
        };
        let outputs: Vec<usize> = (0..tokens.len()).collect();
        case("decoder", element, format!("{:?}, {} rows", decoder.config().arch.architecture, tokens.len()));
        let at = decoder.forward(device, &rows, &outputs).unwrap();
        let given = device.read(Element::F32, at, outputs.len() * vocab_size);
        let places = pass.iter().flat_map(|(index, range)| range.clone().map(move |p| (*index, p)));
        for ((index, position), row) in places.zip(given.chunks_exact(vocab_size)) {
            logits[index][position] = row.to_vec();
        }
    }
    device.synchronize().unwrap();
    logits
}

/// As [`on_device`] on the CPU, for every token.
fn on_cpu(folder: &Path, mode: ComputeMode) -> [Vec<Vec<f32>>; 2] {
    let config = ContextConfig { mode, ..settings() };
    let mut context = Context::load(folder, config).unwrap();
    let vocab_size = context.config().vocab_size;
    sequences(vocab_size).map(|sequence| {
        let seq = context.seq_acquire(0).unwrap();
        let result = Rows::default().run(seq, 0, &sequence.tokens).decode(&mut context).unwrap();
        result.logits.unwrap().chunks_exact(vocab_size).map(<[f32]>::to_vec).collect()
    })
}

/// Returns the ids and logits of the two best tokens.
fn best_two(logits: &[f32]) -> [(usize, f32); 2] {
    let mut order: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    [order[0], order[1]]
}

/// Returns the relative L2 distance over all rows that the device computed.
fn distance(got: &[Vec<Vec<f32>>; 2], want: &[Vec<Vec<f32>>; 2], computed: &[Vec<Vec<f32>>; 2]) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for index in 0..2 {
        for position in (0..computed[index].len()).filter(|&p| !computed[index][p].is_empty()) {
            for (a, b) in got[index][position].iter().zip(&want[index][position]) {
                error += f64::from(a - b).powi(2);
                size += f64::from(*b).powi(2);
            }
        }
    }
    (error / size).sqrt()
}

/// Asserts that greedy tokens are equal to those of f32, except where its two best logits differ by less than 2 ulp of
/// bf16.
fn assert_greedy(device: &[Vec<Vec<f32>>; 2], exact: &[Vec<Vec<f32>>; 2]) {
    let mut n_compared = 0;
    for (index, (device, exact)) in device.iter().zip(exact).enumerate() {
        let rows = device.iter().zip(exact).enumerate();
        for (position, (got, want)) in rows.filter(|(_, (got, _))| !got.is_empty()) {
            let [best, second] = best_two(want);
            let ulp = best.1.abs().log2().floor().exp2() / 128.0;
            let [ours, _] = best_two(got);
            assert!(
                ours.0 == best.0 || best.1 - second.1 < 2.0 * ulp,
                "sequence {index}, position {position}: {ours:?} for {best:?}, {second:?}"
            );
            n_compared += 1;
        }
    }
    assert_eq!(n_compared, N_FIRST + N_SECOND - N_SHARED);
}

/// Compares a tiny model with the CPU. The CPU with bf16 weights rounds the inputs of products. The device also rounds
/// the results of every op, about twice as many roundings, so its distance to f32 may be twice as large.
fn assert_tiny_agrees(model: &Tiny) {
    let folder = model.write();
    let (device, exact) = (on_device(&folder), on_cpu(&folder, ComputeMode::Float32));
    let rounded = on_cpu(&folder, ComputeMode::Bfloat16);
    std::fs::remove_dir_all(&folder).unwrap();
    let (ours, cpu) = (distance(&device, &exact, &device), distance(&rounded, &exact, &device));
    println!("relative L2 to f32: {ours:e} on the device, {cpu:e} in bf16 on the CPU");
    assert_greedy(&device, &exact);
    assert!(ours <= 2.0 * cpu, "{ours:e} and {cpu:e}");
}

#[test]
fn llama_with_an_untied_head_matches_the_cpu() {
    assert_tiny_agrees(&Tiny::for_gpu("LlamaForCausalLM", false));
}

#[test]
fn qwen2_with_qkv_biases_matches_the_cpu() {
    assert_tiny_agrees(&Tiny::for_gpu("Qwen2ForCausalLM", true));
}

#[test]
fn qwen3_with_head_norms_matches_the_cpu() {
    assert_tiny_agrees(&Tiny::for_gpu("Qwen3ForCausalLM", true));
}

/// The checkpoint's joined matrices are split and joined again.
#[test]
fn phi3_with_joined_matrices_matches_the_cpu() {
    assert_tiny_agrees(&Tiny::for_gpu("Phi3ForCausalLM", false).joined());
}

#[test]
fn a_real_f16_checkpoint_matches_the_cpu() {
    let (device, exact) =
        (on_device(&golden("qwen2-f16")), on_cpu(&golden("qwen2-f16"), ComputeMode::Float32));
    let ours = distance(&device, &exact, &device);
    println!("relative L2 to f32: {ours:e}");
    assert_greedy(&device, &exact);
    // A sixteenth of the tolerance of bf16, because f16 has three more bits.
    assert!(ours <= 3e-3, "{ours:e}");
}

#[test]
fn unsupported_models_are_refused_by_name() {
    let refused = |model: &Tiny| {
        let folder = model.write();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let limits =
            DeviceLimits { n_rows: 1, n_outputs: 1, max_len: 1, n_listed: 1, cells: CellCount::Exactly(1) };
        let made = DeviceDecoder::new(&*test_device(), &checkpoint, limits, &Pool::new(1).unwrap());
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
    let part = refused(&Tiny {
        more_keys: r#", "partial_rotary_factor": 0.5"#.to_owned(),
        ..Tiny::for_gpu("Phi3ForCausalLM", true).joined()
    });
    assert!(part.contains("a rotation \"of 32 of 64 elements of a head on a GPU\""), "{part}");
    for architecture in ["SmolLM3ForCausalLM", "Ernie4_5ForCausalLM"] {
        let named = refused(&Tiny::for_gpu(architecture, true));
        assert!(named.contains(&format!("the architecture \"{architecture} on a GPU\"")), "{named}");
    }
    let bias = refused(&Tiny::for_gpu("LlamaForCausalLM", true).with_biases());
    assert!(bias.contains("a bias \"in o_proj on a GPU\""), "{bias}");
    let hunyuan = refused(&Tiny::for_gpu("HunYuanDenseV1ForCausalLM", true));
    assert!(hunyuan.contains("the architecture \"HunYuanDenseV1ForCausalLM on a GPU\""), "{hunyuan}");
    let seed_oss = refused(&Tiny::sized("SeedOssForCausalLM", true, |model| {
        model.more_keys = r#", "attention_bias": false"#.into();
    }));
    assert!(seed_oss.contains("the architecture \"SeedOssForCausalLM on a GPU\""), "{seed_oss}");
}
