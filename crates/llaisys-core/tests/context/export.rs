//! Export and import of keys and values between contexts: decodes continue with the same bits, and invalid data is
//! rejected.

use crate::common::{Outputs, Rows, Tiny, feed, load};
use crate::model_files::golden;
use llaisys_core::Error;
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::dtype::{ComputeMode, KvDType};
use llaisys_core::error::{Exhausted, Rejected};
use llaisys_core::kv::KvError;
use llaisys_core::ops::dispatch::IsaName;

/// One thread: the bits do not depend on the number of threads (`decode.rs`), and many small decodes are faster.
fn settings() -> ContextConfig {
    ContextConfig { n_threads: 1, ..crate::common::settings() }
}

fn model() -> Tiny {
    Tiny::odd("LlamaForCausalLM", true)
}

/// Exports positions 3 to 26 of a sequence, whose cells are not contiguous.
fn exported(context: &mut Context, tokens: &[i32]) -> Vec<u8> {
    let [other, seq] = [(); 2].map(|()| context.seq_acquire(0).unwrap());
    feed(context, other, &[1, 2, 3], 3);
    feed(context, seq, &tokens[..9], 9);
    context.seq_release(other).unwrap();
    let third = context.seq_acquire(0).unwrap();
    feed(context, third, &[4; 40], 40);
    Rows::default().run(seq, 9, &tokens[9..27]).decode(context).unwrap();
    context.kv_node_cache(1, seq, 0, 27).unwrap();
    context.kv_node_export(1, 3, 27).unwrap()
}

#[test]
fn another_context_continues_with_the_same_bits() {
    let tokens = model().tokens(1, 40);
    for kv_dtype in KvDType::ALL {
        let config = ContextConfig { kv_dtype: Some(kv_dtype), lifo: true, ..settings() };
        let mut source = load(&model(), config);
        let data = exported(&mut source.context, &tokens);
        // Two layers, each with K and V of one head of 16.
        assert_eq!(data.len(), 24 * 2 * 2 * kv_dtype.head_bytes(16));
        let want = source.context.seq_acquire(0).unwrap();
        source.context.kv_node_attach(1, want, 0, 27).unwrap();
        let go_on = |seq| Rows::default().run(seq, 27, &tokens[27..]);
        let mut expected = Outputs::default();
        expected.push(&go_on(want).decode(&mut source.context).unwrap());

        let mut target = load(&model(), ContextConfig { n_streams: 2, ..config });
        let context = &mut target.context;
        assert_eq!(context.fingerprint(), source.context.fingerprint());
        let seq = context.seq_acquire(0).unwrap();
        feed(context, seq, &tokens[..3], 3);
        context.kv_node_import(7, 1, 3, &data).unwrap();
        assert_eq!(context.kv_node_export(7, 3, 27).unwrap(), data);
        context.kv_node_attach(7, seq, 3, 27).unwrap();
        context.check_integrity();
        let mut got = Outputs::default();
        got.push(&go_on(seq).decode(context).unwrap());
        assert!(got == expected, "{kv_dtype:?}");
    }
}

#[test]
fn part_of_an_export_equals_the_export_of_the_part() {
    let tokens = model().tokens(2, 40);
    let mut loaded = load(&model(), settings());
    let context = &mut loaded.context;
    let data = exported(context, &tokens);
    let part = context.kv_node_export(1, 5, 8).unwrap();
    let row = 16 * 4;
    for (tensor, got) in part.chunks_exact(3 * row).enumerate() {
        assert_eq!(got, &data[(tensor * 24 + 2) * row..][..3 * row], "tensor {tensor}");
    }
}

