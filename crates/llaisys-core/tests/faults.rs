//! Every fault point is hit once with each of its actions in every call that reaches it. The tests check the error, the
//! side effects, and whether the context can be used again. They need the feature `faults`, which `make test` sets.
#![cfg(feature = "faults")]

mod common;

use common::{Loaded, Outputs, Rows, Tiny, feed, load, settings};
use llaisys_core::Error;
use llaisys_core::batch::output;
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::error::Result;
use llaisys_core::faults::{Action, SetError, hits, names, set};
use llaisys_core::sample::SamplerSpec;
use llaisys_core::seq::SeqId;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Points after which the context is broken.
const BREAKING: [&str; 3] = ["kv.change", "kv.prepare", "kv.commit"];

/// The table of faults is shared by the process, so one test runs at a time.
fn lock_table() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ranks of the contexts under test.
const RANKS: [usize; 2] = [1, 2];

fn model() -> Tiny {
    Tiny::sized("Qwen2ForCausalLM", true, |model| (model.n_heads, model.n_kv_heads) = (4, 2))
}

fn config(n_ranks: usize) -> ContextConfig {
    ContextConfig { n_streams: 2, n_batch: 5, lifo: true, n_ranks, ..settings() }
}

/// A context in which every call has an effect: two sequences in one stream, one in the other, a cache node.
struct Scene {
    loaded: Loaded,
    a: SeqId,
    b: SeqId,
    abroad: SeqId,
    data: Vec<u8>,
}

fn scene(n_ranks: usize) -> Scene {
    let tokens = model().tokens(1, 20);
    let mut loaded = load(&model(), config(n_ranks));
    let context = &mut loaded.context;
    let (a, b) = (context.seq_acquire(0).unwrap(), context.seq_acquire(0).unwrap());
    let abroad = context.seq_acquire(1).unwrap();
    feed(context, a, &tokens, 20);
    feed(context, b, &tokens[..7], 7);
    context.kv_node_cache(1, a, 0, 12).unwrap();
    let data = context.kv_node_export(1, 0, 12).unwrap();
    Scene { loaded, a, b, abroad, data }
}

