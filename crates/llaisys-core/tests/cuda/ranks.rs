//! A model that is split over emulators, which are threads and exchange through host memory. Every rank computes the
//! whole model's results within roundings, with the same bits on all ranks and in every run. Other tests cover lost
//! ranks.

use crate::common::{Outputs, Rows, Tiny, feed, settings};
use crate::emulator::Emulator;
use crate::emulator::arrays::Arrays;
use crate::emulator::flaky::{Flaky, Fuse};
use llaisys_core::collective::LocalRank;
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::cuda::Gpu;
use llaisys_core::cuda::device::{Device, Element, Exchange};
use llaisys_core::cuda::forward::{CellCount, DeviceDecoder, DeviceLimits, load};
use llaisys_core::cuda::ops::join_columns::JoinColumns;
use llaisys_core::dtype::ComputeMode;
use llaisys_core::error::{DeviceError, Error};
use llaisys_core::forward::decoder::ForwardRows;
use llaisys_core::forward::shard::Shard;
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::ops::{AttentionRow, AttentionRows};
use llaisys_core::threads::Pool;
use safetensors::Dtype;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

const N_CELLS: usize = 40;
const N_TOKENS: usize = 30;
/// The rows of each pass: a prompt, decode rows, a chunk in the middle of a context.
const PASSES: [Range<usize>; 4] = [0..17, 17..18, 18..19, 19..30];

/// Returns a tiny model with four KV heads and 96 inner columns. The vocabulary is not divisible, and of four ranks the
/// last has no part of it. Numbers are those of bf16, so that only activations are rounded.
fn tiny(architecture: &'static str, tied_head: bool) -> Tiny {
    let model = Tiny::sized(architecture, tied_head, |model| {
        (model.d_model, model.d_ff, model.vocab_size) = (72, 96, 75);
        (model.n_heads, model.n_kv_heads, model.d_head) = (8, 4, 64);
    });
    model.in_bf16()
}

fn limits() -> DeviceLimits {
    let cells = CellCount::Exactly(N_CELLS);
    DeviceLimits { n_rows: 17, n_outputs: 17, max_len: N_TOKENS, n_listed: N_TOKENS, cells }
}

fn decoder(device: &Emulator, folder: &Path, limits: DeviceLimits) -> Result<DeviceDecoder, Error> {
    let checkpoint = Checkpoint::open(folder).unwrap();
    DeviceDecoder::new(device, &checkpoint, limits, &Pool::new(1).unwrap())
}

/// Runs one pass of the sequence and returns its logits.
fn pass(
    device: &Emulator,
    decoder: &DeviceDecoder,
    tokens: &[i32],
    range: Range<usize>,
) -> Result<Vec<f32>, DeviceError> {
    // Unordered: 7 and the number of cells have no common divisor.
    let cells: Vec<u32> = (0..N_TOKENS).map(|i| (i * 7 % N_CELLS) as u32).collect();
    let positions: Vec<i32> = range.clone().map(|position| position as i32).collect();
    let row = |position| AttentionRow { start: 0, n_hidden: 0, n_visible: position as u32 + 1 };
    let attention = AttentionRows {
        cells: &cells[..range.end],
        rows: &range.clone().map(row).collect::<Vec<_>>(),
        window: None,
        n_shared: &[],
    };
    let rows = ForwardRows {
        tokens: &tokens[range.clone()],
        positions: &positions,
        cells: &cells[range.clone()],
        attention,
        windowed: None,
        recurrent: None,
        lora: None,
    };
    let outputs: Vec<usize> = (0..range.len()).collect();
    let at = decoder.forward(device, &rows, &outputs)?;
    Ok(device.read(Element::F32, at, range.len() * decoder.config().vocab_size))
}

fn all_passes(device: &Emulator, folder: &Path, tokens: &[i32]) -> Vec<f32> {
    let decoder = decoder(device, folder, limits()).unwrap();
    PASSES.into_iter().flat_map(|range| pass(device, &decoder, tokens, range).unwrap()).collect()
}

