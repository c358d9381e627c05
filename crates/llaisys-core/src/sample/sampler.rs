//! One sequence's sampler, and what it does to a row of logits before the draw.
//!
//! Rules apply in vLLM's order: mask, allowed ids, bad words, bias, min_tokens, penalties, temperature, min_p, top_k,
//! top_p, typical_p. Logprobs are those of the model's own distribution, before all rules.

use super::draw::{DrawScratch, draw};
use super::spec::SamplerSpec;
use crate::error::SamplingError;
use crate::ops::dispatch::Kernels;
use crate::ops::{argmax, argmax_finite};

/// The sampling state of one sequence: its parameters, and the tokens that penalties need.
#[derive(Debug, Clone)]
pub struct Sampler {
    spec: SamplerSpec,
    /// One bit per token id, set if the prompt has it. Empty without a repetition penalty.
    in_prompt: Vec<u64>,
    /// Tokens of the completion with their counts, ordered by id. Kept only if a penalty needs them.
    counts: Vec<(u32, u32)>,
    n_output: u32,
    /// One bit per token id, set if it may be drawn. Empty if all may.
    allowed: Vec<u32>,
    /// The newest tokens of the completion, as many as the longest bad word needs.
    tail: Vec<u32>,
    n_tail: usize,
    /// The prompt, kept only for its logprobs.
    prompt: Vec<u32>,
}

impl Sampler {
    /// A sampler for a sequence with this `prompt` and the `output` generated so far.
    ///
    /// Errors: any [`SamplingError`] of the spec; `Token` for an id outside the vocabulary.
    pub fn new(
        spec: SamplerSpec,
        vocab_size: usize,
        prompt: &[i32],
        output: &[i32],
    ) -> Result<Self, SamplingError> {
        spec.check(vocab_size)?;
        let mut sampler = Self {
            allowed: bits(&spec.allowed_ids, vocab_size),
            n_tail: spec.bad_words.iter().map(|word| word.len() - 1).max().unwrap_or(0),
            spec,
            in_prompt: Vec::new(),
            counts: Vec::new(),
            n_output: 0,
            tail: Vec::new(),
            prompt: Vec::new(),
        };
        let outside = |name, id: i32| SamplingError::Token { name, id: id.into(), vocab_size };
        let checked = |name, id: i32| {
            u32::try_from(id).ok().filter(|&t| (t as usize) < vocab_size).ok_or_else(|| outside(name, id))
        };
        if sampler.spec.repetition_penalty != 1.0 {
            sampler.in_prompt = vec![0; vocab_size.div_ceil(64)];
        }
        for &id in prompt {
            let id = checked("prompt", id)?;
            if let Some(word) = sampler.in_prompt.get_mut(id as usize / 64) {
                *word |= 1 << (id % 64);
            }
            if sampler.spec.prompt_logprobs.is_some() {
                sampler.prompt.push(id);
            }
        }
        for &id in output {
            sampler.accept(checked("output", id)?);
        }
        Ok(sampler)
    }

    /// Adds a token to the completion.
    pub fn accept(&mut self, token: u32) {
        self.n_output += 1;
        if self.n_tail > 0 {
            self.tail.drain(..(self.tail.len() + 1).saturating_sub(self.n_tail));
            self.tail.push(token);
        }
        if self.spec.has_penalties() {
            match self.counts.binary_search_by_key(&token, |&(id, _)| id) {
                Ok(i) => self.counts[i].1 += 1,
                Err(i) => self.counts.insert(i, (token, 1)),
            }
        }
    }

    /// The parameters.
    pub fn spec(&self) -> &SamplerSpec {
        &self.spec
    }

    /// The prompt's token after its first `n_before`, and the number of top logprobs for it. `None` unless the row
    /// there returns prompt logprobs instead of a draw.
    pub fn prompt_token(&self, n_before: u32) -> Option<(u32, u32)> {
        Some((*self.prompt.get(n_before as usize)?, self.spec.prompt_logprobs?))
    }