#[test]
fn rejected_import_has_no_side_effects() {
    let tokens = model().tokens(3, 40);
    let mut loaded = load(&model(), ContextConfig { n_cells: 128, n_streams: 2, ..settings() });
    let context = &mut loaded.context;
    let seq = context.seq_acquire(0).unwrap();
    feed(context, seq, &tokens, 40);
    context.kv_node_cache(1, seq, 0, 27).unwrap();
    let data = context.kv_node_export(1, 0, 27).unwrap();
    let of_cell = data.len() / 27;
    let before = context.digest();
    for wrong in [&data[..0], &data[1..], &data[..of_cell - 1]] {
        let rejected = context.kv_node_import(2, 1, 0, wrong).unwrap_err();
        let bytes = wrong.len();
        assert!(
            matches!(rejected, Error::Rejected(Rejected::CellBytes { got, of_cell: n }) if (got, n) == (bytes, of_cell)),
            "{rejected}"
        );
    }
    let rejected = context.kv_node_import(2, 0, 0, &data).unwrap_err();
    assert!(
        matches!(rejected, Error::Exhausted(Exhausted::Cells { needed: 27, free: 24, .. })),
        "{rejected}"
    );
    let rejected = context.kv_node_import(2, 1, 102, &data).unwrap_err();
    assert!(
        matches!(rejected, Error::Rejected(Rejected::OutOfRange { got: 129, max: 128, .. })),
        "{rejected}"
    );
    for (node, stream, p0) in [(1, 1, 0), (2, 2, 0), (2, 1, -1)] {
        let rejected = context.kv_node_import(node, stream, p0, &data).unwrap_err();
        assert!(matches!(rejected, Error::Rejected(Rejected::Kv(_))), "{rejected}");
    }
    for (node, p0, p1, error) in [
        (2, 0, 1, KvError::NoNode { node: 2 }),
        (1, 0, 28, KvError::NodeLacks { node: 1, position: 27 }),
        (1, 5, 5, KvError::Range { p0: 5, p1: 5 }),
    ] {
        let rejected = context.kv_node_export(node, p0, p1).unwrap_err();
        assert!(matches!(rejected, Error::Rejected(Rejected::Kv(e)) if e == error), "{rejected}");
    }
    assert_eq!(context.digest(), before);
    context.kv_node_import(2, 1, 101, &data).unwrap();
}

#[test]
fn contexts_with_different_keys_have_different_fingerprints() {
    let same = |config| load(&model(), config).context.fingerprint();
    let ours = same(settings());
    assert_eq!((ours.len(), &ours), (32, &same(settings())));
    assert_eq!(
        ours,
        same(ContextConfig { n_cells: 64, n_batch: 5, n_threads: 2, n_streams: 2, ..settings() })
    );
    let mut others = vec![
        same(ContextConfig { mode: ComputeMode::Bfloat16, ..settings() }),
        same(ContextConfig { kv_dtype: Some(KvDType::Float16), ..settings() }),
        same(ContextConfig { kv_dtype: Some(KvDType::Bfloat16), ..settings() }),
        same(ContextConfig { kv_dtype: Some(KvDType::Int8), ..settings() }),
    ];
    for isa in IsaName::available().into_iter().skip(1) {
        others.push(same(ContextConfig { isa: Some(isa), ..settings() }));
    }
    let mut changed = model();
    let name = "model.layers.1.self_attn.k_proj.weight";
    let (shape, values) = changed.tensors.get_mut(name).unwrap();
    values[17] += 1.0;
    let (shape, values) = (shape.clone(), values.clone());
    others.push(load(&changed, settings()).context.fingerprint());
    let mut replaced = load(&model(), settings());
    replaced.context.replace_weight(name, &shape, &values).unwrap();
    others.push(replaced.context.fingerprint());
    let rejected = replaced.context.replace_weight(name, &[1], &[0.0]);
    assert!(rejected.is_err() && others.last() == Some(&replaced.context.fingerprint()));
    others.push(
        load(&Tiny::sized("LlamaForCausalLM", true, |m| m.max_positions = 513), settings())
            .context
            .fingerprint(),
    );
    others.push(ours);
    let n = others.len();
    others.sort_unstable();
    others.dedup();
    assert_eq!(others.len(), n, "{others:?}");
}

/// Session files contain fingerprints. If this fails, either restore what the fingerprint hashed before, or increase
/// `KV_FORMAT` because keys and values changed; then saved sessions of earlier versions are rejected.
#[test]
fn fingerprints_of_golden_folders_are_pinned() {
    let pinned = [
        ("qwen2-odd-f32-sharded", "fd87a53af25108ce2be0a3048c7af2fd"),
        ("llama3-rope-bf16", "fa865c23dac9e9910c75f1ee4408b5f8"),
        ("mistral-bf16", "7dfd5032d1267deaf42911d0d6ab85b8"),
        ("qwen3_moe_bf16", "faa39759d6b182df7afd813a28ccb030"),
    ];
    let config = ContextConfig { isa: Some(IsaName::Scalar), ..settings() };
    let found = pinned.map(|(name, _)| (name, Context::load(&golden(name), config).unwrap().fingerprint()));
    assert_eq!(found.each_ref().map(|(name, fingerprint)| (*name, fingerprint.as_str())), pinned);
}
