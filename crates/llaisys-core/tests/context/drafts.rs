//! Drafts (speculative decoding): a decode that verifies drafts gives the ids, logprob bits and faults of decodes with
//! one token of each sequence, whatever the drafts are.

use crate::common::{Random, Rows, Tiny, load, settings};
use llaisys_core::batch::output;
use llaisys_core::context::{Context, ContextConfig, DecodeRequest, DecodeResult, RowMasks};
use llaisys_core::dtype::{ComputeMode, KvDType};
use llaisys_core::sample::{RowFault, SamplerSpec};
use llaisys_core::seq::SeqId;

const VOCAB: usize = 71;
const N_WORDS: usize = VOCAB.div_ceil(32);
const N_TOKENS: usize = 24;

/// One token of a completion: its id, and the bits of its logprob and of the top logprobs.
type Token = (i32, Vec<u32>);

/// A request: its tokens are those of its own prompt and output.
#[derive(Debug, Clone)]
struct Request {
    spec: SamplerSpec,
    prompt: Vec<i32>,
    /// Rows have a mask that depends on all tokens before it. One in 40 allows no token.
    is_masked: bool,
}

/// The completion, and why it ended before `N_TOKENS`.
#[derive(Debug, Clone, Default, PartialEq)]
struct Completion {
    tokens: Vec<Token>,
    fault: Option<RowFault>,
}

impl Completion {
    fn ids(&self) -> Vec<i32> {
        self.tokens.iter().map(|(id, _)| *id).collect()
    }

    fn has_ended(&self) -> bool {
        self.fault.is_some() || self.tokens.len() >= N_TOKENS
    }
}

impl Request {
    fn random(random: &mut Random) -> Self {
        let mut one_in = |n: u64| random.next_u64().is_multiple_of(n);
        let greedy = one_in(2);
        let spec = SamplerSpec {
            temperature: if greedy { 0.0 } else { 0.8 },
            top_k: if one_in(3) { 20 } else { 0 },
            repetition_penalty: if one_in(3) { 1.3 } else { 1.0 },
            presence_penalty: if one_in(3) { 0.7 } else { 0.0 },
            frequency_penalty: if one_in(3) { 0.4 } else { 0.0 },
            logit_bias: if one_in(3) { vec![(5, 8.0), (6, 8.5), (7, 8.2)] } else { Vec::new() },
            // With the bias, words that often nearly occur.
            bad_words: if one_in(2) { vec![vec![5, 6], vec![6, 7, 5], vec![7]] } else { Vec::new() },
            min_tokens: if one_in(2) { 9 } else { 0 },
            stop_ids: vec![5, 6, 7, 40, 41],
            seed: random.next_u64(),
            top_logprobs: random.next_u64().is_multiple_of(3).then_some(3),
            ..SamplerSpec::default()
        };
        let n_prompt = 1 + random.next_u64() % 9;
        let prompt = (0..n_prompt).map(|_| (random.next_u64() % VOCAB as u64) as i32).collect();
        Self { spec, prompt, is_masked: random.next_u64().is_multiple_of(3) }
    }

    /// The mask of the row after these tokens.
    fn mask(&self, output: &[i32]) -> Option<[u32; N_WORDS]> {
        let tokens = self.prompt.iter().chain(output);
        let hash = tokens.fold(1_u64, |hash, &token| Random(hash ^ token as u64).next_u64());
        let mut random = Random(hash);
        let bits = [(); N_WORDS].map(|()| random.next_u64() as u32);
        self.is_masked.then_some(if hash.is_multiple_of(40) { [0; N_WORDS] } else { bits })
    }
}

/// The sequences of some requests, and their completions so far.
struct Batch<'a> {
    context: &'a mut Context,
    requests: &'a [Request],
    seqs: Vec<SeqId>,
    completions: Vec<Completion>,
}

impl<'a> Batch<'a> {
    fn start(context: &'a mut Context, requests: &'a [Request]) -> Self {
        let seqs: Vec<SeqId> = requests.iter().map(|_| context.seq_acquire(0).unwrap()).collect();
        for (request, &seq) in requests.iter().zip(&seqs) {
            context.set_sampler(seq, request.spec.clone(), &request.prompt, &[]).unwrap();
        }
        let completions = vec![Completion::default(); requests.len()];
        Self { context, requests, seqs, completions }
    }