/// Runs `job` for each rank, with its own device and thread, and returns the results in the order of the ranks.
fn on_ranks<T: Send>(world: usize, job: impl Fn(usize, &Emulator) -> T + Sync) -> Vec<T> {
    let job = &job;
    std::thread::scope(|scope| {
        let ends = LocalRank::group(world).into_iter().enumerate();
        let threads: Vec<_> =
            ends.map(|(rank, end)| scope.spawn(move || job(rank, &Emulator::joined(end)))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn on_cpu(folder: &Path, tokens: &[i32], mode: ComputeMode) -> Vec<f32> {
    let mut context = Context::load(folder, ContextConfig { mode, ..settings() }).unwrap();
    let seq = context.seq_acquire(0).unwrap();
    Rows::default().run(seq, 0, tokens).decode(&mut context).unwrap().logits.unwrap()
}

/// Returns the relative L2 distance.
fn distance(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (error / want.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>()).sqrt()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Compares a split model with the CPU in f32.
///
/// A whole layer rounds an activation about twelve times (norms and their products with weights, products, rotation,
/// attention, gate, both sums with the residual stream). Each of several ranks rounds its part of a branch. Together
/// these errors are as large as that of the whole branch, because the squares of the parts are smaller by the number of
/// ranks. The sum is rounded once more. That is two roundings in fourteen, so the L2 distance to f32 grows by a factor
/// of 1.08. The bound is therefore that of the whole model (`parity/decoder.rs`: twice the distance of the CPU in
/// bf16).
fn assert_ranks_agree(model: &Tiny, stored: Dtype) {
    let folder = model.write_as(stored);
    let tokens = model.tokens(5, N_TOKENS);
    let exact = on_cpu(&folder, &tokens, ComputeMode::Float32);
    let cpu = distance(&on_cpu(&folder, &tokens, ComputeMode::Bfloat16), &exact);
    let whole = all_passes(&Emulator::new(), &folder, &tokens);
    println!("{}: in bf16 on the CPU {cpu:e}, whole {:e}", model.architecture, distance(&whole, &exact));
    for world in [2, 4] {
        let ranks = on_ranks(world, |_, device| all_passes(device, &folder, &tokens));
        let ours = distance(&ranks[0], &exact);
        println!("on {world}: {ours:e}, to the whole {:e}", distance(&ranks[0], &whole));
        assert!(ours <= 2.0 * cpu, "{} on {world} ranks: {ours:e} and {cpu:e}", model.architecture);
        assert!(ranks.iter().all(|rank| bits(rank) == bits(&ranks[0])), "ranks differ in their bits");
        let again = on_ranks(world, |_, device| all_passes(device, &folder, &tokens));
        assert!(bits(&again[0]) == bits(&ranks[0]), "runs differ in their bits");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn llama_with_an_untied_head_matches_the_cpu() {
    assert_ranks_agree(&tiny("LlamaForCausalLM", false), Dtype::F32);
}

/// Weights that are stored in the device's type are copied without conversion.
#[test]
fn qwen2_with_biases_and_a_tied_head_in_bf16_matches_the_cpu() {
    assert_ranks_agree(&tiny("Qwen2ForCausalLM", true), Dtype::BF16);
}

#[test]
fn qwen3_with_head_norms_matches_the_cpu() {
    assert_ranks_agree(&tiny("Qwen3ForCausalLM", false), Dtype::BF16);
}

#[test]
fn phi3_with_joined_matrices_matches_the_cpu() {
    assert_ranks_agree(&tiny("Phi3ForCausalLM", false).joined(), Dtype::F32);
}

#[test]
fn each_rank_stores_its_part_and_gets_the_fewest_cells_of_all_ranks() {
    let folder = tiny("LlamaForCausalLM", true).write();
    let n_cells = on_ranks(2, |rank, device| {
        let cells = CellCount::Exactly(N_CELLS + 10 * rank);
        decoder(device, &folder, DeviceLimits { cells, ..limits() }).unwrap().n_cells()
    });
    assert_eq!(n_cells, [N_CELLS; 2]);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let n_bytes = |rank, world| load::n_bytes(&checkpoint, Shard { rank, world }).unwrap();
    let config = checkpoint.config();
    // Each rank has all embeddings and all norms. Norms are aligned to 256 bytes.
    let embeddings = 2 * config.d_model * load::n_head_rows(config.vocab_size, 2) * 2;
    let norms = (2 * config.n_layers + 1) * (config.d_model * 4).next_multiple_of(256);
    let matrices = n_bytes(0, 1) - config.d_model * config.vocab_size * 2 - norms;
    assert_eq!(n_bytes(0, 2), n_bytes(1, 2));
    assert!(n_bytes(0, 2).abs_diff(matrices / 2 + embeddings + norms) < 20 * 256, "{}", n_bytes(0, 2));
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Each rank refuses the model by itself and waits for no other rank.
#[test]
fn models_that_cannot_be_split_are_refused_by_name() {
    let folder = tiny("LlamaForCausalLM", true).write();
    for refused in on_ranks(3, |_, device| decoder(device, &folder, limits()).unwrap_err().to_string()) {
        assert!(refused.contains("over 3 ranks") && refused.contains("key-value heads"), "{refused}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// One rank aborts after the first pass, while the other is in the second pass or before it.
#[test]
fn an_abort_of_one_rank_is_an_error_on_the_others() {
    let model = tiny("LlamaForCausalLM", true);
    let (folder, tokens) = (model.write(), model.tokens(5, N_TOKENS));
    let results = on_ranks(2, |rank, device| {
        let decoder = decoder(device, &folder, limits()).unwrap();
        pass(device, &decoder, &tokens, 0..17).unwrap();
        if rank == 1 {
            device.abort();
        }
        pass(device, &decoder, &tokens, 17..18).map(|_| ())
    });
    for result in results {
        assert!(matches!(result, Err(DeviceError::RankLost { .. })), "{result:?}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn exchanges_are_captured_in_a_graph() {
    let sums = on_ranks(2, |rank, device| {
        let at = device.elements("a number", Element::F32, &[1.0 + rank as f32]);
        device.begin_capture().unwrap();
        device.exchange(&Exchange::AllReduceSum { at, n: 1, element: Element::F32 }).unwrap();
        let graph = device.end_capture().unwrap();
        assert_eq!(device.read(Element::F32, at, 1), [1.0 + rank as f32], "recorded, not run");
        device.replay(graph).unwrap();
        device.replay(graph).unwrap();
        device.read(Element::F32, at, 1)
    });
    assert_eq!(sums, [[6.0], [6.0]]);
    let alone = Emulator::new();
    let at = alone.elements("a number", Element::F32, &[1.0]);
    let error = alone.exchange(&Exchange::Broadcast { at, n: 1, element: Element::F32, root: 0 });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("broadcast of 1 x F32 from 0") && error.contains("joined no other ranks"),
        "{error}"
    );
}

#[test]
fn columns_are_joined_without_padding() {
    let device = Emulator::new();
    for (n_parts, n_rows, width, n_columns) in
        [(2, 1, 16, 17), (4, 3, 160, 601), (3, 5, 32, 96), (4, 2, 16, 30)]
    {
        let numbers: Vec<f32> = (0..n_parts * n_rows * width).map(|i| i as f32).collect();
        let parts = device.elements("parts", Element::F32, &numbers);
        let out = device.unwritten("the whole", Element::F32, n_rows * n_columns);
        JoinColumns { parts, out, n_rows, width, n_columns }.launch(&device).unwrap();
        let at =
            |row: usize, column: usize| ((column / width * n_rows + row) * width + column % width) as f32;
        let want: Vec<f32> =
            (0..n_rows).flat_map(|row| (0..n_columns).map(move |column| at(row, column))).collect();
        assert_eq!(device.read(Element::F32, out, n_rows * n_columns), want);
    }
}

/// Opens a context on emulators, the last of which has the fuse. Rank `absent` cannot open its device.
fn context(model: &Tiny, n_ranks: usize, fuse: &Fuse, absent: Option<usize>) -> Result<Context, Error> {
    let folder = model.write();
    let ends: Vec<_> = LocalRank::group(n_ranks).into_iter().map(|end| Mutex::new(Some(end))).collect();
    let config = ContextConfig { mode: ComputeMode::Auto, n_streams: 2, n_ranks, ..settings() };
    let open = |rank: usize| {
        let end = ends[rank].lock().unwrap().take().unwrap();
        if absent == Some(rank) {
            return Err(
                DeviceError::Cuda { op: "open GPU".into(), status: format!("there is no {rank}") }.into()
            );
        }
        let fuse = if rank + 1 == n_ranks { fuse.clone() } else { Fuse::new() };
        Ok(Gpu {
            device: Box::new(Flaky::joined(&fuse, end)),
            memory_share: None,
            graphs: true,
            overlap: true,
        })
    };
    let made = Context::on_gpus(Checkpoint::open(&folder).unwrap(), config, &open);
    std::fs::remove_dir_all(&folder).unwrap();
    made
}

/// Chunks, two sequences with a common prefix, cells that are copied to another stream, exported and imported: all give
/// the bits of a context that only computes.
#[test]
fn shared_copied_and_imported_prefixes_give_the_same_bits_on_several_ranks() {
    let model = tiny("Qwen2ForCausalLM", true);
    let (folder, tokens) = (model.write(), model.tokens(5, N_TOKENS));
    let exact = on_cpu(&folder, &tokens, ComputeMode::Float32);
    let cpu = distance(&on_cpu(&folder, &tokens, ComputeMode::Bfloat16), &exact);
    std::fs::remove_dir_all(&folder).unwrap();
    for n_ranks in [2, 4] {
        let mut context = context(&model, n_ranks, &Fuse::new(), None).unwrap();
        let [seq, copy, imported] = [0, 1, 0].map(|stream| context.seq_acquire(stream).unwrap());
        let decode_rest = |context: &mut Context, seq, outputs: &mut Outputs| {
            outputs.push(&Rows::default().run(seq, 20, &tokens[20..]).decode(context).unwrap());
        };
        let mut outputs = feed(&mut context, seq, &tokens[..20], 11);
        context.kv_seq_cp(seq, copy, -1, -1).unwrap();
        context.kv_node_cache(1, seq, 0, 20).unwrap();
        let data = context.kv_node_export(1, 0, 20).unwrap();
        assert_eq!(data.len(), 20 * model.n_layers * 2 * model.n_kv_heads * model.d_head * 2);
        context.kv_node_import(7, 0, 0, &data).unwrap();
        context.kv_node_attach(7, imported, 0, 20).unwrap();
        let [mut of_copy, mut of_imported] = [outputs.clone(), outputs.clone()];
        decode_rest(&mut context, seq, &mut outputs);
        decode_rest(&mut context, copy, &mut of_copy);
        decode_rest(&mut context, imported, &mut of_imported);
        assert!(of_copy == outputs && of_imported == outputs, "{n_ranks} ranks");
        assert_eq!(outputs.hidden.len(), N_TOKENS * model.d_model);
        let logits: Vec<f32> = outputs.logits.iter().map(|&bits| f32::from_bits(bits)).collect();
        // As in `assert_ranks_agree`.
        let ours = distance(&logits, &exact);
        assert!(ours <= 2.0 * cpu, "{n_ranks} ranks: {ours:e} and {cpu:e}");
    }
}

/// No rank waits for a rank that is absent or lost. The context returns that rank's error.
#[test]
fn an_error_of_one_rank_is_the_error_of_the_context() {
    let model = tiny("LlamaForCausalLM", true);
    for absent in [0, 1, 2] {
        let Err(error) = context(&model, 4, &Fuse::new(), Some(absent)) else {
            panic!("rank {absent} is absent")
        };
        assert!(error.to_string().contains(&format!("there is no {absent}")), "{error}");
    }
    let fuse = Fuse::new();
    let mut context = context(&model, 2, &fuse, None).unwrap();
    let seq = context.seq_acquire(0).unwrap();
    let rows = Rows::default().run(seq, 0, &model.tokens(5, 9));
    fuse.fail(7);
    let error = rows.decode(&mut context).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("(701)"), "{error}");
    // The group has ended, so the context must be created again.
    let error = rows.decode(&mut context).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Device(DeviceError::RankLost { .. })), "{error}");
    assert!(!context.is_broken());
}

#[test]
fn several_ranks_on_one_device_are_refused() {
    let folder = tiny("LlamaForCausalLM", true).write();
    let gpu = Gpu { device: Box::new(Emulator::new()), memory_share: None, graphs: true, overlap: true };
    let config = ContextConfig { mode: ComputeMode::Auto, n_ranks: 2, ..settings() };
    let made = Context::on_gpu(Checkpoint::open(&folder).unwrap(), config, gpu);
    std::fs::remove_dir_all(&folder).unwrap();
    let Err(error) = made else { panic!("two ranks on one device") };
    assert!(error.to_string().contains("2 on one GPU"), "{error}");
}
