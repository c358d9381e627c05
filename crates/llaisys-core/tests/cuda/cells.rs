//! Changes of a device decoder's cells and weights by the context, and the context's state after the device failed. On
//! the emulator.

use crate::common::{Outputs, Random, Rows, Tiny, feed};
use crate::emulator::Emulator;
use crate::emulator::flaky::{Flaky, Fuse};
use llaisys_core::Error;
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::cuda::Gpu;
use llaisys_core::cuda::forward::{CellCount, DeviceDecoder, DeviceLimits};
use llaisys_core::dtype::{ComputeMode, KvDType};
use llaisys_core::error::Unsupported;
use llaisys_core::load::checkpoint::Checkpoint;
use llaisys_core::threads::Pool;

const GIB: usize = 1 << 30;

/// Two streams of 64 cells, passes of 16 rows.
fn settings() -> ContextConfig {
    ContextConfig { mode: ComputeMode::Auto, n_cells: 128, n_streams: 2, ..crate::common::settings() }
}

fn model() -> Tiny {
    Tiny::for_gpu("Qwen2ForCausalLM", true)
}

/// Opens a context on a device of `total_bytes` with this fuse.
fn open(
    model: &Tiny,
    config: ContextConfig,
    fuse: &Fuse,
    total_bytes: usize,
    memory_share: Option<f64>,
) -> Result<Context, Error> {
    let folder = model.write();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let device = Box::new(Flaky::new(fuse, total_bytes));
    let gpu = Gpu { device, memory_share, graphs: true, overlap: false };
    let context = Context::on_gpu(checkpoint, config, gpu);
    std::fs::remove_dir_all(&folder).unwrap();
    context
}

fn without_failures(model: &Tiny) -> Context {
    open(model, settings(), &Fuse::new(), GIB, None).unwrap()
}

#[test]
fn cells_are_copied_filled_and_written_in_every_layer() {
    const N_CELLS: usize = 8400;
    let model = Tiny::sized("LlamaForCausalLM", true, |model| {
        (model.n_layers, model.d_model, model.d_ff, model.vocab_size) = (1, 64, 8, 8);
        (model.n_heads, model.n_kv_heads, model.d_head) = (1, 1, 64);
    });
    let (device, folder) = (Emulator::new(), model.write());
    let limits =
        DeviceLimits { n_rows: 1, n_outputs: 1, max_len: 1, n_listed: 1, cells: CellCount::Exactly(N_CELLS) };
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let decoder = DeviceDecoder::new(&device, &checkpoint, limits, &Pool::new(1).unwrap()).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(decoder.cell_bytes(), 2 * 64 * 2);

    let all: Vec<u32> = (0..N_CELLS as u32).collect();
    let mut random = Random(1);
    let mut want: Vec<u8> = (0..N_CELLS * 256).map(|_| random.next_u64() as u8).collect();
    decoder.write_cells(&device, &all, &want).unwrap();
    // More cells than one launch copies, from every second cell to targets in another order.
    let from: Vec<u32> = (0..4100).map(|i| 2 * i).collect();
    let to: Vec<u32> = (0..4100).rev().map(|i| 2 * i + 1).collect();
    decoder.copy_cells(&device, &from, &to).unwrap();
    for array in want.chunks_exact_mut(N_CELLS * 128) {
        for (&from, &to) in from.iter().zip(&to) {
            array.copy_within(from as usize * 128..(from as usize + 1) * 128, to as usize * 128);
        }
    }
    assert!(decoder.read_cells(&device, &all).unwrap() == want);
    // Cells that are not adjacent, one of them the last.
    let filled = [7, 8, 9, 11, N_CELLS as u32 - 1];
    decoder.nan_fill(&device, &filled).unwrap();
    for array in want.chunks_exact_mut(N_CELLS * 128) {
        filled.iter().for_each(|&cell| array[cell as usize * 128..][..128].fill(0xff));
    }
    assert!(decoder.read_cells(&device, &all).unwrap() == want);
    let apart = decoder.read_cells(&device, &[11, 3, 4]).unwrap();
    let part = |array: usize, cell: usize| &want[(array * N_CELLS + cell) * 128..][..128];
    assert_eq!(apart, [(0, 11), (0, 3), (0, 4), (1, 11), (1, 3), (1, 4)].map(|(a, c)| part(a, c)).concat());
    decoder.nan_fill_all(&device).unwrap();
    assert!(decoder.read_cells(&device, &all).unwrap().iter().all(|&byte| byte == 0xff));
}

#[test]
fn a_failed_launch_in_a_decode_changes_nothing() {
    let tokens = model().tokens(1, 30);
    let fuse = Fuse::new();
    let mut context = open(&model(), settings(), &fuse, GIB, None).unwrap();
    let seq = context.seq_acquire(0).unwrap();
    feed(&mut context, seq, &tokens[..4], 4);
    let rows = Rows::default().run(seq, 4, &tokens[4..]);
    fuse.fail(1000);
    rows.decode(&mut context).unwrap();
    let n_launches = 1000 - fuse.left();
    context.kv_seq_rm(seq, 4, -1).unwrap();
    let before = (context.digest(), context.progress().sample().n_rows_committed);
    // In the first layer of the first pass, in the last layer of the second, and in the gather of its outputs.
    for n in [3, n_launches - 2, n_launches] {
        fuse.fail(n);
        let Err(error) = rows.decode(&mut context) else { panic!("launch {n} of {n_launches}") };
        assert!(matches!(error, Error::Device(_)) && error.to_string().contains("701"), "{n}: {error}");
        assert_eq!((context.digest(), context.progress().sample().n_rows_committed), before, "{n}");
        assert!(!context.is_broken());
    }
    let (mut got, mut want) = (Outputs::default(), Outputs::default());
    got.push(&rows.decode(&mut context).unwrap());
    let mut fresh = without_failures(&model());
    let seq = fresh.seq_acquire(0).unwrap();
    feed(&mut fresh, seq, &tokens[..4], 4);
    want.push(&Rows::default().run(seq, 4, &tokens[4..]).decode(&mut fresh).unwrap());
    assert!(got == want);
}