    /// Decodes one step of every request that has not ended. `propose` returns the drafts of a request. Returns the
    /// numbers of accepted and rejected drafts.
    fn step(&mut self, propose: &mut dyn FnMut(usize, &[i32]) -> Vec<i32>) -> (usize, usize) {
        let (mut rows, mut masked, mut bits) = (Rows::default(), Vec::new(), Vec::new());
        let mut first_rows = Vec::new();
        for (i, request) in self.requests.iter().enumerate() {
            if self.completions[i].has_ended() {
                continue;
            }
            let mut output = self.completions[i].ids();
            let drafts = propose(i, &output);
            let tokens = [&request.prompt[..], &output].concat();
            let n_cached = if output.is_empty() { 0 } else { tokens.len() - 1 };
            let seq = [self.seqs[i]];
            for (position, &token) in tokens.iter().enumerate().skip(n_cached) {
                let is_last = position + 1 == tokens.len();
                rows = rows.row(token, position as i32, &seq, if is_last { output::LOGITS } else { 0 });
            }
            first_rows.push((i, rows.tokens.len() - 1, drafts.len()));
            for (row, draft) in (rows.tokens.len() - 1..).zip(drafts.iter().map(Some).chain([None])) {
                if let Some(mask) = request.mask(&output) {
                    masked.push(row as i32);
                    bits.extend(mask);
                }
                if let Some(&draft) = draft {
                    let position = (request.prompt.len() + output.len()) as i32;
                    rows = rows.row(draft, position, &seq, output::LOGITS | output::DRAFT);
                    output.push(draft);
                }
            }
        }
        let masks = Some(RowMasks { rows: &masked, bits: &bits });
        let request = DecodeRequest { arrays: rows.arrays(), masks, return_logits: false };
        let result = self.context.decode(&request).unwrap();
        self.context.check_integrity();
        let n_accepted = first_rows.iter().map(|&(i, row, n)| self.append(&result, i, row, n)).sum();
        let n_drafts: usize = first_rows.iter().map(|(.., n)| n).sum();
        (n_accepted, n_drafts - n_accepted)
    }

    /// Appends the tokens of the rows from `first_row` and checks the positions of the sequence. Returns the number of
    /// accepted drafts.
    fn append(&mut self, result: &DecodeResult, i: usize, first_row: usize, n_drafts: usize) -> usize {
        let first_out = result.rows.iter().position(|&row| row as usize == first_row).unwrap();
        let outs = first_out..=first_out + n_drafts;
        let completion = &mut self.completions[i];
        let n_before = completion.tokens.len();
        for out in outs.clone().take_while(|&out| result.token_ids[out] >= 0) {
            let logprobs = result.logprobs.iter().find(|(of, _)| *of == out).map(|(_, logprobs)| logprobs);
            let bits = logprobs.map_or(Vec::new(), |l| {
                let top = l.top.iter().flat_map(|&(id, logprob)| [id, logprob.to_bits()]);
                [l.logprob.to_bits(), l.rank].into_iter().chain(top).collect()
            });
            completion.tokens.push((result.token_ids[out], bits));
        }
        let n_new = completion.tokens.len() - n_before;
        assert!(result.token_ids[first_out + n_new..=first_out + n_drafts].iter().all(|&id| id < 0));
        let faults = result.faults.iter().filter(|(row, _)| (first_row..=first_row + n_drafts).contains(row));
        let faults: Vec<_> = faults.collect();
        completion.fault = faults.first().map(|(_, fault)| *fault);
        if let [(row, _)] = faults[..] {
            assert_eq!(*row, first_row + n_new, "the row after the last accepted draft");
        } else {
            assert!(faults.is_empty() && n_new > 0);
        }
        // The last token has no cell yet, or its row was faulty.
        let n_cells = self.requests[i].prompt.len() + completion.tokens.len() - 1;
        let end = self.context.kv_seq_pos_max(self.seqs[i]).unwrap();
        assert_eq!(end, n_cells.checked_sub(1).map(|end| end as i32));
        n_new.saturating_sub(1)
    }

    fn end(self) -> Vec<Completion> {
        for &seq in &self.seqs {
            self.context.seq_release(seq).unwrap();
        }
        assert_eq!(self.context.n_cells_free(), self.context.n_cells());
        self.completions
    }
}

/// Decodes one token of one request at a time.
fn one_by_one(context: &mut Context, requests: &[Request]) -> Vec<Completion> {
    let alone = |request: &Request| {
        let mut batch = Batch::start(context, std::slice::from_ref(request));
        while !batch.completions[0].has_ended() {
            batch.step(&mut |_, _| Vec::new());
        }
        batch.end().remove(0)
    };
    requests.iter().map(alone).collect()
}

/// Up to 6 drafts: those of the completion `want`, with a wrong one in `one_wrong_in`.
fn drafts(random: &mut Random, want: &Completion, n_output: usize, one_wrong_in: u64) -> Vec<i32> {
    let ids = want.ids();
    let n = (random.next_u64() % 7) as usize;
    let draft = |i: usize| match ids.get(n_output + i) {
        Some(&id) if !random.next_u64().is_multiple_of(one_wrong_in) => id,
        _ => (random.next_u64() % VOCAB as u64) as i32,
    };
    (0..n.min(N_TOKENS - n_output - 1)).map(draft).collect()
}