type Call = (&'static str, fn(&mut Scene) -> Result<()>);

/// Every call of the context that has a fault point.
const CALLS: [Call; 25] = [
    ("seq_acquire", |s| s.loaded.context.seq_acquire(0).map(drop)),
    ("seq_release", |s| s.loaded.context.seq_release(s.b)),
    ("seq_set_lora", |s| s.loaded.context.seq_set_lora(s.abroad, None)),
    ("lora_load", |s| without_adapters(s.loaded.context.lora_load(Path::new("adapter")).map(drop))),
    ("lora_unload", |s| without_adapters(s.loaded.context.lora_unload(0))),
    ("set_sampler", |s| s.loaded.context.set_sampler(s.b, SamplerSpec::default(), &[1], &[])),
    ("decode", |s| both(s).decode(&mut s.loaded.context).map(drop)),
    ("decode with drafts", |s| drafts(s).decode(&mut s.loaded.context).map(drop)),
    ("kv_seq_rm", |s| s.loaded.context.kv_seq_rm(s.b, 3, -1)),
    ("kv_seq_cp", |s| s.loaded.context.kv_seq_cp(s.a, s.b, 7, 10)),
    ("kv_seq_cp abroad", |s| s.loaded.context.kv_seq_cp(s.a, s.abroad, 0, 10)),
    ("kv_seq_keep", |s| s.loaded.context.kv_seq_keep(s.a)),
    ("kv_seq_add", |s| s.loaded.context.kv_seq_add(s.b, 0, -1, 3)),
    ("kv_node_cache", |s| s.loaded.context.kv_node_cache(2, s.a, 12, 15)),
    ("kv_node_attach", |s| s.loaded.context.kv_node_attach(1, s.abroad, 0, 9)),
    ("kv_node_relink", |s| s.loaded.context.kv_node_relink(1, s.b, 0, 7)),
    ("kv_node_keep_state", |s| without_states(s.loaded.context.kv_node_keep_state(1, s.a))),
    ("kv_node_export_state", |s| without_states(s.loaded.context.kv_node_export_state(1).map(drop))),
    ("kv_node_import_state", |s| without_states(s.loaded.context.kv_node_import_state(1, &s.data))),
    ("kv_node_drop_state", |s| s.loaded.context.kv_node_drop_state(1)),
    ("kv_node_split", |s| s.loaded.context.kv_node_split(1, 5, 2)),
    ("kv_node_trim", |s| s.loaded.context.kv_node_trim(1, 5)),
    ("kv_node_export", |s| s.loaded.context.kv_node_export(1, 0, 12).map(drop)),
    ("kv_node_import", |s| s.loaded.context.kv_node_import(3, 1, 0, &s.data)),
    ("replace_weight", |s| {
        let (shape, values) = model().tensors["model.norm.weight"].clone();
        s.loaded.context.replace_weight("model.norm.weight", &shape, &values)
    }),
];

/// The model has no recurrent layers, so these calls are rejected after their fault point.
fn without_states(result: Result<()>) -> Result<()> {
    match result {
        Err(Error::Rejected(_)) => Ok(()),
        result => result,
    }
}

/// The context has no place for adapters, so these calls are rejected after their fault point.
fn without_adapters(result: Result<()>) -> Result<()> {
    match result {
        Err(Error::Rejected(_) | Error::Unsupported(_)) => Ok(()),
        result => result,
    }
}

/// A decode of several passes over both sequences of the first stream.
fn both(scene: &Scene) -> Rows {
    let tokens = model().tokens(1, 20);
    Rows::default().run(scene.a, 20, &[7, 8, 9]).run(scene.b, 7, &tokens[7..15])
}

/// A decode of several passes with drafts in both sequences, of which the first ones of `a` are rejected.
fn drafts(scene: &Scene) -> Rows {
    let draft = output::LOGITS | output::DRAFT;
    let base = Rows::default().row(7, 20, &[scene.a], output::LOGITS);
    let rows = (21..25).fold(base, |rows, position| rows.row(position, position, &[scene.a], draft));
    let rows = rows.row(7, 7, &[scene.b], output::LOGITS);
    (8..11).fold(rows, |rows, position| rows.row(position, position, &[scene.b], draft))
}

fn bits(context: &mut Context, rows: &Rows) -> Outputs {
    let mut outputs = Outputs::default();
    outputs.push(&rows.decode(context).unwrap());
    outputs
}

/// The points that a call reaches on `n_ranks` ranks without a fault.
fn passed(call: Call, n_ranks: usize) -> Vec<&'static str> {
    let mut scene = scene(n_ranks);
    let before: Vec<_> = names().map(hits).collect();
    (call.1)(&mut scene).unwrap();
    names().zip(before).filter(|(point, before)| hits(point) > *before).map(|(point, _)| point).collect()
}

/// An error or panic at any point of a call is reported and has no side effects: later calls have the same results as
/// without it. After a fault in the middle of a change, the context reports that it is broken.
#[test]
fn every_point_of_every_call_has_no_side_effects_or_breaks_the_context() {
    let _lock = lock_table();
    let mut reached = std::collections::BTreeSet::new();
    for n_ranks in RANKS {
        let mut reference = scene(n_ranks);
        let rows = both(&reference);
        let want = bits(&mut reference.loaded.context, &rows);
        // A weight of a split model cannot be replaced.
        for call in CALLS.into_iter().filter(|call| n_ranks == 1 || call.0 != "replace_weight") {
            for point in passed(call, n_ranks) {
                reached.insert(point);
                fail_at(call, n_ranks, point, Action::Panic, &want);
                if set(point, Action::Error, 1).is_ok() {
                    set(point, Action::Off, 1).unwrap();
                    fail_at(call, n_ranks, point, Action::Error, &want);
                }
            }
        }
    }
    let missed: Vec<_> = names().filter(|point| !reached.contains(point)).collect();
    assert!(missed.is_empty(), "no call reaches {missed:?}");
}