    /// True if the row after `n_before` tokens, of which the last `n_drafts` are drafts, needs only the id of the
    /// model's largest logit.
    pub fn is_greedy(&self, n_before: u32, n_drafts: usize) -> bool {
        let is_draw = self.prompt_token(n_before).is_none();
        self.spec.is_greedy() && is_draw && !self.adjusts(n_drafts) && !self.spec.has_logprobs()
    }

    /// False if [`Sampler::adjust`] changes no logit.
    fn adjusts(&self, n_drafts: usize) -> bool {
        let spec = &self.spec;
        let lists = [self.allowed.len(), spec.bad_words.len(), spec.logit_bias.len()];
        lists != [0; 3] || self.is_too_short(n_drafts) || spec.has_penalties()
    }

    /// True if a completion with `n_drafts` more tokens has fewer than `min_tokens`.
    fn is_too_short(&self, n_drafts: usize) -> bool {
        self.n_output as usize + n_drafts < self.spec.min_tokens as usize
    }

    /// True if the completion and `drafts` end with `word`.
    fn ends_with(&self, drafts: &[i32], word: &[u32]) -> bool {
        let n_drafts = drafts.len().min(word.len());
        let (before, last) = word.split_at(word.len() - n_drafts);
        self.tail.ends_with(before)
            && last.iter().zip(&drafts[drafts.len() - n_drafts..]).all(|(&a, &b)| a as i32 == b)
    }

    /// Applies allowed ids, bad words, bias, min_tokens and penalties in place, with `drafts` counted as output.
    fn adjust(&self, logits: &mut [f32], drafts: &[i32]) {
        if !self.allowed.is_empty() {
            apply_mask(logits, &self.allowed);
        }
        for (last, before) in self.spec.bad_words.iter().filter_map(|word| word.split_last()) {
            if self.ends_with(drafts, before) {
                logits[*last as usize] = f32::NEG_INFINITY;
            }
        }
        for &(id, bias) in &self.spec.logit_bias {
            logits[id as usize] += bias;
        }
        if self.is_too_short(drafts.len()) {
            for &id in &self.spec.stop_ids {
                logits[id as usize] = f32::NEG_INFINITY;
            }
        }
        if self.spec.has_penalties() {
            self.penalize(logits, drafts);
        }
    }

    fn penalize(&self, logits: &mut [f32], drafts: &[i32]) {
        let repeated = |logit: f32| {
            if logit > 0.0 {
                logit / self.spec.repetition_penalty
            } else {
                logit * self.spec.repetition_penalty
            }
        };
        for (word_index, &word) in self.in_prompt.iter().enumerate() {
            let mut rest = word;
            while rest != 0 {
                let id = word_index * 64 + rest.trailing_zeros() as usize;
                logits[id] = repeated(logits[id]);
                rest &= rest - 1;
            }
        }
        let mut penalize_output = |id: usize, count: u32| {
            let seen = self.in_prompt.get(id / 64).is_some_and(|word| word >> (id % 64) & 1 == 1);
            let base = if seen { logits[id] } else { repeated(logits[id]) };
            logits[id] = base - self.spec.presence_penalty - self.spec.frequency_penalty * count as f32;
        };
        let n_in = |drafts: &[i32], id: i32| drafts.iter().filter(|&&draft| draft == id).count() as u32;
        for &(id, count) in &self.counts {
            penalize_output(id as usize, count + n_in(drafts, id as i32));
        }
        for (i, &id) in drafts.iter().enumerate() {
            let is_first = !drafts[..i].contains(&id);
            if is_first && self.counts.binary_search_by_key(&(id as u32), |&(id, _)| id).is_err() {
                penalize_output(id as usize, n_in(drafts, id));
            }
        }
    }
}

