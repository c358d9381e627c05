//! What the slots ask of `sample`, on the device: parameters, edits of logits, masks, and the tokens so far.
//!
//! Penalties and bad words look at the tokens themselves, so there are no counts to keep, to reset or to carry over a
//! preemption (decision 0013).

use crate::cuda::device::{Device, DevicePtr};
use crate::error::{DeviceError, Result, Unsupported};
use crate::sample::SamplerSpec;

/// Best tokens of a row at most: the API's own limit.
pub const MAX_TOP: usize = 20;
/// Of a `SampleParams` in `sample.cu`.
const PARAMS_BYTES: usize = 88;
/// Biases, bad words and held-back ids of a request at most. Those of the API's own limits fit.
pub const MAX_EDITS: usize = 2048;
/// Tokens of a request's bad words at most, all but the last of each, and one more for each word.
pub const MAX_WORD_TOKENS: usize = 4096;
/// Sums of weights stay within their integers up to here.
pub const MAX_VOCAB: usize = 1 << 19;

const EDIT_BYTES: usize = 16;
const NONE: u32 = u32::MAX;
const ACTIVE: u32 = 1;
const GREEDY: u32 = 2;
const PENALTIES: u32 = 4;

/// The tables of `n_slots` slots. A slot is idle until something is attached.
#[derive(Debug)]
pub struct SampleTables {
    /// `[n_slots]` of `SampleParams`
    pub(super) params: DevicePtr,
    /// `[n_slots, 2, ceil(vocab_size / 32)]` u32, a bit for each id that is allowed: by a grammar, by the request
    pub(super) masks: DevicePtr,
    /// `[n_slots, MAX_EDITS]` of `Edit`
    pub(super) edits: DevicePtr,
    /// `[n_slots, MAX_WORD_TOKENS]` u32
    pub(super) words: DevicePtr,
    /// `[n_slots, max_len]` i32
    pub(super) tokens: DevicePtr,
    pub(super) vocab_size: usize,
    pub(super) max_len: usize,
    n_slots: usize,
}

/// A sequence that takes a slot.
#[derive(Debug, Clone, Copy)]
pub struct Attach<'a> {
    /// What it asks for, checked.
    pub spec: &'a SamplerSpec,
    /// Its prompt, ids within the vocabulary.
    pub prompt: &'a [i32],
    /// What of its answer there is.
    pub output: &'a [i32],
    /// True if [`SampleTables::set_mask`] will be called before each step.
    pub masked: bool,
}

impl SampleTables {
    /// Takes the memory; all slots are idle.
    ///
    /// Errors: `Unsupported` for a vocabulary over [`MAX_VOCAB`]; those of the device.
    pub fn new(device: &dyn Device, n_slots: usize, vocab_size: usize, max_len: usize) -> Result<Self> {
        if vocab_size > MAX_VOCAB {
            return Err(unsupported("vocab_size on CUDA", vocab_size, "up to 524288").into());
        }
        let alloc = |what, of_slot: usize| device.alloc(what, n_slots * of_slot);
        let params = alloc("sampling parameters", PARAMS_BYTES)?;
        device.fill(params, 0, n_slots * PARAMS_BYTES)?;
        Ok(Self {
            params,
            masks: alloc("sampling masks", 2 * mask_bytes(vocab_size))?,
            edits: alloc("logit edits", MAX_EDITS * EDIT_BYTES)?,
            words: alloc("bad words", MAX_WORD_TOKENS * 4)?,
            tokens: alloc("token table", max_len * 4)?,
            vocab_size,
            max_len,
            n_slots,
        })
    }

    /// Errors: what the tables cannot hold of a request.
    pub fn check(spec: &SamplerSpec) -> Result<(), Unsupported> {
        fitting(spec, 0, 0).map(|_| ())
    }

    /// Gives `slot` to a sequence, in the order of the device's work.
    ///
    /// Panics if the slot or the sequence's length is out of bounds, which the caller's books keep. Errors:
    /// `Unsupported` for what the tables cannot hold; those of the device. The slot is unchanged on `Unsupported`.
    pub fn attach(&self, device: &dyn Device, slot: usize, of: &Attach<'_>) -> Result<()> {
        assert!(slot < self.n_slots, "slot {slot} of {}", self.n_slots);
        let n_tokens = of.prompt.len() + of.output.len();
        assert!(n_tokens <= self.max_len, "{n_tokens} tokens in a row of {}", self.max_len);
        let n_prompt = of.prompt.len() as u32;
        let first_word = slot * MAX_WORD_TOKENS;
        let (edits, words) = fitting(of.spec, n_prompt, first_word as u32)?;
        let mask = |wanted: bool, which: usize| if wanted { (2 * slot + which) as u32 } else { NONE };
        let masks = [mask(of.masked, 0), mask(!of.spec.allowed_ids.is_empty(), 1)];
        let params = params_of(of.spec, [n_prompt, masks[0], masks[1]], [slot * MAX_EDITS, edits.len()]);
        device.upload_words(self.params.at(slot * PARAMS_BYTES), params)?;
        device.upload_words(self.edits.at(slot * MAX_EDITS * EDIT_BYTES), edits.into_iter().flatten())?;
        device.upload_words(self.words.at(first_word * 4), words)?;
        if masks[1] != NONE {
            let mut bits = vec![0_u32; self.vocab_size.div_ceil(32)];
            for id in &of.spec.allowed_ids {
                bits[*id as usize / 32] |= 1 << (id % 32);
            }
            device.upload_words(self.mask(slot, 1), bits)?;
        }
        let tokens = of.prompt.iter().chain(of.output).map(|&id| id as u32);
        Ok(device.upload_words(self.tokens.at(slot * self.max_len * 4), tokens)?)
    }