/// The KV cache has changed already, and the contents of its cells are unknown.
#[test]
fn a_failed_launch_in_a_change_of_cells_breaks_the_context() {
    type Change = fn(&mut Context) -> Result<(), Error>;
    let changes: [Change; 3] = [
        |context| {
            let [seq, other] = [0, 1].map(|stream| context.seq_acquire(stream).unwrap());
            feed(context, seq, &[1, 2, 3], 3);
            context.kv_seq_cp(seq, other, -1, -1)
        },
        |context| {
            let other = context.seq_acquire(1).unwrap();
            context.kv_node_attach(1, other, 0, 2)
        },
        |context| {
            let seq = context.seq_acquire(0).unwrap();
            feed(context, seq, &[1, 2, 3], 3);
            context.kv_seq_add(seq, 0, -1, 3)
        },
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let fuse = Fuse::new();
        let mut context = open(&model(), settings(), &fuse, GIB, None).unwrap();
        let seq = context.seq_acquire(0).unwrap();
        feed(&mut context, seq, &[1, 2], 2);
        context.kv_node_cache(1, seq, 0, 2).unwrap();
        // A pass has its launches before those of the change.
        fuse.fail(if i == 1 { 1 } else { launches_of_a_pass() + 1 });
        assert!(matches!(change(&mut context), Err(Error::Device(_))), "change {i}");
        assert!(context.is_broken(), "change {i}");
    }
}

/// Returns the number of launches of a pass of three rows with outputs.
fn launches_of_a_pass() -> i64 {
    let fuse = Fuse::new();
    let mut context = open(&model(), settings(), &fuse, GIB, None).unwrap();
    let seq = context.seq_acquire(0).unwrap();
    fuse.fail(1000);
    feed(&mut context, seq, &[1, 2, 3], 3);
    1000 - fuse.left()
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    let refused = |config| open(&model(), config, &Fuse::new(), GIB, None).unwrap_err();
    let base = settings();
    let wrong = [
        (ContextConfig { mode: ComputeMode::Float32, ..base }, "dtype \"float32 on a GPU\""),
        (ContextConfig { mode: ComputeMode::Int8, ..base }, "quantization \"int8 on a GPU\""),
        (ContextConfig { kv_dtype: Some(KvDType::Float32), ..base }, "kv_cache_dtype \"float32 on a GPU\""),
        (ContextConfig { n_ranks: 2, ..base }, "tensor_parallel_size \"2 on one GPU\""),
        (ContextConfig { max_loras: 1, ..base }, "enable_lora \"true on a GPU\""),
    ];
    for (config, text) in wrong {
        let error = refused(config);
        assert!(matches!(error, Error::Unsupported(Unsupported::Feature { .. })), "{error}");
        assert!(error.to_string().contains(text), "{error}");
    }
    let same = ContextConfig { mode: ComputeMode::Bfloat16, kv_dtype: Some(KvDType::Bfloat16), ..base };
    assert_eq!(open(&model(), same, &Fuse::new(), GIB, None).unwrap().computes_on(), "emulator");
}

#[test]
fn cells_fill_the_allowed_share_of_memory() {
    let share = |total, share, n_streams| {
        open(&model(), ContextConfig { n_streams, ..settings() }, &Fuse::new(), total, Some(share))
    };
    // 256 MiB are kept for graphs; 1 MiB is 1,024 cells of 1 KiB, one of which is the device's dummy cell.
    assert_eq!(share(514 << 20, 0.5, 1).unwrap().n_cells(), 1023);
    let context = share(514 << 20, 0.5, 2).unwrap();
    assert_eq!((context.n_cells(), context.n_cells_free_in(1).unwrap()), (1022, 511));
    let error = share(512 << 20, 0.5, 1).unwrap_err().to_string();
    assert!(error.contains("gpu_memory_utilization") && error.contains("0 fit"), "{error}");
}

#[test]
fn replaced_weights_give_the_outputs_of_a_checkpoint_with_them() {
    let tokens = model().tokens(2, 20);
    let at = |name: &str| format!("model.layers.1.{name}");
    let names = [
        at("self_attn.k_proj.weight"),
        at("self_attn.v_proj.bias"),
        at("mlp.up_proj.weight"),
        at("mlp.down_proj.weight"),
        at("input_layernorm.weight"),
        "model.norm.weight".to_owned(),
        "model.embed_tokens.weight".to_owned(),
    ];
    let mut other = model();
    let mut context = without_failures(&model());
    let fingerprint = context.fingerprint();
    for (i, name) in names.iter().enumerate() {
        let (shape, values) = other.tensors.get_mut(name).unwrap();
        values.rotate_left(i + 1);
        context.replace_weight(name, shape, values).unwrap();
    }
    assert_ne!(context.fingerprint(), fingerprint);
    let [got, want, old] =
        [context, without_failures(&other), without_failures(&model())].map(|mut context| {
            let seq = context.seq_acquire(0).unwrap();
            feed(&mut context, seq, &tokens, 20)
        });
    assert!(got == want && got != old);
}
