//! The tables that `sample` reads by slot: parameters, edits of logits, masks, and the tokens so far.
//!
//! Penalties and bad words read the tokens themselves, so the device keeps no counts that a reset or a preemption would
//! have to handle (decision 0013).

use crate::cuda::device::{Device, DevicePtr};
use crate::error::{DeviceError, Result, Unsupported};
use crate::sample::SamplerSpec;

/// The most best tokens of a row: the API's own limit.
pub const MAX_TOP: usize = 20;
/// Bytes of a `SampleParams` in `sample.cuh`.
const PARAMS_BYTES: usize = 88;
/// The most logit edits of a request: biases, bad words, and stop ids before `min_tokens`. The API's own limits fit.
pub const MAX_EDITS: usize = 2048;
/// The most bad-word tokens of a request, without the last token of each word, plus one for each word.
pub const MAX_WORD_TOKENS: usize = 4096;
/// The largest vocabulary whose sums of weights fit their integers.
pub const MAX_VOCAB: usize = 1 << 19;

const EDIT_BYTES: usize = 16;
const NONE: u32 = u32::MAX;
const ACTIVE: u32 = 1;
const GREEDY: u32 = 2;
const PENALTIES: u32 = 4;

/// The tables of `n_slots` slots. A slot is idle until a sequence is attached.
#[derive(Debug)]
pub struct SampleTables {
    /// `[n_slots]` of `SampleParams`
    pub(super) params: DevicePtr,
    /// `[n_slots, 2, ceil(vocab_size / 32)]` u32, one bit per allowed id: by the grammar, by the request's
    /// `allowed_ids`
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

/// The sampling of a sequence that is attached to a slot.
#[derive(Debug, Clone, Copy)]
pub struct Attach<'a> {
    /// Its sampling parameters, checked.
    pub spec: &'a SamplerSpec,
    /// Its prompt, ids within the vocabulary.
    pub prompt: &'a [i32],
    /// The part of its completion that exists.
    pub output: &'a [i32],
    /// True if [`SampleTables::set_mask`] will be called before each step.
    pub masked: bool,
}

impl SampleTables {
    /// Allocates the memory. All slots are idle.
    ///
    /// Errors: `Unsupported` for a vocabulary over [`MAX_VOCAB`]; the device's.
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

    /// Checks that the parameters fit the tables. Errors: the first one that does not.
    pub fn check(spec: &SamplerSpec) -> Result<(), Unsupported> {
        fitting(spec, 0, 0).map(|_| ())
    }

    /// Attaches a sequence to `slot`, in the order of the device's work.
    ///
    /// Panics if the slot, the sequence's length or an id of an edit is out of bounds. Errors: `Unsupported` for what
    /// does not fit the tables, which leaves the slot unchanged; the device's.
    pub fn attach(&self, device: &dyn Device, slot: usize, of: &Attach<'_>) -> Result<()> {
        assert!(slot < self.n_slots, "slot {slot} of {}", self.n_slots);
        let n_tokens = of.prompt.len() + of.output.len();
        assert!(n_tokens <= self.max_len, "{n_tokens} tokens in a row of {}", self.max_len);
        let n_prompt = of.prompt.len() as u32;
        let first_word = slot * MAX_WORD_TOKENS;
        let (edits, words) = fitting(of.spec, n_prompt, first_word as u32)?;
        let is_id = |&[id, ..]: &[u32; 4]| (id as usize) < self.vocab_size;
        assert!(edits.iter().all(is_id), "an edit of an id outside of the vocabulary");
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

    /// Sets the ids that the grammar of a `masked` slot allows in its next step, `[ceil(vocab_size / 32)]`; `None`:
    /// all.
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

/// Returns a `SampleParams`, word by word.
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

/// Returns [`edits_of`]. Errors: the first parameter that does not fit the tables.
fn fitting(
    spec: &SamplerSpec,
    n_prompt: u32,
    first_word: u32,
) -> Result<(Vec<[u32; 4]>, Vec<u32>), Unsupported> {
    let (edits, words) = edits_of(spec, n_prompt, first_word);
    for (what, n, max) in [
        ("logprobs on CUDA", spec.top_logprobs.unwrap_or(0) as usize, MAX_TOP),
        ("logprobs of chosen tokens on CUDA", spec.logprob_ids.len(), 0),
        ("prompt_logprobs on CUDA", spec.prompt_logprobs.unwrap_or(0) as usize, MAX_TOP),
        ("biased, held-back and forbidden ids on CUDA", edits.len(), MAX_EDITS),
        ("tokens of bad_words on CUDA", words.len(), MAX_WORD_TOKENS),
    ] {
        if n > max {
            return Err(unsupported(
                what,
                n,
                "fewer: 20 logprobs, none of chosen tokens, 2048 ids, 4096 tokens",
            ));
        }
    }
    Ok((edits, words))
}

/// Returns the edits of logits, and the words that some of them depend on. Edits are sorted by id; those of one id are
/// in the sampler's order.
///
/// An edit is `[id, bias, until, word]`. It applies at positions below `until`. Unless `word` is NONE, it applies only
/// after the tokens at `word`, an index into the table of all slots (the number of tokens, then the tokens).
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