fn fail_at(call: Call, n_ranks: usize, point: &'static str, action: Action, want: &Outputs) {
    let mut scene = scene(n_ranks);
    let before = scene.loaded.context.digest();
    let name = format!("{} with {action:?} at {point} on {n_ranks} ranks", call.0);
    set(point, action, 1).unwrap();
    match (action, catch_unwind(AssertUnwindSafe(|| (call.1)(&mut scene)))) {
        (Action::Error, Ok(Err(Error::Injected { point: p }))) => assert_eq!(p, point, "{name}"),
        (Action::Panic, Err(_)) => {}
        (_, result) => panic!("{name}: {result:?}"),
    }
    let context = &mut scene.loaded.context;
    assert_eq!(context.is_broken(), BREAKING.contains(&point), "{name}");
    if context.is_broken() {
        return;
    }
    assert_eq!(context.digest(), before, "{name} has side effects");
    context.check_integrity();
    let progress = context.progress().sample();
    assert_eq!(progress.n_steps_begun, progress.n_steps_ended, "{name}");
    let rows = both(&scene);
    assert!(&bits(&mut scene.loaded.context, &rows) == want, "{name}: the next decode differs");
}

#[test]
fn fault_in_any_pass_or_layer_rolls_back() {
    let _lock = lock_table();
    RANKS.into_iter().for_each(fail_in_any_pass_or_layer);
}

fn fail_in_any_pass_or_layer(n_ranks: usize) {
    let mut reference = scene(n_ranks);
    let rows = both(&reference);
    let before = reference.loaded.context.digest();
    // Eleven rows in passes of five: three passes, two layers each.
    let points = [("decode.forward", 3), ("decode.layer", 6), ("decode.logits", 3), ("sampler.row", 11)];
    let of_ranks = (n_ranks > 1).then_some(("decode.rank", 3));
    for (point, n_hits) in points.into_iter().chain(of_ranks) {
        for nth in 1..=n_hits {
            set(point, Action::Panic, nth).unwrap();
            let context = &mut reference.loaded.context;
            let result = catch_unwind(AssertUnwindSafe(|| rows.decode(context)));
            assert!(result.is_err(), "{point} {nth}");
            assert_eq!(reference.loaded.context.digest(), before, "{point} {nth}");
        }
        let mut fresh = scene(n_ranks);
        set(point, Action::Panic, n_hits + 1).unwrap();
        let rows = both(&fresh);
        rows.decode(&mut fresh.loaded.context).unwrap();
        set(point, Action::Off, 1).unwrap();
    }
}

#[test]
fn leaked_release_returns_success_without_releasing() {
    let _lock = lock_table();
    let mut scene = scene(1);
    let free = (scene.loaded.context.n_cells_free(), scene.loaded.context.n_seq_free());
    set("seq.release", Action::Leak, 1).unwrap();
    scene.loaded.context.seq_release(scene.b).unwrap();
    assert_eq!((scene.loaded.context.n_cells_free(), scene.loaded.context.n_seq_free()), free);
    let leaked: Vec<SeqId> = scene.loaded.context.snapshot().sequences.iter().map(|held| held.id).collect();
    assert!(leaked.contains(&scene.b), "the snapshot still has it");
}

#[test]
fn pause_stops_the_step_until_it_ends() {
    let _lock = lock_table();
    let mut scene = scene(1);
    let progress = scene.loaded.context.progress();
    set("decode.placed", Action::Pause, 1).unwrap();
    let rows = both(&scene);
    std::thread::scope(|scope| {
        let step = scope.spawn(|| rows.decode(&mut scene.loaded.context).unwrap());
        while progress.sample().n_steps_begun == progress.sample().n_steps_ended {
            std::thread::yield_now();
        }
        assert!(!step.is_finished());
        set("decode.placed", Action::Off, 1).unwrap();
        step.join().unwrap();
    });
    assert_eq!(progress.sample().n_steps_begun, progress.sample().n_steps_ended);
}

#[test]
fn unknown_points_are_rejected() {
    assert_eq!(set("nowhere", Action::Panic, 1), Err(SetError::NoSuchPoint));
    assert_eq!(set("decode.layer", Action::Error, 1), Err(SetError::NoSuchAction));
    assert_eq!(set("kv.node_attach", Action::Leak, 1), Err(SetError::NoSuchAction));
    assert_eq!((hits("nowhere"), Action::parse("explode")), (None, None));
}

/// The table and the source have the same points.
#[test]
fn every_point_of_the_table_occurs_in_the_source_once() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/context");
    let source: String = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap())
        .collect();
    for point in names() {
        assert_eq!(source.matches(&format!("{point:?})")).count(), 1, "{point}");
    }
    let n_points = source.matches("fault_point!(").count() + source.matches("table::hit(").count();
    assert_eq!(n_points, names().count());
}