/// Compares completions with drafts with those of one token per decode. Returns the numbers of accepted drafts,
/// rejected drafts and faults.
fn compare(model: &Tiny, config: ContextConfig, seed: u64) -> [usize; 3] {
    let mut loaded = load(model, ContextConfig { nan_fill: true, ..config });
    let context = &mut loaded.context;
    let mut random = Random(seed);
    let mut totals = [0; 3];
    for one_wrong_in in [1, 2, 5, u64::MAX] {
        let requests: Vec<Request> = (0..6).map(|_| Request::random(&mut random)).collect();
        let want = one_by_one(context, &requests);
        let mut batch = Batch::start(context, &requests);
        while batch.completions.iter().any(|completion| !completion.has_ended()) {
            let (accepted, rejected) =
                batch.step(&mut |i, output| drafts(&mut random, &want[i], output.len(), one_wrong_in));
            totals[0] += accepted;
            totals[1] += rejected;
        }
        for ((request, want), mut got) in requests.iter().zip(&want).zip(batch.end()) {
            got.tokens.truncate(N_TOKENS);
            assert_eq!(got, *want, "seed {seed}, {request:?}");
        }
        totals[2] += want.iter().filter(|completion| completion.fault.is_some()).count();
    }
    totals
}

#[test]
fn drafts_change_no_id_logprob_or_fault() {
    let plain = Tiny::odd("Qwen2ForCausalLM", true);
    let even = Tiny::sized("Qwen2ForCausalLM", true, |m| (m.n_heads, m.n_kv_heads) = (4, 2));
    let windowed = Tiny::sized("MistralForCausalLM", true, |model| {
        model.more_keys = r#", "sliding_window": 7"#.into();
    });
    let experts = Tiny::experts(4);
    let cases = [
        (&plain, settings()),
        (&plain, ContextConfig { mode: ComputeMode::Bfloat16, n_batch: 3, ..settings() }),
        (&plain, ContextConfig { prune_argmax: false, lifo: true, n_threads: 3, ..settings() }),
        (&plain, ContextConfig { kv_dtype: Some(KvDType::Int8), ..settings() }),
        (&even, ContextConfig { n_ranks: 2, n_batch: 5, ..settings() }),
        (&windowed, settings()),
        (&experts, settings()),
    ];
    let mut totals = [0; 3];
    for (seed, (model, config)) in (1..).zip(cases) {
        let counted = compare(model, config, seed);
        assert!(counted[0] > 50 && counted[1] > 50, "accepted, rejected, faults: {counted:?}");
        totals.iter_mut().zip(counted).for_each(|(total, n)| *total += n);
    }
    assert!(totals[2] > 5, "accepted, rejected, faults: {totals:?}");
}

/// The sampler state and the cells after a decode are those of the accepted drafts only.
#[test]
fn rejected_draft_leaves_no_trace() {
    let model = Tiny::odd("Qwen2ForCausalLM", true);
    let mut loaded = load(&model, settings());
    let context = &mut loaded.context;
    let seq = context.seq_acquire(0).unwrap();
    // The biases outweigh the model's logits: 3, 3, 3, 5. With a rejected 4 before it, 3 would be forbidden. With the
    // drafts counted, 5 would come earlier.
    let spec = SamplerSpec {
        temperature: 0.0,
        logit_bias: vec![(5, 300.0), (3, 100.0)],
        min_tokens: 3,
        stop_ids: vec![5],
        bad_words: vec![vec![4, 3], vec![4, 3, 3]],
        ..SamplerSpec::default()
    };
    context.set_sampler(seq, spec, &[1], &[]).unwrap();
    let free = context.n_cells_free();
    let draft = output::LOGITS | output::DRAFT;
    let rows =
        Rows::default().row(1, 0, &[seq], output::LOGITS).row(4, 1, &[seq], draft).row(4, 2, &[seq], draft);
    let result = rows.decode(context).unwrap();
    assert_eq!((result.rows, result.token_ids), (vec![0, 1, 2], vec![3, -1, -1]));
    assert!(result.faults.is_empty());
    assert_eq!((context.kv_seq_pos_max(seq).unwrap(), free - context.n_cells_free()), (Some(0), 1));
    for (position, want) in [(1, 3), (2, 3), (3, 5)] {
        let next = Rows::default().row(3, position, &[seq], output::LOGITS).decode(context).unwrap();
        assert_eq!(next.token_ids, [want]);
    }
}

/// Rows of a sequence after a rejected draft are removed with it, and no others.
#[test]
fn rows_after_a_rejected_draft_are_removed() {
    let model = Tiny::odd("Qwen2ForCausalLM", true);
    let mut loaded = load(&model, settings());
    let context = &mut loaded.context;
    let [a, b] = [(); 2].map(|()| context.seq_acquire(0).unwrap());
    let want = Rows::default().row(1, 0, &[a], output::LOGITS).decode(context).unwrap().token_ids[0];
    context.kv_seq_rm(a, 0, -1).unwrap();
    let wrong = (want + 1) % VOCAB as i32;
    let rows = Rows::default()
        .row(1, 0, &[a], output::LOGITS)
        .row(wrong, 1, &[a], output::LOGITS | output::DRAFT)
        .row(2, 0, &[b], output::LOGITS)
        .row(3, 2, &[a], output::LOGITS);
    let result = rows.decode(context).unwrap();
    assert_eq!(result.token_ids[0], want);
    assert!(result.token_ids[2] >= 0);
    assert_eq!((result.token_ids[1], result.token_ids[3], result.faults.len()), (-1, -1, 0));
    assert_eq!([a, b].map(|seq| context.kv_seq_pos_max(seq).unwrap()), [Some(0), Some(0)]);
}
