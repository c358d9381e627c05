//! A whole decode step as a graph on a device (the emulator, or a GPU). A graph that was captured once gives the bits
//! of the pass that is launched kernel by kernel, for contexts that have grown since the capture.

use crate::common::Tiny;
use crate::emulator::arrays::Arrays;
use crate::emulator::part::Part;
use crate::emulator::pick::{case, gpu_only, test_device};
use llaisys_core::cuda::device::{Device, DevicePtr, Element};
use llaisys_core::cuda::forward::{CellCount, DeviceDecoder, DeviceLimits};
use llaisys_core::forward::decoder::ForwardRows;
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::ops::{AttentionRow, AttentionRows};
use llaisys_core::threads::Pool;

const MAX_LEN: usize = 140;

/// Sequences at a decode step. Each has its newest token and a list of cells of the maximum length, so that the starts
/// of the lists do not change.
struct Step {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    cells: Vec<u32>,
    listed: Vec<u32>,
    rows: Vec<AttentionRow>,
}

impl Step {
    /// Returns step `step` of `n` sequences of different lengths.
    fn new(n: usize, step: usize, vocab_size: usize) -> Self {
        let cell = |sequence: usize, position: usize| ((position * 9 % MAX_LEN) * n + sequence) as u32;
        let listed = (0..n).flat_map(|s| (0..MAX_LEN).map(move |position| cell(s, position))).collect();
        let mut made = Self { tokens: vec![], positions: vec![], cells: vec![], listed, rows: vec![] };
        for sequence in 0..n {
            let position = sequence * 61 % (MAX_LEN - 20) + step;
            made.tokens.push(((sequence * 13 + step * 5) % vocab_size) as i32);
            made.positions.push(position as i32);
            made.cells.push(cell(sequence, position));
            let start = (sequence * MAX_LEN) as u32;
            made.rows.push(AttentionRow { start, n_hidden: 0, n_visible: position as u32 + 1 });
        }
        made
    }

    fn forward(&self, decoder: &DeviceDecoder, device: &dyn Device) -> DevicePtr {
        let attention = AttentionRows { cells: &self.listed, rows: &self.rows, window: None, n_shared: &[] };
        let (tokens, positions, cells) = (&self.tokens, &self.positions, &self.cells);
        let rows =
            ForwardRows { tokens, positions, cells, attention, windowed: None, recurrent: None, lora: None };
        let outputs: Vec<usize> = (0..tokens.len()).collect();
        decoder.forward(device, &rows, &outputs).expect("the pass runs")
    }
}

fn check(checkpoint: &Checkpoint, n: usize) {
    let device = &*test_device();
    let limits = DeviceLimits {
        n_rows: n,
        n_outputs: n,
        max_len: MAX_LEN,
        n_listed: n * MAX_LEN,
        cells: CellCount::Exactly(n * MAX_LEN),
    };
    let decoder = DeviceDecoder::new(device, checkpoint, limits, &Pool::new(1).unwrap()).unwrap();
    let vocab_size = decoder.config().vocab_size;
    case("graph", Element::Bf16, format!("{n} rows of a decode step, captured once, replayed for four"));
    let read = |at| device.read_bytes(at, n * vocab_size * 4);
    let first = Step::new(n, 0, vocab_size);
    // The first pass chooses its product plans and loads its kernels, which a capture cannot do.
    let at = first.forward(&decoder, device);
    device.begin_capture().unwrap();
    first.forward(&decoder, &Part { device, uploads: false });
    let graph = device.end_capture().unwrap();
    for step in 0..4 {
        let rows = Step::new(n, step, vocab_size);
        assert_eq!(rows.forward(&decoder, device), at);
        let eager = read(at);
        // Overwrites the results of the eager pass.
        device.fill(at, 0xff, eager.len()).unwrap();
        rows.forward(&decoder, &Part { device, uploads: true });
        device.replay(graph).unwrap();
        assert!(read(at) == eager, "{n} rows, step {step}: the graph's logits are not the pass's");
        assert!(eager.chunks_exact(4).all(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]).is_finite()));
        // Another step has other logits, so a graph that repeats its first results would be detected.
        let other = Step::new(n, step + 1, vocab_size).forward(&decoder, device);
        assert!(read(other) != eager, "{n} rows, step {step}");
    }
}

/// The numbers of rows use our product kernel and the library's.
#[test]
fn a_replayed_decode_step_has_the_bits_of_the_eager_pass() {
    let model = Tiny::sized("Qwen2ForCausalLM", true, |model| {
        (model.d_model, model.d_ff, model.vocab_size) = (72, 104, 75);
        (model.n_heads, model.n_kv_heads, model.d_head) = (6, 2, 64);
    });
    let folder = model.write();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    for n in [1, 3, 9].into_iter().chain(gpu_only("graph", [2, 4, 8, 16, 24, 32, 64, 128, 256])) {
        check(&checkpoint, n);
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