/// Buffers that are reused between calls.
#[derive(Debug)]
pub struct Scratch {
    draw: DrawScratch,
    best: Vec<(u32, f32)>,
    raw: Vec<f32>,
}

impl Scratch {
    /// Empty buffers for an instruction set, which changes no result.
    pub fn new(kernels: Kernels) -> Self {
        Self { draw: DrawScratch::new(kernels), best: Vec::new(), raw: Vec::new() }
    }
}

impl Default for Scratch {
    /// Empty buffers for the best instruction set of the machine.
    fn default() -> Self {
        Self::new(Kernels::select(None).expect("every machine has the scalar set"))
    }
}

/// The result of sampling one row.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The sampled token.
    Token {
        /// Its id.
        id: u32,
        /// The logprobs that its sampler requested.
        logprobs: Option<Logprobs>,
    },
    /// The row cannot be sampled; its sequence must end.
    Fault(RowFault),
}

/// Why a row cannot be sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowFault {
    /// A logit is NaN or infinite, or a penalty made the best one so. The row's computation has failed.
    NonFinite,
    /// The mask (or bias) allows no token.
    AllMasked,
}

/// Natural logarithms of probabilities under the model's own distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// Logprob of the sampled token.
    pub logprob: f32,
    /// Rank of the sampled token, from 1; tokens of equal logit share the better rank.
    pub rank: u32,
    /// The best tokens, by falling logprob, ties by id; or those of [`SamplerSpec::logprob_ids`], in their order.
    pub top: Vec<(u32, f32)>,
}

/// Samples one row. `logits` `[vocab]` are overwritten. `position` is the number of tokens before the sampled one.
/// Together with seed and choice it determines the draw, or it selects the token of the prompt that is scored instead.
/// `mask` has one bit per id, set if the id is allowed.
pub fn sample(
    scratch: &mut Scratch,
    logits: &mut [f32],
    sampler: Option<&Sampler>,
    position: u32,
    mask: Option<&[u32]>,
) -> Outcome {
    sample_after_drafts(scratch, logits, sampler, SampleAt { position, drafts: &[], mask })
}

/// Where one row is sampled in its sequence.
#[derive(Debug, Clone, Copy)]
pub struct SampleAt<'a> {
    /// The number of tokens before the sampled one, drafts included.
    pub position: u32,
    /// The last of these tokens, which the sampler has not accepted. They count as output.
    pub drafts: &'a [i32],
    /// One bit per id, set if the id is allowed.
    pub mask: Option<&'a [u32]>,
}

/// As [`sample`] for a completion that continues with drafts. The result is that of a sampler that has accepted them.
pub fn sample_after_drafts(
    scratch: &mut Scratch,
    logits: &mut [f32],
    sampler: Option<&Sampler>,
    at: SampleAt<'_>,
) -> Outcome {
    let SampleAt { position, drafts, mask } = at;
    let Some(mut best) = argmax_finite(logits) else {
        return Outcome::Fault(RowFault::NonFinite);
    };
    if let Some((id, n)) = sampler.and_then(|s| s.prompt_token(position)) {
        find_best(&mut scratch.best, logits, n);
        return Outcome::Token {
            id,
            logprobs: Some(logprobs_of(id, logits, &scratch.best, normalizer(logits))),
        };
    }
    // The token is drawn after the logits have changed, so keep the model's own logits.
    let normalizer = sampler.filter(|s| s.spec.has_logprobs()).map(|s| {
        scratch.raw.clear();
        scratch.raw.extend_from_slice(logits);
        begin_logprobs(&mut scratch.best, logits, &s.spec)
    });
    if let Some(mask) = mask {
        apply_mask(logits, mask);
    }
    if let Some(sampler) = sampler {
        sampler.adjust(logits, drafts);
    }
    if mask.is_some() || sampler.is_some_and(|sampler| sampler.adjusts(drafts.len())) {
        best = argmax(logits);
    }
    if logits[best] == f32::NEG_INFINITY {
        return Outcome::Fault(RowFault::AllMasked);
    }
    // A penalty can make a huge finite logit infinite. Without a finite best logit there are no weights for a draw.
    if !logits[best].is_finite() {
        return Outcome::Fault(RowFault::NonFinite);
    }
    let id = match sampler {
        Some(s) if !s.spec.is_greedy() => draw(&mut scratch.draw, logits, logits[best], &s.spec, position),
        _ => best as u32,
    };
    let logprobs = normalizer.map(|normalizer| logprobs_of(id, &scratch.raw, &scratch.best, normalizer));
    Outcome::Token { id, logprobs }
}

