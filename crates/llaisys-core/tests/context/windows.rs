//! Sliding windows in the context: the same bits for any split of the rows and any reclaimed cells. Experts: the same
//! bits in any batch.

use crate::common::{Loaded, Outputs, Random, Rows, Tiny, feed, load, settings};
use llaisys_core::context::{Context, ContextConfig};
use llaisys_core::ops::dispatch::IsaName;
use llaisys_core::seq::SeqId;

const WINDOW: usize = 150;

/// A model with a window in every layer that ends inside a block of 128.
fn windowed() -> Tiny {
    Tiny::sized("MistralForCausalLM", true, |model| {
        model.max_positions = 1024;
        model.more_keys = format!(r#", "sliding_window": {WINDOW}"#);
    })
}

/// A model with a window in the second of two layers.
fn half_windowed() -> Tiny {
    Tiny::sized("Qwen2ForCausalLM", true, |model| {
        model.max_positions = 1024;
        model.more_keys =
            format!(r#", "use_sliding_window": true, "max_window_layers": 1, "sliding_window": {WINDOW}"#);
    })
}

fn config() -> ContextConfig {
    ContextConfig { n_cells: 2048, n_seq_max: 4, n_batch: 600, max_model_len: 1024, ..settings() }
}

fn start(model: &Tiny, config: ContextConfig) -> (Loaded, SeqId) {
    let mut loaded = load(model, config);
    let seq = loaded.context.seq_acquire(0).unwrap();
    (loaded, seq)
}

#[test]
fn bits_do_not_depend_on_chunks_passes_or_threads() {
    for model in [windowed(), half_windowed()] {
        let tokens = model.tokens(1, 600);
        for isa in IsaName::available() {
            let config = ContextConfig { isa: Some(isa), ..config() };
            let (mut loaded, seq) = start(&model, ContextConfig { n_threads: 1, ..config });
            let want = feed(&mut loaded.context, seq, &tokens, 600);
            for (n_batch, n_threads, chunk) in [(600, 3, 600), (64, 2, 600), (600, 2, 97), (600, 3, 11)] {
                let (mut loaded, seq) = start(&model, ContextConfig { n_batch, n_threads, ..config });
                let got = feed(&mut loaded.context, seq, &tokens, chunk);
                let what = format!("{isa:?}, passes of {n_batch}, {n_threads} threads, chunks of {chunk}");
                assert!(got == want, "{}: {what}", model.architecture);
            }
        }
    }
}

#[test]
fn row_depends_only_on_positions_within_its_windows() {
    let model = windowed();
    let reach = model.n_layers * (WINDOW - 1);
    let (mut tokens, mut others) = (model.tokens(1, 500), model.tokens(2, 500));
    others[100..].copy_from_slice(&tokens[100..]);
    let last = |tokens: &[i32]| {
        let (mut loaded, seq) = start(&model, config());
        feed(&mut loaded.context, seq, tokens, 499).logits.split_off(499 * model.vocab_size)
    };
    assert!(499 - 99 > reach);
    assert_eq!(last(&tokens), last(&others), "beyond the reach of all layers");
    let seen = 500 - WINDOW;
    tokens[seen] = (tokens[seen] + 1) % 70;
    assert_ne!(last(&tokens), last(&others), "the oldest position that the last row sees");
}

/// Removes all positions that the next row of `seq` does not see.
fn reclaim(context: &mut Context, seq: SeqId) {
    let window = context.attention_window().unwrap() as i32;
    let last = context.kv_seq_pos_max(seq).unwrap().unwrap();
    context.kv_seq_rm(seq, 0, (last + 2 - window).max(0)).unwrap();
    context.check_integrity();
}

#[test]
fn reclaimed_prefixes_free_their_cells_without_changing_bits() {
    let model = windowed();
    let tokens = model.tokens(1, 600);
    let (mut whole, seq) = start(&model, config());
    let want = feed(&mut whole.context, seq, &tokens, 600);
    // Only the cells of a window and one chunk, so that positions far exceed the number of cells.
    for (chunk, n_batch) in [(3, 600), (37, 600), (130, 64)] {
        let n_cells = WINDOW - 1 + chunk;
        let (mut loaded, seq) = start(&model, ContextConfig { n_cells, n_batch, ..config() });
        let mut got = Outputs::default();
        for (i, part) in tokens.chunks(chunk).enumerate() {
            got.push(&Rows::default().run(seq, i * chunk, part).decode(&mut loaded.context).unwrap());
            reclaim(&mut loaded.context, seq);
            assert!(loaded.context.n_cells_free() >= chunk, "chunk {i}");
        }
        assert!(got == want, "chunks of {chunk}");
        let first = loaded.context.kv_seq_pos_min(seq).unwrap();
        assert_eq!(first, Some((600 + 1 - WINDOW) as i32));
    }
}

#[test]
fn empty_sequence_may_start_at_any_position_and_forks_reclaim_independently() {
    let model = windowed();
    let tokens = model.tokens(1, 420);
    let (mut loaded, seq) = start(&model, config());
    let context = &mut loaded.context;
    feed(context, seq, &tokens[..400], 400);
    let fork = context.seq_acquire(0).unwrap();
    context.kv_seq_cp(seq, fork, -1, -1).unwrap();
    reclaim(context, fork);
    let continue_with = |context: &mut Context, seq| {
        let mut outputs = Outputs::default();
        outputs.push(&Rows::default().run(seq, 400, &tokens[400..]).decode(context).unwrap());
        outputs
    };
    let want = continue_with(context, seq);
    assert_eq!(continue_with(context, fork), want);
    // Shares the same cells with a sequence that never had the others.
    let late = context.seq_acquire(0).unwrap();
    context.kv_seq_cp(seq, late, 401 - WINDOW as i32, 400).unwrap();
    assert_eq!(continue_with(context, late), want);
    assert_eq!(context.kv_seq_pos_min(late).unwrap(), Some(401 - WINDOW as i32));
    let fresh = context.seq_acquire(0).unwrap();
    Rows::default().run(fresh, 300, &tokens[..5]).decode(context).unwrap();
    assert_eq!(context.kv_seq_pos_min(fresh).unwrap(), Some(300));
}

/// Missing positions count for the window, which still ends at its position.
#[test]
fn windows_count_missing_positions() {
    let model = Tiny::sized("MistralForCausalLM", true, |model| {
        model.n_layers = 1;
        model.more_keys = r#", "sliding_window": 10"#.to_owned();
    });
    let tokens = model.tokens(1, 40);
    let last = |removed: &[(i32, i32)]| {
        let (mut loaded, seq) = start(&model, ContextConfig { max_model_len: 512, ..config() });
        feed(&mut loaded.context, seq, &tokens[..30], 30);
        for &(p0, p1) in removed {
            loaded.context.kv_seq_rm(seq, p0, p1).unwrap();
        }
        let mut outputs = Outputs::default();
        outputs.push(&Rows::default().run(seq, 30, &tokens[30..=30]).decode(&mut loaded.context).unwrap());
        outputs
    };
    // Position 30 sees 21 to 30. In a sequence without 22 to 25, the first one is 21; no earlier ones replace the
    // missing.
    assert_eq!(last(&[(22, 26)]), last(&[(22, 26), (0, 21)]));
    assert_ne!(last(&[(22, 26)]), last(&[(21, 26)]));
}

#[test]
fn cells_are_reclaimable_only_with_windows_in_every_layer() {
    let (loaded, _) = start(&windowed(), config());
    assert_eq!(loaded.context.attention_window(), Some(WINDOW));
    for model in [half_windowed(), Tiny::odd("LlamaForCausalLM", true)] {
        let (loaded, _) = start(&model, settings());
        assert_eq!(loaded.context.attention_window(), None);
    }
}

#[test]
fn bits_of_a_row_with_experts_do_not_depend_on_the_batch() {
    let model = Tiny::experts(5);
    let prompts: Vec<Vec<i32>> = (0..4).map(|i| model.tokens(i, 30)).collect();
    let config = ContextConfig { n_cells: 512, n_batch: 64, ..settings() };
    for isa in IsaName::available() {
        let config = ContextConfig { isa: Some(isa), ..config };
        let alone: Vec<Outputs> = prompts
            .iter()
            .map(|prompt| {
                let (mut loaded, seq) = start(&model, ContextConfig { n_threads: 1, ..config });
                feed(&mut loaded.context, seq, prompt, 1)
            })
            .collect();
        let mut loaded = load(&model, config);
        let seqs: Vec<SeqId> = prompts.iter().map(|_| loaded.context.seq_acquire(0).unwrap()).collect();
        let mut random = Random(11);
        let mut got = vec![Outputs::default(); prompts.len()];
        for start in (0..30).step_by(10) {
            // All sequences in one batch, each time in another order.
            let mut order: Vec<usize> = (0..prompts.len()).collect();
            order.rotate_left(random.next_u64() as usize % prompts.len());
            let rows = order
                .iter()
                .fold(Rows::default(), |rows, &i| rows.run(seqs[i], start, &prompts[i][start..start + 10]));
            let result = rows.decode(&mut loaded.context).unwrap();
            let (logits, hidden) = (result.logits.unwrap(), result.hidden.unwrap());
            for (&i, (logits, hidden)) in
                order.iter().zip(logits.chunks(10 * model.vocab_size).zip(hidden.chunks(10 * model.d_model)))
            {
                got[i].logits.extend(logits.iter().map(|x| x.to_bits()));
                got[i].hidden.extend(hidden.iter().map(|x| x.to_bits()));
            }
        }
        assert!(got == alone, "{isa:?}");
    }
}