    /// What the grammar of a `masked` slot allows in its next step, `[ceil(vocab_size / 32)]`; `None`: everything.
    pub fn set_mask(
        &self,
        device: &dyn Device,
        slot: usize,
        bits: Option<&[u32]>,
    ) -> Result<(), DeviceError> {
        match bits {
            Some(bits) => device.upload_words(self.mask(slot, 0), bits.iter().copied()),
            None => device.fill(self.mask(slot, 0), 0xff, mask_bytes(self.vocab_size)),
        }
    }

    /// Makes `slot` idle.
    pub fn detach(&self, device: &dyn Device, slot: usize) -> Result<(), DeviceError> {
        device.fill(self.params.at(slot * PARAMS_BYTES), 0, PARAMS_BYTES)
    }

    fn mask(&self, slot: usize, which: usize) -> DevicePtr {
        self.masks.at((2 * slot + which) * mask_bytes(self.vocab_size))
    }
}

fn mask_bytes(vocab_size: usize) -> usize {
    vocab_size.div_ceil(32) * 4
}

fn unsupported(what: &'static str, got: usize, supported: &'static str) -> Unsupported {
    Unsupported::Feature { what, value: got.to_string(), supported }
}

/// A `SampleParams`, word by word.
fn params_of(
    spec: &SamplerSpec,
    [n_prompt, mask, allowed]: [u32; 3],
    edits: [usize; 2],
) -> [u32; PARAMS_BYTES / 4] {
    let greedy = spec.is_greedy();
    let inverse = if greedy { 1.0 } else { 1.0 / f64::from(spec.temperature) };
    let scale = inverse * std::f64::consts::LOG2_E;
    let scale_high = scale as f32;
    let scale_low = (scale - f64::from(scale_high)) as f32;
    let flags = ACTIVE | if greedy { GREEDY } else { 0 } | if spec.has_penalties() { PENALTIES } else { 0 };
    let halves = |bits: u64| [bits as u32, (bits >> 32) as u32];
    let [inverse_low, inverse_high] = halves(inverse.to_bits());
    let [seed_low, seed_high] = halves(spec.seed);
    [
        inverse_low,
        inverse_high,
        seed_low,
        seed_high,
        scale_high.to_bits(),
        scale_low.to_bits(),
        spec.top_p.to_bits(),
        spec.min_p.to_bits(),
        spec.typical_p.to_bits(),
        spec.repetition_penalty.to_bits(),
        spec.presence_penalty.to_bits(),
        spec.frequency_penalty.to_bits(),
        flags,
        spec.choice,
        spec.top_k,
        n_prompt,
        spec.top_logprobs.unwrap_or(NONE),
        spec.prompt_logprobs.unwrap_or(NONE),
        mask,
        allowed,
        edits[0] as u32,
        edits[1] as u32,
    ]
}

/// As [`edits_of`]. Errors: what the tables cannot hold of a request.
fn fitting(
    spec: &SamplerSpec,
    n_prompt: u32,
    first_word: u32,
) -> Result<(Vec<[u32; 4]>, Vec<u32>), Unsupported> {
    let (edits, words) = edits_of(spec, n_prompt, first_word);
    for (what, n, max) in [
        ("logprobs on CUDA", spec.top_logprobs.unwrap_or(0) as usize, MAX_TOP),
        ("prompt_logprobs on CUDA", spec.prompt_logprobs.unwrap_or(0) as usize, MAX_TOP),
        ("biased, held-back and forbidden ids on CUDA", edits.len(), MAX_EDITS),
        ("tokens of bad_words on CUDA", words.len(), MAX_WORD_TOKENS),
    ] {
        if n > max {
            return Err(unsupported(what, n, "fewer: 20 logprobs, 2048 ids, 4096 tokens"));
        }
    }
    Ok((edits, words))
}

/// What is added to which logits, by id, the edits of one id in the sampler's order, and the words that some wait for.
/// An edit is `[id, bias, until, word]`: for positions below `until`, and, unless `word` is NONE, only after the
/// tokens at `word` (their number, then they), an index into the table of all slots.
fn edits_of(spec: &SamplerSpec, n_prompt: u32, first_word: u32) -> (Vec<[u32; 4]>, Vec<u32>) {
    const FORBIDDEN: u32 = f32::NEG_INFINITY.to_bits();
    let mut words = Vec::new();
    let mut edits = Vec::new();
    for (&last, before) in spec.bad_words.iter().filter_map(|word| word.split_last()) {
        let mut word = NONE;
        if !before.is_empty() {
            word = first_word + words.len() as u32;
            words.push(before.len() as u32);
            words.extend(before);
        }
        edits.push([last, FORBIDDEN, NONE, word]);
    }
    edits.extend(spec.logit_bias.iter().map(|&(id, bias)| [id, bias.to_bits(), NONE, NONE]));
    if spec.min_tokens > 0 {
        let until = n_prompt.saturating_add(spec.min_tokens);
        edits.extend(spec.stop_ids.iter().map(|&id| [id, FORBIDDEN, until, NONE]));
    }
    edits.sort_by_key(|edit| edit[0]);
    (edits, words)
}
