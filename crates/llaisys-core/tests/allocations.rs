//! After warm-up, a decode step allocates only its short lists and its result: no op and no layer allocates. This test
//! has its own process, because the counter counts all threads.

#![allow(unsafe_code, reason = "a global allocator is unsafe by its trait")]

mod common;

use common::{Rows, Tiny, load, settings};
use llaisys_core::batch::output;
use llaisys_core::context::{Context, ContextConfig, DecodeRequest};
use llaisys_core::dtype::ComputeMode;
use llaisys_core::sample::SamplerSpec;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator with counters.
struct Counting;

static N_CALLS: AtomicUsize = AtomicUsize::new(0);
static N_BYTES: AtomicUsize = AtomicUsize::new(0);

fn count(n_bytes: usize) {
    N_CALLS.fetch_add(1, Ordering::Relaxed);
    N_BYTES.fetch_add(n_bytes, Ordering::Relaxed);
}

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const N_STEPS: i32 = 100;

/// Decodes `N_STEPS` tokens of `n_seqs` new sequences with these samplers. Returns the allocations of each step: calls
/// and bytes.
fn steps(context: &mut Context, n_seqs: usize, spec: &SamplerSpec) -> Vec<(usize, usize)> {
    let seqs: Vec<_> = (0..n_seqs).map(|_| context.seq_acquire(0).unwrap()).collect();
    for &seq in &seqs {
        context.set_sampler(seq, spec.clone(), &[1], &[]).unwrap();
    }
    let step = |position: i32| {
        let row = |rows: Rows, seq| rows.row(position % 5, position, &[seq], output::LOGITS);
        let rows = seqs.iter().copied().fold(Rows::default(), row);
        let request = DecodeRequest { arrays: rows.arrays(), masks: None, return_logits: false };
        let before = (N_CALLS.load(Ordering::Relaxed), N_BYTES.load(Ordering::Relaxed));
        let result = context.decode(&request).unwrap();
        let after = (N_CALLS.load(Ordering::Relaxed), N_BYTES.load(Ordering::Relaxed));
        assert!(result.faults.is_empty());
        (after.0 - before.0, after.1 - before.1)
    };
    let counted = (0..N_STEPS).map(step).collect();
    for seq in seqs {
        context.seq_release(seq).unwrap();
    }
    counted
}

/// The median over all steps. Some steps reallocate a list that grows with the sequences, and the test harness has its
/// own thread.
fn median(mut steps: Vec<(usize, usize)>) -> (usize, usize) {
    steps.sort_unstable();
    steps[steps.len() / 2]
}

#[test]
fn warm_step_allocates_its_lists_and_nothing_per_layer() {
    let greedy = SamplerSpec { temperature: 0.0, ..SamplerSpec::default() };
    let drawn = SamplerSpec { top_k: 20, top_p: 0.9, ..SamplerSpec::default() };
    for spec in [greedy, drawn] {
        let mut usual = Vec::new();
        for (mode, n_layers, n_seqs) in
            [(ComputeMode::Bfloat16, 1, 2), (ComputeMode::Bfloat16, 5, 2), (ComputeMode::Float32, 2, 8)]
        {
            // Greedy rows use pruned argmax.
            let model = Tiny::sized("Qwen2ForCausalLM", true, |model| {
                (model.n_layers, model.d_model, model.vocab_size) = (n_layers, 64, 1500);
            });
            let config = ContextConfig { mode, n_cells: 1024, ..settings() };
            let mut loaded = load(&model, config);
            steps(&mut loaded.context, n_seqs, &spec);
            let warm = steps(&mut loaded.context, n_seqs, &spec);
            let (n_calls, n_bytes) = median(warm);
            println!("{mode:?}, {n_layers} layers, {n_seqs} rows: {n_calls} calls, {n_bytes} bytes");
            usual.push(n_calls);
            assert!(n_bytes <= 1024 + 256 * n_seqs, "{n_bytes} bytes for {n_seqs} rows");
        }
        assert_eq!(usual[0], usual[1], "four more layers");
        assert!(usual.iter().all(|&n| n <= MOST_CALLS), "allocations of a step: {usual:?}");
    }
}

/// 19 allocations were counted: the checked batch (5: tokens, positions, sequences and their starts, flags), the rows
/// of the reservation, the result (2), the rows by output (3), the rows to sample, their jobs, the parts per thread,
/// the outcomes, the counted sequences, and lists that grow. All take some bytes per row; none depends on the model.
const MOST_CALLS: usize = 24;