/// One bit per id below `vocab_size`, set for `ids`; empty if `ids` is empty.
fn bits(ids: &[u32], vocab_size: usize) -> Vec<u32> {
    if ids.is_empty() {
        return Vec::new();
    }
    let mut words = vec![0; vocab_size.div_ceil(32)];
    for id in ids {
        words[*id as usize / 32] |= 1 << (id % 32);
    }
    words
}

fn apply_mask(logits: &mut [f32], mask: &[u32]) {
    for (id, logit) in logits.iter_mut().enumerate() {
        if mask[id / 32] >> (id % 32) & 1 == 0 {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// Fills `best` with the candidates whose logprobs `spec` wants, and returns the normalizer.
fn begin_logprobs(best: &mut Vec<(u32, f32)>, logits: &[f32], spec: &SamplerSpec) -> f32 {
    if spec.logprob_ids.is_empty() {
        find_best(best, logits, spec.top_logprobs.unwrap_or(0));
    } else {
        best.clear();
        best.extend(spec.logprob_ids.iter().map(|&id| (id, logits[id as usize])));
    }
    normalizer(logits)
}

/// Returns the log of the summed exponentials.
fn normalizer(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    (f64::from(max) + sum.ln()) as f32
}

/// Fills `best` with the `n` largest logits, falling.
fn find_best(best: &mut Vec<(u32, f32)>, logits: &[f32], n: u32) {
    best.clear();
    let n = (n as usize).min(logits.len());
    if n > INSERTED_MAX {
        best_of_sort(best, logits, n);
    } else {
        best_by_insertion(best, logits, n);
    }
}

/// Number of candidates up to which inserting each better one is faster than a sort.
const INSERTED_MAX: usize = 64;

fn best_by_insertion(best: &mut Vec<(u32, f32)>, logits: &[f32], n: usize) {
    for (id, &logit) in logits.iter().enumerate() {
        if best.len() == n && best.last().is_none_or(|&(_, least)| logit <= least) {
            continue;
        }
        let at = best.partition_point(|&(_, other)| other >= logit);
        best.insert(at, (id as u32, logit));
        best.truncate(n);
    }
}

/// As [`best_by_insertion`], for many candidates, up to the whole vocabulary.
fn best_of_sort(best: &mut Vec<(u32, f32)>, logits: &[f32], n: usize) {
    best.extend((0..).zip(logits.iter().copied()));
    // Adding 0.0 makes -0.0 equal to 0.0, as in a comparison with `<`.
    let descending = |a: &(u32, f32), b: &(u32, f32)| (b.1 + 0.0).total_cmp(&(a.1 + 0.0)).then(a.0.cmp(&b.0));
    if n < best.len() {
        best.select_nth_unstable_by(n, descending);
        best.truncate(n);
    }
    best.sort_unstable_by(descending);
}

/// The logprob and rank of `id`, and the logprobs of `best`, from the model's own logits.
fn logprobs_of(id: u32, raw: &[f32], best: &[(u32, f32)], normalizer: f32) -> Logprobs {
    let own = raw[id as usize];
    Logprobs {
        logprob: own - normalizer,
        rank: 1 + raw.iter().filter(|&&l| l > own).count() as u32,
        top: best.iter().map(|&(id, logit)| (id, logit - normalizer)).collect(),
    }
}
